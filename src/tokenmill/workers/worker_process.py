"""The process that owns an engine: it takes messages, runs a step and sends the step's outputs.

The loop blocks in poll while the engine has no work. It ends when the API process tells it to, or
when that process ends. It does not know how processes are placed or restarted.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import threading
import traceback
from typing import Protocol, runtime_checkable

from tokenmill.core.cost import Cost
from tokenmill.core.kv import FEATURES, KVAddress, KVExchange
from tokenmill.core.kv_events import Dump, EventPublisher
from tokenmill.core.types import Engine, TokenmillError
from tokenmill.workers.fronts.front_link import FrontLink, FrontLinks
from tokenmill.workers.messages import (
    Abort,
    AddFront,
    ConnectKV,
    DisconnectKV,
    DropFront,
    Failed,
    GetKV,
    GetStats,
    KVConnected,
    KVDump,
    KVEvents,
    KVNotices,
    KVReceived,
    KVToWorker,
    LeasesExpired,
    ModelFacts,
    ReleaseKV,
    Shutdown,
    Stats,
    Submit,
    ToWorker,
    decode_to_worker,
)


def run_worker(
    engine: Engine,
    address: str,
    facts: ModelFacts,
    kv: KVExchange | None = None,
    features: FeaturePeer | None = None,
) -> None:
    """Announce the engine at `address` and run its step loop until the API process ends it.

    `kv` is the engine's own, where its KV moves to or from other engines, and `features` where it
    reads the features of images from others.
    The API process is told of an exception out of the engine before it is raised.
    """
    leave_signals_to_the_parent()
    links = FrontLinks(FrontLink(address), facts)
    try:
        gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
        _Loop(engine, links, kv, features).run()
    except Exception as error:
        links.owner.send(Failed(describe(error)))
        raise
    finally:
        links.close()


def send_failure(address: str, error: BaseException) -> None:
    """Tell the API process that the engine could not be built."""
    with contextlib.closing(FrontLink(address)) as link:
        link.send(Failed(describe(error)))


def describe(error: BaseException) -> str:
    """The message of an error that is meant for users; of others type, text and line."""
    if isinstance(error, TokenmillError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def leave_signals_to_the_parent() -> None:
    """Ctrl-C and a service manager signal the whole group; only the parent decides when to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


@runtime_checkable
class KVSource(Protocol):
    """An engine that tells which blocks it has cached."""

    def kv_events(self) -> EventPublisher: ...

    def kv_dump(self) -> Dump: ...


@runtime_checkable
class Metered(Protocol):
    """An engine that tells what its requests have taken so far."""

    def costs(self) -> dict[str, Cost]: ...


class FeaturePeer(Protocol):
    """Reads features of images from encoders."""

    def connect(self, peer: KVAddress) -> str | None: ...

    def disconnect(self, engine_id: str) -> None: ...


class _Loop:
    def __init__(
        self,
        engine: Engine,
        links: FrontLinks,
        kv: KVExchange | None,
        features: FeaturePeer | None = None,
    ) -> None:
        self._engine = engine
        self._links = links
        self._kv, self._features = kv, features
        self._publisher: EventPublisher | None = None
        self._running = True

    def run(self) -> None:
        """Receive, step, send; sleep in poll while there is nothing to do."""
        while self._running:
            self._receive(self._wait_ms())
            outputs = self._engine.step()
            if outputs:
                self._links.send_outputs(outputs)
            batch = self._publisher.take() if self._publisher is not None else None
            if batch is not None:
                self._links.send_events(KVEvents.of(batch))
            if self._kv is not None:
                self._send_events(self._kv)
            self._links.report_load(self._engine.has_work())

    def _wait_ms(self) -> int | None:
        """How long to wait for messages; None: until one comes."""
        if self._engine.has_work():
            return 0
        return None if self._kv is None else self._kv.wait_ms()

    def _send_events(self, kv: KVExchange) -> None:
        events, by_front = kv.take_events(), self._links.by_front
        if events.notices:
            for link, notices in by_front(events.notices, lambda notice: notice.request_id):
                link.send(KVNotices(notices))
        if events.received:
            for link, received in by_front(events.received, str):
                link.send(KVReceived(received))
        if events.expired:
            for link, expired in by_front(events.expired, str):
                link.send(LeasesExpired(expired))
            self._links.released(events.expired)

    def _receive(self, wait_ms: int | None) -> None:
        """Apply the messages that have arrived."""
        messages, self._running = self._links.receive(wait_ms)
        for front, data in messages:
            if self._links.is_there(front):  # or it was dropped by a message before this one
                self._apply(front, decode_to_worker(data))

    def _apply(self, front: str, message: ToWorker) -> None:
        match message:
            case Submit(requests=requests):
                self._links.submitted(front, message)
                for request in requests:
                    self._engine.submit(request)
            case Abort(request_ids=request_ids):
                self._abort(request_ids)
            case GetStats():
                costs = self._links.costs(front, self._costs())
                self._links.link(front).send(Stats(self._engine.stats(), costs))
            case GetKV():
                self._publish(front)
            case AddFront(front=name, address=address) if not front:
                self._abort(self._links.drop(name))
                self._links.add(name, address)
            case DropFront(front=name) if not front:
                self._abort(self._links.drop(name))
            case Shutdown() if not front:
                self._running = False
            case ConnectKV() | DisconnectKV() | KVNotices() | ReleaseKV():
                self._move(front, message)

    def _abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._links.released(request_ids)

    def _move(self, front: str, message: KVToWorker) -> None:
        """Take what is about the memory of other engines: features of images, or KV."""
        if isinstance(message, ConnectKV) and message.peer.geometry.layout == FEATURES:
            error = self._connect_features(message.peer)
            self._links.link(front).send(KVConnected(message.peer.engine_id, error))
            return
        if isinstance(message, DisconnectKV) and self._features is not None:
            self._features.disconnect(message.engine_id)
        self._move_kv(front, message)

    def _connect_features(self, peer: KVAddress) -> str | None:
        if self._features is None:
            return "it encodes images itself"
        return self._features.connect(peer)

    def _costs(self) -> dict[str, Cost]:
        return self._engine.costs() if isinstance(self._engine, Metered) else {}

    def _publish(self, front: str) -> None:
        if isinstance(self._engine, KVSource):
            self._publisher = self._engine.kv_events()
            self._links.listen(front)
            self._links.link(front).send(KVDump(self._engine.kv_dump()))

    def _move_kv(self, front: str, message: KVToWorker) -> None:
        kv, link = self._kv, self._links.link(front)
        match message:
            case ConnectKV(peer=peer) if kv is None:
                link.send(KVConnected(peer.engine_id, "it has no --kv-connector"))
            case ConnectKV(peer=peer) if kv is not None:
                link.send(KVConnected(peer.engine_id, kv.connect(peer)))
            case DisconnectKV(engine_id=engine_id) if kv is not None:
                kv.disconnect(engine_id)
            case KVNotices(notices=notices) if kv is not None:
                for notice in notices:
                    kv.notice(notice)
            case ReleaseKV(request_ids=request_ids) if kv is not None:
                for request_id in request_ids:
                    kv.release(request_id)
                self._links.released(request_ids)
