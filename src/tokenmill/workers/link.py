"""The API side of the socket to a worker process, and the process that it belongs to.

There is one PAIR socket per worker process; messages.py defines its messages. The API side binds
and the worker connects, so a restarted worker gets a new address: a private ipc:// path, or tcp://
with CURVE, where the worker needs a key that only it received.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Protocol

import msgspec
import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.core.requests import Request
from tokenmill.core.types import TokenmillError
from tokenmill.workers.messages import (
    FromWorker,
    LoadReported,
    ModelFacts,
    Outputs,
    Ready,
    Shutdown,
    Submit,
    ToWorker,
    WorkerFailed,
    decode_from_worker,
    encode,
)
from tokenmill.workers.socket_folder import new_address, remove_folder

LOOPBACK = "127.0.0.1"
MAX_AT_ONCE = 8  # messages per turn of the event loop when it lags behind
EVENTS, POLLIN = int(zmq.EVENTS), int(zmq.POLLIN)  # an enum's "&" takes a microsecond
EXIT_AFTER_S = 1.0  # a worker without its socket is given up after this time
MAX_MESSAGES = 65_536  # that wait on each side of a socket; minutes of steps are fewer


class WorkerStartError(TokenmillError):
    """The worker did not come up; the message says why."""


class WorkerDownError(TokenmillError):
    """There is no worker to take a request at the moment."""


class WorkerProcess(Protocol):
    """The part of asyncio.subprocess.Process that the link uses."""

    async def wait(self) -> int | None:
        """The exit code, as far as it is known."""

    def kill(self) -> None: ...


Spawn = Callable[[str], Awaitable[WorkerProcess]]


def _shifted(request: Request, offset_ns: int) -> Request:
    deadline_ns = request.deadline_ns
    return replace(
        request,
        arrival_ns=request.arrival_ns + offset_ns,
        deadline_ns=None if deadline_ns is None else deadline_ns + offset_ns,
    )


def beat(socket: zmq.Socket[bytes]) -> None:
    """Let ZeroMQ detect that the other host is gone."""
    socket.heartbeat_ivl = 5_000
    socket.heartbeat_timeout = 30_000


class WorkerLink:
    """One worker process and the socket to it, from spawn to death.

    With a `host`, an address of this machine, the socket is TCP; "#" and its key end the address.
    """

    def __init__(self, on_message: Callable[[FromWorker], None], host: str | None = None) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.set_hwm(MAX_MESSAGES)
        self._socket.linger = 0
        # Over TCP anyone may connect and leave; there the process and its heartbeats tell.
        events = zmq.EVENT_DISCONNECTED if host is None else 0
        self._monitor = self._socket.get_monitor_socket(events)
        self.address = self._bind(host)
        self._process: WorkerProcess | None = None
        self.pid = 0  # once it is ready
        self._num_at_once = 1
        self._receive_due = False
        self._watcher: asyncio.Task[None] | None = None
        self._elsewhere = host not in (None, LOOPBACK)
        self._offset_ns = 0  # of the clock of a worker on another host
        self.is_behind = False  # there was more to read than the message that is handled
        self.num_unanswered = 0  # heartbeats since it was last heard of
        self.reason = ""  # why it died, once `dead` is set
        self.dead = asyncio.Event()
        self.ready: asyncio.Future[ModelFacts] = asyncio.get_running_loop().create_future()

    def _bind(self, host: str | None) -> str:
        if host is None:
            address = new_address("worker.sock")
            self._socket.bind(address)
            return address
        beat(self._socket)
        public, secret = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.curve_secretkey = secret
        self._socket.ipv6 = ":" in host
        plain = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        return f"{plain}:{self._socket.bind_to_random_port(plain)}#{public.hex()}"

    async def start(self, spawn: Spawn) -> ModelFacts:
        """Spawn the worker and wait until it is ready; raises WorkerStartError."""
        loop = asyncio.get_running_loop()
        loop.add_reader(self._socket.fileno(), self._receive_unless_due)
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
            if isinstance(message, Submit) and self._offset_ns:
                shifted = [_shifted(r, self._offset_ns) for r in message.requests]
                message = msgspec.structs.replace(message, requests=shifted)
            try:
                self._socket.send(encode(message), zmq.NOBLOCK)
            except zmq.Again:  # what it has goes elsewhere; a worker that exited says so before
                asyncio.get_running_loop().call_later(EXIT_AFTER_S, self._give_up)
            # The socket's descriptor is edge-triggered: a send can swallow the edge of a read.
            self._schedule_receive()

    def kill(self, reason: str) -> None:
        """Give up a worker that no longer answers; nothing it may still send is read."""
        self._receive_rest()
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()
        self._die(reason)

    def lost(self, reason: str) -> None:
        """Take what the worker has said and give up the link; the process is others' to end."""
        self._receive_rest()
        self._die(reason)

    async def close(self, grace_s: float, reason: str = "") -> None:
        """Ask the worker to exit, kill it after `grace_s`, and free the socket.

        The socket is freed though the caller be cancelled: a context with an open socket would
        block the process when it ends.
        """
        try:
            if self._process is not None:
                self.send(Shutdown(reason))
                await self._end(self._process, grace_s)
            if self._watcher is not None:
                self._watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await self._watcher
        finally:
            self._free()

    async def _end(self, process: WorkerProcess, grace_s: float) -> None:
        try:
            async with asyncio.timeout(grace_s):
                await process.wait()
        except (TimeoutError, asyncio.CancelledError) as interrupted:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            if not isinstance(interrupted, TimeoutError):
                raise
            await process.wait()

    async def _watch(self, process: WorkerProcess) -> None:
        code = await process.wait()
        self._receive_rest()
        gone = "the worker ended its connection"
        self._die(gone if code is None else f"the worker process exited with code {code}")

    def _schedule_receive(self) -> None:
        """Read once the callbacks that are due have run; one read is enough, whoever asks."""
        if not self._receive_due:
            self._receive_due = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive_unless_due(self) -> None:
        """Leave it to a read that is due: each of two would schedule the next one."""
        if not self._receive_due:
            self._receive()

    def _receive(self) -> None:
        """Take one message and let the streams it woke run; more at once while lagging behind."""
        self._receive_due = False
        socket = self._socket
        if socket.closed:
            return
        try:
            for _ in range(self._num_at_once):
                data = socket.recv(zmq.NOBLOCK)
                self.is_behind = bool(int(socket.get(EVENTS)) & POLLIN)  # cheaper than zmq.Again
                self.handle(decode_from_worker(data))
                if not self.is_behind or socket.closed:
                    self._num_at_once = 1
                    return
        except zmq.Again:
            self._num_at_once = 1
        except Exception:
            self._schedule_receive()  # what comes next is read, whatever this message did
            raise
        else:
            self._num_at_once = min(2 * self._num_at_once, MAX_AT_ONCE)
            self._schedule_receive()

    def _receive_rest(self) -> None:
        with contextlib.suppress(zmq.Again):
            while not self._socket.closed:
                self.handle(decode_from_worker(self._socket.recv(zmq.NOBLOCK)))

    def handle(self, message: FromWorker) -> None:
        """Take a message of the worker: some are for the link, the rest is passed on."""
        if self.dead.is_set():
            return
        self.num_unanswered = 0
        if type(message) is Outputs and not self._offset_ns:  # most of all messages
            self._on_message(message)
            return
        match message:
            case Ready(facts=facts, clock_ns=clock_ns, pid=pid) if not self.ready.done():
                remove_folder(self.address)  # it is connected, and nobody else may be
                self._offset_ns = clock_ns - time.monotonic_ns() if self._elsewhere else 0
                self.pid = pid
                self.ready.set_result(facts)
            case WorkerFailed(message=reason):
                self.reason = self.reason or reason
            case Outputs(outputs=outputs):
                for output in outputs:
                    output.scheduled_ns -= self._offset_ns if output.scheduled_ns else 0
                self._on_message(message)
            case LoadReported() if self._offset_ns:
                message.made_ns -= self._offset_ns
                self._on_message(message)
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

    def _give_up(self) -> None:
        """A message could not be sent."""
        if not self.dead.is_set():
            self.kill(f"it takes no messages: {MAX_MESSAGES} wait for it, the most that may")

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
        remove_folder(self.address)
