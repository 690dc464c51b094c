"""The live page of a video server: its jobs with pictures, its workers, and a form for a job."""

from __future__ import annotations

import time
from typing import Any

import msgspec
from fastapi import FastAPI, Request

from tokenmill import __version__
from tokenmill.api.keys import caller
from tokenmill.api.telemetry.dashboard import add_job_page
from tokenmill.api.telemetry.job_view import JobWorkerView, worker_views
from tokenmill.api.videos.video_record import VideoObject
from tokenmill.api.videos.video_routes import VideoState
from tokenmill.workers.pool import WorkerPool

MAX_SHOWN = 24  # jobs


class VideoView(msgspec.Struct, frozen=True, kw_only=True):
    """All that the page shows."""

    model: str
    version: str
    dtype: str
    device: str
    time_s: float  # Unix time
    uptime_s: float
    draining: bool
    counts: dict[str, int]  # jobs by state
    max_jobs: int
    ended: dict[str, int]  # since the start, by how
    num_steps: int  # since the start
    steps_s: float  # that they took
    stored_bytes: int
    max_stored_bytes: int
    workers: list[JobWorkerView]
    jobs: list[VideoObject]  # the caller's latest


def add_video_page(
    app: FastAPI, client: WorkerPool, state: VideoState, facts: dict[str, Any]
) -> None:
    """Add GET /dashboard, and GET /dashboard/data, which wants a key where there are some."""
    started_s = time.monotonic()

    def view(request: Request) -> VideoView:
        return _view(client, state, facts, request.state.account, time.monotonic() - started_s)

    add_job_page(app, state.keys, "videos", view, caller(state.keys))


def _view(
    client: WorkerPool, state: VideoState, facts: dict[str, Any], owner: str, uptime_s: float
) -> VideoView:
    jobs, metrics, limits = state.jobs, state.metrics, state.preparer.config
    mine = [record for record in jobs.store if record.owner == owner]
    return VideoView(
        model=state.model,
        version=__version__,
        dtype=facts["dtype"],
        device=facts["device"],
        time_s=time.time(),
        uptime_s=uptime_s,
        draining=state.calls.draining,
        counts=jobs.counts(),
        max_jobs=limits.max_video_jobs,
        ended=dict(metrics.ended),
        num_steps=sum(metrics.step_s.counts),
        steps_s=metrics.step_s.total,
        stored_bytes=jobs.store.num_bytes,
        max_stored_bytes=limits.video_storage_bytes,
        workers=worker_views(client),
        jobs=[jobs.shown(record) for record in mine[: -MAX_SHOWN - 1 : -1]],
    )
