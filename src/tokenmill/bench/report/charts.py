"""What web/report.js draws as charts: values over common xs, with axes, marks and intervals."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal

import msgspec

from tokenmill.core.metrics import PERCENTS, percentile, too_few_for

Shape = Literal["line", "steps", "area", "bars", "dots"]
Show = Literal["short", "ms", "count", "share"]  # how values are written

NUM_STEPS = 100  # of a cumulative curve
MIN_BINS, MAX_BINS = 8, 48
LOG_RATIO = 10.0  # largest value to median, from which the axis is logarithmic
LOG_SPAN = 1e4  # of a logarithmic axis at most
MS = "ms"  # the label of axes of time
BLUE, AMBER, GREEN, RED = "var(--c1)", "var(--c2)", "var(--c3)", "var(--bad)"


class Axis(msgspec.Struct):
    """A range of values; `ticks` are (value, text), chosen by the script where none are given."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: Sequence[tuple[float, str]] = ()

    def steps(self, count: int) -> list[float]:
        """`count` + 1 values from end to end, evenly spaced on the page."""
        if self.log:
            ratio = (self.high / self.low) ** (1 / count)
            return [*(self.low * ratio**i for i in range(count)), self.high]
        width = (self.high - self.low) / count
        return [*(self.low + width * i for i in range(count)), self.high]


class ChartSeries(msgspec.Struct):
    """Values along the chart's xs; None: none there."""

    name: str
    values: Sequence[float | None]
    shape: Shape = "line"
    color: str = BLUE
    quiet: bool = False  # drawn, but in no legend and under no pointer
    bounds: Sequence[tuple[float, float] | None] = ()  # of a line: its interval at each value


class Mark(msgspec.Struct):
    """A line across the chart at a value of x."""

    label: str
    value: float
    limit: bool = False  # a limit to keep rather than a figure


class Chart(msgspec.Struct):
    """Series over common xs; `labels` head what is shown for each x."""

    title: str
    about: str  # in words, for those who do not see it
    x: Axis
    y: Axis
    xs: Sequence[float]
    labels: Sequence[str]
    series: Sequence[ChartSeries]
    show: Show = "short"
    marks: Sequence[Mark] = ()
    edges: Sequence[float] = ()  # of bars, one more than xs
    names: Sequence[str] = ()  # beside dots


def short(value: float) -> str:
    size = abs(value)
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 10_000:
        return f"{value / 1e3:.3g}k"
    return f"{value:,.0f}" if size >= 1000 else f"{value:.3g}"


def ms_parts(value: float) -> tuple[str, str]:
    """A latency as (number, unit), in the unit that suits it: 421 ms, 10.7 s, 12 min."""
    for least_ms, unit_ms, unit in ((600_000, 60_000, "min"), (1000, 1000, "s")):
        if abs(value) >= least_ms:
            return short(value / unit_ms), unit
    return short(value), "ms"


def in_ms(value: float) -> str:
    return " ".join(ms_parts(value))


def latency_axis(groups: Sequence[Sequence[float]], limits: Sequence[Mark]) -> Axis:
    """All ordered groups and limits; logarithmic where the largest would flatten the rest."""
    low = min(values[0] for values in groups)
    top = max([values[-1] for values in groups] + [mark.value for mark in limits])
    middle = min(percentile(values, 50) for values in groups)
    if middle > 0 and top > LOG_RATIO * middle:
        return Axis(f"{MS}, logarithmic", max(low, top / LOG_SPAN), top, log=True)
    pad = (top - low) * 0.02 or abs(top) * 0.05 or 1.0
    return Axis(MS, max(low - pad, 0.0), top + pad)


def amount_axis(label: str, values: Sequence[float]) -> Axis:
    """From zero to a little above the largest."""
    return Axis(label, 0.0, max(values, default=0.0) * 1.08 or 1.0)


def distribution(
    label: str,
    values: Sequence[float],
    *,
    what: str = "requests",
    marks: Sequence[Mark] = (),
    curve: bool = True,
) -> list[Chart]:
    """How many values there are of each size, and with `curve` the share up to each size, in ms."""
    values = sorted(values)
    x = latency_axis([values], marks)
    edges = x.steps(min(MAX_BINS, max(MIN_BINS, round(2 * len(values) ** 0.5))))
    inner = [bisect_left(values, edge) for edge in edges[1:-1]]
    counts = [b - a for a, b in pairwise([0, *inner, len(values)])]
    title = f"{label} distribution"
    histogram = Chart(
        title,
        f"{title} of {len(values):,} {what}; {_said(values)}",
        x,
        amount_axis(what, counts),
        middles(edges),
        [f"{in_ms(a)} to {in_ms(b)}" for a, b in pairwise(edges)],
        [ChartSeries(what, counts, "bars")],
        "count",
        [*_percentile_marks(values), *marks],
        edges,
    )
    return [histogram, *([cumulative(label, {"share": values}, marks)] if curve else [])]


def middles(edges: Sequence[float]) -> list[float]:
    return [(a + b) / 2 for a, b in pairwise(edges)]


def cumulative(
    label: str, groups: Mapping[str, Sequence[float]], marks: Sequence[Mark] = ()
) -> Chart:
    """The share of values up to each size, in ms: a curve per group."""
    title, ordered = f"{label}, cumulative", {n: sorted(values) for n, values in groups.items()}
    x = latency_axis(list(ordered.values()), marks)
    xs = x.steps(NUM_STEPS)
    series = []
    for color, (name, values) in zip(ramp(len(groups)), ordered.items(), strict=True):
        shares = [bisect_right(values, at) / len(values) for at in xs]
        series.append(ChartSeries(name, shares, "line", color))
    if len(ordered) == 1:
        marks = [*_percentile_marks(next(iter(ordered.values()))), *marks]
    said = "; ".join(f"{name}: {_said(values)}" for name, values in ordered.items())
    y = Axis("share", 0.0, 1.05, ticks=[(i / 4, f"{i / 4:.0%}") for i in range(5)])
    shown = [f"up to {in_ms(at)}" for at in xs]
    return Chart(title, f"{title}; {said}", x, y, xs, shown, series, "share", marks)


def _percentile_marks(values: Sequence[float]) -> list[Mark]:
    few = too_few_for(len(values))
    return [Mark(n, percentile(values, p)) for n, p in PERCENTS.items() if n not in few]


def _said(values: Sequence[float]) -> str:
    return ", ".join(f"{mark.label} {in_ms(mark.value)}" for mark in _percentile_marks(values))


def ramp(count: int) -> list[str]:
    return [BLUE] if count == 1 else [_mixed(index / (count - 1)) for index in range(count)]


def _mixed(share: float) -> str:
    first, second = (1, 2) if share <= 0.5 else (2, 3)
    part = round(100 * (2 * share - (first - 1)))
    return f"color-mix(in oklab, var(--ramp-{second}) {part}%, var(--ramp-{first}))"
