"""Follows the KV cache events of one publisher: a SUB socket, and replays of what it missed.

Batches are numbered. What is missed is asked for where the publisher has a replay socket (ROUTER:
it gets the first number that is wanted and sends all batches from there on); otherwise what was
told until then is dropped. A publisher whose connection breaks, or whose numbers begin again, may
be another process: all that was told is forgotten at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

import zmq
import zmq.asyncio
from zmq.utils.monitor import parse_monitor_message

from tokenmill.engine_events.wire import (
    END_SEQUENCE,
    EXPECTED,
    SEQUENCE_BYTES,
    EngineBatch,
    WireError,
    decode_batch,
)
from tokenmill.proxy.backend_address import EventAddress
from tokenmill.routing.router import Basis

_log = logging.getLogger(__name__)

HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS = 250, 700  # a host that is gone is noticed within a second
REPLAY_TIMEOUT_S = 2.0  # without a further batch of a replay
LATE_S = 0.05  # until the news of a connection, if a message on it is here first
ANSWER_S = 5.0  # until it is said that nobody answers
MAX_BYTES = 1 << 28  # of a message
LINK = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


@dataclass(slots=True)
class EventCounts:
    """Batches of a backend's events; counters since the start."""

    received: int = 0  # replayed ones included
    replayed: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class Listener:
    """Who takes the events of a stream."""

    begin: Callable[[Basis], None]  # all that was told is void, and this is how much will be told
    restart: Callable[[], None]  # the same, and it may be another process by now
    take: Callable[[EngineBatch], None]  # raises WireError


class EventSource:
    """One stream of events; `name` is that of its backend."""

    def __init__(
        self, name: str, address: EventAddress, listener: Listener, counts: EventCounts
    ) -> None:
        self._name, self._address = name, address
        self._listener, self._counts = listener, counts
        self._context = zmq.asyncio.Context()
        self._last: int | None = None  # number of the last batch that was taken; -1: of none
        self._last_live = -1  # of the last one that was not replayed
        self._linked = asyncio.Event()
        self._failed = False  # what it publishes cannot be read
        self._busy = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        socket = self._context.socket(zmq.SUB)
        socket.linger = 0
        socket.rcvhwm = 0
        socket.maxmsgsize = MAX_BYTES
        socket.heartbeat_ivl, socket.heartbeat_timeout = HEARTBEAT_MS, HEARTBEAT_TIMEOUT_MS
        socket.ipv6 = True
        socket.subscribe(b"")
        monitor = socket.get_monitor_socket(LINK)
        socket.connect(self._address.events)
        works = self._receive(socket), self._watch(monitor), self._doubt()
        self._tasks = [asyncio.create_task(work) for work in works]

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._context.destroy(0)

    # The connection.

    async def _watch(self, monitor: zmq.asyncio.Socket) -> None:
        while True:
            event = parse_monitor_message(await monitor.recv_multipart())["event"]
            async with self._busy:
                if event != zmq.EVENT_DISCONNECTED:
                    self._linked.set()
                    await self._guard(self._catch_up())
                elif self._linked.is_set():
                    self._linked.clear()
                    self._failed = False
                    self._lose(f"the connection to {self._address.events} broke")

    async def _doubt(self) -> None:
        """Say once that nobody answers."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S):
                await self._linked.wait()
            return
        _log.warning(
            f"backend {self._name}: nobody answers at events={self._address.events}; {EXPECTED} "
            "over a PUB socket. Until then the router assumes that the backend caches the prompts "
            "it received"
        )

    def _lose(self, why: str) -> None:
        _log.warning(f"backend {self._name}: {why}; what it had cached is forgotten")
        self._last, self._last_live = None, -1
        self._listener.restart()

    async def _guard(self, work: Awaitable[None]) -> None:
        """Do without a publisher that cannot be read, until another one is there."""
        try:
            await work
        except WireError as error:
            _log.warning(
                f"backend {self._name}: events of {self._address.events} cannot be read: {error}. "
                "The router does without them until the publisher is restarted"
            )
            self._failed, self._last = True, None
            self._listener.begin("assumed")

    # Batches.

    async def _receive(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if not self._linked.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LATE_S):
                        await self._linked.wait()
            async with self._busy:
                if self._linked.is_set():  # else it is of a publisher that is gone
                    await self._guard(self._take(frames))

    async def _take(self, frames: list[bytes]) -> None:
        if self._failed:
            return
        sequence, payload = _numbered(frames)
        if sequence <= self._last_live:
            self._lose(f"its events begin again at {sequence} after {self._last_live}")
        self._last_live = sequence
        if self._last is None:
            await self._begin(sequence)
        assert self._last is not None
        if sequence > self._last + 1:
            await self._close_gap(self._last + 1, sequence)
        if sequence > self._last:
            self._apply(sequence, payload)

    def _apply(self, sequence: int, payload: bytes) -> None:
        self._listener.take(decode_batch(payload))
        self._counts.received += 1
        self._last = sequence

    async def _catch_up(self) -> None:
        """Take what a publisher that was just found has published before."""
        if self._last is None and (batches := await self._ask(0)) is not None:
            self._replay(batches)

    async def _begin(self, sequence: int) -> None:
        """Begin with a publisher whose first batch that came is this one."""
        batches = None if sequence == 0 else await self._ask(0)
        if batches:
            self._replay(batches)
        else:
            self._open(sequence, "partial events" if sequence else "events")

    def _replay(self, batches: list[tuple[int, bytes]]) -> None:
        """Begin with the batches that a publisher still has; none: it has published none."""
        first = batches[0][0] if batches else 0
        self._open(first, "partial events" if first else "events")
        self._apply_all(batches)

    def _open(self, first: int, basis: Basis) -> None:
        self._last = first - 1
        self._listener.begin(basis)

    def _apply_all(self, batches: list[tuple[int, bytes]]) -> None:
        for sequence, payload in batches:
            self._apply(sequence, payload)
        self._counts.replayed += len(batches)

    async def _close_gap(self, first: int, end: int) -> None:
        """Take the missed batches, or drop all that was told."""
        asked = await self._ask(first) or []
        batches = [batch for batch in asked if batch[0] < end]
        if [number for number, _ in batches] == list(range(first, end)):
            return self._apply_all(batches)
        self._counts.lost += end - first
        how = "they are no longer there to be replayed" if self._address.replay else "no replay="
        _log.warning(
            f"backend {self._name}: {end - first} batches of events were missed ({how}); "
            "what it had cached is forgotten"
        )
        self._open(end, "partial events")

    async def _ask(self, first: int) -> list[tuple[int, bytes]] | None:
        """All batches from a number on that are still there; None: nobody can be asked."""
        if self._address.replay is None:
            return None
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.linger, socket.maxmsgsize, socket.ipv6 = 0, MAX_BYTES, True
            socket.connect(self._address.replay)
            await socket.send_multipart([b"", first.to_bytes(SEQUENCE_BYTES, "big")])
            return [batch async for batch in _replayed(socket)]
        except TimeoutError:
            _log.warning(f"backend {self._name}: no answer from replay={self._address.replay}")
            return None
        finally:
            socket.close()


async def _replayed(socket: zmq.asyncio.Socket) -> AsyncIterator[tuple[int, bytes]]:
    """The answer of a replay socket: [topic,] number and batch, until a number below 0."""
    while True:
        async with asyncio.timeout(REPLAY_TIMEOUT_S):
            frames = await socket.recv_multipart()
        if len(frames) > 1 and frames[-2] == END_SEQUENCE:
            return
        yield _numbered(frames)


def _numbered(frames: list[bytes]) -> tuple[int, bytes]:
    """The last two frames, behind a delimiter or a topic: a batch and its number."""
    if len(frames) < 3 or len(frames[-2]) != SEQUENCE_BYTES:
        sizes = ", ".join(str(len(frame)) for frame in frames)
        raise WireError(
            f"a message has frames of {sizes} bytes; expected a topic, a number of "
            f"{SEQUENCE_BYTES} bytes and a batch; {EXPECTED}"
        )
    return int.from_bytes(frames[-2], "big"), frames[-1]
