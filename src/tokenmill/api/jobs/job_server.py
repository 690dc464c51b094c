"""The server process of workers that answer jobs: a socket, a pool, an app, and an orderly end."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import FastAPI

from tokenmill.api.jobs.job_app import JobState
from tokenmill.api.middleware import Front
from tokenmill.api.server import (
    GAVE_UP,
    ServerError,
    Signals,
    bind,
    drain,
    listening,
    run_in_loop,
    url_of,
)
from tokenmill.core.config import PoolConfig, ServerConfig
from tokenmill.http_connection import raise_file_limit
from tokenmill.workers.jobs.job_pool import JobPool
from tokenmill.workers.placement import open_placement

MakeApp = Callable[[JobPool], tuple[FastAPI, JobState]]  # of a started pool
OnListening = Callable[[str, dict[str, Any]], None]  # of the URL and the workers' facts


def serve_jobs(
    worker_argv: Sequence[str],
    config: ServerConfig,
    pool: PoolConfig,
    max_open: int,
    make_app: MakeApp,
    on_listening: OnListening,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    `worker_argv` followed by "--address ADDRESS" starts a worker. Raises TokenmillError when the
    server cannot start or its workers cannot be kept alive.
    """
    raise_file_limit()
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        open_placement(pool) as placement,
    ):
        jobs = JobPool(placement.spawner(worker_argv), pool, placement.host, max_open)
        run_in_loop(_run(listener, jobs, config, make_app, on_listening))


async def _run(
    listener: socket.socket,
    pool: JobPool,
    config: ServerConfig,
    make_app: MakeApp,
    on_listening: OnListening,
) -> None:
    signals = Signals()
    try:
        facts = await signals.interrupt(pool.start())
        if facts is None:
            return
        app, state = make_app(pool)
        ended = await _answer_calls(
            app, state, listener, signals, lambda url: on_listening(url, facts)
        )
        if ended:
            raise ServerError(GAVE_UP)
    finally:
        await pool.close()


async def _answer_calls(
    app: FastAPI,
    state: JobState,
    listener: socket.socket,
    signals: Signals,
    on_listening: Callable[[str], None],
) -> bool:
    """Answer calls until a signal comes or the pool gives up, then drain; True: it gave up."""
    gc.freeze()  # the app lives as long as the process: do not scan it
    config, pool = state.config, state.pool
    async with listening(Front(app, config, state.metrics), listener, config):
        on_listening(url_of(listener))
        ended = await signals.interrupt(pool.gave_up.wait())
        pool.drain()
        await drain(state.calls, config.drain_timeout_s, signals)
        pool.fail_open("the server is shutting down", "shutdown")
    return bool(ended)
