"""Writes a comparison as one self-contained HTML page, in light and dark, without a network."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tokenmill.bench.results.comparison import TOO_FEW
from tokenmill.bench.results.reports import (
    CompareReport,
    Comparison,
    PointComparison,
    RoundReport,
    RowReport,
)
from tokenmill.bench.workload import BenchError

WIDTH, HEIGHT = 160, 18
MOST = 1000.0  # a ratio beyond it, or below its inverse, is drawn at the end of the scale
CLASSES = {"better": "good", "worse": "bad", "mixed": "warn"}
STYLE = """
:root { color-scheme: light dark;
  --bg: #f6f7f9; --card: #fff; --fg: #1b2430; --dim: #64748b; --line: #dfe4ea;
  --good: #0f7b4b; --bad: #c02b2b; --warn: #9a6400; --accent: #3b7dd8; }
@media (prefers-color-scheme: dark) { :root {
  --bg: #10151c; --card: #18202a; --fg: #e3e8ee; --dim: #93a1b2; --line: #2b3644;
  --good: #4cc38a; --bad: #ff7b72; --warn: #e3b341; --accent: #6ea8fe; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1100px; padding: 24px 16px 48px; background: var(--bg);
  color: var(--fg); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 12px; } h2 { font-size: 1.2rem; margin: 0 0 8px; }
h3 { font-size: 1rem; margin: 20px 0 6px; }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
  padding: 16px; margin: 16px 0; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 10px; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { color: var(--dim); font-weight: 500; }
th.text, td.text { text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 9em; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); }
.dim { color: var(--dim); } ul { margin: 4px 0; padding-left: 20px; } svg { display: block; }
li { overflow-wrap: anywhere; }
"""


def check_page(path: Path) -> None:
    """Refuse a file that cannot be written before anything is read."""
    if path.suffix != ".html":
        raise BenchError(f"--html {path}: expected a file that ends in .html")
    if not path.parent.is_dir():
        raise BenchError(f"--html {path}: there is no folder {path.parent}")


def page(report: CompareReport, footnote: str) -> str:
    """The whole page of a report of `compare`."""
    names = ", ".join(one["name"] for one in report["rounds"][1:])
    title = f"{names} against A"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        '<link rel="icon" href="data:,">',  # else a browser asks the server for one
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body>",
        "<h1>Rounds side by side</h1>",
        _rounds(report["rounds"]),
        *(_comparison(one, report["noise_threshold"]) for one in report["comparisons"]),
        f'<p class="dim">{escape(footnote)} Speed-ups are ratios in the direction of better.</p>',
        "</body></html>\n",
    ]
    return "\n".join(parts)


def _rounds(rounds: Iterable[RoundReport]) -> str:
    rows = [["", "result", "tool", "GPUs", "$ per GPU and hour", "notes"]]
    rows += [
        [
            one["name"],
            one["source"],
            one["tool"],
            _text(one["gpus"]),
            _text(one["usd_per_gpu_hour"]),
            "; ".join(one["notices"]) or "-",
        ]
        for one in rounds
    ]
    return f"<section>{_table(rows, text_columns=(1, 2, 5))}</section>"


def _comparison(one: Comparison, threshold: float) -> str:
    first, second, verdict = one["baseline"], one["other"], one["verdict"]
    mark = f'<span class="{_color(verdict)}">{escape(_verdict(one))}</span>'
    facts = [f"{name}: {', '.join(texts)}" for name, texts in one["headline"].items()]
    facts += [f"only {first} has {load}" for load in one["only_baseline"]]
    facts += [f"only {second} has {load}" for load in one["only_other"]]
    parts = [f"<section><h2>{second} against {first}: {mark}</h2>", _list(facts)]
    parts.append(_list([f"warning: {text}" for text in one["warnings"]], "warn"))
    if one["changed"]:
        rows = [["setting", first, second]]
        rows += [[key, _text(a), _text(b)] for key, (a, b) in one["changed"].items()]
        parts += ["<h3>What changed</h3>", _table(rows, text_columns=(1, 2))]
    for point in one["points"]:
        parts += [f"<h3>{escape(point['load'])}</h3>", _point(point, first, second, threshold)]
    return "\n".join([*parts, "</section>"])


def _verdict(one: Comparison) -> str:
    """With what puts it in doubt."""
    doubts = ", ".join(one["doubts"])
    return f"{one['verdict']}: {doubts}" if doubts else one["verdict"]


def _point(point: PointComparison, first: str, second: str, threshold: float) -> str:
    rows = point["rows"]
    ratios = [bound for row in rows for bound in (row["ci95"] or []) + [row["speedup"]]]
    reach = max([abs(_log(ratio)) for ratio in ratios] + [math.log(1.1)])
    head = ["metric", first, second, "change", "speed-up", "95 % interval", "", "verdict"]
    cells = "".join(f"<th>{escape(text)}</th>" for text in head)
    body = "\n".join(_row(row, reach, threshold) for row in rows)
    return f'<div class="wide"><table><tr>{cells}</tr>\n{body}</table></div>'


def _row(row: RowReport, reach: float, threshold: float) -> str:
    bounds, verdict = row["ci95"], row["verdict"]
    interval = f"{bounds[0]:.3f} to {bounds[1]:.3f}" if bounds else "none"
    shown = verdict or "-"
    if verdict not in (None, TOO_FEW) and not bounds:
        shown += f" (±{threshold:.0%})"
    color = _color(verdict)
    cells = [
        escape(row["label"]),
        f"{row['baseline']:,.3f}",
        f"{row['other']:,.3f}",
        f"{row['change']:+.1%}",
        f"<b>{row['speedup']:.3f}x</b>",
        f'<span class="dim">{interval}</span>',
        _whisker(row, reach, color),
        f'<span class="{color}">{shown}</span>',
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _whisker(row: RowReport, reach: float, color: str) -> str:
    """The speed-up and its interval on a logarithmic scale with 1 in the middle."""

    def x(ratio: float) -> float:
        return WIDTH / 2 + _log(ratio) / reach * (WIDTH / 2 - 6)

    middle = HEIGHT / 2
    line = ""
    if row["ci95"]:
        low, high = (x(bound) for bound in row["ci95"])
        line = f'<path d="M{low:.1f} {middle}H{high:.1f}" stroke="currentColor" stroke-width="3"/>'
    return (
        f'<svg class="{color}" width="{WIDTH}" height="{HEIGHT}" aria-hidden="true">'
        f'<path d="M{WIDTH / 2} 0V{HEIGHT}" stroke="var(--line)"/>{line}'
        f'<circle cx="{x(row["speedup"]):.1f}" cy="{middle}" r="4" fill="currentColor"/></svg>'
    )


def _log(ratio: float) -> float:
    """The logarithm within the scale; reports round a tiny ratio to 0."""
    return math.log(min(max(ratio, 1 / MOST), MOST))


def _table(rows: Sequence[Sequence[str]], text_columns: Iterable[int] = ()) -> str:
    wide = set(text_columns)
    lines = []
    for number, row in enumerate(rows):
        tag = "td" if number else "th"
        cells = [
            f"<{tag}{' class=text' if index in wide else ''}>{escape(cell)}</{tag}>"
            for index, cell in enumerate(row)
        ]
        lines.append(f"<tr>{''.join(cells)}</tr>")
    return f'<div class="wide"><table>{"".join(lines)}</table></div>'


def _list(texts: Sequence[str], name: str = "") -> str:
    items = "".join(f"<li>{escape(text)}</li>" for text in texts)
    return f'<ul class="{name}">{items}</ul>' if items else ""


def _color(verdict: str | None) -> str:
    return CLASSES.get(verdict or "", "dim")


def _text(value: Any) -> str:
    return "-" if value is None else str(value)
