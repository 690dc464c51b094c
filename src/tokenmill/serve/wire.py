"""The link between the API process and the worker: messages, and the API side of the socket.

One PAIR socket per worker process on a private ipc:// path; every message is msgpack of the
structs below. The API side binds and the worker connects, so a restarted worker gets a new path.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.core.kv import KVAddress
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    Request,
    RequestOutput,
    TokenmillError,
)
from tokenmill.serve.kv_wire import (
    ConnectKV,
    DisconnectKV,
    KVConnected,
    KVNotices,
    KVReceived,
    LeasesExpired,
    ReleaseKV,
)

_log = logging.getLogger(__name__)

MAX_AT_ONCE = 8  # messages per turn of the event loop when it lags behind
EXIT_AFTER_S = 1.0  # a worker without its socket is given up after this time


class ModelFacts(msgspec.Struct, frozen=True):
    """What the worker tells the frontend about the engine it owns."""

    max_model_len: int
    vocab_size: int
    num_kv_blocks: int
    block_size: int
    dtype: str
    device: str = "cpu"
    kv: KVAddress | None = None  # how other engines reach its KV


class Submit(msgspec.Struct, tag=True):
    requests: list[Request]


class Abort(msgspec.Struct, tag=True):
    request_ids: list[str]


class Drain(msgspec.Struct, tag=True):
    """Refuse new requests from now on; running ones finish."""


class GetStats(msgspec.Struct, tag=True):
    """Answered by one Stats."""


class Shutdown(msgspec.Struct, tag=True):
    """Leave the loop and exit."""


class Ready(msgspec.Struct, tag=True):
    facts: ModelFacts


class Failed(msgspec.Struct, tag=True):
    """The worker is about to exit; the message is one sentence for the user."""

    message: str


class Outputs(msgspec.Struct, tag=True):
    outputs: list[RequestOutput]


class Stats(msgspec.Struct, tag=True):
    stats: EngineStats


KVToWorker = ConnectKV | DisconnectKV | KVNotices | ReleaseKV
KVFromWorker = KVConnected | KVNotices | KVReceived | LeasesExpired
ToWorker = Submit | Abort | Drain | GetStats | Shutdown | KVToWorker
FromWorker = Ready | Failed | Outputs | Stats | KVFromWorker

encode = msgspec.msgpack.Encoder().encode
decode_to_worker = msgspec.msgpack.Decoder(ToWorker).decode
decode_from_worker = msgspec.msgpack.Decoder(FromWorker).decode


class WorkerStartError(TokenmillError):
    """The worker did not come up; the message says why."""


class WorkerDownError(TokenmillError):
    """There is no worker to take a request at the moment."""


class StreamClosedError(Exception):
    """The reader of an OutputStream was told to stop."""


class WorkerProcess(Protocol):
    """The part of asyncio.subprocess.Process that the link uses."""

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


Spawn = Callable[[str], Awaitable[WorkerProcess]]


class OutputStream:
    """Outputs of one API call's requests. Unread outputs of a request are merged into one."""

    __slots__ = ("_closed", "_pending", "_waiter", "request_ids")

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self._pending: dict[int, RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False

    def put(self, index: int, output: RequestOutput) -> None:
        """Add what request `index` produced and wake the reader."""
        earlier = self._pending.get(index)
        if earlier is None:
            self._pending[index] = output
        else:
            _merge(earlier, output)
        self._wake()

    def close(self) -> None:
        """Make the reader's current or next get() raise StreamClosedError."""
        self._closed = True
        self._wake()

    async def get(self) -> dict[int, RequestOutput]:
        """Wait for outputs; returns all there are, by request index."""
        while not self._pending and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._closed:
            raise StreamClosedError
        pending, self._pending = self._pending, {}
        return pending

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(into: RequestOutput, output: RequestOutput) -> None:
    """Append a later output of the same request."""
    into.token_ids.extend(output.token_ids)
    if into.logprobs is None:
        into.logprobs = output.logprobs
    else:
        into.logprobs.extend(output.logprobs or [])
    into.prompt_logprobs = into.prompt_logprobs or output.prompt_logprobs
    into.finish_reason = output.finish_reason
    into.stop_reason = output.stop_reason
    into.error = output.error
    into.num_cached_tokens = max(into.num_cached_tokens, output.num_cached_tokens)
    into.scheduled_ns = into.scheduled_ns or output.scheduled_ns


class WorkerLink:
    """One worker process and the socket to it, from spawn to death."""

    def __init__(self, on_message: Callable[[FromWorker], None]) -> None:
        self._on_message = on_message
        self._directory = Path(tempfile.mkdtemp(prefix="tokenmill-"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(0)
        self._socket.linger = 0
        self.address = f"ipc://{self._directory / 'worker.sock'}"
        self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        self._socket.bind(self.address)
        self._process: WorkerProcess | None = None
        self._num_at_once = 1
        self._receive_due = False
        self._watcher: asyncio.Task[None] | None = None
        self.reason = ""  # why it died, once `dead` is set
        self.dead = asyncio.Event()
        self.ready: asyncio.Future[ModelFacts] = asyncio.get_running_loop().create_future()

    async def start(self, spawn: Spawn) -> ModelFacts:
        """Spawn the worker and wait until it is ready; raises WorkerStartError."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._schedule_receive)
        loop.add_reader(self._monitor.fileno(), self._receive_event)
        try:
            self._process = await spawn(self.address)
        except OSError as error:
            raise WorkerStartError(f"the worker process cannot be started: {error}") from error
        self._watcher = asyncio.create_task(self._watch(self._process))
        return await self.ready

    def send(self, message: ToWorker) -> None:
        """Queue a message; never blocks. It is lost when the worker is gone, which `dead` tells."""
        if not self.dead.is_set():
            with contextlib.suppress(zmq.Again):
                self._socket.send(encode(message), zmq.NOBLOCK)
            # The socket's descriptor is edge-triggered: a send can swallow the edge of a read.
            self._schedule_receive()

    async def close(self, grace_s: float) -> None:
        """Ask the worker to exit, kill it after `grace_s`, and free the socket."""
        if self._process is not None:
            self.send(Shutdown())
            try:
                async with asyncio.timeout(grace_s):
                    await self._process.wait()
            except TimeoutError:
                with contextlib.suppress(ProcessLookupError):
                    self._process.kill()
                await self._process.wait()
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        self._free()

    async def _watch(self, process: WorkerProcess) -> None:
        code = await process.wait()
        self._receive_rest()
        self._die(f"the worker process exited with code {code}")

    def _schedule_receive(self) -> None:
        """Read once the callbacks that are due have run; one read is enough, whoever asks."""
        if not self._receive_due:
            self._receive_due = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        """Take one message and let the streams it woke run; more at once while lagging behind."""
        self._receive_due = False
        if self._socket.closed:
            return
        try:
            for _ in range(self._num_at_once):
                self._handle(decode_from_worker(self._socket.recv(zmq.NOBLOCK)))
        except zmq.Again:
            self._num_at_once = 1
        else:
            self._num_at_once = min(2 * self._num_at_once, MAX_AT_ONCE)
            self._schedule_receive()

    def _receive_rest(self) -> None:
        """Take all there is."""
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self._handle(decode_from_worker(self._socket.recv(zmq.NOBLOCK)))

    def _handle(self, message: FromWorker) -> None:
        match message:
            case Ready(facts=facts) if not self.ready.done():
                self.ready.set_result(facts)
            case Failed(message=reason):
                self.reason = self.reason or reason
            case _:
                self._on_message(message)

    def _receive_event(self) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._receive_rest()  # what it said before it went
                # The exit code, which says more, follows unless the process hangs.
                loop = asyncio.get_running_loop()
                loop.call_later(EXIT_AFTER_S, self._die, "the worker closed its connection")

    def _die(self, reason: str) -> None:
        if self.dead.is_set():
            return
        self.reason = self.reason or reason
        self.dead.set()
        if not self.ready.done():
            self.ready.set_exception(WorkerStartError(self.reason))

    def _free(self) -> None:
        if self._socket.closed:
            return
        self.dead.set()
        self.ready.cancel()
        loop = asyncio.get_running_loop()
        for socket in (self._socket, self._monitor):
            loop.remove_reader(socket.fileno())
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
        self._context.term()
        shutil.rmtree(self._directory, ignore_errors=True)


class EngineClient:
    """The engine as the API process sees it: submit, abort, stats, and a worker that is kept alive.

    When the worker dies, every open request gets one ERROR output and a new worker is spawned, up
    to `max_restarts` times in a row with growing pauses; then `gave_up` is set.
    """

    def __init__(
        self,
        spawn: Spawn,
        *,
        max_restarts: int = 5,
        backoff_s: float = 0.5,
        stable_s: float = 60.0,
    ) -> None:
        self._spawn = spawn
        self._max_restarts = max_restarts
        self._backoff_s = backoff_s
        self._stable_s = stable_s  # a worker that lived this long starts the count anew
        self._link: WorkerLink | None = None
        self._supervisor: asyncio.Task[None] | None = None
        self._streams: dict[str, tuple[OutputStream, int]] = {}
        self._stats_waiters: list[asyncio.Future[EngineStats]] = []
        self._stats = EngineStats()
        self._draining = False
        self.facts: ModelFacts | None = None
        self.num_restarts = 0
        self.gave_up = asyncio.Event()

    @property
    def ready(self) -> bool:
        """True while a worker is there to take requests."""
        return self._link is not None and self._link.ready.done() and not self._link.dead.is_set()

    @property
    def num_open(self) -> int:
        """Requests submitted and not yet finished."""
        return len(self._streams)

    async def start(self) -> ModelFacts:
        """Spawn the first worker; raises WorkerStartError when it does not come up."""
        facts = await self._launch()
        self._supervisor = asyncio.create_task(self._supervise())
        return facts

    def submit(self, requests: list[Request]) -> OutputStream:
        """Send requests to the worker; their outputs come by their index in the stream."""
        if not self.ready or self._link is None:
            raise WorkerDownError("the engine is restarting; try again shortly")
        stream = OutputStream([r.request_id for r in requests])
        for index, request_id in enumerate(stream.request_ids):
            self._streams[request_id] = (stream, index)
        self._link.send(Submit(requests))
        return stream

    def abort(self, request_ids: list[str]) -> None:
        """Forget requests and free what the engine holds for them; finished ids are ignored."""
        open_ids = [i for i in request_ids if self._streams.pop(i, None) is not None]
        if open_ids and self._link is not None:
            self._link.send(Abort(open_ids))

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        """The engine's counters; the last known ones when a long step keeps it from answering."""
        if self.ready and self._link is not None:
            waiter: asyncio.Future[EngineStats] = asyncio.get_running_loop().create_future()
            self._stats_waiters.append(waiter)
            self._link.send(GetStats())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    self._stats = await waiter
        return self._stats

    def drain(self) -> None:
        """Make the engine refuse new requests; also a worker that is started later."""
        self._draining = True
        if self._link is not None:
            self._link.send(Drain())

    def fail_open(self, message: str, stop_reason: str) -> None:
        """End every open request with one ERROR output and abort it in the engine."""
        streams = list(self._streams.items())
        self.abort([request_id for request_id, _ in streams])
        for request_id, (stream, index) in streams:
            stream.put(index, _error_output(request_id, message, stop_reason))

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop the worker; open requests end in ERROR."""
        if self._supervisor is not None:
            self._supervisor.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._supervisor
        self.fail_open("the server is shutting down", "shutdown")
        if self._link is not None:
            link, self._link = self._link, None
            await link.close(grace_s)

    async def _launch(self) -> ModelFacts:
        link = self._link = WorkerLink(self._on_message)
        try:
            self.facts = await link.start(self._spawn)
        except BaseException:
            self._link = None
            await link.close(grace_s=0.0)
            raise
        if self._draining:
            link.send(Drain())
        return self.facts

    async def _supervise(self) -> None:
        loop = asyncio.get_running_loop()
        attempts = 0
        while self._link is not None:
            started_s = loop.time()
            link = self._link
            await link.dead.wait()
            _log.error("the engine stopped: %s", link.reason)
            self.fail_open(f"the engine stopped: {link.reason}", "worker_died")
            await link.close(grace_s=self._backoff_s)
            attempts = 0 if loop.time() - started_s > self._stable_s else attempts
            attempts = await self._restart(attempts)

    async def _restart(self, attempts: int) -> int:
        """Launch until a worker is ready; returns the attempts used, or sets `gave_up`."""
        while attempts < self._max_restarts:
            await asyncio.sleep(self._backoff_s * 2**attempts)
            attempts += 1
            try:
                await self._launch()
            except WorkerStartError as error:
                _log.error("restart %d of the engine failed: %s", attempts, error)
                continue
            _log.warning("the engine was restarted")
            self.num_restarts += 1
            return attempts
        self._link = None
        self.gave_up.set()
        return attempts

    def _on_message(self, message: FromWorker) -> None:
        match message:
            case Outputs(outputs=outputs):
                for output in outputs:
                    self._dispatch(output)
            case Stats(stats=stats):
                self._stats = stats
                waiters, self._stats_waiters = self._stats_waiters, []
                for waiter in waiters:
                    if not waiter.done():
                        waiter.set_result(stats)

    def _dispatch(self, output: RequestOutput) -> None:
        entry = self._streams.get(output.request_id)
        if entry is None:  # aborted here before the engine heard of it
            return
        stream, index = entry
        if output.finish_reason is not None:
            del self._streams[output.request_id]
        stream.put(index, output)


def _error_output(request_id: str, message: str, stop_reason: str) -> RequestOutput:
    return RequestOutput(
        request_id, [], finish_reason=FinishReason.ERROR, stop_reason=stop_reason, error=message
    )
