"""Charts as self-contained HTML: an SVG that stretches to the page, with its labels as text.

The drawing has no fixed width, so a chart fits a phone and a desktop while its text keeps its size.
web/report.js shows the values of `data-hover` under the pointer or the arrow keys.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any, Literal, NewType

from tokenmill.core.metrics import PERCENTS, percentile, too_few_for

Html = NewType("Html", str)
Shape = Literal["line", "area", "bars", "dots"]
Show = Callable[[float], str]

WIDTH, HEIGHT = 1000, 300  # units of the drawing
NUM_STEPS = 100  # of a cumulative curve
MIN_BINS, MAX_BINS = 8, 48
LOG_RATIO = 10.0  # largest value to median, from which the axis is logarithmic
LOG_SPAN = 1e4  # of a logarithmic axis at most
MAX_TICKS = 5
MAX_PINS = 12  # points of a line up to which each is marked
MARK_WIDTH = 0.27  # of the plot on a phone: labels of marks nearer than this go to different rows
MS = "ms"  # the label of axes of time
MANY_MS = 2000  # from which such an axis has ticks with units of their own
BLUE, AMBER, GREEN, RED = "var(--c1)", "var(--c2)", "var(--c3)", "var(--bad)"


@dataclass(frozen=True, slots=True)
class Axis:
    """A range of values; `ticks` are (value, text), chosen here where none are given."""

    label: str
    low: float
    high: float
    log: bool = False
    ticks: tuple[tuple[float, str], ...] = ()

    def place(self, value: float) -> float:
        """Where a value is between the ends, from 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, self.low))
        return min(max((value - low) / (high - low), 0.0), 1.0)

    def steps(self, count: int) -> list[float]:
        """`count` + 1 values from end to end, evenly spaced on the page."""
        if self.log:
            ratio = (self.high / self.low) ** (1 / count)
            return [*(self.low * ratio**i for i in range(count)), self.high]
        width = (self.high - self.low) / count
        return [*(self.low + width * i for i in range(count)), self.high]

    def labels(self) -> tuple[tuple[float, str], ...]:
        """Its ticks."""
        if self.ticks:
            return self.ticks
        values = _log_ticks(self.low, self.high) if self.log else _ticks(self.low, self.high)
        show = in_ms if self.label.startswith(MS) and self.high >= MANY_MS else short
        return tuple((value, show(value)) for value in values)


@dataclass(frozen=True, slots=True)
class Series:
    """Values along the chart's xs; None: none there."""

    name: str
    values: Sequence[float | None]
    shape: Shape = "line"
    color: str = BLUE
    quiet: bool = False  # drawn, but in no legend and under no pointer
    bounds: Sequence[tuple[float, float] | None] = ()  # of a line: its interval at each value


@dataclass(frozen=True, slots=True)
class Mark:
    """A line across the chart at a value of x."""

    label: str
    value: float
    limit: bool = False  # a limit to keep rather than a figure


@dataclass(frozen=True, slots=True)
class Chart:
    """Series over common xs; `labels` head what is shown for each x."""

    title: str
    about: str  # in words, for those who do not see it
    x: Axis
    y: Axis
    xs: Sequence[float]
    labels: Sequence[str]
    series: Sequence[Series]
    show: Show
    marks: Sequence[Mark] = ()
    edges: Sequence[float] = ()  # of bars, one more than xs
    names: Sequence[str] = ()  # beside dots


def short(value: float) -> str:
    """Three digits that matter."""
    size = abs(value)
    if size >= 999_500:
        return f"{value / 1e6:.3g}M"
    if size >= 10_000:
        return f"{value / 1e3:.3g}k"
    if size >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def ms_parts(value: float) -> tuple[str, str]:
    """A latency as (number, unit), in the unit that suits it: 421 ms, 10.7 s, 12 min."""
    for least_ms, unit in ((600_000, "min"), (1000, "s")):
        if abs(value) >= least_ms:
            return short(value / {"min": 60_000, "s": 1000}[unit]), unit
    return short(value), "ms"


def in_ms(value: float) -> str:
    """A latency in milliseconds as text."""
    return " ".join(ms_parts(value))


def round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(least))
    return next(power * m for m in (1, 2, 5, 10) if power * m >= least * 0.999)


def _ticks(low: float, high: float) -> list[float]:
    step = round_step((high - low) / MAX_TICKS)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [index * step for index in range(first, last + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for factors in ((1, 2, 5), (1, 3), (1,)):
        found = [f * 10.0**p for p in powers for f in factors if low <= f * 10.0**p <= high]
        if len(found) <= MAX_TICKS + 1:
            return found
    return found[:: math.ceil(len(found) / MAX_TICKS)]


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


def histogram(
    title: str, values: Sequence[float], *, what: str = "requests", marks: Sequence[Mark] = ()
) -> Html:
    """How many values there are of each size, in ms; `marks` are limits."""
    values = sorted(values)
    x = latency_axis([values], marks)
    edges = x.steps(min(MAX_BINS, max(MIN_BINS, round(2 * len(values) ** 0.5))))
    inner = [bisect_left(values, edge) for edge in edges[1:-1]]
    counts = [b - a for a, b in pairwise([0, *inner, len(values)])]
    chart = Chart(
        title,
        f"{title} of {len(values):,} {what}; {_said(values)}",
        x,
        amount_axis(what, counts),
        [(a + b) / 2 for a, b in pairwise(edges)],
        [f"{in_ms(a)} to {in_ms(b)}" for a, b in pairwise(edges)],
        [Series(what, counts, "bars")],
        lambda count: f"{count:,.0f}",
        [*_percentile_marks(values), *marks],
        edges,
    )
    return draw(chart)


def cumulative(
    title: str, groups: Mapping[str, Sequence[float]], *, marks: Sequence[Mark] = ()
) -> Html:
    """The share of values up to each size, in ms: a curve per group."""
    ordered = {name: sorted(values) for name, values in groups.items()}
    x = latency_axis(list(ordered.values()), marks)
    xs = x.steps(NUM_STEPS)
    series = []
    for color, (name, values) in zip(ramp(len(groups)), ordered.items(), strict=True):
        shares = [bisect_right(values, at) / len(values) for at in xs]
        series.append(Series(name, shares, "line", color))
    only = next(iter(ordered.values())) if len(ordered) == 1 else ()
    shares_axis = Axis("share", 0.0, 1.05, ticks=tuple((i / 4, f"{i / 4:.0%}") for i in range(5)))
    said = "; ".join(f"{name}: {_said(values)}" for name, values in ordered.items())
    chart = Chart(
        title,
        f"{title}; {said}",
        x,
        shares_axis,
        xs,
        [f"up to {in_ms(at)}" for at in xs],
        series,
        lambda share: f"{share:.1%}",
        [*(_percentile_marks(only) if only else ()), *marks],
    )
    return draw(chart)


def _percentile_marks(values: Sequence[float]) -> list[Mark]:
    """Of the percentiles for which there are enough values."""
    few = too_few_for(len(values))
    return [Mark(n, percentile(values, p)) for n, p in PERCENTS.items() if n not in few]


def _said(values: Sequence[float]) -> str:
    return ", ".join(f"{mark.label} {in_ms(mark.value)}" for mark in _percentile_marks(values))


def ramp(count: int) -> list[str]:
    """Colours from the first to the last of an ordered set."""
    if count == 1:
        return [BLUE]
    return [_mixed(index / (count - 1)) for index in range(count)]


def _mixed(share: float) -> str:
    first, second = (1, 2) if share <= 0.5 else (2, 3)
    part = round(100 * (2 * share - (first - 1)))
    return f"color-mix(in oklab, var(--ramp-{second}) {part}%, var(--ramp-{first}))"


def draw(chart: Chart) -> Html:
    """The chart as a figure."""
    parts = [f'<figure class="chart"><figcaption>{escape(chart.title)}</figcaption>']
    spoken = [series for series in chart.series if not series.quiet]
    if len(spoken) > 1:
        parts.append(_legend(spoken))
    rows = _mark_rows(chart)
    names = [[series.name, series.color] for series in spoken]
    width = max((len(text) for _, text in chart.y.labels()), default=1)
    parts += [
        f'<div class="plot" tabindex="0" role="group" aria-label="{escape(chart.about)}" '
        f"data-series={_attribute(names)} data-hover={_attribute(_hover(chart))} "
        f'style="--y-width:{width}ch;--mark-rows:{max(rows, default=-1) + 1}">',
        f'<div class="y-name">{escape(_axis_name(chart.y))}</div>',
        f'<div class="y-axis">{_tick_texts(chart.y, "bottom")}</div>',
        f'<div class="area">{_svg(chart)}{_dots(chart)}{_marks(chart, rows)}'
        '<i class="cursor"></i></div>',
        f'<div class="x-axis">{_tick_texts(chart.x, "left")}</div>',
        f'<div class="x-name">{escape(_axis_name(chart.x))}</div>',
        '<div class="tip" role="status"></div></div></figure>',
    ]
    return Html("".join(parts))


def _legend(series: Sequence[Series]) -> str:
    items = [f'<li><i style="background:{s.color}"></i>{escape(s.name)}</li>' for s in series]
    return f'<ul class="legend">{"".join(items)}</ul>'


def _axis_name(axis: Axis) -> str:
    """The label; ticks that have units need no other one."""
    is_long = axis.label.startswith(MS) and axis.high >= MANY_MS
    return axis.label.replace(MS, "time", 1) if is_long else axis.label


def _tick_texts(axis: Axis, side: str) -> str:
    return "".join(
        f'<span style="{side}:{100 * axis.place(value):.2f}%">{escape(text)}</span>'
        for value, text in axis.labels()
    )


def _svg(chart: Chart) -> str:
    lines = [
        f"M0 {y:.1f}H{WIDTH}"
        for value, _ in chart.y.labels()
        for y in (HEIGHT * (1 - chart.y.place(value)),)
    ]
    shapes = [f'<path class="grid" d="{"".join(lines)}"/>']
    for series in chart.series:
        shapes += _paths(chart, series)
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" aria-hidden="true">'
        f"{''.join(shapes)}</svg>"
    )


def _paths(chart: Chart, series: Series) -> list[str]:
    if series.shape == "bars":
        return [f'<path class="bars" style="fill:{series.color}" d="{_bars(chart, series)}"/>']
    points = [
        (WIDTH * chart.x.place(x), HEIGHT * (1 - chart.y.place(value)))
        for x, value in zip(chart.xs, series.values, strict=True)
        if value is not None
    ]
    if not points or series.shape == "dots":
        return []
    line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
    found = [f'<path class="line" style="stroke:{series.color}" d="M{line}"/>']
    if series.bounds:
        found.insert(0, _band(chart, series))
    if series.shape == "area":
        begin, end = points[0][0], points[-1][0]
        area = f"M{begin:.1f} {HEIGHT}L{line}L{end:.1f} {HEIGHT}Z"
        found.insert(0, f'<path class="fill" style="fill:{series.color}" d="{area}"/>')
    return found


def _band(chart: Chart, series: Series) -> str:
    """The interval of a line: along the upper bounds, and back along the lower ones."""
    known = [(x, b) for x, b in zip(chart.xs, series.bounds, strict=True) if b is not None]
    ends = [(x, high) for x, (_, high) in known] + [(x, low) for x, (low, _) in reversed(known)]
    corners = "L".join(
        f"{WIDTH * chart.x.place(x):.1f} {HEIGHT * (1 - chart.y.place(value)):.1f}"
        for x, value in ends
    )
    return f'<path class="band" style="fill:{series.color}" d="M{corners}Z"/>'


def _bars(chart: Chart, series: Series) -> str:
    edges = [WIDTH * chart.x.place(edge) for edge in chart.edges]
    return "".join(
        f"M{a:.1f} {HEIGHT}V{HEIGHT * (1 - chart.y.place(value)):.1f}H{b:.1f}V{HEIGHT}Z"
        for (a, b), value in zip(pairwise(edges), series.values, strict=True)
        if value
    )


def _dots(chart: Chart) -> str:
    """Round whatever the width: dots with names, and pins on lines of few points."""
    names = _clear_names(chart)
    parts = []
    for series in chart.series:
        if series.shape != "dots" and (series.shape != "line" or len(chart.xs) > MAX_PINS):
            continue
        kind = "dot" if series.shape == "dots" else "dot pin"
        for index, (x, value) in enumerate(zip(chart.xs, series.values, strict=True)):
            if value is None or series.quiet:
                continue
            place = f"left:{100 * chart.x.place(x):.2f}%;bottom:{100 * chart.y.place(value):.2f}%"
            name = escape(names[index]) if series.shape == "dots" and names else ""
            parts.append(f'<span class="{kind}" style="{place};--dot:{series.color}">{name}</span>')
    return "".join(parts)


def _clear_names(chart: Chart) -> list[str]:
    """The names of dots; one that would lie on another's is left to the pointer."""
    taken: list[tuple[float, float]] = []
    names = []
    for x, value, name in zip(chart.xs, chart.series[0].values, chart.names, strict=False):
        place = (chart.x.place(x), chart.y.place(value or 0.0))
        clear = all(abs(place[0] - a) > 0.06 or abs(place[1] - b) > 0.09 for a, b in taken)
        names.append(name if clear else "")
        taken += [place] * clear
    return names


def _mark_rows(chart: Chart) -> list[int]:
    """The row of each mark's label above the plot: none lies on another."""
    ends: list[float] = []  # of the last label in each row
    rows = []
    for mark in sorted(chart.marks, key=lambda mark: mark.value):
        place = chart.x.place(mark.value)
        row = next((i for i, end in enumerate(ends) if place - end > MARK_WIDTH), len(ends))
        ends[row : row + 1] = [place]
        rows.append(row)
    return rows


def _marks(chart: Chart, rows: Sequence[int]) -> str:
    parts = []
    for mark, row in zip(sorted(chart.marks, key=lambda mark: mark.value), rows, strict=True):
        place = chart.x.place(mark.value)
        kind = "mark limit" if mark.limit else "mark"
        kind += " first" * (place < 0.1) + " last" * (place > 0.9)
        parts.append(
            f'<span class="{kind}" style="left:{100 * place:.2f}%;--row:{row}">'
            f"<b>{escape(mark.label)} {escape(_mark_text(chart.x, mark.value))}</b></span>"
        )
    return "".join(parts)


def _mark_text(axis: Axis, value: float) -> str:
    return in_ms(value) if axis.label.startswith(MS) else short(value)


def _attribute(value: Any) -> str:
    """JSON in single quotes: to escape its many double ones would double its length."""
    text = json.dumps(value, separators=(",", ":"))
    return "'" + text.replace("&", "&amp;").replace("'", "&#39;").replace("<", "&lt;") + "'"


def _hover_text(chart: Chart, series: Series, index: int) -> str | None:
    value = series.values[index]
    if value is None:
        return None
    bounds = series.bounds[index] if series.bounds else None
    if bounds is None:
        return chart.show(value)
    return f"{chart.show(value)} ({chart.show(bounds[0])} to {chart.show(bounds[1])})"


def _hover(chart: Chart) -> list[list[Any]]:
    """[x in %, heading, texts, heights in %] for every x."""
    rows = []
    spoken = [series for series in chart.series if not series.quiet]
    for index, (x, label) in enumerate(zip(chart.xs, chart.labels, strict=True)):
        values = [series.values[index] for series in spoken]
        texts = [_hover_text(chart, series, index) for series in spoken]
        heights = [None if v is None else round(100 * chart.y.place(v), 1) for v in values]
        rows.append([round(100 * chart.x.place(x), 2), label, texts, heights])
    return rows
