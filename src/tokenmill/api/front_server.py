"""Several API processes on one port: the owner's process, and the process of one front.

Where the kernel divides connections among sockets (SO_REUSEPORT on Linux), each front listens for
itself, and one that dies takes only its own connections with it. Elsewhere the owner listens, and
all fronts accept from its socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import os
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace

from tokenmill import __version__
from tokenmill.api.access import Calls
from tokenmill.api.keys import Keys, open_keys
from tokenmill.api.openai_routes import create_app
from tokenmill.api.server import (
    BACKLOG,
    GAVE_UP,
    TRACED_AS,
    OnListening,
    ServerError,
    Signals,
    answer_calls,
    bind,
    logging_stats,
    run_in_loop,
    text_service,
    url_of,
)
from tokenmill.api.stream import ApiState
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.tracing import open_tracing
from tokenmill.core.config import PoolConfig, RouterConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.core.types import TokenmillError
from tokenmill.engine_events.publisher import open_publisher
from tokenmill.http_connection import raise_file_limit
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.loader import ImageLoader
from tokenmill.workers.fronts.control import FrontSetup, OpenCalls, Totals, Welcome
from tokenmill.workers.fronts.front_process import TICKET_VARIABLE, SpawnFront, front_spawner
from tokenmill.workers.fronts.member import MemberPool
from tokenmill.workers.fronts.owner import FrontError, FrontOwner
from tokenmill.workers.fronts.owner_link import FrontMembership, OwnerLink
from tokenmill.workers.joining.protocol import link_host
from tokenmill.workers.placement import open_placement
from tokenmill.workers.pool import WorkerPool

DIVIDES = sys.platform == "linux"  # elsewhere SO_REUSEPORT is missing, or one socket gets all
LISTENER_VARIABLE = "TOKENMILL_FRONT_LISTENER"  # the owner's socket, where all accept from it
PROBE = 'Fronts must agree on tokens: naïve café 数字 {"x": [1, 2.5]}\n\tdef f(x): return x'
OWNER_GONE = "the server that this front belongs to has stopped"
# What the owner of the workers logs is not repeated by every front.
OWNERS_LOGS = ("tokenmill.workers.lifecycle", "tokenmill.workers.slot")

_log = logging.getLogger(__name__)

Load = Callable[[FrontSetup], tuple[Tokenizer, ImageLoader | None]]


def fingerprint(tokenizer: Tokenizer) -> str:
    """Equal where tokenizers agree, as far as a sentence shows."""
    facts = [tokenizer.vocab_size, list(tokenizer.eos_token_ids), tokenizer.encode(PROBE)]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


# The owner.


def serve_fronts(
    worker_argv: Sequence[str],
    front_argv: Sequence[str],
    tokenizer: Tokenizer,
    config: ServerConfig,
    model: str,
    on_listening: OnListening | None = None,
    pool: PoolConfig | None = None,
    router: RouterConfig | None = None,
    prefill_argv: Sequence[str] | None = None,
    vision: VisionConfig | None = None,
    path: str = "",
) -> None:
    """Serve with config.fronts processes until SIGTERM or SIGINT, then drain and return.

    `front_argv` followed by "--address ADDRESS" starts a front, which calls run_front(). The other
    arguments are those of server.serve(); `path` says where a front finds the model.
    """
    raise_file_limit()
    pool = pool or PoolConfig()
    joined_host = None if pool.join_listen is None else link_host(pool.join_listen)
    with (
        reserve(config.host, config.port) as (listener, passed),
        open_keys(config, listener.getsockname()[1]) as keys,
        open_placement(pool) as placement,
        open_publisher(pool) as publisher,
    ):
        worker, prefill = placement.spawner(worker_argv, pool.ranks), None
        if prefill_argv is not None:
            prefill = placement.spawner(prefill_argv, pool.prefill_ranks)
        setup = FrontSetup(
            version=__version__,
            model=model,
            path=path,
            fingerprint=fingerprint(tokenizer),
            server=_without_secrets(config, listener.getsockname()[1]),
            keys=keys.ring,
            pool=pool,
            router=router or RouterConfig(),
            vision=vision or VisionConfig(),
            link_host=placement.host or joined_host,
        )
        client = WorkerPool(worker, pool, RouterConfig(events=False), placement.host, prefill)
        client.routers.publisher = publisher
        spawn = front_spawner(front_argv, passed)
        run_in_loop(_own(client, setup, keys, spawn, url_of(listener, keys), on_listening))


def _without_secrets(config: ServerConfig, port: int) -> ServerConfig:
    """The settings of fronts: they check keys by their digests."""
    token = None if config.control_token is None else ""
    return replace(config, port=port, log_stats=False, api_keys=(), control_token=token)


@contextlib.contextmanager
def reserve(host: str, port: int) -> Iterator[tuple[socket.socket, int | None]]:
    """Hold an address for the fronts; ServerError where somebody has it.

    The number is that of the socket that all fronts accept from, where each cannot have its own.
    """
    with contextlib.closing(bind(host, port)) as probe:  # a shared one would join others unasked
        if DIVIDES:
            port = probe.getsockname()[1]
            probe.close()
            with contextlib.closing(bind(host, port, shared=True)) as shared:
                yield shared, None
        else:
            probe.listen(BACKLOG)
            probe.set_inheritable(True)
            os.environ[LISTENER_VARIABLE] = str(probe.fileno())
            yield probe, probe.fileno()


async def _own(
    client: WorkerPool,
    setup: FrontSetup,
    keys: Keys,
    spawn: SpawnFront,
    url: str,
    on_listening: OnListening | None,
) -> None:
    config, metrics = keys.config, FrontSums(setup.model)
    owner = FrontOwner(client, setup, spawn, config.fronts, metrics.take)

    def reload() -> None:
        if keys.reload():
            owner.replace_keys(keys.ring)

    signals = Signals(reload)
    try:
        facts = await signals.interrupt(client.start())
        if facts is None or await signals.interrupt(started(owner)) is None:
            return
        async with logging_stats(config, metrics.metrics, client.known_stats):
            if on_listening is not None:
                on_listening(url, facts)
            gave_up = await signals.interrupt(client.gave_up.wait())
            await drain_fronts(owner, signals, client.failure)
        if gave_up:
            raise ServerError(GAVE_UP)
    finally:
        await owner.close()
        await client.close()


async def started(owner: FrontOwner) -> bool:
    await owner.start()
    return True


async def drain_fronts(owner: FrontOwner, signals: Signals, failure: str) -> None:
    """Let the fronts finish, or fail what they have; a second signal makes them stop now."""
    drained = asyncio.create_task(owner.drain(failure))
    hurried = False
    while not drained.done():
        await asyncio.wait((drained,), timeout=0.05)
        if signals.count > 1 and not hurried:
            hurried = True
            owner.hurry()
    drained.result()


class FrontSums:
    """The counters of all fronts, as the owner's log lines want them."""

    def __init__(self, model: str) -> None:
        self.metrics = ServerMetrics(model)

    def take(self, totals: Totals) -> None:
        new = self.metrics.total(totals.report.counts)
        for name in ("num_prompt_tokens", "num_output_tokens", "finished"):
            setattr(self.metrics, name, getattr(new, name))


# A front.


def run_front(join: str, load: Load) -> None:
    """Be a front of the owner at the address `join`, until it says so or a signal comes.

    `load` gives tokenizer and images of the model.
    """
    raise_file_limit()
    for name in OWNERS_LOGS:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    run_in_loop(_join(join, load))


async def _join(join: str, load: Load) -> None:
    signals = Signals(lambda: None)  # the owner says when keys have changed
    async with joined(join) as (owner, welcome):
        setup, config = welcome.setup, welcome.setup.server
        keys = Keys(config, setup.keys)
        client = MemberPool(welcome, owner, setup.link_host)
        client.asked_to_drain = signals.came
        client.membership.on_keys = keys.reload
        tokenizer, images = load(setup)
        if fingerprint(tokenizer) != setup.fingerprint:
            raise FrontError(f"the tokenizer here is not that of the server's {setup.model!r}")
        with (
            contextlib.closing(open_tracing(config.otlp_endpoint, TRACED_AS)) as tracing,
            contextlib.closing(front_listener(config)) as listener,
        ):
            try:
                if await signals.interrupt(client.start()) is None:
                    return
                app = create_app(client, tokenizer, keys, setup.model, tracing, images)
                _share(client.membership, app.state.api)
                ended = await answer_calls(
                    *(text_service(client, app), listener, signals, owner.gone),
                    client.membership.listening,
                )
                if ended:
                    raise FrontError(OWNER_GONE)
            finally:
                await client.close()


@contextlib.asynccontextmanager
async def joined(join: str) -> AsyncIterator[tuple[OwnerLink, Welcome]]:
    """A front's connection to its owner, who is told why it fails."""
    owner = OwnerLink(join)
    try:
        yield owner, await owner.join(os.environ.get(TICKET_VARIABLE, ""), __version__)
    except TokenmillError as error:
        owner.fail(str(error))
        raise
    finally:
        owner.close()


def front_listener(config: ServerConfig) -> socket.socket:
    """Where a front listens: at the address that all fronts share."""
    if number := os.environ.get(LISTENER_VARIABLE):
        return socket.socket(fileno=os.dup(int(number)))
    return bind(config.host, config.port, shared=True)


def _share(membership: FrontMembership, state: ApiState) -> None:
    """Tell the other fronts what is open and counted here, and hear the same of them."""
    membership.counts = state.metrics.counts
    share_calls(membership, state.calls)


def share_calls(membership: FrontMembership, calls: Calls) -> None:
    membership.calls = calls.open_calls

    def on_others(others: OpenCalls) -> None:
        calls.others = others

    membership.on_others = on_others
