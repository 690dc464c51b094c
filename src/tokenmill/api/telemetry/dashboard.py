"""The live page over HTTP: its files, and the figures that it asks for once a second."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Guard, Keys, overseer
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.stream import ApiState
from tokenmill.api.telemetry.dashboard_view import DashboardView, History
from tokenmill.api.telemetry.job_view import JobWorkerView

View = Callable[[float, bool], DashboardView]  # of the uptime, with or without decisions
WEB = Path(__file__).with_name("web")
KINDS = {".css": "text/css", ".js": "text/javascript"}
FILES = {  # of all pages, by path
    f"/dashboard/{file.name}": (file.name, KINDS[file.suffix])
    for file in sorted(WEB.iterdir())
    if file.suffix in KINDS
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


def add_dashboard(app: FastAPI, state: ApiState) -> None:
    add_page(app, state.keys, lambda uptime_s, decisions: _view(state, uptime_s, decisions))


def add_page(app: FastAPI, keys: Keys, view: View) -> None:
    """Add GET /dashboard, the files of the page, and GET /dashboard/data: figures over all keys.

    The history begins where the app is made in a running loop, as servers do.
    """
    add_files(app, keys, "dashboard")
    started_s = time.monotonic()
    history = History(lambda: view(time.monotonic() - started_s, False))
    with contextlib.suppress(RuntimeError):
        history.start(asyncio.get_running_loop())

    @app.get("/dashboard/data", dependencies=[Depends(overseer(keys))])
    async def data(request: Request) -> Response:
        late = history.since(_since(request))
        now = view(time.monotonic() - started_s, True)
        body = json_encode(msgspec.structs.replace(now, history=late, events=history.events))
        return Response(body, media_type="application/json", headers={"cache-control": "no-store"})


def add_files(app: FastAPI, keys: Keys, page: str) -> None:
    """Add GET /dashboard and the files of all pages, which tell nothing of the server.

    PAGE.html holds the line that names its kind, and the main part; frame.html holds the rest.
    """
    label, main = (WEB / f"{page}.html").read_text(encoding="utf-8").split("\n", 1)
    parts = {"needs_key": "yes" if keys.ring.is_needed else "no", "page": page}
    text = (WEB / "frame.html").read_text(encoding="utf-8")
    for name, part in (parts | {"kind": label, "main": main.rstrip()}).items():
        text = text.replace(f"{{{name}}}", part)
    _add_text(app, "/dashboard", text, "text/html")
    for path, (name, kind) in FILES.items():
        _add_text(app, path, (WEB / name).read_text(encoding="utf-8"), kind)


def _since(request: Request) -> float:
    """The time of the last sample that the page has."""
    text = request.query_params.get("since", "0")
    try:
        return float(text)
    except ValueError:
        message = f"since: must be a Unix time in seconds, got {text!r}"
        raise ApiError(400, message, "since", "invalid_value") from None


def _add_text(app: FastAPI, path: str, text: str, kind: str) -> None:
    @app.get(path)
    async def get() -> Response:
        return Response(text, media_type=kind, headers=HEADERS)


def _view(state: ApiState, uptime_s: float, decisions: bool) -> DashboardView:
    client = state.client
    metrics = state.metrics.total(client.total_counts())
    facts = client.facts
    assert facts is not None
    return DashboardView(
        model=state.model,
        version=__version__,
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
        rejected=dict(metrics.rejected),
        window_s=metrics.recent_ttft_ms.window_s,
        ttft_ms=metrics.recent_ttft_ms.summary(),
        tpot_ms=metrics.recent_tpot_ms.summary(),
        engine=client.known_stats(),
        pool=client.view(decisions),
        takes_images=state.takes_images,
    )


class JobsView(msgspec.Struct, frozen=True):
    """A server of jobs, as /workers and the live page show it."""

    task: str
    model: str
    version: str
    time_s: float  # Unix time
    uptime_s: float
    draining: bool
    num_open: int  # jobs that have not ended
    num_held: int  # of these, those that wait for a worker
    max_open: int
    migrations: int
    answered: int  # jobs
    latency_ms: dict[str, float]  # of the calls of the last minute; {} when there are none
    rejected: dict[str, int]  # calls refused, by the code of the error
    figures: dict[str, float]  # the sums over all workers, as they last told
    workers: list[JobWorkerView]
    facts: dict[str, Any]  # what the first worker told of its engine


def add_job_page(
    app: FastAPI,
    keys: Keys,
    page: str,
    view: Callable[[Request], msgspec.Struct],
    guard: Guard,
) -> None:
    """Add GET /dashboard, its files, and GET /dashboard/data, which is guarded."""
    add_files(app, keys, page)

    @app.get("/dashboard/data", dependencies=[Depends(guard)])
    async def data(request: Request) -> Response:
        headers = {"cache-control": "no-store"}
        return Response(json_encode(view(request)), media_type="application/json", headers=headers)
