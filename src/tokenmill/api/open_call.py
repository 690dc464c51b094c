"""One API call under way: engine outputs in, pieces of text out.

Most tokens of a stream add text and nothing else. Their events are written where the worker's
message is read (`DirectText`): no task is woken, and no layer of the app is passed. Everything else
goes the way of ASGI.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

from tokenmill.api.call import CallRecord
from tokenmill.api.connection import ChunkWriter
from tokenmill.api.errors import of_output
from tokenmill.api.protocol.answers import (
    CompletionTokensDetails,
    FinishText,
    Usage,
    json_encode,
    usage_of,
)
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.types import FinishReason, TokenLogprobs
from tokenmill.text.detokenize import Detokenizer, StopTable
from tokenmill.text.message import MessageReader
from tokenmill.text.parsers import ContentDelta, MessageEvent
from tokenmill.text.tokenizer import JsonPieces, Tokenizer

_FINISH: dict[FinishReason, FinishText] = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
}


@dataclass(slots=True)
class TextDelta:
    """What one output added to choice `index`."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None
    prompt_logprobs: list[TokenLogprobs | None] | None
    finish_reason: FinishText | None
    stop_reason: int | str | None
    events: list[MessageEvent] | None = None  # the text's parts; None: all of it is content

    @property
    def parts(self) -> list[MessageEvent]:
        if self.events is not None:
            return self.events
        return [ContentDelta(self.text)] if self.text else []


def join_deltas(deltas: list[TextDelta]) -> TextDelta:
    """The deltas of one choice, in order, as one."""
    last = deltas[-1]
    logprobs = [p for d in deltas if d.logprobs is not None for p in d.logprobs]
    return TextDelta(
        index=last.index,
        text="".join([d.text for d in deltas]),
        token_ids=[t for d in deltas for t in d.token_ids],
        logprobs=None if last.logprobs is None else logprobs,
        prompt_logprobs=deltas[0].prompt_logprobs,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        events=None if last.events is None else [e for d in deltas for e in d.events or ()],
    )


class OpenChoice:
    """One engine request: its detokeniser, its clock and its counts."""

    __slots__ = (
        "_detokenizer",
        "_echo_only",
        "_reader",
        "_request",
        "_stop_ids",
        "finished",
        "num_tokens",
        "reason",
        "text_stream",
        "times",
    )

    def __init__(
        self,
        tokenizer: Tokenizer,
        request: Request,
        stops: StopTable | None,
        job: PreparedCall,
        streams: bool,
    ) -> None:
        sampling = request.task.sampling
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=stops,
            include_stop_str=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            continues=job.continues,
        )
        self.text_stream = self._detokenizer.stream  # of a plain choice, whose tokens it counts
        self._echo_only = job.echo_only
        self._reader: MessageReader | None = None
        if job.make_reader is not None:
            self._reader = job.make_reader(self._detokenizer, streams)
        self._stop_ids = frozenset(tokenizer.eos_token_ids).union(sampling.stop_token_ids)
        self.times = RequestTimes(request.arrival_ns)
        self.num_tokens = 0
        self.finished = False
        self.reason = ""  # why it is finished

    def push(self, index: int, output: RequestOutput) -> TextDelta:
        """Detokenise an output; a stop string ends the choice where it was found."""
        if self._echo_only:
            self.finished = True
            return TextDelta(index, "", [], [], output.prompt_logprobs, "length", None)
        if self._reader is not None:
            return self._read(self._reader, index, output)
        detokenizer = self._detokenizer
        text = detokenizer.push(self._visible(output))
        delta = self._delta(index, output, detokenizer.stop_reason is not None)
        if delta.finish_reason is not None:
            text += detokenizer.finish()
        delta.text = text
        return delta

    @property
    def is_plain(self) -> bool:
        """True where text is all that a token adds, and nothing in it ends the choice."""
        has_stops = bool(self._request.task.sampling.stop)
        return self._reader is None and not has_stops and not self._echo_only

    def _read(self, reader: MessageReader, index: int, output: RequestOutput) -> TextDelta:
        """The same with the parts of the message apart; the one call that is wanted ends it."""
        events = reader.push(self._visible(output))
        delta = self._delta(index, output, reader.done or reader.stop_reason is not None)
        if delta.finish_reason is not None:
            cut = delta.finish_reason == "length" or isinstance(delta.stop_reason, str)
            events += reader.finish(cut)
        delta.text = "".join([e.text for e in events if isinstance(e, ContentDelta)])
        delta.events = events
        return delta

    def _delta(self, index: int, output: RequestOutput, stopped: bool) -> TextDelta:
        """What the output says beside its text; `stopped`: what was read last ends the choice."""
        token_ids, logprobs = output.token_ids, output.logprobs
        finish_reason = _FINISH[output.finish_reason] if output.finish_reason else None
        stop_reason = output.stop_reason
        if stopped:
            num_used = self._detokenizer.num_tokens - self.num_tokens
            token_ids = token_ids[:num_used]
            logprobs = logprobs[:num_used] if logprobs is not None else None
            finish_reason, stop_reason = "stop", self._detokenizer.stop_reason
        self.num_tokens += len(token_ids)
        self.finished = finish_reason is not None
        return TextDelta(
            index, "", token_ids, logprobs, output.prompt_logprobs, finish_reason, stop_reason
        )

    @property
    def num_reasoning_tokens(self) -> int:
        return 0 if self._reader is None else self._reader.num_reasoning_tokens

    def _visible(self, output: RequestOutput) -> list[int]:
        """The tokens without the stop token that ended them, unless its text is wanted."""
        token_ids = output.token_ids
        if (
            output.finish_reason == FinishReason.STOP
            and token_ids
            and token_ids[-1] in self._stop_ids
            and not self._request.task.sampling.include_stop_str_in_output
        ):
            return token_ids[:-1]
        return token_ids


class OpenCall:
    def __init__(
        self, job: PreparedCall, tokenizer: Tokenizer, metrics: ServerMetrics, streams: bool
    ) -> None:
        self.job = job
        self.metrics = metrics
        stops = StopTable.of(job.requests[0].task.sampling.stop)  # every choice has the same
        self.choices = [
            OpenChoice(tokenizer, request, stops, job, streams) for request in job.requests
        ]
        self._num_cached = [0] * len(job.requests)
        self.num_open = len(job.requests)
        self.stopped: list[str] = []  # ended by a stop string, still running in the engine

    def advance(self, outputs: dict[int, RequestOutput]) -> list[TextDelta]:
        """Take outputs by choice; raises ApiError when one of them is an error."""
        now_ns = time.monotonic_ns()
        deltas = []
        for index, output in outputs.items():
            choice = self.choices[index]
            if choice.finished:  # a stop string was found; the engine had gone on meanwhile
                continue
            error = of_output(output) if output.finish_reason is not None else None
            if error is not None:
                self._finish(choice, index, str(output.finish_reason))
                raise error
            if not choice.times.first_ns:
                self._first(index, output)
            self.metrics.output(choice.times, now_ns, len(output.token_ids))
            delta = choice.push(index, output)
            if delta.finish_reason is not None:
                self._finish(choice, index, delta.finish_reason)
                if output.finish_reason is None:
                    self.stopped.append(output.request_id)
            deltas.append(delta)
        return deltas

    def extend(self, index: int, token_ids: list[int], now_ns: int) -> str:
        """Take tokens of a plain choice that has begun and goes on; returns their text.

        It is "" when nothing is certain yet.
        """
        choice, num_tokens = self.choices[index], len(token_ids)
        self.metrics.later_output(choice.times, now_ns, num_tokens)
        choice.num_tokens += num_tokens
        return choice.text_stream.push(token_ids)

    def close(self) -> None:
        """Count the choices that are still open as aborted."""
        for index, choice in enumerate(self.choices):
            if not choice.finished:
                self._finish(choice, index, "abort")

    def usage(self) -> Usage:
        """Each prompt once, all choices; cached tokens as the first choice found them."""
        num_prompt = sum(len(p.token_ids) for p in self.job.prompts)
        num_output = sum(c.num_tokens for c in self.choices)
        usage = usage_of(num_prompt, num_output, sum(self._num_cached[:: self.job.n]))
        if num_image := sum(span.num_tokens for p in self.job.prompts for span in p.images):
            usage.prompt_tokens_details.image_tokens = num_image
        if self.job.make_reader is not None:
            num_reasoning = sum(c.num_reasoning_tokens for c in self.choices)
            details = CompletionTokensDetails(reasoning_tokens=num_reasoning)
            usage.completion_tokens_details = details
        return usage

    def describe(self, record: CallRecord) -> None:
        usage = self.usage()
        record.num_prompt_tokens = usage.prompt_tokens
        record.num_output_tokens = usage.completion_tokens
        record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.ttft_ms = self.choices[0].times.ttft_ms
        record.finish_reason = ",".join(sorted({choice.reason for choice in self.choices}))

    def _first(self, index: int, output: RequestOutput) -> None:
        self._num_cached[index] = output.num_cached_tokens
        self.metrics.num_prompt_tokens += len(self.job.requests[index].task.prompt_token_ids)
        if output.scheduled_ns:
            waited_ns = output.scheduled_ns - self.job.requests[index].arrival_ns
            self.metrics.queue_s.observe(max(waited_ns, 0) / 1e9)

    def _finish(self, choice: OpenChoice, index: int, reason: str) -> None:
        choice.finished, choice.reason = True, reason
        self.num_open -= 1
        num_prompt = len(self.job.requests[index].task.prompt_token_ids)
        self.metrics.finish(choice.times, num_prompt, reason)


LONG_PIECE = 128  # bytes of JSON; no table has the sizes of longer ones


@runtime_checkable
class PlainFormat(Protocol):
    """A format whose events of plain text are a JSON string between two constants."""

    def around_text(self, index: int) -> tuple[bytes, bytes] | None: ...


class DirectText:
    """Takes the tokens of one call's plain choices while its task waits for outputs.

    Most steps give one token to the only choice of a call. Its event is joined from constants: the
    frame is the stream's, and the JSON of a token's text the tokenizer's.
    """

    __slots__ = (
        *("_pieces", "_flow", "_text", "_heads", "_before", "_after", "_transport"),
        *("_metrics", "_times", "_choice", "_around", "_form", "_call", "_writer"),
    )

    def __init__(self, call: OpenCall, form: PlainFormat, writer: ChunkWriter) -> None:
        self._call = call
        self._form = form
        self._writer = writer
        self._around: list[tuple[bytes, bytes] | None] = [None] * len(call.choices)
        self._flow, self._transport = writer.flow, writer.transport
        self._before = self._after = b""
        self._heads: list[bytes] = []  # of chunks, by the size of a piece
        self._choice = call.choices[0]
        self._times = self._choice.times
        self._text = self._choice.text_stream
        self._pieces: JsonPieces | None = None  # of an only choice that is plain
        self._metrics = call.metrics

    def write_one(self, token_ids: list[int], now_ns: int) -> bool:
        """Write the event of an only choice's tokens; False: nothing was done with them."""
        pieces = self._pieces
        if pieces is None or len(token_ids) != 1 or self._text.held:
            return self.write({0: token_ids}, now_ns)
        piece = pieces[token_ids[0]]
        if not 0 < len(piece) < LONG_PIECE:
            return self.write({0: token_ids}, now_ns)
        if self._flow.write_paused:
            return False
        parts = (self._heads[len(piece)], self._before, piece, self._after)
        self._transport.write(b"".join(parts))
        self._metrics.later_output(self._times, now_ns, 1)
        self._choice.num_tokens += 1
        return True

    def write(self, tokens: dict[int, list[int]], now_ns: int) -> bool:
        """Write the events of tokens, by choice; False: nothing was done with them."""
        if not self._writer.can_write():
            return False
        for index in tokens:
            if self._around[index] is None and not self._begin(index):
                return False
        body = b""
        for index, token_ids in tokens.items():
            text, around = self._call.extend(index, token_ids, now_ns), self._around[index]
            if text and around is not None:
                body += b"%b%b%b" % (around[0], json_encode(text), around[1])
        if body:
            self._writer.write(body)
        return True

    def _begin(self, index: int) -> bool:
        """Look whether the events of a choice are plain by now."""
        if self._call.choices[index].is_plain and self._writer.has_begun():
            self._around[index] = self._form.around_text(index)
        around = self._around[index]
        if around is not None and len(self._around) == 1:
            self._before, self._after = around[0], around[1] + b"\r\n"
            self._heads = _chunk_heads(len(around[0]) + len(around[1]))
            self._pieces = self._text.json_pieces
        return around is not None


@lru_cache(1024)
def _chunk_heads(size: int) -> list[bytes]:
    """The first lines of chunks of this size and a piece, by the size of the piece."""
    return [b"%x\r\n" % (size + piece) for piece in range(LONG_PIECE)]
