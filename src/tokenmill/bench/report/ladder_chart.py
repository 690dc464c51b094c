"""The ladder as a picture: bars in an SVG that needs nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from tokenmill.bench.workload import BenchError

SUFFIXES = (".svg", ".html")
WIDTH, ROW, BAR = 860, 34, 20
TOP, LEFT, RIGHT = 64, 140, 230  # for the title, the names and the figures
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.title{font-size:16px;font-weight:600}"
    ".dim{fill:#66788a}.name{text-anchor:end}"
)


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
    height = TOP + ROW * len(rows) + 16
    most = max((row["tok_s"] for row in rows if "tok_s" in row), default=1.0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        '<text class="dim" x="16" y="46">output tokens per second</text>',
    ]
    for index, row in enumerate(rows):
        parts += _bar(row, TOP + ROW * index, most)
    return "\n".join([*parts, "</svg>", ""])


def _bar(row: Mapping[str, Any], y: int, most: float) -> list[str]:
    middle = y + BAR - 5
    name = f'<text class="name" x="{LEFT - 10}" y="{middle}">{escape(row["name"])}</text>'
    if "tok_s" not in row:
        reason = f"skipped: {row['skipped']}" if "skipped" in row else f"failed: {row['error']}"
        return [name, f'<text class="dim" x="{LEFT}" y="{middle}">{escape(reason)}</text>']
    width = (WIDTH - LEFT - RIGHT) * row["tok_s"] / most
    figures = (
        f"{row['tok_s']:,.0f}  x{row['cumulative']:.2f}  ${row['usd_per_million']:.3f}/M  "
        f"{row['share_of_ceiling']:.0%} of roof"
    )
    return [
        name,
        f'<rect x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2" fill="#3b7dd8"/>',
        f'<text x="{LEFT + width + 8:.1f}" y="{middle}">{figures}</text>',
    ]
