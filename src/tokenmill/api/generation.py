"""One API call under way: engine outputs in, pieces of text out."""

from __future__ import annotations

import time
from dataclasses import dataclass

from tokenmill.api.call import CallRecord
from tokenmill.api.errors import of_output
from tokenmill.api.protocol.answers import FinishText, Usage, usage_of
from tokenmill.api.protocol.prepare import Job
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import FinishReason, Request, RequestOutput, TokenLogprobs
from tokenmill.text.detokenize import Detokenizer
from tokenmill.text.parsers import ReasoningParser, ToolParser
from tokenmill.text.tokenizer import Tokenizer

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

    @property
    def cut_off(self) -> bool:
        """True where the model had more to say: max_tokens was reached, or a stop string."""
        return self.finish_reason == "length" or isinstance(self.stop_reason, str)


class CallWatch:
    """Tells when the one call that is wanted is complete, wherever reasoning ends."""

    __slots__ = ("_reasoning", "_tools")

    def __init__(self, tools: ToolParser, reasoning_opened: bool | None) -> None:
        self._tools = tools
        self._reasoning = None if reasoning_opened is None else ReasoningParser(reasoning_opened)

    def is_done(self, text: str) -> bool:
        """Read on; True once the call is complete."""
        if self._reasoning is not None:
            text = self._reasoning.push(text)[1]
        self._tools.push(text)
        return self._tools.done


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
    )


class Choice:
    """One engine request: its detokeniser, its clock and its counts."""

    __slots__ = (
        "_detokenizer",
        "_echo_only",
        "_request",
        "_stop_ids",
        "_watch",
        "finished",
        "num_tokens",
        "reason",
        "times",
    )

    def __init__(self, tokenizer: Tokenizer, request: Request, job: Job) -> None:
        sampling = request.sampling
        self._request = request
        self._detokenizer = Detokenizer(
            tokenizer,
            skip_special_tokens=sampling.skip_special_tokens,
            stop=sampling.stop,
            include_stop_str=sampling.include_stop_str_in_output,
            min_tokens=sampling.min_tokens,
            continues=job.continues,
        )
        self._echo_only = job.echo_only
        self._watch: CallWatch | None = None
        if job.tool_use is not None and job.tool_use.one_call:
            self._watch = CallWatch(job.tool_use.parser(), job.reasoning_opened)
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
        detokenizer = self._detokenizer
        token_ids, logprobs = output.token_ids, output.logprobs
        finish_reason = _FINISH[output.finish_reason] if output.finish_reason else None
        stop_reason = output.stop_reason
        num_before = self.num_tokens
        text, called = self._push_tokens(self._visible(output))
        if called or detokenizer.stop_reason is not None:
            num_used = detokenizer.num_tokens - num_before
            token_ids = token_ids[:num_used]
            logprobs = logprobs[:num_used] if logprobs is not None else None
            finish_reason, stop_reason = "stop", detokenizer.stop_reason
        elif finish_reason is not None:
            text += detokenizer.finish()
        self.num_tokens += len(token_ids)
        self.finished = finish_reason is not None
        return TextDelta(
            index, text, token_ids, logprobs, output.prompt_logprobs, finish_reason, stop_reason
        )

    def _push_tokens(self, token_ids: list[int]) -> tuple[str, bool]:
        """Their text, and whether the one call that is wanted ends in it."""
        if self._watch is None:
            return self._detokenizer.push(token_ids), False
        text = ""
        for token_id in token_ids:
            piece = self._detokenizer.push((token_id,))
            text += piece
            if self._watch.is_done(piece):
                return text, True
        return text, False

    def _visible(self, output: RequestOutput) -> list[int]:
        """The tokens without the stop token that ended them, unless its text is wanted."""
        token_ids = output.token_ids
        if (
            output.finish_reason == FinishReason.STOP
            and token_ids
            and token_ids[-1] in self._stop_ids
            and not self._request.sampling.include_stop_str_in_output
        ):
            return token_ids[:-1]
        return token_ids


class Generation:
    """The choices of one job."""

    def __init__(self, job: Job, tokenizer: Tokenizer, metrics: ServerMetrics) -> None:
        self.job = job
        self._metrics = metrics
        self.choices = [Choice(tokenizer, request, job) for request in job.requests]
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
            self._metrics.output(choice.times, now_ns, len(output.token_ids))
            delta = choice.push(index, output)
            if delta.finish_reason is not None:
                self._finish(choice, index, delta.finish_reason)
                if output.finish_reason is None:
                    self.stopped.append(output.request_id)
            deltas.append(delta)
        return deltas

    def close(self) -> None:
        """Count the choices that are still open as aborted."""
        for index, choice in enumerate(self.choices):
            if not choice.finished:
                self._finish(choice, index, "abort")

    def usage(self) -> Usage:
        """Each prompt once, all choices; cached tokens as the first choice found them."""
        num_prompt = sum(len(p.token_ids) for p in self.job.prompts)
        num_output = sum(c.num_tokens for c in self.choices)
        return usage_of(num_prompt, num_output, sum(self._num_cached[:: self.job.n]))

    def describe(self, record: CallRecord) -> None:
        """Put the counts, times and ends of all choices into the call's record."""
        usage = self.usage()
        record.num_prompt_tokens = usage.prompt_tokens
        record.num_output_tokens = usage.completion_tokens
        record.num_cached_tokens = usage.prompt_tokens_details.cached_tokens
        record.ttft_ms = self.choices[0].times.ttft_ms
        record.finish_reason = ",".join(sorted({choice.reason for choice in self.choices}))

    def _first(self, index: int, output: RequestOutput) -> None:
        self._num_cached[index] = output.num_cached_tokens
        self._metrics.num_prompt_tokens += len(self.job.requests[index].prompt_token_ids)
        if output.scheduled_ns:
            waited_ns = output.scheduled_ns - self.job.requests[index].arrival_ns
            self._metrics.queue_s.observe(max(waited_ns, 0) / 1e9)

    def _finish(self, choice: Choice, index: int, reason: str) -> None:
        choice.finished, choice.reason = True, reason
        self.num_open -= 1
        num_prompt = len(self.job.requests[index].prompt_token_ids)
        self._metrics.finish(choice.times, num_prompt, reason)
