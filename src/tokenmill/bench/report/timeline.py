"""Timelines of a run: rates and counts in windows of equal length."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from tokenmill.bench.report.charts import (
    Axis,
    Chart,
    ChartSeries,
    amount_axis,
    in_ms,
    middles,
    short,
)

NUM_WINDOWS = 60


@dataclass(frozen=True, slots=True)
class Windows:
    begin_ns: int
    end_ns: int
    count: int = NUM_WINDOWS

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9

    @property
    def width_ns(self) -> float:
        return (self.end_ns - self.begin_ns) / self.count

    def index(self, at_ns: int) -> int:
        return min(max(int((at_ns - self.begin_ns) / self.width_ns), 0), self.count - 1)

    def edges_s(self) -> list[float]:
        return [self.seconds * i / self.count for i in range(self.count + 1)]


def counted(windows: Windows, moments_ns: Sequence[int]) -> list[float]:
    counts = [0.0] * windows.count
    for at_ns in moments_ns:
        counts[windows.index(at_ns)] += 1
    return counts


def in_flight(windows: Windows, spans_ns: Sequence[tuple[int, int]]) -> list[float]:
    totals = [0.0] * windows.count
    for begin, end in spans_ns:
        for index, part in _parts(windows, begin, end):
            totals[index] += part / windows.width_ns
    return totals


def spread(
    windows: Windows, spans_ns: Sequence[tuple[int, int]], amounts: Sequence[int]
) -> list[float]:
    rates = [0.0] * windows.count
    for (begin, end), amount in zip(spans_ns, amounts, strict=True):
        length = max(end - begin, 1)
        for index, part in _parts(windows, begin, begin + length):
            rates[index] += amount * part / length / windows.width_ns * 1e9
    return rates


def _parts(windows: Windows, begin: int, end: int) -> Iterator[tuple[int, float]]:
    """(window, ns of the span in it) for every window that the span touches."""
    first, last = windows.index(begin), windows.index(end)
    inner = (windows.begin_ns + windows.width_ns * i for i in range(first + 1, last + 1))
    stops = [float(begin), *inner, float(end)]
    for index, (a, b) in enumerate(pairwise(stops), first):
        yield index, b - a


def timeline(
    title: str, unit: str, windows: Windows, series: Sequence[ChartSeries], *, is_time: bool = False
) -> Chart:
    edges, write = windows.edges_s(), in_ms if is_time else short
    digits = max(0, 2 - math.floor(math.log10(max(windows.seconds, 1e-3))))
    known = [[v for v in one.values if v is not None] for one in series]
    means = [
        f"{one.name} {write(sum(found) / len(found) if found else 0.0)} on average"
        for one, found in zip(series, known, strict=True)
    ]
    return Chart(
        title,
        f"{title} over {windows.seconds:.1f} seconds: {', '.join(means)}",
        Axis("seconds", 0.0, windows.seconds),
        amount_axis(unit, [value for found in known for value in found]),
        middles(edges),
        [f"{a:.{digits}f} to {b:.{digits}f} s" for a, b in pairwise(edges)],
        series,
        "ms" if is_time else "short",
        edges=edges,
    )
