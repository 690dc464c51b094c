"""The charts of an endpoint run: of one point, and of a sweep."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tokenmill.bench.client.connections import CANCELLED
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.client.summary import times_of, window_rates
from tokenmill.bench.report.charts import (
    AMBER,
    BLUE,
    GREEN,
    MS,
    RED,
    Axis,
    Chart,
    ChartSeries,
    Mark,
    Shape,
    amount_axis,
    cumulative,
    distribution,
    in_ms,
    ramp,
    short,
)
from tokenmill.bench.report.tables import LABELS, label_of
from tokenmill.bench.report.timeline import Windows, counted, in_flight, timeline
from tokenmill.bench.results.reports import ABSENT, LatencyName, PointReport
from tokenmill.core.metrics import NS_PER_MS, PERCENTS, USER_PERCENTILE, percentile

MAX_CURVES = 6  # in one chart of a sweep


@dataclass(frozen=True, slots=True)
class PointRecords:
    summary: PointReport
    records: Sequence[LoadRecord]
    stream: bool

    @property
    def whole(self) -> list[LoadRecord]:
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
        limit = getattr(self.summary.goodput or None, f"{name}_ms", None)
        return [Mark("limit", limit, limit=True)] if limit else []


def distributions(point: PointRecords, *, curves: bool) -> Iterable[Chart]:
    """A histogram of each latency, and with `curves` its cumulative share."""
    for name, values in point.latencies().items():
        what, marks = "gaps" if name == "itl" else "requests", point.limits(name)
        yield from distribution(LABELS[name], values, what=what, marks=marks, curve=curves)


def timelines(point: PointRecords) -> Iterable[Chart]:
    sent = [r for r in point.records if r.sent_ns]
    windows = Windows(
        min(r.sent_ns for r in sent), max(max(r.end_ns, r.last_ns, r.sent_ns + 1) for r in sent)
    )
    rates = window_rates(
        point.whole, windows.begin_ns, windows.seconds, point.stream, windows.count
    )
    yield timeline(
        "Throughput", "output tok/s", windows, [ChartSeries("output tok/s", rates, "area")]
    )
    spans = [(r.sent_ns, max(r.end_ns, r.last_ns, r.sent_ns)) for r in sent]
    series = [ChartSeries("in flight", in_flight(windows, spans), "area", GREEN)]
    failed = [r.end_ns or r.sent_ns for r in sent if r.error not in (None, CANCELLED)]
    if failed:
        series.append(ChartSeries("failed", counted(windows, failed), "bars", RED))
    yield timeline("Concurrency", "requests", windows, series)
    if point.stream:
        series = _ttft_series(point, windows)
        yield timeline("TTFT by time of sending", MS, windows, series, is_time=True)


def _ttft_series(point: PointRecords, windows: Windows) -> list[ChartSeries]:
    by_window: list[list[float]] = [[] for _ in range(windows.count)]
    for record in point.whole:
        if (ttft_ms := times_of(record, point.stream).ttft_ms) is not None:
            by_window[windows.index(record.sent_ns)].append(ttft_ms)
    return [
        ChartSeries(f"p{p}", [percentile(v, p) if v else None for v in by_window], "line", color)
        for p, color in ((50, BLUE), (90, AMBER))
    ]


def sweep_curves(points: Sequence[PointRecords]) -> Iterable[Chart]:
    curves = {point.summary.load: point.latencies() for point in _some(points)}
    for name in ("ttft", "tpot", "e2e"):
        groups = {load: found[name] for load, found in curves.items() if name in found}
        if groups:
            yield cumulative(LABELS[name], groups, points[0].limits(name))


def _some(points: Sequence[PointRecords]) -> Sequence[PointRecords]:
    """MAX_CURVES of them at most, the first and the last among them."""
    if len(points) <= MAX_CURVES:
        return points
    places = [round(i * (len(points) - 1) / (MAX_CURVES - 1)) for i in range(MAX_CURVES)]
    return [points[place] for place in places]


def pareto(points: Sequence[PointReport]) -> Chart:
    """Throughput of the system against that of each user; the frontier joins what nothing beats."""
    per_gpu = all(point.price for point in points)
    ordered = sorted(points, key=lambda p: p.tok_s_user or 0.0)
    xs = [point.tok_s_user or 0.0 for point in ordered]
    ys = [p.price.output_tok_s_gpu if per_gpu else p.output_tok_s for p in ordered]
    # From the right, a point is on the frontier when it is higher than all before.
    frontier = [y if y > max(ys[i + 1 :], default=-1.0) else None for i, y in enumerate(ys)]
    shape: Shape = "steps" if points[0].region is not ABSENT else "line"  # as its rules have it
    unit = "output tok/s per GPU" if per_gpu else "output tok/s"
    labels = [_user_label(point, x) for point, x in zip(ordered, xs, strict=True)]
    said = [f"{label}, {short(y)} {unit}" for label, y in zip(labels, ys, strict=True)]
    return Chart(
        "Throughput against interactivity",
        "Pareto curve: " + "; ".join(said),
        amount_axis(f"tok/s/user (1000 / {USER_PERCENTILE} of TPOT in ms)", xs),
        amount_axis(unit, ys),
        xs,
        labels,
        [ChartSeries(unit, ys, "dots"), ChartSeries("frontier", frontier, shape, quiet=True)],
        names=[_load_name(point) for point in ordered],
    )


def _user_label(point: PointReport, per_user: float) -> str:
    usd = point.price.usd_per_million_output if point.price else None
    price = f" (${usd:,.2f} per M output tokens)" if usd is not None else ""
    return f"{point.load}: {short(per_user)} tok/s/user{price}"


def _load_name(point: PointReport) -> str:
    if point.concurrency is not None:
        return str(point.concurrency)
    return f"{point.rate:g}/s" if point.rate else str(point.load)


def against_load(points: Sequence[PointReport]) -> Iterable[Chart]:
    unit = "output tok/s"
    rates = {unit: [point.output_tok_s for point in points]}
    yield _by_load("Throughput", points, unit, rates)
    names: tuple[LatencyName, ...] = ("ttft_ms", "tpot_ms")
    for name in names:
        if all(getattr(point, name) for point in points):
            values = {percent: [getattr(p, name)[percent] for p in points] for percent in PERCENTS}
            yield _by_load(label_of(name), points, MS, values)


def _by_load(
    what: str, points: Sequence[PointReport], unit: str, values: Mapping[str, Sequence[float]]
) -> Chart:
    series = [
        ChartSeries(name, found, "line", color)
        for color, (name, found) in zip(ramp(len(values)), values.items(), strict=True)
    ]
    pad, write = 0.15, in_ms if unit == MS else short
    ticks = [(float(index), _load_name(point)) for index, point in enumerate(points)]
    title, loads = f"{what} by load", [point.load for point in points]
    first, shown = next(iter(values.items()))
    said = "; ".join(f"{load} {write(value)}" for load, value in zip(loads, shown, strict=True))
    return Chart(
        title,
        f"{title}, {first}: {said}",
        Axis("load", -pad, len(points) - 1 + pad, ticks=ticks),
        amount_axis(unit, [value for found in values.values() for value in found]),
        [float(index) for index in range(len(points))],
        loads,
        series,
        "ms" if unit == MS else "short",
    )
