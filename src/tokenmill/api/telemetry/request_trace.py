"""A call and its requests as spans: parse, tokenize, route, queue, prefill, kv_transfer, decode.

The front stamps what it sees; a worker's own stamp, when it began, comes with the first output.
Every span is a child of the call's. A request that goes on elsewhere has its stages once more.
"""

from __future__ import annotations

import time
from types import TracebackType

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import Usage
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.api.telemetry.tracing import Attributes, Span, terms_of
from tokenmill.core.requests import RequestOutput
from tokenmill.routing.router import Decision
from tokenmill.workers.trace import NO_TRACE, RequestTrace


class CallTrace:
    """The span of an API call; leaving its block by an exception ends it."""

    __slots__ = ("_mark_ns", "_operation", "_span")

    def __init__(self, span: Span, operation: str, start_ns: int) -> None:
        self._span = span
        self._operation = operation
        self._mark_ns = start_ns

    def __enter__(self) -> CallTrace:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._span.end(f"{getattr(error, 'code', None) or type(error).__name__}: {error}")

    def parsed(self, at_ns: int) -> None:
        """End the stage `parse`: the body was read then, and valid."""
        self._stage("parse", at_ns)

    def prepared(self, job: PreparedCall, model: str) -> None:
        """End the stage `tokenize`, and set what was asked for."""
        self._stage("tokenize", time.monotonic_ns())
        sampling = job.requests[0].task.sampling
        facts = {
            "gen_ai.request.model": model,
            "gen_ai.response.model": model,
            "gen_ai.response.id": job.job_id,
            "gen_ai.request.max_tokens": sampling.max_tokens or 0,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "gen_ai.request.choice.count": job.n,
        }
        self._span.rename(f"{self._operation} {model}")
        self._span.set(facts)

    def requests(self, job: PreparedCall) -> list[RequestTrace]:
        if not self._span.recording:
            return [NO_TRACE] * len(job.requests)
        return [RequestSpans(self._span, index) for index in range(len(job.requests))]

    def end(self, usage: Usage, reasons: list[str], error: ApiError | None) -> None:
        facts = {
            "gen_ai.usage.input_tokens": usage.prompt_tokens,
            "gen_ai.usage.output_tokens": usage.completion_tokens,
            "gen_ai.usage.cache_read.input_tokens": usage.prompt_tokens_details.cached_tokens,
            "gen_ai.response.finish_reasons": reasons,
        }
        self._span.set(facts)
        self._span.end(None if error is None else f"{error.code or error.status}: {error}")

    def _stage(self, name: str, end_ns: int) -> None:
        began_ns, self._mark_ns = self._mark_ns, end_ns
        self._span.child(name, {}, began_ns, self._mark_ns)


class RequestSpans(RequestTrace):
    __slots__ = (
        "_call",
        "_first_ns",
        "_index",
        "_num_tokens",
        "_queued_ns",
        "_received_ns",
        "_transfer_ns",
    )

    def __init__(self, call: Span, index: int) -> None:
        self._call = call
        self._index = index
        self._num_tokens = 0
        self._reset(0)

    def _reset(self, queued_ns: int) -> None:
        self._queued_ns = queued_ns
        self._first_ns = self._transfer_ns = self._received_ns = 0

    def routed(self, decision: Decision, began_ns: int, role: str) -> None:
        self._reset(time.monotonic_ns())
        facts = {
            "tokenmill.router.worker": decision.worker,
            "tokenmill.router.role": role,
            "tokenmill.router.num_prompt_tokens": decision.num_prompt_tokens,
            "tokenmill.router.num_cached_tokens": decision.num_cached_tokens,
        }
        self._stage("route", began_ns, self._queued_ns, facts | terms_of(decision.terms()))

    def output(self, output: RequestOutput) -> None:
        self._num_tokens += len(output.token_ids)
        if self._first_ns or not output.token_ids:
            return
        now_ns = self._first_ns = time.monotonic_ns()
        started_ns = min(max(output.scheduled_ns, self._queued_ns), now_ns)
        cached = {"tokenmill.num_cached_tokens": output.num_cached_tokens}
        self._stage("queue", self._queued_ns, started_ns)
        self._stage("prefill", started_ns, now_ns, cached)

    def transfer_began(self) -> None:
        self._transfer_ns = self._transfer_ns or time.monotonic_ns()

    def transfer_ended(self) -> None:
        if self._transfer_ns and not self._received_ns:
            self._received_ns = time.monotonic_ns()
            self._stage("kv_transfer", self._transfer_ns, self._received_ns)

    def migrated(self, reason: str) -> None:
        self.ended()
        facts = {
            "tokenmill.reason": reason,
            "tokenmill.choice": self._index,
            "gen_ai.usage.output_tokens": self._num_tokens,
        }
        self._call.event("migrated", facts)

    def ended(self) -> None:
        if self._first_ns:
            tokens = {"gen_ai.usage.output_tokens": self._num_tokens}
            began_ns = max(self._first_ns, self._received_ns)
            self._stage("decode", began_ns, time.monotonic_ns(), tokens)
        elif self._queued_ns:
            self._stage("queue", self._queued_ns, time.monotonic_ns())
        self._reset(0)

    def _stage(
        self, name: str, began_ns: int, ended_ns: int, facts: Attributes | None = None
    ) -> None:
        own = {"tokenmill.choice": self._index}
        self._call.child(name, {**own, **(facts or {})}, began_ns, ended_ns)
