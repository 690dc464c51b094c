"""The curves as one self-contained HTML page and as CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.bench.report.charts import Axis, Chart, ChartSeries, amount_axis, ramp, short
from tokenmill.bench.report.page import Folded, Grid, Notice, ReportPage, Section, Table
from tokenmill.plan.pareto.curves import OFFLINE, Curve, CurvePoint, ParetoCase, point_report
from tokenmill.plan.pareto.published_points import PublishedPoint

NO_LIMIT = "no limit"
TICKS = (5, 10, 20, 50, 100, 200, 500, 1000, 2000)
FIELDS = (
    *("kind", "gpu", "gpus", "precision", "scenario", "source", "tok_s_per_user"),
    *("ttft_limit_ms", "tpot_limit_ms", "tok_s_per_gpu", "tok_s_per_gpu_low"),
    *("tok_s_per_gpu_high", "usd_per_million_output", "usd_per_million_output_low"),
    *("usd_per_million_output_high", "price_per_gpu_hour", "replicas", "tp", "attention_dp"),
    *("mtp", "sequences_per_gpu", "prefill_replicas"),
)


@dataclass(frozen=True, slots=True)
class Result:
    case: ParetoCase
    xs: tuple[float, ...]
    curves: tuple[Curve, ...]
    published: tuple[PublishedPoint, ...]
    left_out: tuple[str, ...]

    @property
    def colors(self) -> dict[str, str]:
        names = [curve.name for curve in self.curves]
        return dict(zip(names, ramp(len(names)), strict=True))


def pareto_page(result: Result) -> ReportPage:
    """Predictions as lines with their intervals, published rows as dots."""
    case = result.case
    blocks = [Grid([_throughput(result), _price(result)])]
    sections = [
        Section(
            "Predicted curves",
            blocks,
            f"Each line is a prediction of the best configuration under a limit per token that "
            f"{case.percentile:g} % of the requests keep; its band is the interval. "
            "Dots are published results.",
        )
    ]
    if result.published:
        intro = "Each row's own system is predicted; rows that were fitted on are marked."
        table = Table("Published", _published_rows(result), (0, 1, 2))
        sections.append(Section("Published beside predicted", [table], intro))
    tables = [
        Folded(curve.name, [Table(curve.name, _curve_rows(curve))]) for curve in result.curves
    ]
    sections.append(Section("Every predicted point", tables, _price_words(result)))
    return ReportPage(
        title=f"{case.model}: throughput and price against interactivity",
        kind="Prediction",
        chips=[case.lengths.name, f"software of {case.round}", *_names(result)],
        tiles=[],
        sections=sections,
        notices=[_prediction_notice(case), *_left_out(result)],
    )


def _names(result: Result) -> list[str]:
    return [curve.name for curve in result.curves]


def _prediction_notice(case: ParetoCase) -> Notice:
    fit = case.fit
    origin = f"Its efficiencies were fitted to {len(fit.fitted_on)} rows ({fit.source}, {fit.date})"
    if fit.name != case.round:
        origin += f"; {case.round} has no published results to fit on yet"
    lines = [
        f"{origin}.",
        "Intervals are what 90 % of the rows stayed within that nothing was fitted on.",
        "A published result stands at the tokens/s per user that its scenario's limit grants to "
        "99 % of the requests; Offline has no limit.",
        "Lines may draft tokens wherever that is faster and the round's software can; MLPerf "
        "allows it in few scenarios, and the table of published results keeps to its rules.",
    ]
    return Notice("warn", "This page is a prediction, not a measurement.", lines)


def _left_out(result: Result) -> list[Notice]:
    return [Notice("note", "Left out", result.left_out)] if result.left_out else []


def _price_words(result: Result) -> str:
    prices = {
        curve.gpu.key: f"{curve.gpu.key} ${curve.price:g} per GPU and hour"
        + (f" ({curve.gpu.price_note})" if curve.price == curve.gpu.price_per_hour else "")
        for curve in result.curves
    }
    return "Prices: " + "; ".join(prices.values()) + ". The whole cost is that of output tokens."


def _throughput(result: Result) -> Chart:
    title = "Throughput against interactivity"
    return _chart(result, title, "output tok/s per GPU", lambda curve, per_gpu: per_gpu)


def _price(result: Result) -> Chart:
    title = "Price against interactivity"
    return _chart(result, title, "$ per million output tokens", Curve.usd_per_million)


def _chart(
    result: Result, title: str, unit: str, value_of: Callable[[Curve, float], float]
) -> Chart:
    series = [
        *(_line(result, curve, value_of) for curve in result.curves),
        *_dots(result, value_of),
    ]
    values = [value for one in series for value in one.values if value is not None]
    values += [bound for one in series for pair in one.bounds if pair for bound in pair]
    about = "; ".join(f"{one.name} {_span(one)}" for one in series)
    return Chart(
        title,
        f"{title}, {unit}: {about}",
        _user_axis(result.xs),
        _value_axis(unit, values),
        [x or _least(result.xs) for x in result.xs],
        [f"{short(x)} tok/s/user" if x else "Offline: no limit per user" for x in result.xs],
        series,
    )


def _span(series: ChartSeries) -> str:
    values = [value for value in series.values if value is not None]
    return f"from {short(values[0])} to {short(values[-1])}"


def _least(xs: Sequence[float]) -> float:
    """Where Offline is drawn: left of the slowest user."""
    return min(x for x in xs if x) / 2.5


def _user_axis(xs: Sequence[float]) -> Axis:
    low, high = _least(xs), max(xs) * 1.1
    ticks = [(float(tick), str(tick)) for tick in TICKS if low * 1.2 < tick <= high]
    first = [(low, NO_LIMIT)] if OFFLINE in xs else []
    label = "tok/s/user (1000 / limit of TPOT in ms), logarithmic"
    return Axis(label, low, high, log=True, ticks=(*first, *ticks))


def _value_axis(unit: str, values: Sequence[float]) -> Axis:
    """Prices span orders of magnitude; throughput starts at nothing."""
    if unit.startswith("$"):
        return Axis(f"{unit}, logarithmic", min(values) / 1.2, max(values) * 1.2, log=True)
    return amount_axis(unit, values)


def _line(result: Result, curve: Curve, value_of: Callable[[Curve, float], float]) -> ChartSeries:
    def bounds(point: CurvePoint) -> tuple[float, float]:
        low, high = sorted(value_of(curve, bound) for bound in point.interval)
        return low, high

    return ChartSeries(
        curve.name,
        [value_of(curve, point.per_gpu) if point else None for point in curve.points],
        "line",
        result.colors[curve.name],
        bounds=[bounds(point) if point else None for point in curve.points],
    )


def _dots(result: Result, value_of: Callable[[Curve, float], float]) -> list[ChartSeries]:
    """The published rows of each GPU in the colour of its first curve."""
    found = []
    for key in dict.fromkeys(curve.gpu.key for curve in result.curves):
        curve = next(curve for curve in result.curves if curve.gpu.key == key)
        places = {p.per_user: value_of(curve, p.per_gpu) for p in result.published if p.gpu == key}
        if places:
            values = [places.get(x) for x in result.xs]
            color = result.colors[curve.name]
            found.append(ChartSeries(f"{key} published", values, "dots", color))
    return found


def _published_rows(result: Result) -> list[list[str]]:
    head = ["system", "scenario", "by", "tok/s/user", "published", "predicted", "interval"]
    rows = [[*head, "error", "fitted on"]]
    for point in result.published:
        gpus, entry = point.row.question.gpus, point.row.entry
        low, high = (bound / gpus for bound in point.interval)
        rows.append(
            [
                f"{gpus} x {point.gpu}",
                entry.scenario,
                entry.submitter,
                short(point.per_user) if point.per_user else NO_LIMIT,
                f"{point.per_gpu:,.0f}",
                f"{point.predicted / gpus:,.0f}",
                f"{low:,.0f} to {high:,.0f}",
                f"{point.predicted / entry.result - 1:+.0%}",
                "yes" if point.fitted else "no",
            ]
        )
    return rows


def _curve_rows(curve: Curve) -> list[list[str]]:
    head = ["tok/s/user", "tok/s per GPU", "interval", "$/M output", "interval"]
    rows = [[*head, "replica", "drafts", "sequences per GPU", "bottleneck"]]
    for point in filter(None, curve.points):
        report = point_report(curve, point)
        shape, plan = report["configuration"], point.plan
        low, high = report["usd_per_million_output_interval"]
        kind = (
            f"attention-dp {shape['attention_dp']}"
            if shape["attention_dp"] > 1
            else f"tp {shape['tp']}"
        )
        apart = f", {plan.prefill_replicas} prefill" if plan.prefill else ""
        rows.append(
            [
                short(point.per_user) if point.per_user else NO_LIMIT,
                f"{point.per_gpu:,.0f}",
                f"{point.interval[0]:,.0f} to {point.interval[1]:,.0f}",
                f"{report['usd_per_million_output']:,.3f}",
                f"{low:,.3f} to {high:,.3f}",
                f"{shape['replicas']} x {kind}{apart}",
                str(shape["mtp"]),
                f"{shape['sequences_per_gpu']:,.0f}",
                plan.operation.bottleneck,
            ]
        )
    return rows


def pareto_csv(result: Result) -> str:
    """A row for every predicted and every published point."""
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    for curve in result.curves:
        writer.writerows(_csv_row(result, curve, point) for point in filter(None, curve.points))
    writer.writerows(_published_row(result, point) for point in result.published)
    return text.getvalue()


def _csv_row(result: Result, curve: Curve, point: CurvePoint) -> dict[str, Any]:
    report = point_report(curve, point)
    shape = report.pop("configuration")
    low, high = report.pop("tok_s_per_gpu_interval")
    cheap, dear = report.pop("usd_per_million_output_interval")
    chosen = {key: shape[key] for key in ("replicas", "tp", "attention_dp", "mtp")}
    return {
        **report,
        **chosen,
        "kind": "predicted",
        "gpu": curve.gpu.key,
        "gpus": curve.gpus,
        "precision": curve.precision,
        "scenario": result.case.scenario(point.per_user) if result.case.benchmark else "",
        "source": f"efficiencies of {result.case.fit.name}",
        "tok_s_per_gpu_low": low,
        "tok_s_per_gpu_high": high,
        "usd_per_million_output_low": cheap,
        "usd_per_million_output_high": dear,
        "price_per_gpu_hour": curve.price,
        "sequences_per_gpu": shape["sequences_per_gpu"],
        "prefill_replicas": point.plan.prefill_replicas,
    }


def _published_row(result: Result, point: PublishedPoint) -> dict[str, Any]:
    curve = next(curve for curve in result.curves if curve.gpu.key == point.gpu)
    question = point.row.question
    return {
        "kind": "published",
        "gpu": point.gpu,
        "gpus": question.gpus,
        "precision": point.row.entry.weights,
        "scenario": question.scenario,
        "source": f"MLPerf {point.row.entry.round}, {point.row.entry.submitter}",
        "tok_s_per_user": round(point.per_user, 2) or None,
        "ttft_limit_ms": question.limit.ttft_s * 1e3 if question.limit else None,
        "tpot_limit_ms": question.limit.tpot_s * 1e3 if question.limit else None,
        "tok_s_per_gpu": round(point.per_gpu, 1),
        "usd_per_million_output": round(curve.usd_per_million(point.per_gpu), 4),
        "price_per_gpu_hour": curve.price,
    }
