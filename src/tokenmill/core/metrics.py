"""Defines TTFT, ITL, TPOT, end-to-end time and percentiles, all computed from timestamps.

All stamps of one request come from one monotonic clock.
TTFT: arrival to first output. ITL: the gap between two successive outputs of a stream, whatever
number of tokens an output carries. TPOT: (last output - first output) / (tokens - tokens of the
first output), the mean time of a token after the first output. TPOT by n - 1, as LoadGen has it:
the same time / (tokens - 1), less where the first output carries several.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

NS_PER_MS, NS_PER_S = 1_000_000, 1_000_000_000


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
    def tpot_n1_ms(self) -> float | None:
        """Time per output token by LoadGen's rule; None of a single token."""
        later = self.num_tokens - 1
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


def summarize(values: Iterable[float | None], digits: int | None = None) -> dict[str, float]:
    """Mean, p50, p90, p99 and max of the values that exist, rounded if asked; {} when none does."""
    present = [v for v in values if v is not None]
    if not present:
        return {}
    summary = {
        "mean": sum(present) / len(present),
        "p50": percentile(present, 50),
        "p90": percentile(present, 90),
        "p99": percentile(present, 99),
        "max": max(present),
    }
    return summary if digits is None else {k: round(v, digits) for k, v in summary.items()}


PERCENTS = {"p50": 50, "p90": 90, "p99": 99}
USER_PERCENTILE = "p90"  # of TPOT, behind tok/s/user: as MLPerf Endpoints counts


def min_values(percent: int) -> int:
    """Values that a percentile needs so that one of them is expected beyond it: p99 needs 100."""
    return -(-100 // (100 - percent))


def too_few_for(num_values: int) -> list[str]:
    return [name for name, percent in PERCENTS.items() if num_values < min_values(percent)]


def tok_s_user(tpot_ms: Mapping[str, float]) -> float | None:
    """Tokens per second that nine users of ten have at least: 1000 / p90 of TPOT in ms."""
    tpot = tpot_ms.get(USER_PERCENTILE)
    return 1000 / tpot if tpot else None


def usd_per_million_tokens(usd_per_hour: float, tok_s: float) -> float:
    """What a million tokens cost at a price per hour and a rate per second."""
    return usd_per_hour / (tok_s * 3600) * 1e6


@dataclass(frozen=True, slots=True)
class Slo:
    """Limits that a request must keep to be good; None: no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None
    e2e_ms: float | None = None

    def met_by(self, times: RequestTimes) -> bool:
        """True when every limit holds; one token has no TPOT and so keeps its limit."""
        if times.ttft_ms is None or times.e2e_ms is None:
            return False
        values = (times.ttft_ms, times.tpot_ms or 0.0, times.e2e_ms)
        limits = (self.ttft_ms, self.tpot_ms, self.e2e_ms)
        return all(m is None or v <= m for v, m in zip(values, limits, strict=True))


class Acceptance(TypedDict):
    """How many drafts were accepted; None: nothing was drafted."""

    first: float | None
    length: float | None
    positions: list[float]


def acceptance(drafted: Sequence[int], accepted: Sequence[int]) -> Acceptance:
    """Share of right first drafts, tokens per verified step, and the share by position.

    `drafted` and `accepted` count drafts by position; a step brings one token besides.
    """
    if not drafted or not drafted[0]:
        return {"first": None, "length": None, "positions": []}
    positions = [a / d if d else 0.0 for d, a in zip(drafted, accepted, strict=True)]
    return {
        "first": round(positions[0], 4),
        "length": round(1 + sum(accepted) / drafted[0], 4),
        "positions": [round(share, 4) for share in positions],
    }
