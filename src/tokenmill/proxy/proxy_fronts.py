"""Several processes of `tokenmill route` on one port: their owner, and one of them.

Backends do not report what they have to do, so that each front tells the others of every call that
it sends and of its end, by way of the owner. The owner takes no calls; its own health checks are
the ones that are logged and counted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from types import MappingProxyType

from tokenmill import __version__
from tokenmill.api.access import Calls
from tokenmill.api.front_server import (
    OWNER_GONE,
    FrontSums,
    drain_fronts,
    front_listener,
    joined,
    reserve,
    share_calls,
    started,
)
from tokenmill.api.server import Signals, logging_stats, run_in_loop, url_of
from tokenmill.api.telemetry.tracing import open_tracing
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.core.types import EngineStats
from tokenmill.http_connection import raise_file_limit
from tokenmill.proxy.backends import Backends
from tokenmill.proxy.fronts_view import report_of, stats_of
from tokenmill.proxy.proxy_metrics import ALL_MODELS
from tokenmill.proxy.proxy_routes import RouteState
from tokenmill.proxy.proxy_server import TRACED_AS, OnListening, pass_calls
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.processor import ImageProcessor
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.control import (
    CallAnswered,
    CallBegan,
    CallEnded,
    FrontGone,
    FrontJoined,
    FrontSetup,
    ResponseStored,
    ToFront,
    Totals,
)
from tokenmill.workers.fronts.front_process import SpawnFront, front_spawner
from tokenmill.workers.fronts.owner import FrontError, FrontOwner
from tokenmill.workers.fronts.owner_link import Membership, OwnerLink, front_number
from tokenmill.workers.lifecycle import PoolError, WorkerWatcher
from tokenmill.workers.pool_view import PoolView
from tokenmill.workers.slot import OnMessage, Role, WorkerSlot

OWNERS_LOG = "tokenmill.proxy.backend"  # not repeated by every front

Load = Callable[[FrontSetup], tuple[Tokenizer | None, ImageProcessor | None]]


# The owner.


class OwnedBackends:
    """The backends as the owner of fronts sees them; it starts and drains none of them."""

    slots: Mapping[str, WorkerSlot] = MappingProxyType({})
    num_restarts = 0

    def __init__(self, backends: Backends) -> None:
        self._backends = backends
        self.stats_of_all = EngineStats()

    def watch(self, watcher: WorkerWatcher, on_front: OnMessage) -> None:
        """No worker comes or goes."""

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        return self.stats_of_all

    def known_stats(self) -> EngineStats:
        return self.stats_of_all

    def view(self, decisions: bool = True) -> PoolView:
        return self._backends.view(decisions)

    def accounts(self) -> AccountsView:
        return AccountsView(0, 0.0, 0.0, [], [])

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        raise PoolError("a router starts no workers")

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        raise PoolError("a router drains no workers")


def route_fronts(
    front_argv: Sequence[str],
    config: ServerConfig,
    backends: RouteConfig,
    router: RouterConfig,
    on_listening: OnListening | None = None,
    path: str = "",
    source: str = "",
) -> None:
    """Route with config.fronts processes until SIGTERM or SIGINT, then drain and return.

    `front_argv` followed by "--join ADDRESS" starts a front, which calls run_route_front().
    `path` and `source` say where it finds the tokenizer, if there is one.
    """
    raise_file_limit()
    with reserve(config.host, config.port) as (listener, passed):
        setup = FrontSetup(
            version=__version__,
            model=ALL_MODELS,
            path=path,
            source=source,
            fingerprint="",
            server=replace(config, port=listener.getsockname()[1], log_stats=False),
            router=router,
            route=backends,
        )
        spawn = front_spawner(front_argv, passed)
        run_in_loop(_own(backends, setup, config, spawn, url_of(listener), on_listening))


async def _own(
    config: RouteConfig,
    setup: FrontSetup,
    server: ServerConfig,
    spawn: SpawnFront,
    url: str,
    on_listening: OnListening | None,
) -> None:
    signals, sums = Signals(), FrontSums(ALL_MODELS)
    backends = Backends(config, setup.router)
    pool = OwnedBackends(backends)

    def take(totals: Totals) -> None:
        sums.take(totals)
        pool.stats_of_all = stats_of(totals.report)

    owner = FrontOwner(pool, setup, spawn, server.fronts, take)
    try:
        await signals.interrupt(backends.start())
        if await signals.interrupt(started(owner)) is None:
            return
        async with logging_stats(server, sums.metrics, pool.known_stats):
            if on_listening is not None:
                on_listening(url, backends.view())
            await signals.wait()
            await drain_fronts(owner, signals, "")
    finally:
        await owner.close()
        await backends.close()


# A front.


def run_route_front(join: str, load: Load) -> None:
    """Be a front of the owner at the address `join`, until it says so or a signal comes."""
    raise_file_limit()
    logging.getLogger(OWNERS_LOG).setLevel(logging.CRITICAL)
    run_in_loop(_join(join, load))


async def _join(join: str, load: Load) -> None:
    signals = Signals()
    async with joined(join) as (owner, welcome):
        setup = welcome.setup
        assert setup.route is not None
        config = setup.server
        router = replace(setup.router, seed=setup.router.seed + front_number(welcome.front))
        tokenizer, processor = load(setup)
        with (
            closing(open_tracing(config.otlp_endpoint, TRACED_AS)) as tracing,
            closing(front_listener(config, shared=True)) as listener,
        ):
            backends = Backends(setup.route, router, welcome.link, owner.send)
            calls = Calls(config)
            state = RouteState(backends, tokenizer, config, calls, tracing, processor)
            membership = state.membership = Membership(
                welcome,
                owner,
                lambda decisions: report_of(backends.view(decisions), state.metrics.counts()),
                lambda: sum(worker.num_waiting for worker in backends.view(False).workers),
            )
            membership.on_drain = lambda failure: signals.came()
            share_calls(membership, calls)
            _listen(owner, membership, backends)
            telling = asyncio.create_task(membership.tell())
            try:
                if await pass_calls(state, listener, signals, owner.gone, membership.listening):
                    raise FrontError(OWNER_GONE)
            finally:
                telling.cancel()


def _listen(owner: OwnerLink, membership: Membership, backends: Backends) -> None:
    """Take the messages of the owner and, by way of it, of other fronts."""

    def receive(message: ToFront) -> None:
        match message:
            case CallBegan() | CallAnswered() | CallEnded() | ResponseStored():
                backends.heard(message)
            case FrontJoined():
                backends.tell_open()
            case FrontGone(link=link):
                backends.front_gone(link)
            case _:
                membership.receive(message)

    owner.pass_to(receive)
