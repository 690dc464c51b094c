"""Rounds side by side: what changed, by how much, and whether it is more than noise. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenmill.bench.results.intervals import CONFIDENCE, Estimate, ratio_interval
from tokenmill.bench.results.reports import (
    CompareReport,
    Comparison,
    PointComparison,
    RoundReport,
    RowReport,
)
from tokenmill.bench.results.result import ResultPoint, ToolResult
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import usd_per_million_tokens

BETTER, WORSE, NOISE, MIXED = "better", "worse", "within noise", "mixed"
NOTHING, TOO_FEW = "nothing to compare", "not enough requests"
UNLIKE = "no verdict, the runs cannot be compared"
ALIKE = 0.05  # how far the requests of two rounds may differ in their mean lengths
HITS_APART = 0.1  # of the prompt tokens, by which the prefix-cache hits of two rounds may differ
AGREES = 0.01  # how far a summary may be from its own events, and two tools' token counts apart
EFFECT = ": tokens/s, TPOT and prices differ by as much without any change of speed"


@dataclass(frozen=True, slots=True)
class Metric:
    """A figure of a point; `of`: the figure that it is a multiple of."""

    name: str
    label: str
    higher: bool = False  # is better
    of: str = ""
    per_gpu: bool = False


def _latencies(name: str, label: str, statistics: Sequence[str]) -> list[Metric]:
    return [Metric(f"{name}.{statistic}", f"{label} {statistic}") for statistic in statistics]


ALL = ("mean", "p50", "p90", "p99")
RATES = {
    "output_tok_s": "output tok/s",
    "total_tok_s": "total tok/s",
    "request_s": "requests/s",
    "good_request_s": "good requests/s",
    "good_output_tok_s": "good output tok/s",
}
METRICS = (
    *(Metric(name, label, True) for name, label in RATES.items()),
    *(Metric(f"{n}_gpu", f"{label}/GPU", True, n, True) for n, label in RATES.items()),
    Metric("usd_per_million_output", "$/M output tokens", of="output_tok_s"),
    Metric("usd_per_million_total", "$/M total tokens", of="total_tok_s"),
    *_latencies("ttft_ms", "TTFT ms", ALL),
    *_latencies("ttft_from_schedule_ms", "TTFT from schedule ms", ("p50", "p99")),
    *_latencies("tpot_ms", "TPOT ms", ALL),
    *_latencies("itl_ms", "ITL ms", ("p50", "p99")),
    *_latencies("e2e_ms", "end-to-end ms", ALL),
    *_latencies("step_us", "step us", ("p50", "p99")),
)
# These decide, and only they have a verdict; where a round has none of them, all of its metrics do.
# What was measured by too few requests for an interval decides nothing.
HEADLINE = {"output_tok_s", "output_tok_s_gpu", "ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50"}


@dataclass(frozen=True, slots=True)
class MetricRow:
    """One metric of two points; `judged`: whether it may decide."""

    metric: Metric
    baseline: float
    other: float
    estimates: tuple[Estimate, Estimate] | None
    judged: bool
    sampled: bool = False  # from single requests, on either side

    @property
    def too_few(self) -> bool:
        """True if there are too few requests for an interval, although their data are there."""
        return self.estimates is None and self.sampled

    @property
    def unfounded(self) -> bool:
        """True for a tail percentile without any measure of its accuracy."""
        known = self.estimates is not None or self.sampled
        return not known and self.metric.name.endswith("p99")

    @property
    def speedup(self) -> float:
        ratio = self.other / self.baseline
        return ratio if self.metric.higher else 1 / ratio

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float] | None:
        """Of the speed-up; None where a side has no data for one."""
        if self.estimates is None:
            return None
        baseline, other = self.estimates
        pair = (other, baseline) if self.metric.higher else (baseline, other)
        return ratio_interval(*pair, confidence)

    def verdict(self, threshold: float, confidence: float) -> str:
        """By the interval; without one by the threshold."""
        if self.too_few:
            return TOO_FEW
        low, high = self.interval(confidence) or (
            self.speedup / (1 + threshold),
            self.speedup * (1 + threshold),
        )
        return BETTER if low > 1 else WORSE if high < 1 else NOISE

    def report(self, threshold: float, confidence: float, decides: bool) -> RowReport:
        bounds = self.interval(confidence)
        return RowReport(
            metric=self.metric.name,
            label=self.metric.label,
            baseline=self.baseline,
            other=self.other,
            change=round(self.other / self.baseline - 1, 5),
            speedup=round(self.speedup, 5),
            ci95=[round(bound, 5) for bound in bounds] if bounds else None,
            verdict=self.verdict(threshold, confidence) if decides else None,
        )


def compare(rounds: Sequence[ToolResult], threshold: float) -> CompareReport:
    """Every round against the first one."""
    names = [chr(ord("A") + index) for index in range(len(rounds))]
    for one in rounds:
        _add_derived(one)
    pairs = zip(names[1:], rounds[1:], strict=True)
    return CompareReport(
        rounds=[_describe(name, one) for name, one in zip(names, rounds, strict=True)],
        noise_threshold=threshold,
        comparisons=[_compare(rounds[0], other, name, threshold) for name, other in pairs],
    )


def _describe(name: str, one: ToolResult) -> RoundReport:
    return RoundReport(
        name=name,
        source=one.source,
        tool=one.tool,
        gpus=one.gpus,
        usd_per_gpu_hour=one.usd_per_gpu_hour,
        loads=[point.load for point in one.points],
        notices=one.notices,
    )


def _add_derived(one: ToolResult) -> None:
    """Rates per GPU, and prices, where the GPUs and their price are known."""
    for point in one.points:
        values = point.values
        for metric in METRICS:
            if metric.per_gpu and one.gpus and metric.of in values:
                values[metric.name] = values[metric.of] / one.gpus
            elif metric.of in values and one.gpus and one.usd_per_gpu_hour and values[metric.of]:
                per_hour = one.gpus * one.usd_per_gpu_hour
                values[metric.name] = usd_per_million_tokens(per_hour, values[metric.of])


def _compare(baseline: ToolResult, other: ToolResult, name: str, threshold: float) -> Comparison:
    pairs = _matched(baseline, other)
    warnings = _differences(baseline, other, pairs)
    by_load, comparable = [], []
    for first, second in pairs:
        rows = _rows(first, second, baseline.gpus == other.gpus)
        unlike = _unlike(first, second, baseline.tool == other.tool)
        warnings += unlike
        comparable += [] if unlike else rows
        warnings += _disagreements(rows, (baseline, first), (other, second))
        by_load.append((first.load, rows))
    matched = {id(point) for pair in pairs for point in pair}
    alone = [[p.load for p in one.points if id(p) not in matched] for one in (baseline, other)]
    decisive = _decisive(comparable)
    confidence = _joint_confidence(decisive)
    ids = {id(row) for row in decisive}
    verdict, headline = _overall(by_load, decisive, threshold, confidence)
    doubts = hit_differences(pairs)
    if not comparable and any(rows for _, rows in by_load):
        verdict = UNLIKE
    elif doubts and verdict != NOTHING:  # something else may explain it
        verdict += ", in doubt"
    return Comparison(
        baseline="A",
        other=name,
        confidence=confidence,
        verdict=verdict,
        headline=headline,
        doubts=doubts,
        changed=changes(baseline, other),
        warnings=warnings,
        only_baseline=alone[0],
        only_other=alone[1],
        points=[
            PointComparison(
                load=load,
                rows=[row.report(threshold, confidence, id(row) in ids) for row in rows],
            )
            for load, rows in by_load
        ],
    )


def _matched(baseline: ToolResult, other: ToolResult) -> list[tuple[ResultPoint, ResultPoint]]:
    """Points with the same key; two single points are shown side by side whatever they are."""
    others = {point.key: point for point in other.points}
    pairs = [(p, others[p.key]) for p in baseline.points if p.key in others]
    if pairs:
        return pairs
    if len(baseline.points) == len(other.points) == 1:
        return [(baseline.points[0], other.points[0])]
    loads = [", ".join(p.load for p in one.points) or "nothing" for one in (baseline, other)]
    raise BenchError(
        f"no load in common: {baseline.source} has {loads[0]}; {other.source} has {loads[1]}"
    )


def _unlike(first: ResultPoint, second: ResultPoint, same_tool: bool) -> list[str]:
    """Why a difference between two points says nothing about the systems."""
    found = []
    if first.key != second.key:
        found.append(f"the loads differ: {first.load} against {second.load}")
    for fact in ("input_tokens", "output_tokens")[0 if same_tool else 1 :]:
        one, two = first.facts.get(fact), second.facts.get(fact)
        if one and two and abs(two / one - 1) > ALIKE:
            what = fact.replace("_", " ")
            found.append(f"{first.load}: {one:,.1f} against {two:,.1f} {what} a request")
    return found


def _differences(
    baseline: ToolResult, other: ToolResult, pairs: Iterable[tuple[ResultPoint, ResultPoint]]
) -> list[str]:
    found = []
    same_tool = baseline.tool == other.tool
    if not same_tool:
        found.append(
            f"measured by {baseline.tool} and by {other.tool}: clients have costs of their own"
        )
    for first, second in pairs:
        for fact in ("input_tokens", "output_tokens"):
            one, two = first.facts.get(fact), second.facts.get(fact)
            if not same_tool and one and two and abs(two / one - 1) > AGREES:
                what = fact.replace("_", " ")
                text = f"{first.load}: {one:,.1f} against {two:,.1f} {what} a request"
                found.append(f"{text}, as each tool counts them{EFFECT}")
        if first.slo != second.slo and first.slo and second.slo:
            found.append(
                f"{first.load}: goodput under {first.slo} is not goodput under {second.slo}"
            )
    return found


def _disagreements(rows: Iterable[MetricRow], *sides: tuple[ToolResult, ResultPoint]) -> list[str]:
    """Summaries that do not agree with their own events."""
    found = []
    for row in rows:
        for index, (one, point) in enumerate(sides):
            value = (row.baseline, row.other)[index]
            if row.estimates and not row.metric.of and _base(row.metric.name) in point.samples:
                counted = row.estimates[index].value
                if abs(counted / value - 1) > AGREES:
                    found.append(
                        f"{one.source} says {value:,.2f} for {row.metric.label} at {point.load}, "
                        f"but its events give {counted:,.2f}"
                    )
    return found


def _rows(first: ResultPoint, second: ResultPoint, same_gpus: bool) -> list[MetricRow]:
    rows = []
    for metric in METRICS:
        if metric.name.startswith("good_") and first.slo != second.slo:
            continue
        one, two = first.values.get(metric.name), second.values.get(metric.name)
        if not one or not two:
            continue
        both = f"{metric.name}_gpu" in first.values and f"{metric.name}_gpu" in second.values
        # Of a rate and the same rate per GPU one decides: that which is not a matter of size.
        judged = same_gpus != metric.per_gpu if metric.per_gpu or both else True
        estimates = _estimates(metric, first, second)
        sampled = any(_base(metric.of or metric.name) in p.samples for p in (first, second))
        rows.append(MetricRow(metric, one, two, estimates, judged, sampled))
    return rows


def _estimates(
    metric: Metric, first: ResultPoint, second: ResultPoint
) -> tuple[Estimate, Estimate] | None:
    """Of both points; what is a multiple of another figure is known as well as that."""
    found = []
    for point in (first, second):
        source = metric.of or metric.name
        estimate = point.estimate(source) if source in point.values else None
        if estimate is None:
            return None
        if metric.of:
            estimate = replace(estimate, value=point.values[metric.name])
        found.append(estimate)
    return found[0], found[1]


def _decisive(rows: Sequence[MetricRow]) -> list[MetricRow]:
    """The rows that decide: the headline metrics', or all where there are none of these."""
    judged = [row for row in rows if row.judged and not row.unfounded]
    return [row for row in judged if row.metric.name in HEADLINE] or judged


def _joint_confidence(decisive: Sequence[MetricRow]) -> float:
    """Of one interval, so that all that decide hold together at 95 %."""
    num_intervals = sum(row.estimates is not None for row in decisive)
    return 1 - (1 - CONFIDENCE) / max(num_intervals, 1)


def _overall(
    by_load: Sequence[tuple[str, Sequence[MetricRow]]],
    decisive: Sequence[MetricRow],
    threshold: float,
    confidence: float,
) -> tuple[str, dict[str, list[str]]]:
    """The verdict of the rows that decide, and these: the very verdicts that the rows show."""
    loads = {id(row): load for load, rows in by_load for row in rows}
    found: dict[str, list[str]] = {BETTER: [], WORSE: [], NOISE: [], TOO_FEW: []}
    for row in decisive:
        where = f" at {loads[id(row)]}" if len(by_load) > 1 else ""
        text = f"{row.metric.label}{where} {row.speedup:.2f}x"
        found[row.verdict(threshold, confidence)].append(text)
    headline = {name: texts for name, texts in found.items() if texts}
    if found[BETTER] and found[WORSE]:
        return MIXED, headline
    return next(iter(headline), NOTHING), headline


def hit_differences(pairs: Iterable[tuple[ResultPoint, ResultPoint]]) -> list[str]:
    """Points at which the server's prefix cache did more in one round than in the other."""
    found = []
    for first, second in pairs:
        one, two = (point.facts.get("prefix_hits") for point in (first, second))
        if one is not None and two is not None and abs(two - one) > HITS_APART:
            found.append(f"prefix-cache hits {one:.0%} -> {two:.0%} at {first.load}")
    return found


def changes(baseline: ToolResult, other: ToolResult) -> dict[str, list[Any]]:
    """The settings that differ: name -> [baseline, other].

    Tools have settings of their own: between two tools only those that both have are compared.
    """
    keys = [key for key in baseline.config if key in other.config]
    if baseline.tool == other.tool:
        keys = list(dict.fromkeys([*baseline.config, *other.config]))
    pairs = {
        "tool": (baseline.tool, other.tool),
        "gpus": (baseline.gpus, other.gpus),
        "usd_per_gpu_hour": (baseline.usd_per_gpu_hour, other.usd_per_gpu_hour),
        **{key: (baseline.config.get(key), other.config.get(key)) for key in keys},
    }
    return {key: list(pair) for key, pair in pairs.items() if pair[0] != pair[1]}


def _base(name: str) -> str:
    return name.partition(".")[0]
