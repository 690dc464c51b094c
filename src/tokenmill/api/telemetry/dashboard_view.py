"""What the live page shows: the figures of now, and those of the last minutes, one sample a second.

The history is kept here, so that every page shows the same. A sample looks at every open request
once and leaves the routing decisions out, which are the larger part; the ring is bounded.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterator

import msgspec

from tokenmill.core.types import EngineStats
from tokenmill.workers.pool_view import PoolView, WorkerView

INTERVAL_S = 1.0
NUM_SAMPLES = 300
NUM_EVENTS = 50
_TONES = {"ready": "good", "restarting": "warn", "draining": "warn", "failed": "bad"}


class Sample(msgspec.Struct, frozen=True):
    """One second of the history; None: not known, or nothing to divide by."""

    time_s: float  # Unix time
    output_tok_s: float | None  # sent to clients since the sample before
    prompt_tok_s: float | None  # computed by the workers, over ten seconds
    num_generating: int
    num_pending: int
    rejected_per_s: float | None  # calls refused since the sample before
    ttft_ms: dict[str, float]  # p50 and p99 of the last minute; {} when there are none
    tpot_ms: dict[str, float]
    kv_share: float | None
    hit_tokens: int  # counters, from which the page takes the share of a minute
    query_tokens: int
    workers: dict[str, tuple[float | None, float]]  # prompt and output tok/s, over ten seconds


class Event(msgspec.Struct, frozen=True):
    number: int
    time_s: float
    tone: str  # good, note, warn or bad
    text: str


class DashboardView(msgspec.Struct, frozen=True):
    model: str
    version: str
    dtype: str  # of the engine; "" and 0: there is none behind this front, but other servers
    device: str
    max_model_len: int
    block_size: int
    time_s: float  # Unix time
    uptime_s: float
    draining: bool
    num_pending: int  # requests without a first token
    restarts: int
    prompt_tokens: int  # of requests that have a first token
    output_tokens: int  # sent to clients
    finished: dict[str, int]  # requests by finish reason
    rejected: dict[str, int]  # calls refused, by the code of the error
    window_s: float  # that the latencies below are of
    ttft_ms: dict[str, float]  # {} when there are none
    tpot_ms: dict[str, float]
    engine: EngineStats  # the sums over all workers, as they last told
    pool: PoolView
    takes_images: bool = False
    history: list[Sample] = []
    events: list[Event] = []


class History:
    def __init__(self, view: Callable[[], DashboardView]) -> None:
        self._view = view
        self._before: DashboardView | None = None
        self._samples: deque[Sample] = deque(maxlen=NUM_SAMPLES)
        self._events: deque[Event] = deque(maxlen=NUM_EVENTS)
        self._num_events = 0

    @property
    def events(self) -> list[Event]:
        return list(self._events)

    def since(self, time_s: float) -> list[Sample]:
        return [sample for sample in self._samples if sample.time_s > time_s]

    def start(self, loop: asyncio.AbstractEventLoop) -> None:
        """Take a sample now, and every second for as long as the loop runs."""
        self.sample()
        loop.call_later(INTERVAL_S, self.start, loop)

    def sample(self) -> None:
        now, before = self._view(), self._before
        self._samples.append(_sample(now, before))
        for tone, text in changes(before, now) if before is not None else ():
            self._num_events += 1
            self._events.append(Event(self._num_events, now.time_s, tone, text))
        self._before = now


def _sample(now: DashboardView, before: DashboardView | None) -> Sample:
    engine, workers = now.engine, now.pool.workers
    seconds = now.time_s - before.time_s if before is not None else 0.0
    known = [w.prompt_tokens_per_s for w in workers if w.prompt_tokens_per_s is not None]
    output, rejected = None, None
    if before is not None and seconds > 0:
        output = (now.output_tokens - before.output_tokens) / seconds
        rejected = (sum(now.rejected.values()) - sum(before.rejected.values())) / seconds
    return Sample(
        time_s=now.time_s,
        output_tok_s=output,
        prompt_tok_s=sum(known) if known else None,
        num_generating=now.pool.num_open - now.num_pending,
        num_pending=now.num_pending,
        rejected_per_s=rejected,
        ttft_ms=_quantiles(now.ttft_ms),
        tpot_ms=_quantiles(now.tpot_ms),
        kv_share=engine.num_kv_blocks_used / engine.num_kv_blocks if engine.num_kv_blocks else None,
        hit_tokens=engine.prefix_hit_tokens,
        query_tokens=engine.prefix_query_tokens,
        workers={w.name: (w.prompt_tokens_per_s, w.tokens_per_s) for w in workers},
    )


def _quantiles(summary: dict[str, float]) -> dict[str, float]:
    return {name: summary[name] for name in ("p50", "p99") if name in summary}


def changes(before: DashboardView, now: DashboardView) -> Iterator[tuple[str, str]]:
    """(tone, sentence) of what happened between two views."""
    old = {worker.name: worker for worker in before.pool.workers}
    for worker in now.pool.workers:
        yield from _worker_changes(old.pop(worker.name, None), worker)
    for name in old:
        yield "note", f"{name} left the pool"
    if (moved := now.pool.migrations - before.pool.migrations) > 0:
        yield "warn", f"{_requests(moved)} went on at another worker"
    if (failed := now.pool.failed_transfers - before.pool.failed_transfers) > 0:
        yield "warn", f"{_requests(failed)} lost the KV that a prefill worker had computed"
    if (errors := now.finished.get("error", 0) - before.finished.get("error", 0)) > 0:
        yield "bad", f"{_requests(errors)} ended in an error"
    for reason in sorted(now.rejected.keys() - before.rejected.keys()):
        yield "warn", f"the first call was refused: {reason}"
    if now.draining and not before.draining:
        yield "warn", "the server is draining"


def _worker_changes(old: WorkerView | None, new: WorkerView) -> Iterator[tuple[str, str]]:
    if old is None:
        yield "note", f"{new.name} joined the pool, {new.state}"
        return
    if new.failures > old.failures:
        yield "bad", f"{new.name} failed: {new.last_failure}"
    if new.restarts > old.restarts:
        yield "good", f"{new.name} was restarted"
    elif new.state != old.state:
        yield _TONES.get(new.state, "note"), f"{new.name} is {new.state}"


def _requests(count: int) -> str:
    return f"{count} request{'' if count == 1 else 's'}"
