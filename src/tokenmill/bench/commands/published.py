"""tokenmill bench published."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.options import PublishedOptions
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.results.published_results import Ours
    from tokenmill.bench.results.reports import PlacedReport, PublishedEntry, PublishedReport
    from tokenmill.bench.results.result import ToolResult


PANELS = {"Table": (PublishedOptions, JsonOption)}
FILTERS = ("round", "accelerator", "submitter")
NUMBER_COLUMNS, SYSTEM_WIDTH = 4, 48
NARROW_COLUMNS, NARROW_WIDTH = (0, 1, 3, 4, 6, 7), 22  # on a narrower terminal


def published(settings: Settings) -> None:
    """The published MLPerf results per accelerator, and the rank of yours.

    The table is that of MLPerf Inference v5.1 and v6.0, datacenter. Without
    --benchmark the benchmarks are listed; an MLPerf result names its own.

    tokenmill bench published --benchmark deepseek-r1 --scenario Server
    tokenmill bench published --benchmark llama3.1-8b --accelerator H200
    tokenmill bench published --benchmark gpt-oss-120b --tok-s 3400 --gpus 1
    tokenmill bench published --result mlperf.json
    """
    from tokenmill.bench.results.published_results import NOTE, choose, overview, place, read_table
    from tokenmill.bench.results.reports import PublishedReport, as_json

    mine = _result(settings)
    facts = mine.config if mine else {}
    benchmark = settings.values.get("benchmark") or facts.get("mlperf_benchmark")
    scenario = settings.values.get("scenario") or facts.get("scenario") or "Offline"
    table = read_table()
    if benchmark is None:
        if mine or "tok-s" in settings:
            raise SettingsError(
                "--benchmark is missing: the result is ranked among the rows of one benchmark"
            )
        _print_overview(settings, overview(table))
        return
    filters = {key: settings.values.get(key) for key in FILTERS}
    entries = choose(table, benchmark, scenario, **filters)
    report = PublishedReport(
        mlperf_benchmark=entries[0].benchmark,
        scenario=entries[0].scenario,
        unit=entries[0].unit,
        filters={key: text for key, text in filters.items() if text},
        rows=entries,
    )
    if ours := _ours(settings, mine, entries[0]):
        report.placed = place(entries, ours)
    if not settings.get("json"):
        _print(report, settings.get("limit"))
        console.out.print(NOTE)
    console.print_json(as_json(report), settings.get("json"))


def _result(settings: Settings) -> ToolResult | None:
    from tokenmill.bench.results.reading import read_round

    if "result" not in settings:
        return None
    if "tok-s" in settings:
        raise SettingsError("give --result or --tok-s, not both")
    return read_round(Path(settings.get("result")).expanduser())


def _ours(settings: Settings, mine: ToolResult | None, entry: PublishedEntry) -> Ours | None:
    from tokenmill.bench.results.published_results import Ours, of_round

    gpus = settings.values.get("gpus")
    if mine is not None:
        return of_round(mine, entry, gpus)
    if "tok-s" not in settings:
        return None
    if gpus is None:
        raise SettingsError("--tok-s needs --gpus: results are compared per accelerator")
    return Ours(settings.get("tok-s"), gpus)


def _print_overview(settings: Settings, found: dict[str, dict[str, int]]) -> None:
    scenarios = sorted({name for counts in found.values() for name in counts})
    if not settings.get("json"):
        rows = [["benchmark", *scenarios]]
        rows += [
            [name, *(str(counts.get(scenario, "-")) for scenario in scenarios)]
            for name, counts in found.items()
        ]
        console.print_table(rows)
        console.out.print("published rows of each; --benchmark NAME --scenario NAME lists them")
    console.print_json({"benchmark": "published", "rows": found}, settings.get("json"))


def _print(report: PublishedReport, limit: int) -> None:
    entries = report.rows
    title = f"{report.mlperf_benchmark}, {report.scenario}, {report.unit}"
    shown = "".join(f", {key} {text}" for key, text in report.filters.items())
    console.out.print(f"[bold]{title}[/bold]{shown}: {len(entries)} rows")
    _print_rows(_table(entries[:limit], report.placed))
    if len(entries) > limit:
        console.out.print(f"... and {len(entries) - limit} more (--limit)")
    if placed := report.placed:
        share = f"{placed.share_of_best:.1%} of the best"
        console.out.print(f"yours: rank {placed.rank} of {placed.of}, {share}")
        for notice in placed.notices:
            console.out.print(f"note: {notice}", markup=False)


def _table(entries: Sequence[PublishedEntry], placed: PlacedReport | None) -> list[list[str]]:
    """The rows with ours between them, or after them where it is worse than all of them."""
    head = ["", "per accelerator", "result", "x", "round", "division", "submitter", "accelerator"]
    rows = [_cells(str(index + 1), entry) for index, entry in enumerate(entries)]
    if placed:
        rank = placed.rank
        rows = [_cells(str(i + 1 + (i + 1 >= rank)), entry) for i, entry in enumerate(entries)]
        rows.insert(rank - 1, _our_cells(placed))
    return [[*head, "system"], *rows]


def _cells(rank: str, entry: PublishedEntry) -> list[str]:
    return [
        rank,
        _number(entry.per_accelerator),
        _number(entry.result),
        str(entry.accelerators or "-"),
        entry.round,
        entry.division + ("" if entry.availability == "available" else f", {entry.availability}"),
        entry.submitter,
        entry.accelerator or "no accelerator",
        entry.system[:SYSTEM_WIDTH],
    ]


def _our_cells(placed: PlacedReport) -> list[str]:
    values = (_number(placed.per_accelerator), _number(placed.result))
    gpus = str(placed.accelerators or "-")
    return [str(placed.rank), *values, gpus, "", "", "<- yours", "", ""]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.5g}" if value < 100 else f"{value:,.1f}"


def _print_rows(rows: Sequence[Sequence[str]]) -> None:
    """Numbers to the right, texts to the left; fewer columns on a terminal that is narrower."""
    num_numbers, widths = NUMBER_COLUMNS, _widths(rows)
    if console.out.is_terminal and sum(widths) + 2 * len(widths) > console.out.width:
        rows = [[row[i][:NARROW_WIDTH] for i in NARROW_COLUMNS] for row in rows]
        num_numbers, widths = NARROW_COLUMNS.index(NUMBER_COLUMNS), _widths(rows)
    for row in rows:
        cells = [
            cell.rjust(width) if index < num_numbers else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        console.out.print("  ".join(cells).rstrip(), markup=False)


def _widths(rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(*rows, strict=True)]


COMMANDS = (BenchCommand("published", published, PANELS),)
