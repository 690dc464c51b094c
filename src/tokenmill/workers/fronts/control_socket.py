"""The sockets between the owner of a pool and its fronts, in an event loop.

The owner binds a ROUTER socket in a private folder, and each front connects a DEALER socket.
Messages are bytes here; control.py says what they mean.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.workers.link import MAX_MESSAGES
from tokenmill.workers.socket_folder import new_address, remove_folder

MAX_AT_ONCE = 16  # messages per turn of the event loop

_log = logging.getLogger(__name__)


class _Socket:
    """Reads a socket in the event loop; sending never blocks."""

    def __init__(self, kind: int, on_message: Callable[[list[bytes]], None]) -> None:
        self._on_message = on_message
        self._context = zmq.Context()
        self._socket = self._context.socket(kind)
        self._socket.set_hwm(MAX_MESSAGES)
        self._socket.linger = 200
        self._due = False

    def _listen(self) -> None:
        asyncio.get_running_loop().add_reader(self._socket.fileno(), self._schedule)

    def _send(self, frames: list[bytes]) -> bool:
        """False: the other side takes no messages, and as many wait as may."""
        if self._socket.closed:
            return True
        self._schedule()  # the descriptor is edge-triggered: a send can swallow a read's edge
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.Again:
            return False
        except zmq.ZMQError:  # it is gone
            pass
        return True

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
        if not self._socket.closed:
            asyncio.get_running_loop().remove_reader(self._socket.fileno())
            self._socket.close()
            self._context.term()


class OwnerSocket(_Socket):
    """The owner's side: messages come with the identity of their sender.

    `on_stuck` hears of the one that takes none.
    """

    def __init__(
        self, on_message: Callable[[bytes, bytes], None], on_stuck: Callable[[bytes], None]
    ) -> None:
        super().__init__(zmq.ROUTER, lambda frames: on_message(frames[0], frames[1]))
        self._on_stuck = on_stuck
        self._socket.router_mandatory = True  # or what is over the bound is dropped without a word
        self.address = new_address("owner.sock")
        self._socket.bind(self.address)
        self._listen()

    def send(self, identity: bytes, data: bytes) -> None:
        """Send to one front; it is lost when the front is gone."""
        if not self._send([identity, data]):
            self._on_stuck(identity)

    def close(self) -> None:
        super().close()
        remove_folder(self.address)


class FrontSocket(_Socket):
    """A front's side; `gone` is set when the owner is."""

    def __init__(self, on_message: Callable[[bytes], None], address: str) -> None:
        super().__init__(zmq.DEALER, lambda frames: on_message(frames[0]))
        self.gone = asyncio.Event()
        self._socket.identity = b"f" + os.urandom(15)
        self._socket.reconnect_ivl = -1
        ends = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED
        self._monitor = self._socket.get_monitor_socket(ends)
        asyncio.get_running_loop().add_reader(self._monitor.fileno(), self._receive_event)
        self._socket.connect(address)
        self._listen()

    def send(self, data: bytes) -> None:
        """Send to the owner; it is lost when that is gone."""
        if not self._send([data]):
            _log.error("the server takes no messages: %d wait, the most that may", MAX_MESSAGES)
            self.gone.set()

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
