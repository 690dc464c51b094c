"""Which waiting requests make the next batch: by tokens and by the time that the step will take.

There is no torch here: the engine, a simulation and the tests run the same code. Nothing waits for
company, since one request of the benchmark's size already fills a GPU; a batch is what has come
while the last step ran, as far as its step stays short enough for those who come next.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from tokenmill.core.requests import End, RequestOutput
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import FinishReason, InvalidRequestError
from tokenmill.ranking.requests import RankRequest

_WEIGHT_OF_NEW = 0.2  # of a step's rate in the running mean


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """What one step may take, and how many requests may wait."""

    max_batch_tokens: int = 160_000
    max_batch_requests: int = 128
    max_queue_requests: int = 4096
    latency_ms: float = 80.0  # of a request, queue and step; a step may take a third of it

    @property
    def max_step_ns(self) -> float:
        """A request may come just after a batch was made: it waits for the step that runs then,
        and where batches are made ahead for that batch's step too, and runs in the next.
        """
        return self.latency_ms * 1e6 / 3


@dataclass(slots=True)
class BatchRate:
    """Nanoseconds per FLOP of past steps, a running mean; 0 before the first."""

    ns_per_flop: float = 0.0

    def observe(self, flops: float, elapsed_ns: float) -> None:
        rate = elapsed_ns / flops
        known = self.ns_per_flop
        self.ns_per_flop = known + _WEIGHT_OF_NEW * (rate - known) if known else rate

    def step_ns(self, flops: float) -> float:
        return flops * self.ns_per_flop


@dataclass(frozen=True, slots=True)
class Waiting:
    request: RankRequest
    arrival_ns: int
    flops: float


class RankQueue:
    """First come, first served, bounded; who cannot answer in time any more is not run."""

    def __init__(self, spec: HstuSpec, limits: BatchLimits) -> None:
        self.spec, self.limits, self.meter = spec, limits, BatchRate()
        self._waiting: deque[Waiting] = deque()
        self._ids: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, request: RankRequest, now_ns: int) -> RequestOutput | None:
        """The answer to a request that is refused at once, else nothing."""
        if request.request_id in self._ids:
            name = request.request_id
            raise InvalidRequestError(f"request_id: {name!r} is already waiting", "request_id")
        if len(self._waiting) >= self.limits.max_queue_requests:
            most = self.limits.max_queue_requests
            message = f"{most} requests are waiting, which is the limit (max_queue_requests)"
            return _refusal(request, message, "queue_full")
        if request.num_tokens > self.limits.max_batch_tokens:
            message = (
                f"history.item_ids: history and candidates are {request.num_tokens} tokens; a "
                f"batch takes {self.limits.max_batch_tokens} (max_batch_tokens)"
            )
            return _refusal(request, message, "invalid")
        flops = self.spec.flops(request.num_history, request.num_candidates)
        self._waiting.append(Waiting(request, now_ns, flops))
        self._ids.add(request.request_id)
        return None

    def abort(self, request_id: str) -> RequestOutput | None:
        """The answer to a request that was waiting; one that runs is past stopping."""
        if request_id not in self._ids:
            return None
        self._ids.discard(request_id)
        self._waiting = deque(w for w in self._waiting if w.request.request_id != request_id)
        return End(FinishReason.ABORT, "aborted", "the caller gave up").output(request_id)

    def take(self, now_ns: int) -> tuple[list[Waiting], list[RequestOutput]]:
        """The next batch, and the answers to requests whose deadline it would miss."""
        batch: list[Waiting] = []
        late: list[RequestOutput] = []
        tokens, flops = 0, 0.0
        while self._waiting and len(batch) < self.limits.max_batch_requests:
            head = self._waiting[0]
            if self._is_late(head, now_ns):
                late.append(_late_output(head, now_ns))
            else:
                tokens += head.request.num_tokens
                flops += head.flops
                if batch and self._is_full(tokens, flops):
                    break
                batch.append(head)
            self._waiting.popleft()
            self._ids.discard(head.request.request_id)
        return batch, late

    def _is_late(self, waiting: Waiting, now_ns: int) -> bool:
        deadline = waiting.request.deadline_ns
        return deadline is not None and now_ns + self.meter.step_ns(waiting.flops) > deadline

    def _is_full(self, tokens: int, flops: float) -> bool:
        too_long = self.meter.step_ns(flops) > self.limits.max_step_ns
        return tokens > self.limits.max_batch_tokens or too_long


def _refusal(request: RankRequest, message: str, code: str) -> RequestOutput:
    return End(FinishReason.REJECT, code, message).output(request.request_id)


def _late_output(waiting: Waiting, now_ns: int) -> RequestOutput:
    queued_ms = (now_ns - waiting.arrival_ns) / 1e6
    message = f"the deadline cannot be met after {queued_ms:.1f} ms in the queue"
    return End(FinishReason.ABORT, "deadline", message).output(waiting.request.request_id)
