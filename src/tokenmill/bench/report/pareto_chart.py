"""The curve of a campaign as a picture: tokens/s of the system over tokens/s of a user, in SVG."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from tokenmill.bench.mlperf.regions import pareto_front, step_line

WIDTH, HEIGHT = 860, 480
LEFT, RIGHT, TOP, BOTTOM = 84, 110, 76, 56
NUM_TICKS = 6
_STYLE = (
    "text{font:13px system-ui,sans-serif;fill:#1f2933}.title{font-size:16px;font-weight:600}"
    ".dim{fill:#66788a}.mark{fill:#b42318}.end{text-anchor:end}.middle{text-anchor:middle}"
)


def pareto_svg(title: str, points: Sequence[Mapping[str, Any]], remark: str = "") -> str:
    """Every point with its concurrency (and price), the front as a step function."""
    known = [p for p in points if p["tps_per_user"] and p["system_tps"]]
    curve = [(p["tps_per_user"], p["system_tps"]) for p in known]
    x_ticks = ticks(max((x for x, _ in curve), default=1.0))
    y_ticks = ticks(max((y for _, y in curve), default=1.0))
    frame = _Frame(x_ticks[-1], y_ticks[-1])
    line = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in step_line(pareto_front(curve)))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" role="img">',
        f"<style>{_STYLE}</style>",
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text class="title" x="16" y="26">{escape(title)}</text>',
        f'<text class="mark" x="16" y="46">{escape(remark)}</text>',
        '<text class="dim" x="16" y="66">output tokens per second of the system</text>',
        f'<text class="dim end" x="{WIDTH - RIGHT}" y="{HEIGHT - 12}">tokens per second of a user '
        "(1000 / p90 TPOT in ms)</text>",
        *(_tick_x(frame, value) for value in x_ticks),
        *(_tick_y(frame, value) for value in y_ticks),
        f'<polyline points="{line}" fill="none" stroke="#3b7dd8" stroke-width="2"/>',
        *(_mark(frame, point) for point in known),
        "</svg>",
        "",
    ]
    return "\n".join(parts)


class _Frame:
    def __init__(self, x_most: float, y_most: float) -> None:
        self._x_most, self._y_most = x_most, y_most

    def x(self, value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * value / self._x_most

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * value / self._y_most


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to at least `most`, NUM_TICKS or fewer steps."""
    rough = most / NUM_TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    return [step * index for index in range(math.ceil(most / step) + 1)]


def _tick_x(frame: _Frame, value: float) -> str:
    x = frame.x(value)
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" stroke="#e4e9ef"/>'
        f'<text class="dim middle" x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}">{value:,g}</text>'
    )


def _tick_y(frame: _Frame, value: float) -> str:
    y = frame.y(value)
    return (
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e9ef"/>'
        f'<text class="dim end" x="{LEFT - 8}" y="{y + 4:.1f}">{value:,g}</text>'
    )


def _mark(frame: _Frame, point: Mapping[str, Any]) -> str:
    x, y = frame.x(point["tps_per_user"]), frame.y(point["system_tps"])
    usd = point.get("price", {}).get("usd_per_million_output")
    label = f"{point['concurrency']}" + ("" if usd is None else f" (${usd:,.2f}/M)")
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="#3b7dd8"/>'
        f'<text x="{x + 7:.1f}" y="{y - 7:.1f}">{label}</text>'
    )
