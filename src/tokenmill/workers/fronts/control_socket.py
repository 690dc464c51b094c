"""The sockets between the owner of a pool and its fronts, in an event loop.

The owner binds a ROUTER socket, by a private ipc:// path or by tcp:// with CURVE, and each front
connects a DEALER socket. Messages are bytes here; control.py says what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.workers.link import beat

MAX_AT_ONCE = 16  # messages per turn of the event loop


class _Socket:
    """Reads a socket in the event loop; sending never blocks."""

    def __init__(self, kind: int, on_message: Callable[[list[bytes]], None]) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(0)
        self._socket.linger = 200
        self._due = False

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._schedule)

    def _send(self, frames: list[bytes]) -> None:
        if not self._socket.closed:
            with contextlib.suppress(zmq.Again, zmq.ZMQError):
                self._socket.send_multipart(frames, zmq.NOBLOCK)
            self._schedule()  # the descriptor is edge-triggered: a send can swallow a read's edge

    def _schedule(self) -> None:
        if not self._due:
            self._due = True
            asyncio.get_running_loop().call_soon(self._receive)

    def _receive(self) -> None:
        self._due = False
        try:
            for _ in range(MAX_AT_ONCE):
                if self._socket.closed:
                    return
                self._on_message(self._socket.recv_multipart(zmq.NOBLOCK))
        except zmq.Again:
            return
        except Exception:
            self._schedule()  # what comes next is read, whatever this message did
            raise
        self._schedule()

    def close(self) -> None:
        """Send what is queued, and free the socket."""
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()


class OwnerSocket(_Socket):
    """The owner's side: messages come with the identity of their sender.

    With a `host`, an address of this machine, it is TCP, and `key` lets fronts in; OSError where
    nobody can listen there.
    """

    def __init__(
        self, on_message: Callable[[OwnerSocket, bytes, bytes], None], host: str | None = None
    ) -> None:
        super().__init__(zmq.ROUTER, lambda frames: on_message(self, frames[0], frames[1]))
        self._directory = Path(tempfile.mkdtemp(prefix="tokenmill-"))
        self.key = ""
        try:
            self.address = self._bind(host)
        except zmq.ZMQError as error:
            self.close()
            raise OSError(error.errno, error.strerror) from error
        self._listen()

    def _bind(self, host: str | None) -> str:
        if host is None:
            address = f"ipc://{self._directory / 'owner.sock'}"
            self._socket.bind(address)
            return address
        beat(self._socket)
        public, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.curve_server = True
        self._socket.ipv6 = ":" in host
        self.key = public.hex()
        plain = f"tcp://[{host}]" if ":" in host else f"tcp://{host}"
        return f"{plain}:{self._socket.bind_to_random_port(plain)}"

    def send(self, identity: bytes, data: bytes) -> None:
        """Send to one front; it is lost when the front is gone."""
        self._send([identity, data])

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._directory, ignore_errors=True)


class FrontSocket(_Socket):
    """A front's side; `gone` is set when the owner is."""

    def __init__(self, on_message: Callable[[bytes], None], address: str, key: str = "") -> None:
        super().__init__(zmq.DEALER, lambda frames: on_message(frames[0]))
        self.gone = asyncio.Event()
        self._socket.identity = b"f" + os.urandom(15)
        self._socket.reconnect_ivl = -1
        if key:
            self._socket.curve_serverkey = bytes.fromhex(key)
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
            self._socket.ipv6 = "[" in address
            beat(self._socket)
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_AUTH
        self._monitor = self._socket.get_monitor_socket(ends)
        asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._receive_event)
        self._socket.connect(address)
        self._listen()

    def send(self, data: bytes) -> None:
        """Send to the owner; it is lost when that is gone."""
        self._send([data])

    def _receive_event(self) -> None:
        with contextlib.suppress(zmq.Again, zmq.ZMQError):
            while True:
                recv_monitor_message(self._monitor, zmq.NOBLOCK)
                self._schedule()  # what it said before it went
                asyncio.get_running_loop().call_soon(self.gone.set)

    def close(self) -> None:
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._monitor.fileno())
            self._socket.disable_monitor()
            self._monitor.close(0)
        super().close()
