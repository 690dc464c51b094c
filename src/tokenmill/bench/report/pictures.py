"""Draws a campaign's curve or a ladder as one self-contained SVG file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tokenmill.bench.mlperf.regions import pareto_front, step_line
from tokenmill.bench.report.charts import round_step
from tokenmill.bench.workload import BenchError

SUFFIXES = (".svg", ".html")
WIDTH, CURVE_HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 110, 76, 56  # of a curve: for its axes, labels and titles
NUM_TICKS = 6
ROW, BAR = 34, 20
BARS_TOP, NAMES, FIGURES = 64, 140, 230  # of bars: for the title, the names and the figures
INK = "#3b7dd8"
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.title{font-size:16px;font-weight:600}"
    ".dim{fill:#66788a}.mark{fill:#b42318}.end{text-anchor:end}.middle{text-anchor:middle}"
)


def _text(x: float, y: float, text: str, kind: str = "") -> str:
    named = f' class="{kind}"' if kind else ""
    return f'<text{named} x="{x:.5g}" y="{y:.5g}">{escape(text)}</text>'


def _picture(title: str, height: int, parts: Sequence[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">'
    )
    paper = f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>'
    heading = _text(16, 26, title, "title")
    return "\n".join([head, f"<style>{_STYLE}</style>", paper, heading, *parts, "</svg>", ""])


def pareto_svg(title: str, points: Sequence[Mapping[str, Any]], remark: str = "") -> str:
    """Tokens/s of the system over tokens/s of a user: every point, and the front as steps."""
    known = [p for p in points if p["tps_per_user"] and p["system_tps"]]
    curve = [(p["tps_per_user"], p["system_tps"]) for p in known]
    x_ticks = ticks(max((x for x, _ in curve), default=1.0))
    y_ticks = ticks(max((y for _, y in curve), default=1.0))

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / x_ticks[-1],
            CURVE_HEIGHT - BOTTOM - (CURVE_HEIGHT - TOP - BOTTOM) * y / y_ticks[-1],
        )

    front = [place(x, y) for x, y in step_line(pareto_front(curve))]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts = [
        _text(16, 46, remark, "mark"),
        _text(16, 66, "output tokens per second of the system", "dim"),
        _text(
            *(WIDTH - RIGHT, CURVE_HEIGHT - 12),
            "tokens per second of a user (1000 / p90 TPOT in ms)",
            "dim end",
        ),
        *(_tick_x(place(value, 0)[0], value) for value in x_ticks),
        *(_tick_y(place(0, value)[1], value) for value in y_ticks),
        f'<polyline points="{line}" fill="none" stroke="{INK}" stroke-width="2"/>',
    ]
    for point in known:
        x, y = place(point["tps_per_user"], point["system_tps"])
        dot = f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{INK}"/>'
        parts += [dot, _text(x + 7, y - 7, _point_name(point))]
    return _picture(title, CURVE_HEIGHT, parts)


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, NUM_TICKS or fewer steps."""
    step = round_step(most / NUM_TICKS)
    return [step * index for index in range(math.ceil(most / step) + 1)]


def _tick_x(x: float, value: float) -> str:
    low = CURVE_HEIGHT - BOTTOM
    line = f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{low}" stroke="#e4e9ef"/>'
    return line + _text(x, low + 18, f"{value:,g}", "dim middle")


def _tick_y(y: float, value: float) -> str:
    end = WIDTH - RIGHT
    line = f'<line x1="{LEFT}" x2="{end}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e9ef"/>'
    return line + _text(LEFT - 8, y + 4, f"{value:,g}", "dim end")


def _point_name(point: Mapping[str, Any]) -> str:
    usd = point.get("price", {}).get("usd_per_million_output")
    return f"{point['concurrency']}" + ("" if usd is None else f" (${usd:,.2f}/M)")


def check_plot(path: Path) -> None:
    """Refuse a file that cannot be written before anything is measured."""
    if path.suffix not in SUFFIXES:
        raise BenchError(f"--plot {path}: expected a file that ends in {' or '.join(SUFFIXES)}")
    if not path.parent.is_dir():
        raise BenchError(f"--plot {path}: there is no folder {path.parent}")


def write_plot(path: Path, title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write the rows of a ladder as .svg, or as .html around it."""
    svg = ladder_svg(title, rows)
    if path.suffix == ".html":
        head = f'<!doctype html><meta charset="utf-8"><title>{escape(title)}</title>'
        svg = f"{head}\n<body>{svg}</body>\n"
    path.write_text(svg, encoding="utf-8")


def ladder_svg(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """A bar of tokens/s per rung with its figures, or why there is none."""
    most = max((row["tok_s"] for row in rows if "tok_s" in row), default=1.0)
    parts = [_text(16, 46, "output tokens per second", "dim")]
    for index, row in enumerate(rows):
        parts += _bar(row, BARS_TOP + ROW * index, most)
    return _picture(title, BARS_TOP + ROW * len(rows) + 16, parts)


def _bar(row: Mapping[str, Any], y: int, most: float) -> list[str]:
    middle = y + BAR - 5
    name = _text(NAMES - 10, middle, row["name"], "end")
    if "tok_s" not in row:
        reason = f"skipped: {row['skipped']}" if "skipped" in row else f"failed: {row['error']}"
        return [name, _text(NAMES, middle, reason, "dim")]
    width = (WIDTH - NAMES - FIGURES) * row["tok_s"] / most
    figures = (
        f"{row['tok_s']:,.0f}  x{row['cumulative']:.2f}  ${row['usd_per_million']:.3f}/M  "
        f"{row['share_of_ceiling']:.0%} of roof"
    )
    return [
        name,
        f'<rect x="{NAMES}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="{INK}"/>',
        _text(NAMES + width + 8, middle, figures),
    ]
