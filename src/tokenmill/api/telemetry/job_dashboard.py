"""The live page of a server of jobs: what it shows, its file, and the figures that it asks for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tokenmill.api.keys import Guard, Keys
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.telemetry.dashboard import add_files
from tokenmill.workers.jobs.job_pool import JobWorkerView


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
