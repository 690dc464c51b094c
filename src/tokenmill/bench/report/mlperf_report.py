"""Writes summary.json and the page of an MLPerf run from LoadGen's figures and our time stamps."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from msgspec import UNSET

from tokenmill.bench.report import page as html
from tokenmill.bench.report.charts import (
    GREEN,
    Chart,
    ChartSeries,
    Mark,
    distribution,
    in_ms,
    ms_parts,
    short,
)
from tokenmill.bench.report.page import Grid, Notice, PagePart, PageTile, ReportPage, Section, Table
from tokenmill.bench.report.timeline import Windows, in_flight, spread, timeline
from tokenmill.bench.results.manifest import write_manifest
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.results.reports import Facts, as_json
from tokenmill.core.metrics import RequestTimes

SUMMARY, PAGE, EVENTS = "summary.json", "report.html", "events.csv"
LABELS = {"ttft": "TTFT", "tpot": "TPOT", "latency": "End to end"}
STAMPS = ("arrival_ns", "first_ns", "last_ns", "num_first_tokens", "num_tokens")
LATENCIES = ("ttft_ms", "tpot_ms", "e2e_ms")  # of our stamps, in the order of the labels


def write_times(path: Path, times: Iterable[RequestTimes]) -> None:
    """A line per answered query: its stamps, and the latencies that follow from them."""
    columns = (*STAMPS, *LATENCIES)
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([getattr(each, name) for name in columns] for each in times)


def read_times(path: Path) -> list[RequestTimes]:
    """What `write_times` wrote; nothing where there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return [RequestTimes(*(int(row[name]) for name in STAMPS)) for row in rows]


def write_result(folder: Path, report: MlperfReport, logs: Path, facts: Facts) -> None:
    """Summary, page and events beside the logs of a submission; the manifest comes last."""
    folder.mkdir(parents=True, exist_ok=True)
    times = read_times(logs / EVENTS)
    if times:
        shutil.copyfile(logs / EVENTS, folder / EVENTS)
    summary = json.dumps(as_json(report), indent=2) + "\n"
    (folder / SUMMARY).write_text(summary, encoding="utf-8")
    (folder / PAGE).write_text(html.render(mlperf_page(report, times, facts)), encoding="utf-8")
    write_manifest(folder, facts)


def mlperf_page(report: MlperfReport, times: Sequence[RequestTimes], facts: Facts) -> ReportPage:
    """The page of one run of LoadGen, or of the best of a search."""
    sections = []
    if report.limits:
        sections.append(Section("Limits", [Table("Limits", _limit_rows(report))]))
    if report.metric is not UNSET:
        sections.append(_latency_section(report, times))
    if times and report.num_output_tokens == 0:
        sections.append(Section("Timeline", [Grid([_concurrency(times)])]))
    elif times:
        intro = "Tokens are spread evenly between the first and the last of an answer."
        sections.append(Section("Timeline", [Grid(list(_timelines(times)))], intro))
    if report.runs:
        sections.append(_search_section(report))
    if report.accuracy is not None:
        sections.append(_accuracy_section(report))
    machine = "The machine that ran LoadGen."
    sections += html.facts_sections(facts.configuration, facts, machine)
    valid = report.result == "VALID"
    return ReportPage(
        title=report.headline,
        kind="MLPerf Inference by LoadGen",
        chips=_chips(report, facts),
        tiles=_tiles(report),
        sections=sections,
        notices=_notices(report),
        verdict=("good" if valid else "bad", report.verdict),
    )


def _chips(report: MlperfReport, facts: Facts) -> list[str]:
    named = [text for text in (report.model, report.dtype, report.device) if text]
    rate = [] if report.scenario == "Offline" else [f"{report.target_qps:g} queries/s"]
    return [*named, *rate, html.started(facts)]


def _notices(report: MlperfReport) -> list[Notice]:
    found = []
    if report.quick:
        found.append(Notice("warn", "Not a valid submission", report.notices))
    elif report.notices:
        found.append(Notice("note", "About this run", report.notices))
    if report.reasons:
        found.append(Notice("bad", "INVALID, because", report.reasons))
    return found


def _tiles(report: MlperfReport) -> list[PageTile]:
    tiles = []
    if metric := report.metric:
        tiles.append(PageTile("Result", short(metric.value), metric.unit, metric.name))
    if report.runs is not None:
        peak = report.peak_qps
        tiles.append(PageTile("Highest valid rate", short(peak) if peak else "none", "queries/s"))
    if rate := report.samples_per_s:
        tiles.append(PageTile("Samples", short(rate), "per second"))
    if seconds := report.s_per_video:
        price = f"${report.usd_per_video:,.4f} at ${report.usd_per_hour:g} an hour"
        tiles.append(PageTile("A video", short(seconds), "s", price))
    percent = f"p{report.percentile or 99}"
    for name, found in report.latencies.items():
        limit = report.limits.get(name)
        if percent in found and (name != "latency" or limit is not None):
            tiles.append(_latency_tile(f"{LABELS[name]}, {percent}", found[percent], limit))
    if report.num_queries is not None:
        num_tokens = report.num_output_tokens
        note = f"{num_tokens:,} output tokens" if num_tokens else ""
        tiles.append(PageTile("Queries", f"{report.num_queries:,}", "answered", note))
    for name, gate in (report.accuracy_gates or {}).items():
        tone: html.Tone = "good" if gate.passed else "bad"
        tiles.append(PageTile(name, f"{gate.value:,.4f}", "", f"required {gate.required}", tone))
    return tiles


def _latency_tile(label: str, found: float, limit: float | None) -> PageTile:
    if limit is None:
        return PageTile(label, *ms_parts(found))
    tone: html.Tone = "good" if found <= limit else "bad"
    return PageTile(label, *ms_parts(found), f"limit {in_ms(limit)}", tone)


def _limit_rows(report: MlperfReport) -> list[list[str]]:
    rows = [["latency", "percentile", "measured", "limit", "share of limit", "met"]]
    percent, latencies = f"p{report.percentile}", report.latencies
    for name, limit in report.limits.items():
        found = latencies.get(name, {}).get(percent)
        if found is not None:
            figures = [in_ms(found), in_ms(limit), f"{found / limit:,.0%}"]
            rows.append([LABELS[name], percent, *figures, "yes" if found <= limit else "no"])
    return rows


def _latency_section(report: MlperfReport, times: Sequence[RequestTimes]) -> Section:
    blocks: list[PagePart] = []
    latencies = report.latencies
    columns = list(dict.fromkeys(key for found in latencies.values() for key in found))
    rows = [["latency (ms)", *columns]]
    for name, found in latencies.items():
        cells = [f"{found[key]:,.2f}" if key in found else "-" for key in columns]
        rows.append([LABELS[name], *cells])
    if len(rows) > 1:
        blocks.append(Table("Latency in milliseconds", rows))
    if times:
        shown = list(LABELS) if report.num_output_tokens else ["latency"]
        blocks.append(Grid(list(_distributions(times, report.limits, shown))))
    return Section(
        "Latency",
        blocks,
        "The table is LoadGen's, from the scheduled arrival (in Offline TTFT and TPOT are the "
        "adapter's). The charts have the adapter's stamps, from the issue of a query.",
    )


def _distributions(
    times: Sequence[RequestTimes], limits: Mapping[str, float], shown: Sequence[str]
) -> Iterable[Chart]:
    for (name, label), attribute in zip(LABELS.items(), LATENCIES, strict=True):
        found = [value for each in times if (value := getattr(each, attribute)) is not None]
        if not found or name not in shown:
            continue
        limit = limits.get(name)
        marks = [Mark("limit", limit, limit=True)] if limit is not None else []
        yield from distribution(label, found, what="queries", marks=marks)


def _timelines(times: Sequence[RequestTimes]) -> Iterable[Chart]:
    windows = _windows(times)
    tokens = [each.num_tokens for each in times]
    rates = spread(windows, [(each.first_ns, each.last_ns) for each in times], tokens)
    yield timeline(
        "Throughput", "output tok/s", windows, [ChartSeries("output tok/s", rates, "area")]
    )
    yield _concurrency(times)


def _concurrency(times: Sequence[RequestTimes]) -> Chart:
    windows = _windows(times)
    spans = [(each.arrival_ns, each.last_ns) for each in times]
    flying = ChartSeries("in flight", in_flight(windows, spans), "area", GREEN)
    return timeline("Concurrency", "queries", windows, [flying])


def _windows(times: Sequence[RequestTimes]) -> Windows:
    begin = min(each.arrival_ns for each in times)
    return Windows(begin, max(max(each.last_ns for each in times), begin + 1))


def _search_section(report: MlperfReport) -> Section:
    rows = [["queries/s", "result", "why"]]
    rows += [
        [f"{tried.target_qps:g}", tried.result, "; ".join(tried.reasons) or "-"]
        for tried in report.runs or ()
    ]
    peak = report.peak_qps
    found = f"Highest valid rate: {peak:g} queries/s." if peak else "No rate was valid."
    return Section("Peak search", [Table("Rates tried", rows, (0, 1, 2))], found)


def _accuracy_section(report: MlperfReport) -> Section:
    gates = report.accuracy_gates or {}
    rows = [["score", "value", "required", "passed"]]
    for name, value in (report.accuracy or {}).items():
        gate = gates.get(name)
        cells = [gate.required, "yes" if gate.passed else "no"] if gate else ["-"] * 2
        rows.append([name, "not scored here" if value is None else html.plain(value), *cells])
    return Section("Accuracy", [Table("Scores", rows)])
