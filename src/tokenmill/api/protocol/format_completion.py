"""Text completions as bytes: the streamed events, and the whole answer."""

from __future__ import annotations

from tokenmill.api.open_call import TextDelta
from tokenmill.api.protocol.answers import (
    Completion,
    CompletionChoice,
    Usage,
    json_encode,
)
from tokenmill.api.protocol.format_stream import EventFrame, UsageIn
from tokenmill.api.protocol.logprobs import completion_logprobs, prompt_logprobs
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.core.types import TokenLogprobs
from tokenmill.text.tokenizer import Tokenizer

_AFTER = b',"logprobs":null,"finish_reason":null}'


class CompletionFormat:
    """Formats one text completion call; `echo` puts the prompt before the text."""

    def __init__(
        self, job: PreparedCall, model: str, tokenizer: Tokenizer, usage_in: UsageIn, echo: bool
    ) -> None:
        self._job = job
        self._model = model
        self._tokenizer = tokenizer
        self._echo = echo
        self._wants_logprobs = job.requests[0].task.sampling.logprobs is not None
        self._plain = not (self._wants_logprobs or job.return_token_ids)
        self._started = [False] * len(job.requests)
        self._offsets = [0] * len(job.requests)  # of the next token in the text
        self.frame = EventFrame(job, model, "text_completion", usage_in)
        self._before = [
            self.frame.head + b'{"index":%d,"text":' % i for i in range(len(job.requests))
        ]

    def event(self, delta: TextDelta) -> bytes:
        if self._plain and self._started[delta.index] and delta.finish_reason is None:
            if not delta.text:
                return b""
            before, text = self._before[delta.index], json_encode(delta.text)
            return b"%b%b%b%b" % (before, text, _AFTER, self.frame.tail)
        events = []
        piece = self._take(delta)
        if piece.text or piece.logprobs is not None or self._job.return_token_ids:
            events.append(self.frame.head + json_encode(piece) + self.frame.tail)
        if delta.finish_reason is not None:
            last = CompletionChoice(
                index=delta.index,
                text="",
                logprobs=None,
                finish_reason=delta.finish_reason,
                stop_reason=delta.stop_reason,
            )
            events.append(self.frame.head + json_encode(last) + self.frame.tail)
        return b"".join(events)

    def around_text(self, index: int) -> tuple[bytes, bytes] | None:
        """What stands around the JSON string of an event; None while there is more to say."""
        if not self._plain or self.frame.counts or not self._started[index]:
            return None
        return self._before[index], _AFTER + self.frame.tail

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes:
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
        if self._job.prompt_logprobs is not None:
            choice.prompt_logprobs = prompt_logprobs(
                self._tokenizer, delta.prompt_logprobs or [], self._job.prompt_logprobs
            )
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
                positions = [*self._echoed(delta), *positions]
            if self._job.return_token_ids:
                piece.prompt_token_ids = prompt.token_ids
        if self._wants_logprobs:
            piece.logprobs, self._offsets[index] = completion_logprobs(
                self._tokenizer,
                token_ids,
                positions,
                self._offsets[index],
                self._job.tokens_as_ids,
            )
        if self._job.return_token_ids:
            piece.token_ids = delta.token_ids
        return piece

    def _echoed(self, delta: TextDelta) -> list[TokenLogprobs | None]:
        """The prompt's positions with as many alternatives as logprobs asks for."""
        sampling = self._job.requests[delta.index].task.sampling
        size = (sampling.logprobs or 0) + 1
        return [
            position
            and TokenLogprobs(position.token_ids[:size], position.logprobs[:size], position.rank)
            for position in delta.prompt_logprobs or []
        ]
