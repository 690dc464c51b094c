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
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from tokenmill.core.cost import Cost
from tokenmill.core.kv import KVExchange
from tokenmill.core.kv_events import Dump, EventPublisher
from tokenmill.core.requests import Engine
from tokenmill.core.types import TokenmillError
from tokenmill.workers.fronts.front_link import FrontLink, FrontLinks
from tokenmill.workers.messages import (
    Abort,
    AddFront,
    BlockEvents,
    ConnectKV,
    DisconnectKV,
    DropFront,
    GetKV,
    GetStats,
    KVConnected,
    KVDump,
    KVNotices,
    KVReceived,
    KVToWorker,
    LeasesExpired,
    ModelFacts,
    ReleaseKV,
    ResetPrefixCache,
    Shutdown,
    Stats,
    Submit,
    ToWorker,
    WorkerFailed,
    decode_to_worker,
)

ENDING = (signal.SIGINT, signal.SIGTERM)


def run_worker(
    engine: Engine,
    address: str,
    facts: ModelFacts,
    kv: KVExchange | None = None,
    leave: Callable[[], None] | None = None,
) -> bool:
    """Announce the engine at `address` and run its step loop until the API process ends it.

    `kv` is the engine's own, where its KV moves to or from other engines. `leave` asks the API
    process to end a worker that is not its child, at a signal. False: the API process is gone.
    The API process is told of an exception out of the engine before it is raised.
    """
    take_signals(leave)
    links = FrontLinks(FrontLink(address), facts)
    try:
        gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
        told = WorkerLoop(engine, links, kv).run()
    except Exception as error:
        links.owner.send(WorkerFailed(describe(error)))
        raise
    finally:
        links.close()
    if told is not None and told.reason:
        raise TokenmillError(told.reason)
    return told is not None


def send_failure(address: str, error: BaseException) -> None:
    """Tell the API process that the engine could not be built."""
    with contextlib.closing(FrontLink(address)) as link:
        link.send(WorkerFailed(describe(error)))


def describe(error: BaseException) -> str:
    """The message of an error that is meant for users; of others type, text and line."""
    if isinstance(error, TokenmillError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" (in {frames[-1].name}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{where}"


def take_signals(leave: Callable[[], None] | None = None) -> None:
    """Ctrl-C and a service manager signal the whole group; only the parent decides when to end.

    A worker without a parent asks to `leave`; the second signal ends it.
    """

    def on_signal(number: int, frame: object) -> None:
        assert leave is not None
        for each in ENDING:
            signal.signal(each, signal.SIG_DFL)
        leave()

    if threading.current_thread() is threading.main_thread():
        for each in ENDING:
            signal.signal(each, signal.SIG_IGN if leave is None else on_signal)


@runtime_checkable
class KVSource(Protocol):
    """An engine that tells which blocks it has cached."""

    def kv_events(self) -> EventPublisher: ...

    def kv_dump(self) -> Dump: ...

    def reset_prefix_cache(self) -> None: ...


@runtime_checkable
class Metered(Protocol):
    """An engine that tells what its requests have taken so far."""

    def costs(self) -> dict[str, Cost]: ...


class WorkerLoop:
    """What a worker does until its owner ends it or is gone."""

    def __init__(self, engine: Engine, links: FrontLinks, kv: KVExchange | None) -> None:
        self._engine, self._links, self._kv = engine, links, kv
        self._publisher: EventPublisher | None = None
        self._running = True
        self._has_aborted = False  # since the last step, which has to say so even at the end
        self._told: Shutdown | None = None

    def run(self) -> Shutdown | None:
        """Receive, step, send; sleep in poll while there is nothing to do; returns what ended it.

        None: the owner is gone.
        """
        while self._running:
            self._receive(self._wait_ms())
            if not (self._running or self._has_aborted):
                break
            outputs = self._engine.step()
            if outputs:
                self._links.send_outputs(outputs)
            batch = self._publisher.take() if self._publisher is not None else None
            if batch is not None:
                self._links.send_events(BlockEvents.of(batch))
            if self._kv is not None:
                self._send_events(self._kv)
            self._links.report_load(self._engine.has_work())
        return self._told

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
        messages, self._running = self._links.receive(wait_ms)
        self._has_aborted = False
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
            case GetKV() | ResetPrefixCache():
                self._serve_cache(front, message)
            case AddFront(front=name, address=address) if not front:
                self._abort(self._links.drop(name))
                self._links.add(name, address)
            case DropFront(front=name) if not front:
                self._abort(self._links.drop(name))
            case Shutdown() if not front:
                self._running, self._told = False, message
            case ConnectKV() | DisconnectKV() | KVNotices() | ReleaseKV():
                self._move_kv(front, message)

    def _serve_cache(self, front: str, message: GetKV | ResetPrefixCache) -> None:
        if isinstance(message, GetKV):
            self._publish(front, message.with_tokens)
        elif isinstance(self._engine, KVSource):
            self._engine.reset_prefix_cache()

    def _abort(self, request_ids: list[str]) -> None:
        self._has_aborted = True
        for request_id in request_ids:
            self._engine.abort(request_id)
        self._links.released(request_ids)

    def _costs(self) -> dict[str, Cost]:
        return self._engine.costs() if isinstance(self._engine, Metered) else {}

    def _publish(self, front: str, with_tokens: bool) -> None:
        if isinstance(self._engine, KVSource):
            self._publisher = self._engine.kv_events()
            if with_tokens:
                self._publisher.record_tokens()
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
