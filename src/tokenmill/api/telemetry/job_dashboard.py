"""The live page of a server of jobs: what it shows, its file, and the figures that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, FastAPI
from starlette.responses import Response

from tokenmill.api.access import authorizer
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.telemetry.dashboard import FILES, add_files
from tokenmill.core.config import ServerConfig
from tokenmill.workers.jobs.job_pool import JobWorkerView

SHARED = ("dashboard.css", "charts.js", "elements.js", "format.js")


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
    app: FastAPI, config: ServerConfig, name: str, view: Callable[[], JobsView]
) -> None:
    """Add GET /dashboard, the files of the page, and GET /dashboard/data, which wants a key."""
    files = {path: file for path, file in FILES.items() if file[0] in SHARED}
    files[f"/dashboard/{name}.js"] = (f"{name}.js", "text/javascript")
    add_files(app, config, f"{name}.html", files)

    @app.get("/dashboard/data", dependencies=[Depends(authorizer(config))])
    async def data() -> Response:
        headers = {"cache-control": "no-store"}
        return Response(json_encode(view()), media_type="application/json", headers=headers)
