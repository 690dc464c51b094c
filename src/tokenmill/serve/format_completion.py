"""Text completions as bytes: the streamed events, and the whole answer."""

from __future__ import annotations

from tokenmill.core.types import TokenLogprobs
from tokenmill.serve.format_chat import DONE
from tokenmill.serve.generation import TextDelta
from tokenmill.serve.logprobs import completion_logprobs
from tokenmill.serve.prepare import Job
from tokenmill.serve.responses import (
    Completion,
    CompletionChoice,
    Usage,
    json_encode,
)
from tokenmill.serve.tokenizer import Tokenizer


class CompletionFormat:
    """Formats one text completion call; `echo` puts the prompt before the text."""

    def __init__(
        self, job: Job, model: str, tokenizer: Tokenizer, include_usage: bool, echo: bool
    ) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._echo = echo
        self._include_usage = include_usage
        self._wants_logprobs = job.requests[0].sampling.logprobs is not None
        self._plain = not (self._wants_logprobs or job.return_token_ids)
        self._started = [False] * len(job.requests)
        self._offsets = [0] * len(job.requests)  # of the next token in the text
        identity = b'"id":%b,"object":"text_completion","created":%d,"model":%b' % (
            json_encode(job.job_id),
            job.created,
            json_encode(model),
        )
        self._head = b"data: {" + identity + b',"choices":['
        self._tail = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._before = [self._head + b'{"index":%d,"text":' % i for i in range(len(job.requests))]
        self._after = b',"logprobs":null,"finish_reason":null}' + self._tail

    def event(self, delta: TextDelta) -> bytes:
        """The events of one delta; b"" when nothing is certain yet."""
        if self._plain and self._started[delta.index] and delta.finish_reason is None:
            if not delta.text:
                return b""
            return b"%b%b%b" % (self._before[delta.index], json_encode(delta.text), self._after)
        events = []
        piece = self._take(delta)
        if piece.text or piece.logprobs is not None or self._job.return_token_ids:
            events.append(self._head + json_encode(piece) + self._tail)
        if delta.finish_reason is not None:
            last = CompletionChoice(
                index=delta.index,
                text="",
                logprobs=None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            events.append(self._head + json_encode(last) + self._tail)
        return b"".join(events)

    def end(self, usage: Usage) -> bytes:
        """What closes the stream."""
        if not self._include_usage:
            return DONE
        return self._head + b'],"usage":' + json_encode(usage) + b"}\n\n" + DONE

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes:
        """The JSON of the whole answer, one whole delta per choice."""
        answer = Completion(
            id=self._job.job_id,
            created=self._job.created,
            model=self._model,
            choices=[self._whole(delta) for delta in wholes],
            usage=usage,
        )
        encoded: bytes = json_encode(answer)
        return encoded

    def _whole(self, delta: TextDelta) -> CompletionChoice:
        choice = self._take(delta)
        choice.finish_reason = delta.finish_reason
        choice.stop_reason = delta.stop_reason
        return choice

    def _take(self, delta: TextDelta) -> CompletionChoice:
        """The delta as a choice, with the echoed prompt before the first one."""
        index, token_ids = delta.index, delta.token_ids
        positions: list[TokenLogprobs | None] = list(delta.logprobs or [])
        prompt = self._job.prompt_of(index)
        piece = CompletionChoice(index=index, text=delta.text, logprobs=None, finish_reason=None)
        if not self._started[index]:
            self._started[index] = True
            if self._echo:
                piece.text = prompt.text + delta.text
                token_ids = prompt.token_ids + token_ids
                positions = [*(delta.prompt_logprobs or []), *positions]
            if self._job.return_token_ids:
                piece.prompt_token_ids = prompt.token_ids
        if self._wants_logprobs:
            piece.logprobs, self._offsets[index] = completion_logprobs(
                self._tokenizer, token_ids, positions, self._offsets[index]
            )
        if self._job.return_token_ids:
            piece.token_ids = delta.token_ids
        return piece
