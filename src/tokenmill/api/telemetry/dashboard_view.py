"""What the live page shows: the figures of now, and those of the last minutes."""

from __future__ import annotations

import msgspec

from tokenmill.core.types import EngineStats
from tokenmill.workers.pool_view import PoolView


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
    """Something that happened between two samples."""

    number: int
    time_s: float
    tone: str  # good, note, warn or bad
    text: str


class DashboardView(msgspec.Struct, frozen=True):
    """All that the page shows."""

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
