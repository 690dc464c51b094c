"""MLPerf Endpoints: the regions of concurrency, the points to measure, and the curve of them.

Rules 1.0, sections 5.3 to 5.5 and 6.2. `compute_regions` is their reference algorithm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import tok_s_user

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import PointReport

ULTRA_LOW_MAX = 32  # concurrency up to which a point counts as ultra low
MIN_POINTS = 7
ULTRA_LOW_S, OTHER_S = 600.0, 1200.0  # least durations of a point
MARGIN = 1.10  # points may lie so far above C_max


@dataclass(frozen=True, slots=True)
class Regions:
    """Inclusive bounds of the regions between C_min and C_max."""

    c_min: int
    low_end: int
    med_end: int
    c_max: int

    @property
    def bounds(self) -> dict[str, tuple[int, int]]:
        """By name, in ascending order."""
        return {
            "low_latency": (1, self.c_min),
            "low_concurrency": (self.c_min + 1, self.low_end),
            "med_concurrency": (self.low_end + 1, self.med_end),
            "high_concurrency": (self.med_end + 1, self.c_max),
            "margin": (self.c_max + 1, math.ceil(MARGIN * self.c_max)),
        }

    def region_of(self, concurrency: int) -> str | None:
        """The region of a point; None above the margin."""
        for name, (first, last) in self.bounds.items():
            if first <= concurrency <= last:
                return name
        return None


def compute_regions(c_max: int, c_min: int) -> Regions:
    """Three regions of equal width in log2 above C_min; rounded half to even."""
    if not 1 <= c_min <= ULTRA_LOW_MAX:
        raise BenchError(f"the lowest concurrency must be 1 to {ULTRA_LOW_MAX}, got {c_min}")
    if c_max <= ULTRA_LOW_MAX:
        raise BenchError(
            f"--max-concurrency must be above {ULTRA_LOW_MAX}, as the rules have it, got {c_max}"
        )
    width = math.log2(c_max - c_min) / 3
    return Regions(c_min, round(c_min + 2**width), round(c_min + 2 ** (2 * width)), c_max)


def choose_points(c_max: int, c_min: int = 1, count: int = MIN_POINTS) -> list[int]:
    """C_min, C_max, the middle of the regions between, then the widest gaps halved; in log2."""
    regions = compute_regions(c_max, c_min)
    chosen = {c_min, c_max}
    for name in ("low_concurrency", "med_concurrency", "high_concurrency"):
        first, last = regions.bounds[name]
        if first > last:
            raise BenchError(
                f"--max-concurrency {c_max} leaves no point for {name} above {c_min}: give a "
                "higher one, or a lower --min-concurrency"
            )
        if name != "high_concurrency":
            chosen.add(_middle(first, last))
    while len(chosen) < count:
        gaps = [(b / a, a, b) for a, b in pairwise(sorted(chosen)) if b - a > 1]
        if not gaps:
            raise BenchError(f"--points {count}: there are only {len(chosen)} up to {c_max}")
        _, low, high = max(gaps)
        chosen.add(min(max(_middle(low, high), low + 1), high - 1))
    return sorted(chosen)


def _middle(low: int, high: int) -> int:
    return round(math.sqrt(low * high))


def min_duration_s(concurrency: int) -> float:
    """How long a point must be measured, agentic benchmarks aside."""
    return ULTRA_LOW_S if concurrency <= ULTRA_LOW_MAX else OTHER_S


def official_metrics(point: PointReport) -> dict[str, float | None]:
    """The figures that are published for a point; None where nothing was answered."""
    tpot_ms, ttft_ms = point.tpot_ms or {}, point.ttft_ms or {}
    return {
        "system_tps": point.output_tok_s,
        "tps_per_user": tok_s_user(tpot_ms),
        "ttft_p90_ms": ttft_ms.get("p90"),
        "tpot_p90_ms": tpot_ms.get("p90"),
    }


def pareto_front(curve: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The (tps_per_user, system_tps) that no other one beats in both, by rising tps_per_user."""
    front: list[tuple[float, float]] = []
    for user, system in sorted(set(curve), reverse=True):
        if not front or system > front[-1][1]:
            front.append((user, system))
    return front[::-1]
