"""Progress of a run: counters and coarse histograms in memory that client processes share.

A process adds a few integers per request to memory that it shares with the parent; the parent
reads it a few times a second. Percentiles are those of buckets 6 % wide.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.core.metrics import RequestTimes

DONE, FAILED, TOKENS, OPEN = range(4)  # places in the counters of a process
LOWEST_MS, GROWTH, NUM_BUCKETS = 0.05, 1.06, 300  # the last bucket begins after half an hour
TTFT, TPOT = 4, 4 + NUM_BUCKETS  # where the histograms begin
NUM_COUNTERS = 4 + 2 * NUM_BUCKETS
_LOG_GROWTH = math.log(GROWTH)


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of a run at one moment; latencies are those of finished answers."""

    seconds: float
    num_done: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    num_open: int = 0
    ttft: Sequence[int] = field(default=())  # requests by bucket
    tpot: Sequence[int] = field(default=())

    @classmethod
    def read(cls, seconds: float, counters: Sequence[Sequence[int]]) -> Progress:
        totals = [sum(column) for column in zip(*counters, strict=True)]
        done, failed, tokens, is_open = totals[:TTFT]
        return cls(seconds, done, failed, tokens, is_open, totals[TTFT:TPOT], totals[TPOT:])


def observe(counters: Any, times: RequestTimes) -> None:
    for begin, value in ((TTFT, times.ttft_ms), (TPOT, times.tpot_ms)):
        if value is not None:
            counters[begin + bucket_of(value)] += 1


def bucket_of(value_ms: float) -> int:
    """The bucket of a latency; what is out of range is in the first or the last one."""
    if value_ms <= LOWEST_MS:
        return 0
    return min(int(math.log(value_ms / LOWEST_MS) / _LOG_GROWTH) + 1, NUM_BUCKETS - 1)


def percentile_of(counts: Sequence[int], percent: float) -> float | None:
    """The middle of the bucket that holds the percentile, in ms; None where nothing is counted."""
    rank, seen = percent / 100 * sum(counts), 0
    for bucket, count in enumerate(counts):
        seen += count
        if count and seen >= rank:
            return LOWEST_MS * math.pow(GROWTH, bucket - 0.5)
    return None
