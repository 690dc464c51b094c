"""Writes the files of an endpoint run: summary.json, CSV and one HTML page.

The same records give the same page; only `write_result` touches files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from tokenmill.bench.client.audit import all_warnings
from tokenmill.bench.client.records import LoadRecord, write_records
from tokenmill.bench.report import page as html
from tokenmill.bench.report.charts import in_ms, ms_parts, short
from tokenmill.bench.report.page import (
    Folded,
    Grid,
    Lines,
    Notice,
    PagePart,
    PageTile,
    ReportPage,
    Section,
    Table,
)
from tokenmill.bench.report.point_charts import (
    PointRecords,
    against_load,
    distributions,
    pareto,
    sweep_curves,
    timelines,
)
from tokenmill.bench.report.tables import (
    FEW,
    cautions,
    curve_table,
    error_table,
    events_csv,
    is_thin,
    label_of,
    latency_table,
    points_table,
    server_table,
    summary_csv,
)
from tokenmill.bench.results.manifest import write_manifest
from tokenmill.bench.results.reports import (
    ABSENT,
    LIMITS,
    EndpointReport,
    Facts,
    OccurrenceName,
    PointReport,
    as_json,
)
from tokenmill.core.metrics import USER_PERCENTILE

SUMMARY, PAGE = "summary.json", "report.html"
KINDS = {"endpoint": "Endpoint benchmark", "campaign": "MLPerf Endpoints campaign"}
MAX_LINES = 4  # of warnings at the top
USERS = f"1000 / {USER_PERCENTILE} of TPOT in ms"
THIN = f"Percentiles marked {FEW} stand on too few requests"


def write_result(
    folder: Path, report: EndpointReport, records: Sequence[LoadRecord] | None, facts: Facts
) -> None:
    """All files of a run; the manifest comes last. Without records theirs are left out."""
    texts = {
        SUMMARY: json.dumps(as_json(report), indent=2) + "\n",
        "summary.csv": summary_csv(report.points),
        PAGE: html.render(endpoint_page(report, records or (), facts)),
    }
    if records is not None:
        texts["events.csv"] = events_csv(report.points, records, report.stream)
        write_records(folder / "events.jsonl", records)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    write_manifest(folder, facts)


def endpoint_page(
    report: EndpointReport, records: Sequence[LoadRecord], facts: Facts
) -> ReportPage:
    """The page of a run: one point in full, or a sweep with its points folded."""
    points = [
        PointRecords(summary, [r for r in records if r.point == index], report.stream)
        for index, summary in enumerate(report.points)
    ]
    points.sort(key=lambda point: _load_order(point.summary))  # a search goes up and down
    report = replace(report, points=[point.summary for point in points])
    sections = [*_point_sections(points, report.points)]
    if any(point.goodput or point.price for point in report.points):
        sections.append(_value_section(report.points))
    if any(point.server for point in report.points):
        table = Table("By the server's own count", server_table(report.points))
        sections.append(Section("Server", [table], "From its /metrics, during each point."))
    sections += [
        _error_section(report.points),
        *([_audit_section(report.points)] if points else []),
        *html.facts_sections(
            {"url": report.url, "model": report.model}
            | {f"prompts-{name}": value for name, value in _prompts(report).items()}
            | facts.configuration,
            facts,
            "The machine that sent the requests; the server may run elsewhere.",
        ),
    ]
    return ReportPage(
        title=str(report.model),
        kind=KINDS[report.benchmark],
        chips=_chips(report, facts),
        tiles=_saturation_tiles(report) + _headline(report.points),
        sections=sections,
        notices=_notices(report),
    )


def _prompts(report: EndpointReport) -> dict[str, Any]:
    return as_json(report.prompts) if report.prompts else {}


def _load_order(point: PointReport) -> tuple[float, float]:
    return point.concurrency or 0, point.rate or 0


def _headline(points: Sequence[PointReport]) -> list[PageTile]:
    if not points:
        return []
    return _tiles(points[0]) if len(points) == 1 else _sweep_tiles(points)


def _saturation_tiles(report: EndpointReport) -> list[PageTile]:
    search = report.saturation or report.search
    if not search or search.found is None:
        return []
    unit = "users" if search.by == "concurrency" else "requests/s"
    return [PageTile("Highest load", f"{search.found:g}", unit, search.stopped)]


def _point_sections(
    points: Sequence[PointRecords], summaries: Sequence[PointReport]
) -> Iterator[Section]:
    answered = [point for point in points if point.summary.num_completed]
    recorded = [point for point in answered if point.whole]
    if len(points) > 1 and answered:
        yield sweep_section(answered, summaries)
    if len(points) > 1 and recorded:
        yield _folded_points(recorded)
    if len(points) == 1 and recorded:
        yield _latency_section(recorded[0])
        yield _timeline_section(recorded[0])


def _chips(report: EndpointReport, facts: Facts) -> list[str]:
    loads = [point.load for point in report.points]
    closed = all(point.concurrency is not None for point in report.points)
    points = loads[0] if len(loads) == 1 else f"{len(loads)} points"
    points = f"closed loop, {points}" if closed and loads else points
    return [
        report.url,
        report.api,
        "streamed" if report.stream else "not streamed",
        points,
        html.started(facts),
    ]


def _notices(report: EndpointReport) -> list[Notice]:
    points, found = report.points, []
    if reasons := report.not_valid_because:
        found.append(Notice("warn", "Not a valid submission", reasons))
    if report.interrupted:
        found.append(Notice("warn", "Interrupted: these are the figures of what had finished"))
    if failed := sum(point.num_failed for point in points):
        total = failed + sum(point.num_completed for point in points)
        title = f"{failed:,} of {total:,} requests failed; they are in no average"
        found.append(Notice("bad", title, _by_class(points, "errors")))
    if warnings := all_warnings(points):
        shown = warnings[:MAX_LINES]
        if len(warnings) > MAX_LINES:
            shown.append(f"and {len(warnings) - MAX_LINES} more in the client audit")
        found.append(Notice("warn", "The client may have been the limit, not the server", shown))
    if doubts := _by_class(points, "doubts"):
        found.append(Notice("warn", "What puts these figures in doubt", doubts))
    if report.prompts and report.prompts.same_at_every_point:
        found.append(Notice("warn", "The same prompts were sent at every point (--same-prompts)"))
    if few := cautions(points):
        found.append(Notice("note", THIN, few))
    return found


def _by_class(points: Sequence[PointReport], key: OccurrenceName) -> list[str]:
    """A line per class over all points, with what the first one said."""
    counts: dict[str, int] = {}
    said: dict[str, str] = {}
    for point in points:
        for name, entry in getattr(point, key).items():
            counts[name] = counts.get(name, 0) + entry.count
            said.setdefault(name, entry.first)
    return [f"{counts[name]:,} × {name}: {said[name]}" for name in counts]


def _tiles(point: PointReport) -> list[PageTile]:
    ends = point.output_tok_s_ci95
    bounds = f"95 %: {short(ends[0])} to {short(ends[1])}" if ends else ""
    failed = point.num_failed
    tiles = [
        PageTile("Output throughput", short(point.output_tok_s), "tok/s", bounds),
        PageTile("Request rate", short(point.request_s), "requests/s", _duration_note(point)),
    ]
    for name in LIMITS:
        if figures := getattr(point, name):
            few = {p: FEW if is_thin(point, name, p) else "" for p in ("p90", "p99")}
            tail = ", ".join(f"{p} {in_ms(figures[p])}{mark}" for p, mark in few.items())
            tiles.append(PageTile(f"{label_of(name)}, median", *ms_parts(figures["p50"]), tail))
    if users := point.tok_s_user:
        tiles.append(PageTile("Interactivity", short(users), "tok/s/user", USERS))
    if seen := point.num_image_tokens:
        prompt = f"of {point.num_prompt_tokens:,} prompt tokens"
        tiles.append(PageTile("Image tokens", f"{seen:,}", "", prompt))
    share = failed / (failed + point.num_completed) if failed else 0.0
    note = f"{point.num_completed:,} answered" + (f", {failed:,} failed" if failed else "")
    tiles.append(PageTile("Failed", f"{share:.1%}", "", note, "bad" if failed else "good"))
    return tiles + _value_tiles(point)


def _duration_note(point: PointReport) -> str:
    return f"{point.num_completed:,} in {point.seconds:,.1f} s"


def _value_tiles(point: PointReport) -> list[PageTile]:
    tiles = []
    if goodput := point.goodput:
        note = f"{short(goodput.request_s)} good requests/s"
        share = goodput.good_share
        tone: html.Tone = "good" if share >= 0.99 else "warn"
        tiles.append(PageTile("Within the limits", f"{share:.1%}", "", note, tone))
    if (price := point.price) and price.usd_per_million_output is not None:
        total = f"${price.usd_per_million_total:,.3f} per million in total"
        value = f"${price.usd_per_million_output:,.3f}"
        tiles.append(PageTile("Per million output tokens", value, "", total))
    return tiles


def _sweep_tiles(points: Sequence[PointReport]) -> list[PageTile]:
    best = max(points, key=lambda p: p.output_tok_s)
    tiles = [PageTile("Highest throughput", short(best.output_tok_s), "tok/s", best.load)]
    streamed = [p for p in points if p.tok_s_user]
    if streamed:
        fast = max(streamed, key=lambda p: p.tok_s_user or 0.0)
        users = short(fast.tok_s_user or 0.0)
        tiles.append(PageTile("Highest interactivity", users, "tok/s/user", fast.load))
        quick = min(streamed, key=lambda p: p.ttft_ms["p50"])
        tiles.append(PageTile("Lowest median TTFT", *ms_parts(quick.ttft_ms["p50"]), quick.load))
    rate = max(points, key=lambda p: p.request_s)
    tiles.append(PageTile("Highest rate", short(rate.request_s), "requests/s", rate.load))
    if all(p.goodput for p in points):
        good = max(points, key=lambda p: p.goodput.request_s)
        note = f"{good.load}, {good.goodput.good_share:.1%} within limits"
        value = short(good.goodput.request_s)
        tiles.append(PageTile("Highest goodput", value, "requests/s", note))
    priced = [p for p in points if p.price and p.price.usd_per_million_output is not None]
    if priced:
        low = min(priced, key=lambda p: p.price.usd_per_million_output or 0.0)
        value = f"${low.price.usd_per_million_output:,.3f}"
        tiles.append(PageTile("Lowest price per M output", value, "", low.load))
    failed, done = (sum(getattr(p, key) for p in points) for key in ("num_failed", "num_completed"))
    note = f"{done:,} answered" + (f", {failed:,} failed" if failed else "")
    share = failed / (failed + done) if failed else 0.0
    return [*tiles, PageTile("Failed", f"{share:.1%}", "", note, "bad" if failed else "good")]


def _latency_section(point: PointRecords) -> Section:
    blocks: list[PagePart] = [Table("Latency in milliseconds", latency_table(point.summary))]
    blocks.append(Grid([*distributions(point, curves=True)]))
    return Section(
        "Latency", blocks, "Of answered requests. ITL: gaps between outputs of a stream."
    )


def _timeline_section(point: PointRecords) -> Section:
    return Section("Timeline", [Grid(list(timelines(point)))], "Seconds from the first request.")


def sweep_section(points: Sequence[PointRecords], summaries: Sequence[PointReport]) -> Section:
    """All points side by side: table, Pareto curve, and each figure against the load."""
    is_campaign = summaries[0].region is not ABSENT
    blocks: list[PagePart] = [Table("Points of the sweep", points_table(summaries))]
    if is_campaign:
        blocks.insert(0, Table("Points of the curve", curve_table(summaries), (0, 1)))
    streamed = [point.summary for point in points if point.summary.tok_s_user]
    if len(streamed) > 1:
        blocks.append(Grid([pareto(streamed)]))
    charts = [*against_load([point.summary for point in points]), *sweep_curves(points)]
    return Section("Curve" if is_campaign else "Sweep", [*blocks, Grid(charts)])


def _folded_points(points: Sequence[PointRecords]) -> Section:
    parts = []
    for point in points:
        figures = point.summary
        head = f"{figures.load}: {short(figures.output_tok_s)} tok/s"
        if figures.ttft_ms:
            head += f", TTFT {in_ms(figures.ttft_ms['p50'])}"
        charts = [*distributions(point, curves=False), *timelines(point)]
        table = Table(f"Latency at {figures.load}", latency_table(figures))
        parts.append(Folded(head, [table, Grid(charts)]))
    return Section("Points", parts, "Each with its distributions and its timeline.")


def _value_section(points: Sequence[PointReport]) -> Section:
    blocks: list[PagePart] = []
    if points[0].goodput:
        blocks.append(Table("Goodput", _goodput_rows(points), (0, 1)))
    if points[0].price:
        price = points[0].price
        gpus = "1 GPU" if price.gpus == 1 else f"{price.gpus} GPUs"
        text = (
            f"{gpus} at ${price.usd_per_gpu_hour:g} per GPU and hour. $/M is the price of a "
            "million tokens; total counts prompt and output tokens."
        )
        blocks += [Table("Price", _price_rows(points)), Lines([text])]
    return Section("Goodput and price", blocks)


def _goodput_rows(points: Sequence[PointReport]) -> list[list[str]]:
    rows = [["load", "limits", "good", "good share", "good requests/s", "good output tok/s"]]
    for point in points:
        good = point.goodput
        given = {name: getattr(good, name) for name in LIMITS}
        limits = ", ".join(f"{label_of(n)} {limit:g} ms" for n, limit in given.items() if limit)
        counts = (f"{good.num_good:,}", f"{good.good_share:.1%}")
        rates = (short(good.request_s), short(good.output_tok_s))
        rows.append([point.load, limits, *counts, *rates])
    return rows


def _price_rows(points: Sequence[PointReport]) -> list[list[str]]:
    columns = {
        "usd_per_million_output": "$/M output",
        "usd_per_million_total": "$/M total",
        "usd_per_million_good_output": "$/M good output",
    }
    keys = [key for key in columns if getattr(points[0].price, key) is not ABSENT]
    rows = [["load", "output tok/s per GPU", *(columns[key] for key in keys)]]
    for point in points:
        per_gpu = short(point.price.output_tok_s_gpu)
        rows.append([point.load, per_gpu, *(_usd(getattr(point.price, key)) for key in keys)])
    return rows


def _usd(value: float | None) -> str:
    return "-" if value is None else f"{value:,.3f}"


def _error_section(points: Sequence[PointReport]) -> Section:
    blocks: list[PagePart] = []
    texts: dict[OccurrenceName, tuple[str, str]] = {
        "errors": ("Failed requests", "No request failed."),
        "doubts": ("Doubts", "Nothing puts these figures in doubt."),
    }
    for key, (title, none) in texts.items():
        rows = error_table(points, key)
        if len(rows) == 1:
            blocks.append(Lines([none], "good"))
        else:
            blocks.append(Table(title, rows, (0, 1, 2), heading=True))
    ends: dict[str, int] = {}
    for point in points:
        for name, count in point.finish_reasons.items():
            ends[name] = ends.get(name, 0) + count
    said = ", ".join(f"{name} {count:,}" for name, count in ends.items())
    if said:
        blocks.append(Lines([f"Finish reasons: {said}."]))
    for what, counts in (
        ("cut off by the end", [point.num_unfinished for point in points]),
        ("sent once more", [point.num_retried for point in points]),
    ):
        if count := sum(counts):
            blocks.append(Lines([f"{count:,} requests were {what}."]))
    return Section("Errors and doubts", blocks)


def _audit_section(points: Sequence[PointReport]) -> Section:
    warnings = all_warnings(points)
    said = Lines(warnings, "warn")
    if not warnings:
        said = Lines(["No sign that the client was the limit."], "good")
    rows = [["load", "processes", "CPU of a core", "sent late p50 (ms)"]]
    rows[0] += ["sent late p99 (ms)", "stalls", "longest stall (ms)"]
    for point in points:
        audit = point.audit
        lag = [f"{audit.lag_ms.get(p, 0.0):.2f}" for p in ("p50", "p99")]
        stalls = [f"{audit.num_stalls:,}", f"{audit.max_stall_ms:.0f}"]
        share = f"{audit.cpu_share:.0%}"
        rows.append([point.load, str(audit.num_processes), share, *lag, *stalls])
    blocks = [said, Table("The client", rows)]
    if alone := points[-1].audit.floor:
        text = (
            f"Against a server that answers at once this client does {alone.request_s:,.0f} "
            f"requests/s and {alone.outputs_s:,.0f} outputs/s, and adds "
            f"{alone.latency_ms.get('p50', 0.0):.2f} ms to a latency."
        )
    else:
        text = "What the client does at best was not measured in this run."
    return Section(
        "Client audit",
        [*blocks, Lines([text])],
        "Was it the server that was measured, or the client?",
    )
