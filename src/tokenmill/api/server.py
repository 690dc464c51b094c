"""The server process: a socket, a worker, the app between them, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import logging
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

import uvicorn
from fastapi import FastAPI

from tokenmill.api.access import Calls
from tokenmill.api.connection import ConnectionLimits, ServerConnection, check_all
from tokenmill.api.keys import Keys, open_keys
from tokenmill.api.middleware import CallCounter, CallMiddleware
from tokenmill.api.openai_routes import create_app
from tokenmill.api.stream import ApiState
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.tracing import open_tracing
from tokenmill.core.config import PoolConfig, RouterConfig, ServerConfig
from tokenmill.core.kv import DISK, HOST
from tokenmill.core.types import EngineStats, TokenmillError
from tokenmill.engine_events.publisher import open_publisher
from tokenmill.http_connection import max_open_files, raise_file_limit
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.placement import WorkerPlacement, open_placement
from tokenmill.workers.pool import WorkerPool

BACKLOG = 2048
CLOSE_S = 5  # answers still being sent when the drain is over get this long
RESERVED_FILES = 256  # that are no clients' connections
TRACED_AS = "tokenmill"
GAVE_UP = "the engine keeps stopping; see its messages above"
POLL_S = 0.02
SWEEP_TICKS = 5  # of uvicorn, a tenth of a second each, between two looks at all connections
STATS_EVERY_S = 10.0
YOUNG_OBJECTS = 10_000  # between two collections: the tokens of one step are thousands of lists

_log = logging.getLogger(__name__)

T = TypeVar("T")
OnListening = Callable[[str, ModelFacts], None]


class ServerError(TokenmillError):
    """The server cannot start or go on; the message says why."""


def serve(
    worker_argv: Sequence[str],
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: str,
    on_listening: OnListening | None = None,
    pool: PoolConfig | None = None,
    router: RouterConfig | None = None,
    prefill_argv: Sequence[str] | None = None,
    images: ImageLoader | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, then drain and return.

    `worker_argv` followed by "--address ADDRESS" starts a worker, `prefill_argv` one that computes
    prompts for others; `on_listening` gets the URL.
    Without `images` the model takes text only.
    Raises TokenmillError when the server cannot start or its worker cannot be kept alive.
    """
    pool = pool or PoolConfig()
    with (
        contextlib.closing(open_tracing(config.otlp_endpoint, TRACED_AS)) as tracing,
        open_publisher(pool) as publisher,
    ):

        def make_pool(placement: WorkerPlacement) -> WorkerPool:
            worker, prefill = placement.spawner(worker_argv, pool.ranks), None
            if prefill_argv is not None:
                prefill = placement.spawner(prefill_argv, pool.prefill_ranks)
            client = WorkerPool(worker, pool, router, placement.host, prefill)
            client.routers.publisher = publisher
            return client

        async def make_service(keys: Keys, client: WorkerPool) -> HttpService:
            return text_service(client, create_app(client, tokenizer, keys, model, tracing, images))

        serve_pool(config, pool, make_pool, make_service, on_listening)


@dataclass(frozen=True, slots=True)
class HttpService:
    """An app over a started pool, and what goes on while it takes calls."""

    app: FastAPI
    keys: Keys
    metrics: CallCounter
    calls: Calls
    running: AbstractAsyncContextManager[object]  # its end answers the calls that still wait
    refuse: Callable[[], None] = lambda: None  # has requests refused that come from now on
    close: Callable[[], None] = lambda: None
    streams: bool = True


MakeService = Callable[[Keys, WorkerPool], Awaitable[HttpService]]


def serve_pool(
    config: ServerConfig,
    pool: PoolConfig,
    make_pool: Callable[[WorkerPlacement], WorkerPool],
    make_service: MakeService,
    on_listening: OnListening | None = None,
    salt: bytes = b"",
) -> None:
    """Serve any task until SIGTERM or SIGINT, then drain and return.

    `salt` is that of the names of keys. Raises TokenmillError when the server cannot start or its
    workers cannot be kept alive.
    """
    raise_file_limit()
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        open_keys(config, listener.getsockname()[1], salt) as keys,
        open_placement(pool) as placement,
    ):
        run_in_loop(_run(listener, make_pool(placement), keys, make_service, on_listening))


async def _run(
    listener: socket.socket,
    client: WorkerPool,
    keys: Keys,
    make_service: MakeService,
    on_listening: OnListening | None,
) -> None:
    signals = Signals(keys.reload)
    try:
        facts = await signals.interrupt(client.start())
        if facts is None:
            return
        ended = await answer_calls(
            *(await make_service(keys, client), listener, signals, client.gave_up),
            lambda url: on_listening(url, facts) if on_listening is not None else None,
        )
        if ended:
            raise ServerError(GAVE_UP)
    finally:
        await client.close()


def text_service(client: WorkerPool, app: FastAPI) -> HttpService:
    """The service of create_app()."""
    state: ApiState = app.state.api
    running = _logging_and_failing(client, state)
    close = app.state.bodies.close
    return HttpService(app, state.keys, state.metrics, state.calls, running, client.drain, close)


@contextlib.asynccontextmanager
async def _logging_and_failing(client: WorkerPool, state: ApiState) -> AsyncIterator[None]:
    async with logging_stats(state.config, state.metrics, client.known_stats):
        yield
        client.fail_open("the server is shutting down", "shutdown")


async def answer_calls(
    service: HttpService,
    listener: socket.socket,
    signals: Signals,
    ends: asyncio.Event,
    on_listening: Callable[[str], None],
) -> bool:
    """Answer calls until a signal comes or `ends` is set, then drain; True: it is set."""
    gc.freeze()  # vocabulary and app live as long as the process: do not scan them
    gc.set_threshold(YOUNG_OBJECTS)
    keys = service.keys
    front = CallMiddleware(service.app, keys, service.metrics, service.streams)
    with contextlib.closing(service):
        async with listening(front, listener, keys), service.running:
            on_listening(url_of(listener, keys))
            ended = await signals.interrupt(ends.wait())
            service.refuse()
            await drain(service.calls, keys.config.drain_timeout_s, signals)
    return bool(ended)


def run_in_loop(work: Coroutine[Any, Any, None]) -> None:
    loop_factory = uvicorn.Config(app="", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(work)


@contextlib.asynccontextmanager
async def listening(app: Any, listener: socket.socket, keys: Keys) -> AsyncIterator[None]:
    """The app over HTTP while the block runs; ServerError where another one listens by now."""
    with _naming(listener.getsockname()):
        listener.listen(BACKLOG)
    server = _Uvicorn(_uvicorn_config(app, keys))
    serving = asyncio.create_task(server.serve([listener]))
    while not server.started and not serving.done():
        await asyncio.sleep(POLL_S)
    try:
        yield
    finally:
        server.should_exit = True
        await serving


async def drain(calls: Calls, timeout_s: float, signals: Signals) -> None:
    """Refuse new calls and let the open ones finish; a second signal or the timeout ends that."""
    calls.draining = True
    if calls.num_open and signals.count < 2:
        _log.info(
            f"stopping: waiting for {_running(calls)}, up to {timeout_s:g} s (--drain-timeout); "
            "press Ctrl-C again to stop now"
        )
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while calls.num_open and loop.time() < deadline_s and signals.count < 2:
        await asyncio.sleep(POLL_S)
    if calls.num_open:
        why = "interrupted again" if signals.count > 1 else f"{timeout_s:g} s are over"
        _log.info(f"stopping now ({why}): an error ends {_running(calls)}")


def _running(calls: Calls) -> str:
    return "1 running request" if calls.num_open == 1 else f"{calls.num_open} running requests"


@contextlib.asynccontextmanager
async def logging_stats(
    config: ServerConfig, metrics: ServerMetrics, stats: Callable[[], EngineStats]
) -> AsyncIterator[None]:
    """Lines of throughput while the block runs, where they are wanted."""
    task = asyncio.create_task(_log_stats(StatsLog(metrics, stats))) if config.log_stats else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


async def _log_stats(log: StatsLog) -> None:
    while True:
        await asyncio.sleep(STATS_EVERY_S)
        if (line := log.line()) is not None:
            _log.info(line)


class Signals:
    """SIGTERM and SIGINT, counted; SIGHUP calls `reload`, unless it is ignored (nohup)."""

    def __init__(self, reload: Callable[[], object]) -> None:
        self.count = 0
        self._came = asyncio.Event()
        self._reload, self._had_terminal = reload, _has_terminal()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.came)
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            loop.add_signal_handler(signal.SIGHUP, self._hung_up)

    def _hung_up(self) -> None:
        if self._had_terminal and not _has_terminal():
            self.came()
        else:
            self._reload()

    def came(self) -> None:
        self.count += 1
        self._came.set()

    async def wait(self) -> None:
        await self._came.wait()

    async def interrupt(self, work: Coroutine[Any, Any, T]) -> T | None:
        """The result of `work`; None when a signal comes first, which cancels it."""
        task = asyncio.create_task(work)
        came = asyncio.create_task(self._came.wait())
        await asyncio.wait((task, came), return_when=asyncio.FIRST_COMPLETED)
        came.cancel()
        if task.done():
            return task.result()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return None


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handling, which would end streams and exit by the signal.

    It ends connections whose clients are late.
    """

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def on_tick(self, counter: int) -> bool:
        if counter % SWEEP_TICKS == 0:
            check_all(self.server_state.connections, asyncio.get_running_loop().time())
        return await super().on_tick(counter)


def _uvicorn_config(app: Any, keys: Keys) -> uvicorn.Config:
    config = keys.config
    limits = ConnectionLimits.of(config, max_open_files() - RESERVED_FILES)
    made = uvicorn.Config(
        app,
        http=functools.partial(ServerConnection, limits),  # type: ignore[arg-type]
        ws="none",
        lifespan="off",
        log_level="warning",
        access_log=False,
        backlog=BACKLOG,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=config.keep_alive_timeout_s,  # type: ignore[arg-type]
        timeout_graceful_shutdown=CLOSE_S,
    )
    made.load()
    made.ssl = keys.tls
    return made


def bind(host: str, port: int, shared: bool = False) -> socket.socket:
    """A socket at an address; a `shared` one lets others of this user listen there, too."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        with _naming((host, port)):
            listener.bind((host, port))
    except ServerError:
        listener.close()
        raise
    return listener


@contextlib.contextmanager
def _naming(address: Sequence[Any]) -> Iterator[None]:
    """An error that says where the server cannot listen."""
    try:
        yield
    except OSError as error:
        where = f"{address[0]}:{address[1]}"
        raise ServerError(f"cannot listen on {where}: {error.strerror or error}") from None


def url_of(listener: socket.socket, keys: Keys) -> str:
    host, port = listener.getsockname()[:2]
    scheme = "http" if keys.tls is None else "https"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@dataclass(frozen=True, slots=True)
class Reading:
    time_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    prefix_queries: int
    prefix_hits: int
    num_calls: int


class StatsLog:
    def __init__(self, metrics: ServerMetrics, stats: Callable[[], EngineStats]) -> None:
        self._metrics = metrics
        self._stats = stats
        self._last = self._read(stats())

    def line(self) -> str | None:
        """What was done since the last call; None where that is nothing."""
        stats, before = self._stats(), self._last
        now = self._last = self._read(stats)
        prompt = now.num_prompt_tokens - before.num_prompt_tokens
        output = now.num_output_tokens - before.num_output_tokens
        is_idle = not stats.num_running and not stats.num_waiting
        if is_idle and not prompt and not output and now.num_calls == before.num_calls:
            return None
        seconds = max(now.time_s - before.time_s, 1e-9)
        parts = [
            f"running {stats.num_running}, waiting {stats.num_waiting}",
            f"prompt {prompt / seconds:.1f} tok/s, output {output / seconds:.1f} tok/s",
        ]
        if stats.num_kv_blocks:
            parts.append(f"KV cache {stats.num_kv_blocks_used / stats.num_kv_blocks:.1%} used")
        if tiers := stats.tiers:
            host, disk = (tiers.get(f"{tier}_blocks", 0) for tier in (HOST, DISK))
            parts.append(f"{host:.0f} KV blocks in host memory, {disk:.0f} on disk")
        if (queries := now.prefix_queries - before.prefix_queries) > 0:
            parts.append(f"prefix hits {(now.prefix_hits - before.prefix_hits) / queries:.1%}")
        return "; ".join(parts)

    def _read(self, stats: EngineStats) -> Reading:
        metrics = self._metrics
        return Reading(
            time.monotonic(),
            metrics.num_prompt_tokens,
            metrics.num_output_tokens,
            stats.prefix_query_tokens,
            stats.prefix_hit_tokens,
            sum(metrics.finished.values()),
        )
