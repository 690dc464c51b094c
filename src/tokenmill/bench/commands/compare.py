"""tokenmill bench compare."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.options import CompareOptions
from tokenmill.bench.workload import BenchError
from tokenmill.settings import Settings, SettingsError
from tokenmill.settings.shared import JsonOption

if TYPE_CHECKING:
    from tokenmill.bench.results.reports import CompareReport, Comparison, RoundReport, RowReport
    from tokenmill.bench.results.result import ToolResult


PANELS = {"Comparison": (CompareOptions, JsonOption)}
SHOWN = 60  # characters of a changed setting
# Of a sweep only these are printed; the JSON line and the page have all.
SHORT = (
    *("output_tok_s", "output_tok_s_gpu", "usd_per_million_output"),
    *("ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "tpot_ms.p99"),
)
DRIFT = (
    "The intervals of the metrics that decide hold together at 95 %; the others are as wide and "
    "have no verdict. They cover the noise within a run, and its repetitions where it has any; "
    "what drifts from run to run is not in them."
)


def compare(
    settings: Settings,
    rounds: Annotated[
        list[Path], typer.Argument(metavar="ROUND", help="Two or more; baseline first.")
    ],
) -> None:
    """Compare results: speed-ups with intervals, changed settings, and a verdict.

    A round is a result folder or a JSON file of tokenmill (a saved last line
    works, too), AIPerf, guidellm, mlcommons/endpoints or vllm bench serve. The
    first round is the baseline. Loads are matched by concurrency or rate.

    tokenmill bench compare results/monday results/tuesday
    tokenmill bench compare before after --gpus 8,16 --price-per-gpu-hour 3
    tokenmill bench compare ours profile_export_aiperf.json --html compare.html
    """
    from tokenmill.bench.report.page import render
    from tokenmill.bench.report.table_pages import check_page, comparison_page
    from tokenmill.bench.results.comparison import compare as compare_rounds
    from tokenmill.bench.results.reading import read_round
    from tokenmill.bench.results.reports import as_json

    if len(rounds) < 2:
        raise SettingsError("a comparison needs two results or more: A B [C...]")
    html = Path(settings.get("html")).expanduser() if "html" in settings else None
    if html:
        check_page("html", html)
    read = [read_round(path.expanduser()) for path in rounds]
    for key in ("gpus", "price-per-gpu-hour"):
        set_for_each(read, key, settings)
    report = compare_rounds(read, settings.get("noise"))
    if not settings.get("json"):
        _print(report)
    console.print_json(as_json(report), settings.get("json"))
    if html:
        html.write_text(render(comparison_page(report, DRIFT)), encoding="utf-8")
        console.note(f"written: {html}")
    if "fail-on" in settings:
        _fail_on_worse(report)


def _fail_on_worse(report: CompareReport) -> None:
    from tokenmill.bench.results.comparison import BETTER, NOISE

    for one in report.comparisons:
        if not one.verdict.startswith((BETTER, NOISE)):
            raise BenchError(f"--fail-on worse: {one.other} against A: {one.verdict}")


def set_for_each(rounds: Sequence[ToolResult], key: str, settings: Settings) -> None:
    """Set the number of each round, or one number for all rounds."""
    given = settings.values.get(key)
    if given is None:
        return
    values = given if isinstance(given, tuple) else (given,)
    if len(values) not in (1, len(rounds)):
        raise SettingsError(
            f"--{key} needs one number, or one for each of the {len(rounds)} rounds, "
            f"got {len(values)}"
        )
    attribute = {"gpus": "gpus", "price-per-gpu-hour": "usd_per_gpu_hour"}[key]
    for index, one in enumerate(rounds):
        setattr(one, attribute, values[index % len(values)])


def _print(report: CompareReport) -> None:
    for one in report.rounds:
        where = f"{one.name}  {one.source} ({one.tool}{_machines(one)})"
        console.out.print(where, markup=False)
        for notice in one.notices:
            console.out.print(f"   note: {notice}", markup=False)
    for comparison in report.comparisons:
        _print_comparison(comparison, report.noise_threshold)


def _machines(one: RoundReport) -> str:
    if not one.gpus:
        return ""
    price = one.usd_per_gpu_hour
    gpus = "1 GPU" if one.gpus == 1 else f"{one.gpus} GPUs"
    return f", {gpus}" + (f" at ${price:g} an hour each" if price else "")


def _print_comparison(comparison: Comparison, threshold: float) -> None:
    first, second = comparison.baseline, comparison.other
    doubts = f": {', '.join(comparison.doubts)}" if comparison.doubts else ""
    verdict = f"{second} against {first}: {comparison.verdict}{doubts}"
    console.out.print(f"\n[bold]{verdict}[/bold]")
    for name, texts in comparison.headline.items():
        console.out.print(f"  {name}: {', '.join(texts)}", markup=False)
    for warning in comparison.warnings:
        console.out.print(f"  warning: {warning}", markup=False)
    for name, loads in ((first, comparison.only_baseline), (second, comparison.only_other)):
        if loads:
            console.out.print(f"  only {name} has {', '.join(loads)}", markup=False)
    console.out.print("\nchanged" if comparison.changed else "\nno setting changed")
    for key, (one, two) in comparison.changed.items():
        console.out.print(f"  {key}: {_short(one)} -> {_short(two)}", markup=False)
    points = comparison.points
    for point in points:
        rows = point.rows
        if len(points) > 1:
            rows = [row for row in rows if row.metric in SHORT] or rows
        if not rows:
            continue
        console.out.print(f"\n[bold]{point.load}[/bold]")
        head = ["metric", first, second, "change", "speed-up", "95 % interval", "verdict"]
        console.print_table([head, *(_cells(row, threshold) for row in rows)])
    if any(row.ci95 for point in points for row in point.rows):
        console.out.print(DRIFT)


def _cells(row: RowReport, threshold: float) -> list[str]:
    from tokenmill.bench.results.comparison import TOO_FEW

    bounds = row.ci95
    verdict = row.verdict or "-"
    if row.verdict not in (None, TOO_FEW) and not bounds:
        verdict += f" (±{threshold:.0%})"
    return [
        row.label,
        f"{row.baseline:,.3f}",
        f"{row.other:,.3f}",
        f"{row.change:+.1%}",
        f"{row.speedup:.3f}x",
        f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "no interval",
        verdict,
    ]


def _short(value: Any) -> str:
    text = "-" if value is None else str(value)
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"


COMMANDS = (BenchCommand("compare", compare, PANELS),)
