"""Publishes what the workers of a server cache, as vLLM's ZmqEventPublisher does.

One PUB socket has the events of all workers, each of which is a data-parallel rank. A ROUTER socket
sends the latest batches again, from the number on that it is asked for.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

import zmq

from tokenmill.core.config import PoolConfig
from tokenmill.core.images import CONTENT_ID
from tokenmill.core.kv import DEVICE, DISK, HOST
from tokenmill.core.kv_events import Event, EventBatch, Removed, Stored
from tokenmill.core.types import TokenmillError
from tokenmill.engine_events.wire import (
    END_SEQUENCE,
    SEQUENCE_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EngineBatch,
    EngineEvent,
    ExtraKeys,
    encode_batch,
)

_log = logging.getLogger(__name__)

MAX_BATCHES = 10_000  # that can be asked for again, as in vLLM
HIGH_WATER_MARK = 100_000  # batches that wait for a slow subscriber; it misses further ones
POLL_MS = 100
MEDIUMS = {DEVICE: "GPU", HOST: "CPU", DISK: "STORAGE"}
KIND = "full_attention"  # of the layers whose blocks are told of
IMAGE_TOKEN = 0  # in place of a token of an image, which an extra key names


class PublisherError(TokenmillError):
    """An address cannot be bound; the message names the flag."""


def engine_event(event: Event) -> EngineEvent:
    match event:
        case Stored():
            return _stored(event)
        case Removed(hashes=hashes, tier=tier):
            return BlockRemoved([*hashes], MEDIUMS[tier], 0)
        case _:
            return AllBlocksCleared()


def _stored(event: Stored) -> BlockStored:
    size = len(event.token_ids) // len(event.hashes)
    is_root = event.salt is not None or event.tier != DEVICE
    return BlockStored(
        block_hashes=[*event.hashes],
        parent_block_hash=None if is_root else event.parent,
        token_ids=[IMAGE_TOKEN if t >= CONTENT_ID else t for t in event.token_ids],
        block_size=size,
        medium=MEDIUMS[event.tier],
        extra_keys=_extra_keys(event, size),
        group_idx=0,
        kv_cache_spec_kind=KIND,
    )


def _extra_keys(event: Stored, size: int) -> ExtraKeys | None:
    """What beside its tokens is in each block: a salt in the first one, and images."""
    has_images = max(event.token_ids, default=0) >= CONTENT_ID
    if not has_images and not event.salt:
        return None
    starts = range(0, len(event.token_ids), size)
    keys: list[list[Any]] = [_image_keys(event.token_ids[start : start + size]) for start in starts]
    if event.salt:
        keys[0].append(event.salt)
    return [each or None for each in keys]


def _image_keys(token_ids: list[int]) -> list[list[str | int]]:
    """A key and a place for each run of tokens of images, whose ids are hashes of the content."""
    runs = [
        place
        for place, token in enumerate(token_ids)
        if token >= CONTENT_ID and (place == 0 or token_ids[place - 1] < CONTENT_ID)
    ]
    return [[f"{token_ids[place]:x}", place] for place in runs]


class CachePublisher:
    """The sockets of a server; take() and forget() belong to one thread."""

    def __init__(self, address: str, replay: str | None = None) -> None:
        self._context = zmq.Context()
        self._kept: deque[tuple[bytes, bytes]] = deque(maxlen=MAX_BATCHES)
        self._sequence = 0
        self._ranks: dict[str, int] = {}  # by worker
        self._last: dict[str, int] = {}  # number of a worker's last batch
        self._closed = False
        self._thread: threading.Thread | None = None
        try:
            self._socket = self._bind("--kv-events", zmq.PUB, address)
            if replay is not None:
                router = self._bind("--kv-events replay=", zmq.ROUTER, replay)
                self._thread = threading.Thread(
                    target=self._serve_replays, args=(router,), name="kv-events", daemon=True
                )
                self._thread.start()
        except PublisherError:
            self._context.destroy(0)
            raise

    def _bind(self, flag: str, kind: int, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.set_hwm(HIGH_WATER_MARK)
        socket.linger, socket.ipv6 = 0, "[" in address
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise PublisherError(
                f"{flag} {address} cannot be bound: {error.strerror or error}; expected an address "
                "of this machine, such as tcp://*:5557 or tcp://10.0.0.1:5557"
            ) from None
        return socket

    def take(self, worker: str, batch: EventBatch) -> None:
        """Publish what a worker has cached and dropped; after a gap all of it is void."""
        if batch.sequence != self._last.get(worker, 0) + 1:
            self.forget(worker)
        self._last[worker] = batch.sequence
        self._publish(worker, [engine_event(event) for event in batch.events])

    def forget(self, worker: str) -> None:
        if self._last.pop(worker, None) is not None:
            self._publish(worker, [AllBlocksCleared()])

    def _publish(self, worker: str, events: list[EngineEvent]) -> None:
        rank = self._ranks.setdefault(worker, len(self._ranks))
        payload = encode_batch(EngineBatch(time.time(), events, rank))
        number = self._sequence.to_bytes(SEQUENCE_BYTES, "big")
        self._sequence += 1
        self._kept.append((number, payload))
        with contextlib.suppress(zmq.Again):
            self._socket.send_multipart((b"", number, payload), zmq.NOBLOCK)

    def _serve_replays(self, socket: zmq.Socket[bytes]) -> None:
        while not self._closed:
            if socket.poll(POLL_MS):
                self._replay(socket, socket.recv_multipart())
        socket.close()

    def _replay(self, socket: zmq.Socket[bytes], frames: list[bytes]) -> None:
        if len(frames) != 3 or len(frames[2]) != SEQUENCE_BYTES:
            _log.warning(
                f"a request for KV cache events has {len(frames)} frames; expected an empty one "
                f"and the first number that is wanted in {SEQUENCE_BYTES} bytes"
            )
            return
        client, delimiter, first = frames
        for number, payload in list(self._kept):  # copied at once: the other thread appends
            if number >= first:
                socket.send_multipart((client, delimiter, b"", number, payload))
        socket.send_multipart((client, delimiter, b"", END_SEQUENCE, b""))

    def close(self) -> None:
        self._closed = True
        if self._thread is not None:
            self._thread.join()
        self._socket.close()
        self._context.term()


@contextlib.contextmanager
def open_publisher(config: PoolConfig) -> Iterator[CachePublisher | None]:
    """The publisher of a server while the block runs; None where it publishes nothing."""
    if config.kv_events is None:
        yield None
        return
    address, _, replay = config.kv_events.partition(",replay=")
    with contextlib.closing(CachePublisher(address, replay or None)) as publisher:
        yield publisher
