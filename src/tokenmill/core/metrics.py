"""Timestamps to latency: the only definition of TTFT, ITL, TPOT, end-to-end time and percentiles.

All stamps of one request come from one monotonic clock.
TTFT: arrival to first output. ITL: the gap between two successive outputs of a stream, whatever
number of tokens an output carries. TPOT: (last output - first output) / (tokens - tokens of the
first output), the mean time of a token after the first output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

NS_PER_MS = 1_000_000


@dataclass(slots=True)
class RequestTimes:
    """The stamps of one request; `record` is called once per output."""

    arrival_ns: int
    first_ns: int = 0
    last_ns: int = 0
    num_first_tokens: int = 0
    num_tokens: int = 0

    def record(self, now_ns: int, num_tokens: int) -> float | None:
        """Note an output of `num_tokens` tokens; return its ITL in ms, None for the first one."""
        previous_ns = self.last_ns
        self.last_ns = now_ns
        self.num_tokens += num_tokens
        if self.first_ns:
            return (now_ns - previous_ns) / NS_PER_MS
        self.first_ns = now_ns
        self.num_first_tokens = num_tokens
        return None

    @property
    def ttft_ms(self) -> float | None:
        """Time to first token; None before the first output."""
        return (self.first_ns - self.arrival_ns) / NS_PER_MS if self.first_ns else None

    @property
    def tpot_ms(self) -> float | None:
        """Time per output token after the first output; None while there is no later token."""
        later = self.num_tokens - self.num_first_tokens
        return (self.last_ns - self.first_ns) / NS_PER_MS / later if later > 0 else None

    @property
    def e2e_ms(self) -> float | None:
        """Arrival to last output; None before the first output."""
        return (self.last_ns - self.arrival_ns) / NS_PER_MS if self.first_ns else None


def percentile(values: Sequence[float], percent: float) -> float:
    """The value at `percent` in [0, 100], interpolated linearly between the two nearest ranks."""
    if not values:
        raise ValueError("percentile needs at least one value")
    if not 0.0 <= percent <= 100.0:
        raise ValueError(f"percent must be in [0, 100], got {percent}")
    ordered = sorted(values)
    rank = (len(ordered) - 1) * percent / 100.0
    low = math.floor(rank)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def summarize(values: Iterable[float | None]) -> dict[str, float]:
    """Mean, p50, p90, p99 and max of the values that exist; {} when none does."""
    present = [v for v in values if v is not None]
    if not present:
        return {}
    return {
        "mean": sum(present) / len(present),
        "p50": percentile(present, 50),
        "p90": percentile(present, 90),
        "p99": percentile(present, 99),
        "max": max(present),
    }


def usd_per_million_tokens(usd_per_hour: float, tok_s: float) -> float:
    """What a million tokens cost at a price per hour and a rate per second."""
    return usd_per_hour / (tok_s * 3600) * 1e6
