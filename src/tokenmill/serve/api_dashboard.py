"""The live page over HTTP: its files, and the figures that it asks for once a second."""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import msgspec
from fastapi import Depends, FastAPI
from starlette.responses import Response

from tokenmill.core.config import ServerConfig
from tokenmill.core.types import EngineStats
from tokenmill.serve.api_access import authorizer
from tokenmill.serve.api_stream import ApiState
from tokenmill.serve.floor_view import FloorView
from tokenmill.serve.responses import json_encode

WEB = Path(__file__).with_name("web")
FILES = {
    "/dashboard/dashboard.css": ("dashboard.css", "text/css"),
    "/dashboard/charts.js": ("charts.js", "text/javascript"),
    "/dashboard/chat.js": ("chat.js", "text/javascript"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript"),
}
HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class DashboardView(msgspec.Struct, frozen=True):
    """All that the page shows; it keeps the history itself."""

    model: str
    version: str
    dtype: str  # of the engine; "" and 0: there is none behind this front, but other servers
    device: str
    max_model_len: int
    block_size: int
    time_s: float  # Unix time
    uptime_s: float
    draining: bool
    num_pending: int  # requests without a first token
    restarts: int
    prompt_tokens: int  # of finished requests
    output_tokens: int  # sent to clients
    finished: dict[str, int]  # requests by finish reason
    window_s: float  # that the latencies below are of
    ttft_ms: dict[str, float]  # {} when there are none
    tpot_ms: dict[str, float]
    engine: EngineStats  # the sums over all workers, as they last told
    floor: FloorView


def add_dashboard(app: FastAPI, state: ApiState) -> None:
    """The page of a server with an engine."""
    add_page(app, state.config, lambda uptime_s: _view(state, uptime_s))


def add_page(app: FastAPI, config: ServerConfig, view: Callable[[float], DashboardView]) -> None:
    """Add GET /dashboard, the files of the page, and GET /dashboard/data, which wants a key."""
    needs_key = "yes" if config.api_keys else "no"
    page = (WEB / "dashboard.html").read_text(encoding="utf-8").replace("{needs_key}", needs_key)
    _add_text(app, "/dashboard", page, "text/html")
    for path, (name, kind) in FILES.items():
        _add_text(app, path, (WEB / name).read_text(encoding="utf-8"), kind)
    started_s = time.monotonic()

    @app.get("/dashboard/data", dependencies=[Depends(authorizer(config))])
    async def data() -> Response:
        body = json_encode(view(time.monotonic() - started_s))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def _add_text(app: FastAPI, path: str, text: str, kind: str) -> None:
    @app.get(path)
    async def get() -> Response:
        return Response(text, media_type=kind, headers=HEADERS)


def _view(state: ApiState, uptime_s: float) -> DashboardView:
    client, metrics = state.client, state.metrics
    facts = client.facts
    assert facts is not None
    return DashboardView(
        model=state.model,
        version=version("tokenmill"),
        dtype=facts.dtype,
        device=facts.device,
        max_model_len=facts.max_model_len,
        block_size=facts.block_size,
        time_s=time.time(),
        uptime_s=uptime_s,
        draining=state.calls.draining,
        num_pending=client.num_pending,
        restarts=client.num_restarts,
        prompt_tokens=metrics.num_prompt_tokens,
        output_tokens=metrics.num_output_tokens,
        finished=dict(metrics.finished),
        window_s=metrics.recent_ttft_ms.window_s,
        ttft_ms=metrics.recent_ttft_ms.summary(),
        tpot_ms=metrics.recent_tpot_ms.summary(),
        engine=client.known_stats(),
        floor=client.view(),
    )
