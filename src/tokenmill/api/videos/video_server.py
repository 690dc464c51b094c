"""The process of `tokenmill serve --task video`: its socket, store, workers, and app."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from tokenmill import __version__
from tokenmill.api.access import Calls
from tokenmill.api.jobs.job_app import add_job_workers, add_model, base_app
from tokenmill.api.keys import Keys
from tokenmill.api.openapi import document
from tokenmill.api.server import HttpService, OnListening, serve_pool
from tokenmill.api.telemetry.dashboard import JobsView
from tokenmill.api.telemetry.job_view import facts_of, worker_views
from tokenmill.api.videos.video_jobs import VideoJobs
from tokenmill.api.videos.video_metrics import VideoMetrics
from tokenmill.api.videos.video_page import add_video_page
from tokenmill.api.videos.video_request import VideoPreparer
from tokenmill.api.videos.video_routes import VIDEOS, VideoState, add_videos
from tokenmill.api.videos.video_store import VideoStore
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.core.keys.run_folder import key_salt
from tokenmill.core.specs.wan import TEXT_TOKENS, WanSpec
from tokenmill.core.video import VideoServerConfig
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.text.tokenizer import load_tokenizer
from tokenmill.workers.placement import WorkerPlacement
from tokenmill.workers.pool import WorkerPool

DEFAULT_FOLDER = "~/.cache/tokenmill/videos"

_log = logging.getLogger(__name__)


def serve_videos(
    worker_argv: Sequence[str],
    config: ServerConfig,
    videos: VideoServerConfig,
    model: str,
    on_listening: OnListening,
    pool: PoolConfig,
    num_ranks: int = 1,
) -> None:
    """Serve until SIGTERM or SIGINT; jobs that are not finished then run at the next start.

    `worker_argv` followed by "--address ADDRESS" starts a worker of `num_ranks`, each of which has
    a GPU of its own where the machine has as many; `on_listening` gets the URL and what the first
    worker says of its model. Raises TokenmillError when the server cannot start, or its workers
    cannot be kept alive.
    """
    folder = Path(videos.video_dir or DEFAULT_FOLDER).expanduser()
    with contextlib.closing(VideoStore(folder, videos.video_storage_bytes)) as store:
        make_service = partial(make_video_service, store, videos, model)

        def make_pool(placement: WorkerPlacement) -> WorkerPool:
            spawn = placement.spawner(worker_argv, num_ranks)
            return WorkerPool(spawn, pool, host=placement.host, max_per_worker=1)

        serve_pool(config, pool, make_pool, make_service, on_listening, key_salt(folder))


async def make_video_service(
    store: VideoStore,
    videos: VideoServerConfig,
    model: str,
    keys: Keys,
    client: WorkerPool,
) -> HttpService:
    """The service of a started pool, which has taken the jobs of the server before."""
    facts = facts_of(client)
    state = video_state(client, store, keys, videos, model, facts)
    app = create_app(client, state, facts)
    await resume(state.jobs, model)
    return HttpService(app, keys, state.metrics, state.calls, running(state.jobs), streams=False)


async def resume(jobs: VideoJobs, model: str) -> None:
    """Take the jobs of the server before, which no call may change meanwhile."""
    num_jobs = await jobs.resume(model)
    if num_jobs:
        _log.info(f"unfinished videos of an earlier run, made again from their seeds: {num_jobs}")


@contextlib.asynccontextmanager
async def running(jobs: VideoJobs) -> AsyncIterator[None]:
    task = asyncio.create_task(jobs.run())
    try:
        yield
    finally:
        task.cancel()
        await jobs.close()


def video_state(
    client: WorkerPool,
    store: VideoStore,
    keys: Keys,
    videos: VideoServerConfig,
    model: str,
    facts: dict[str, Any],
) -> VideoState:
    """What the handlers share, for workers that told these facts."""
    metrics = VideoMetrics(model)
    tokenizer = None if facts["tokenizer"] is None else load_tokenizer(facts["tokenizer"])
    spec = msgspec.convert(facts["spec"], WanSpec)
    parallel = msgspec.convert(facts["parallel"], VideoParallel)
    preparer = VideoPreparer(spec, tokenizer, videos, parallel)
    per_key = keys.config.max_concurrency_per_key
    jobs = VideoJobs(client, store, metrics, videos.max_video_jobs, per_key)
    return VideoState(keys, model, metrics, Calls(keys.config), jobs, preparer)


def create_app(client: WorkerPool, state: VideoState, facts: dict[str, Any]) -> FastAPI:
    api = partial(document, VIDEOS, __version__, state.model, state.keys.ring.is_needed)

    async def metrics() -> bytes:
        return state.metrics.render_jobs(client)

    app = base_app(client, state.keys, state.calls, api, metrics)
    add_videos(app, state)
    add_model(app, state.keys, state.model, TEXT_TOKENS)
    add_job_workers(app, state.keys, client, lambda: _workers_view(client, state))
    add_video_page(app, client, state, facts)
    return app


def _workers_view(client: WorkerPool, state: VideoState) -> JobsView:
    """The server for /workers; the live page has a view of its own."""
    counts = state.jobs.counts()
    return JobsView(
        task="video",
        model=state.model,
        version=__version__,
        time_s=time.time(),
        uptime_s=0.0,
        draining=state.calls.draining,
        num_open=counts["queued"] + counts["in_progress"],
        num_held=counts["queued"],
        max_open=state.preparer.config.max_video_jobs,
        migrations=client.num_migrations,
        answered=state.metrics.ended["completed"],
        latency_ms={},
        rejected=dict(state.metrics.rejected),
        figures=client.known_stats().figures,
        workers=worker_views(client),
        facts=facts_of(client),
    )
