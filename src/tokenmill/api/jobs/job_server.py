"""The server process of workers that answer jobs: a socket, a pool, an app, and an orderly end."""

from __future__ import annotations

import contextlib
import gc
import socket
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI

from tokenmill.api.access import Calls
from tokenmill.api.keys import Keys, open_keys
from tokenmill.api.middleware import CallCounter, CallMiddleware
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


@dataclass(frozen=True, slots=True)
class Service:
    """An app over a started pool, and what goes on while it takes calls."""

    app: FastAPI
    metrics: CallCounter
    calls: Calls
    running: AbstractAsyncContextManager[object]  # its end answers the calls that still wait


MakeService = Callable[[Keys, JobPool], Awaitable[Service]]
OnListening = Callable[[str, dict[str, Any]], None]  # of the URL and the workers' facts


def serve_jobs(
    worker_argv: Sequence[str],
    config: ServerConfig,
    pool: PoolConfig,
    make_service: MakeService,
    on_listening: OnListening,
    num_ranks: int = 1,
    salt: bytes = b"",
    **limits: int,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    `worker_argv` followed by "--address ADDRESS" starts a worker of `num_ranks`; `limits` are those
    of a JobPool; `salt` is that of the names of keys. Raises TokenmillError when the server cannot
    start or its workers cannot be kept alive.
    """
    raise_file_limit()
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        open_keys(config, listener.getsockname()[1], salt) as keys,
        open_placement(pool) as placement,
    ):
        jobs = JobPool(placement.spawner(worker_argv, num_ranks), pool, placement.host, **limits)
        run_in_loop(_run(listener, jobs, keys, make_service, on_listening))


async def _run(
    listener: socket.socket,
    pool: JobPool,
    keys: Keys,
    make_service: MakeService,
    on_listening: OnListening,
) -> None:
    signals, config = Signals(keys.reload), keys.config
    try:
        facts = await signals.interrupt(pool.start())
        if facts is None:
            return
        service = await make_service(keys, pool)
        gc.freeze()  # the app lives as long as the process: do not scan it
        front = CallMiddleware(service.app, keys, service.metrics, streams=False)
        async with listening(front, listener, keys), service.running:
            on_listening(url_of(listener, keys), facts)
            ended = await signals.interrupt(pool.gave_up.wait())
            await drain(service.calls, config.drain_timeout_s, signals)
        if ended:
            raise ServerError(GAVE_UP)
    finally:
        await pool.close()
