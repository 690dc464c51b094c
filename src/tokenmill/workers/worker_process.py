"""The process that owns an engine: it takes messages, runs a step and sends the step's outputs.

The loop blocks in poll while the engine has no work. It ends when the API process tells it to, or
when that process ends. It does not know how processes are placed or restarted.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
import traceback
from typing import Protocol, runtime_checkable

import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.core.cost import Cost
from tokenmill.core.kv import FEATURES, KVAddress, KVExchange
from tokenmill.core.kv_events import Dump, EventPublisher
from tokenmill.core.types import Engine, TokenmillError
from tokenmill.workers.link import beat
from tokenmill.workers.messages import (
    Abort,
    ConnectKV,
    DisconnectKV,
    Failed,
    FromWorker,
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
    OutputPacker,
    Ready,
    ReleaseKV,
    Shutdown,
    Stats,
    Submit,
    decode_to_worker,
    encode,
)

CONNECT_TIMEOUT_MS = 10_000
KEY_VARIABLE = "TOKENMILL_LINK_KEY"  # the key to a tcp:// address: not for the process list
LINGER_MS = 2_000  # last words may take this long to leave


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
    An exception out of the engine is sent to the API process as its last words, then raised.
    """
    _leave_signals_to_the_parent()
    link = FrontLink(address)
    try:
        link.send(Ready(facts, time.monotonic_ns()))
        gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
        _Loop(engine, link, kv, features).run()
    except Exception as error:
        link.send(Failed(describe(error)))
        raise
    finally:
        link.close()


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


def _leave_signals_to_the_parent() -> None:
    """Ctrl-C and a service manager signal the whole group; only the parent decides when to end."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


class FrontLink:
    """The worker's end of the socket."""

    def __init__(self, address: str) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = LINGER_MS
        self._socket.reconnect_ivl = -1
        connected = zmq.EVENT_CONNECTED
        if address.startswith("tcp:"):
            self._socket.curve_serverkey = bytes.fromhex(os.environ.get(KEY_VARIABLE, ""))
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.ipv6 = "[" in address
            beat(self._socket)
            connected = zmq.EVENT_HANDSHAKE_SUCCEEDED
        self._monitor = self._socket.get_monitor_socket(connected | zmq.EVENT_DISCONNECTED)
        self._socket.connect(address)
        if not self._monitor.poll(CONNECT_TIMEOUT_MS):
            self.close()
            raise TokenmillError(f"no API process listens at {address}")
        recv_monitor_message(self._monitor)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, message: FromWorker) -> None:
        """Queue a message; it is lost when the other side is gone, which receive() tells."""
        with contextlib.suppress(zmq.Again):
            self._socket.send(encode(message), zmq.NOBLOCK)

    def receive(self, wait_ms: int | None) -> tuple[list[bytes], bool]:
        """The messages that arrived, and whether the other side is still there."""
        ready = dict(self._poller.poll(wait_ms))
        messages = []
        if self._socket in ready:
            with contextlib.suppress(zmq.Again):
                while True:
                    messages.append(self._socket.recv(zmq.NOBLOCK))
        return messages, self._monitor not in ready

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close()
        self._context.term()


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
        link: FrontLink,
        kv: KVExchange | None,
        features: FeaturePeer | None = None,
    ) -> None:
        self._engine = engine
        self._link = link
        self._kv, self._features = kv, features
        self._packer = OutputPacker()
        self._publisher: EventPublisher | None = None
        self._running = True

    def run(self) -> None:
        """Receive, step, send; sleep in poll while there is nothing to do."""
        while self._running:
            self._receive(self._wait_ms())
            outputs = self._engine.step()
            if outputs:
                self._link.send(self._packer.pack(outputs))
            batch = self._publisher.take() if self._publisher is not None else None
            if batch is not None:
                self._link.send(KVEvents.of(batch))
            if self._kv is not None:
                self._send_events(self._kv)

    def _wait_ms(self) -> int | None:
        """How long to wait for messages; None: until one comes."""
        if self._engine.has_work():
            return 0
        return None if self._kv is None else self._kv.wait_ms()

    def _send_events(self, kv: KVExchange) -> None:
        events = kv.take_events()
        if events.notices:
            self._link.send(KVNotices(events.notices))
        if events.received:
            self._link.send(KVReceived(events.received))
        if events.expired:
            self._link.send(LeasesExpired(events.expired))

    def _receive(self, wait_ms: int | None) -> None:
        """Apply the messages that have arrived."""
        messages, self._running = self._link.receive(wait_ms)
        for data in messages:
            match decode_to_worker(data):
                case Submit(requests=requests):
                    for request in requests:
                        self._engine.submit(request)
                case Abort(request_ids=request_ids):
                    for request_id in request_ids:
                        self._engine.abort(request_id)
                case GetStats():
                    self._link.send(Stats(self._engine.stats(), self._costs()))
                case GetKV():
                    self._publish()
                case Shutdown():
                    self._running = False
                case message:
                    self._move(message)

    def _move(self, message: KVToWorker) -> None:
        """Take what is about the memory of other engines: features of images, or KV."""
        if isinstance(message, ConnectKV) and message.peer.geometry.layout == FEATURES:
            error = self._connect_features(message.peer)
            self._link.send(KVConnected(message.peer.engine_id, error))
            return
        if isinstance(message, DisconnectKV) and self._features is not None:
            self._features.disconnect(message.engine_id)
        if self._kv is not None:
            self._move_kv(message, self._kv)
        elif isinstance(message, ConnectKV):
            self._link.send(KVConnected(message.peer.engine_id, "it has no --kv-connector"))

    def _connect_features(self, peer: KVAddress) -> str | None:
        if self._features is None:
            return "it encodes images itself"
        return self._features.connect(peer)

    def _costs(self) -> dict[str, Cost]:
        return self._engine.costs() if isinstance(self._engine, Metered) else {}

    def _publish(self) -> None:
        if isinstance(self._engine, KVSource):
            self._publisher = self._engine.kv_events()
            self._link.send(KVDump(self._engine.kv_dump()))

    def _move_kv(self, message: KVToWorker, kv: KVExchange) -> None:
        match message:
            case ConnectKV(peer=peer):
                self._link.send(KVConnected(peer.engine_id, kv.connect(peer)))
            case DisconnectKV(engine_id=engine_id):
                kv.disconnect(engine_id)
            case KVNotices(notices=notices):
                for notice in notices:
                    kv.notice(notice)
            case ReleaseKV(request_ids=request_ids):
                for request_id in request_ids:
                    kv.release(request_id)
