"""The pages of `bench compare` and `bench ladder`: tables with a drawing in each row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenmill.bench.report.page import (
    Bar,
    Lines,
    Notice,
    PagePart,
    ReportPage,
    Section,
    Table,
    Text,
    Tone,
    Whisker,
)
from tokenmill.bench.results.comparison import TOO_FEW
from tokenmill.bench.results.reports import (
    CompareReport,
    Comparison,
    PointComparison,
    RowReport,
    RungReport,
)
from tokenmill.bench.workload import BenchError

MOST = 1000.0  # a ratio beyond it, or below its inverse, is drawn at the end of the scale
TONES: dict[str | None, Tone] = {"better": "good", "worse": "bad", "mixed": "warn"}


def check_page(flag: str, path: Path) -> None:
    """Refuse a file that cannot be written before anything is measured or read."""
    if path.suffix != ".html":
        raise BenchError(f"--{flag} {path}: expected a file that ends in .html")
    if not path.parent.is_dir():
        raise BenchError(f"--{flag} {path}: there is no folder {path.parent}")


def comparison_page(report: CompareReport, footnote: str) -> ReportPage:
    rows = [["", "result", "tool", "GPUs", "$ per GPU and hour", "notes"]]
    for one in report.rounds:
        notes = "; ".join(one.notices) or "-"
        numbers = [_text(one.gpus), _text(one.usd_per_gpu_hour)]
        rows.append([one.name, one.source, one.tool, *numbers, notes])
    names = ", ".join(one.name for one in report.rounds[1:])
    threshold = report.noise_threshold
    return ReportPage(
        title=f"{names} against A",
        kind="Rounds side by side",
        chips=[],
        tiles=[],
        sections=[
            Section("Rounds", [Table("Rounds", rows, (0, 1, 2, 5))]),
            *(_comparison(one, threshold) for one in report.comparisons),
        ],
        notices=[_verdict(one) for one in report.comparisons],
        footer=f"{footnote} Speed-ups are ratios in the direction of better.",
    )


def _verdict(one: Comparison) -> Notice:
    doubts = f": {', '.join(one.doubts)}" if one.doubts else ""
    facts = [f"{name}: {', '.join(texts)}" for name, texts in one.headline.items()]
    title = f"{one.other} against {one.baseline}: {one.verdict}{doubts}"
    return Notice(TONES.get(one.verdict, "note"), title, facts)


def _comparison(one: Comparison, threshold: float) -> Section:
    first, second = one.baseline, one.other
    alone = [f"only {first} has {load}" for load in one.only_baseline]
    alone += [f"only {second} has {load}" for load in one.only_other]
    blocks: list[PagePart] = [Lines(alone)] if alone else []
    if one.warnings:
        blocks.append(Lines([f"warning: {text}" for text in one.warnings], "warn"))
    if one.changed:
        rows = [["setting", first, second]]
        rows += [[key, _text(a), _text(b)] for key, (a, b) in one.changed.items()]
        blocks.append(Table("What changed", rows, (0, 1, 2), heading=True))
    blocks += [_point(point, first, second, threshold) for point in one.points]
    return Section(f"{second} against {first}", blocks)


def _point(point: PointComparison, first: str, second: str, threshold: float) -> Table:
    ratios = [r for row in point.rows for r in (row.ci95 or []) + [row.speedup]]
    limited = [min(max(ratio, 1 / MOST), MOST) for ratio in ratios]  # tiny ones are rounded to 0
    reach = max([abs(math.log(ratio)) for ratio in limited] + [math.log(1.1)])
    head = ["metric", first, second, "change", "speed-up", "95 % interval", "", "verdict"]
    rows = [_row(row, reach, threshold) for row in point.rows]
    return Table(point.load, [head, *rows], heading=True)


def _row(row: RowReport, reach: float, threshold: float) -> list[str | PagePart]:
    bounds, verdict = row.ci95, row.verdict
    shown, tone = verdict or "-", TONES.get(verdict, "note")
    if verdict not in (None, TOO_FEW) and not bounds:
        shown += f" (±{threshold:.0%})"
    return [
        row.label,
        f"{row.baseline:,.3f}",
        f"{row.other:,.3f}",
        f"{row.change:+.1%}",
        f"{row.speedup:.3f}x",
        f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "none",
        Whisker(row.speedup, bounds or [], reach, tone),
        Text(shown, tone),
    ]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def ladder_page(title: str, rungs: Sequence[RungReport]) -> ReportPage:
    """A bar of tokens/s per rung with its figures, or why there is none."""
    most = max((rung.tok_s for rung in rungs if rung.tok_s), default=1.0)
    head = ["rung", "output tokens per second", "cumulative", "$ per M output", "of its roofline"]
    rows: list[list[str | PagePart]] = [[*head]]
    for rung in rungs:
        if rung.tok_s:
            bar = Bar(rung.tok_s / most, f"{rung.tok_s:,.0f}")
            price, share = f"{rung.usd_per_million:.3f}", f"{rung.share_of_ceiling:.0%}"
            rows.append([rung.name, bar, f"{rung.cumulative:.2f}x", price, share])
        else:
            skipped = rung.skipped
            why = f"skipped: {skipped}" if skipped else f"failed: {rung.error}"
            rows.append([rung.name, why, "-", "-", "-"])
    sections = [Section("Rungs", [Table("Rungs", rows, (0, 1))])]
    return ReportPage(title, "Ladder of optimisations", [], [], sections)
