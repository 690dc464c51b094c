"""The charts of an endpoint run: of one point, and of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.bench.client.connections import CANCELLED
from tokenmill.bench.client.records import Record
from tokenmill.bench.client.summary import times_of, window_rates
from tokenmill.bench.report.charts import (
    AMBER,
    BLUE,
    GREEN,
    MS,
    RED,
    Axis,
    Chart,
    Html,
    Mark,
    Series,
    Show,
    amount_axis,
    cumulative,
    draw,
    histogram,
    in_ms,
    ramp,
    short,
)
from tokenmill.bench.report.tables import LABELS
from tokenmill.bench.report.timeline import Windows, counted, in_flight, timeline
from tokenmill.bench.results.reports import PointReport
from tokenmill.core.metrics import NS_PER_MS, PERCENTS, USER_PERCENTILE, percentile

MAX_CURVES = 6  # in one chart of a sweep


@dataclass(frozen=True, slots=True)
class Point:
    """One point of the run: its summary and its records."""

    summary: PointReport
    records: Sequence[Record]
    stream: bool

    @property
    def whole(self) -> list[Record]:
        """The requests that were answered."""
        return [record for record in self.records if record.error is None]

    def latencies(self) -> dict[str, list[float]]:
        """Ordered values in ms by name; those without any are left out."""
        times = [times_of(record, self.stream) for record in self.whole]
        found: dict[str, Iterable[float | None]] = {"e2e": (t.e2e_ms for t in times)}
        if self.stream:
            gaps = [gap / NS_PER_MS for record in self.whole for gap in record.gaps_ns]
            streamed = {"ttft": (t.ttft_ms for t in times), "tpot": (t.tpot_ms for t in times)}
            found = streamed | {"itl": gaps} | found
        present = {name: sorted(v for v in f if v is not None) for name, f in found.items()}
        return {name: values for name, values in present.items() if values}

    def limits(self, name: str) -> list[Mark]:
        """The limit of the SLO on a latency."""
        goodput: Mapping[str, Any] = self.summary.get("goodput") or {}
        limit = goodput.get(f"{name}_ms")
        return [Mark("limit", limit, limit=True)] if limit else []


def distributions(point: Point, *, curves: bool) -> Iterable[Html]:
    """A histogram of each latency, and with `curves` its cumulative share."""
    for name, values in point.latencies().items():
        what = "gaps" if name == "itl" else "requests"
        marks = point.limits(name)
        yield histogram(f"{LABELS[name]} distribution", values, what=what, marks=marks)
        if curves:
            yield cumulative(f"{LABELS[name]}, cumulative", {"share": values}, marks=marks)


def timelines(point: Point) -> Iterable[Html]:
    """Throughput, requests in flight and TTFT over the run."""
    sent = [r for r in point.records if r.sent_ns]
    windows = Windows(
        min(r.sent_ns for r in sent), max(max(r.end_ns, r.last_ns, r.sent_ns + 1) for r in sent)
    )
    rates = window_rates(
        point.whole, windows.begin_ns, windows.seconds, point.stream, windows.count
    )
    yield timeline("Throughput", "output tok/s", windows, [Series("output tok/s", rates, "area")])
    spans = [(r.sent_ns, max(r.end_ns, r.last_ns, r.sent_ns)) for r in sent]
    series = [Series("in flight", in_flight(windows, spans), "area", GREEN)]
    failed = [r.end_ns or r.sent_ns for r in sent if r.error not in (None, CANCELLED)]
    if failed:
        series.append(Series("failed", counted(windows, failed), "bars", RED))
    yield timeline("Concurrency", "requests", windows, series)
    if point.stream:
        yield timeline(
            "TTFT by time of sending", MS, windows, _ttft_series(point, windows), show=in_ms
        )


def _ttft_series(point: Point, windows: Windows) -> list[Series]:
    by_window: list[list[float]] = [[] for _ in range(windows.count)]
    for record in point.whole:
        if (ttft_ms := times_of(record, point.stream).ttft_ms) is not None:
            by_window[windows.index(record.sent_ns)].append(ttft_ms)
    return [
        Series(f"p{p}", [percentile(v, p) if v else None for v in by_window], "line", color)
        for p, color in ((50, BLUE), (90, AMBER))
    ]


def sweep_curves(points: Sequence[Point]) -> Iterable[Html]:
    """The cumulative latencies of all points, a curve each."""
    curves = {point.summary["load"]: point.latencies() for point in _some(points)}
    for name in ("ttft", "tpot", "e2e"):
        groups = {load: found[name] for load, found in curves.items() if name in found}
        if groups:
            marks = points[0].limits(name)
            yield cumulative(f"{LABELS[name]}, cumulative", groups, marks=marks)


def _some(points: Sequence[Point]) -> Sequence[Point]:
    """MAX_CURVES of them at most, the first and the last among them."""
    if len(points) <= MAX_CURVES:
        return points
    places = [round(i * (len(points) - 1) / (MAX_CURVES - 1)) for i in range(MAX_CURVES)]
    return [points[place] for place in places]


def pareto(points: Sequence[PointReport]) -> Html:
    """Throughput of the system against that of each user; the frontier joins what nothing beats."""
    per_gpu = all("price" in point for point in points)
    ordered = sorted(points, key=lambda p: p["tok_s_user"] or 0.0)
    xs = [point["tok_s_user"] or 0.0 for point in ordered]
    ys = [p["price"]["output_tok_s_gpu"] if per_gpu else p["output_tok_s"] for p in ordered]
    # From the right, a point is on the frontier when it is higher than all before.
    frontier = [y if y > max(ys[i + 1 :], default=-1.0) else None for i, y in enumerate(ys)]
    unit = "output tok/s per GPU" if per_gpu else "output tok/s"
    chart = Chart(
        "Throughput against interactivity",
        "Pareto curve: "
        + "; ".join(
            f"{p['load']}: {short(x)} tok/s/user, {short(y)} {unit}"
            for p, x, y in zip(ordered, xs, ys, strict=True)
        ),
        amount_axis(f"tok/s/user (1000 / {USER_PERCENTILE} of TPOT in ms)", xs),
        amount_axis(unit, ys),
        xs,
        [f"{p['load']}: {short(x)} tok/s/user" for p, x in zip(ordered, xs, strict=True)],
        [Series(unit, ys, "dots"), Series("frontier", frontier, quiet=True)],
        short,
        names=[_load_name(point) for point in ordered],
    )
    return draw(chart)


def _load_name(point: PointReport) -> str:
    """The load in a word: 16, or 4/s."""
    if point["concurrency"] is not None:
        return str(point["concurrency"])
    return f"{point['rate']:g}/s" if point["rate"] else str(point["load"])


def against_load(points: Sequence[PointReport]) -> Iterable[Html]:
    """Throughput and latency percentiles, point by point."""
    unit = "output tok/s"
    yield _by_load("Throughput by load", points, unit, {unit: ["output_tok_s"]}, short)
    for name in ("ttft", "tpot"):
        if all(point.get(f"{name}_ms") for point in points):
            paths = {percent: [f"{name}_ms", percent] for percent in PERCENTS}
            yield _by_load(f"{LABELS[name]} by load", points, MS, paths, in_ms)


def _by_load(
    title: str,
    points: Sequence[PointReport],
    unit: str,
    paths: Mapping[str, Sequence[str]],
    show: Show,
) -> Html:
    series = [
        Series(name, [_at(point, path) for point in points], "line", color)
        for color, (name, path) in zip(ramp(len(paths)), paths.items(), strict=True)
    ]
    names = [_load_name(point) for point in points]
    pad = 0.15
    x = Axis("load", -pad, len(points) - 1 + pad, ticks=tuple(enumerate(names)))
    loads = [point["load"] for point in points]
    first = [_at(point, next(iter(paths.values()))) for point in points]
    said = "; ".join(f"{load} {show(value)}" for load, value in zip(loads, first, strict=True))
    about = f"{title}, {next(iter(paths))}: {said}"
    y = amount_axis(unit, [value for s in series for value in s.values if value is not None])
    return draw(Chart(title, about, x, y, range(len(points)), loads, series, show))


def _at(point: PointReport, path: Sequence[str]) -> float:
    value: Any = point
    for name in path:
        value = value[name]
    return float(value)
