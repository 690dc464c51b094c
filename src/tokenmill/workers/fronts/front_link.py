"""The worker's side of its links: one to its owner and, with several fronts, one to each of them.

A request belongs to the link that it came by: its outputs go there and nowhere else. When the owner
says that a front is gone, what came by its link is aborted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

import zmq
from zmq.utils.monitor import recv_monitor_message

from tokenmill.core.cost import Cost
from tokenmill.core.kv import PREFILLED
from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import TokenmillError
from tokenmill.routing.load_report import LoadAccount
from tokenmill.workers.link import MAX_MESSAGES, beat
from tokenmill.workers.messages import (
    BlockEvents,
    FromWorker,
    FrontDropped,
    FrontLost,
    LoadReported,
    ModelFacts,
    OutputPacker,
    Ready,
    Submit,
    encode,
)

CONNECT_TIMEOUT_MS = 10_000
KEY_VARIABLE = "TOKENMILL_LINK_KEY"  # the key to a tcp:// address: not for the process list
LINGER_MS = 2_000  # what a worker says at its end may take this long to leave

_log = logging.getLogger(__name__)

Item = TypeVar("Item")


class FrontLink:
    """The worker's end of one socket.

    The first one waits until it is connected; one that shares its context does not.
    """

    def __init__(self, address: str, shared: zmq.Context[zmq.Socket[bytes]] | None = None) -> None:
        address, _, key = address.partition("#")
        self.context = shared or zmq.Context()
        self._is_shared = shared is not None
        self.socket = self.context.socket(zmq.PAIR)
        self.is_stuck = False  # a message could not be sent: the other side takes none
        self.socket.set_hwm(MAX_MESSAGES)
        self.socket.linger = LINGER_MS
        self.socket.reconnect_ivl = -1
        connected = zmq.EVENT_CONNECTED
        if address.startswith("tcp:"):
            key = key or os.environ.get(KEY_VARIABLE, "")
            self.socket.curve_serverkey = bytes.fromhex(key)
            self.socket.curve_publickey, self.socket.curve_secretkey = zmq.curve_keypair()
            self.socket.ipv6 = "[" in address
            beat(self.socket)
            connected = zmq.EVENT_HANDSHAKE_SUCCEEDED
        # A refused connection is closed; one that was made is disconnected.
        events = zmq.EVENT_DISCONNECTED | (zmq.EVENT_CLOSED if shared else connected)
        self.monitor = self.socket.get_monitor_socket(events)
        self.socket.connect(address)
        if not shared:
            self._wait(address)

    def _wait(self, address: str) -> None:
        if not self.monitor.poll(CONNECT_TIMEOUT_MS):
            self.close()
            raise TokenmillError(f"no API process listens at {address}")
        recv_monitor_message(self.monitor)

    def send(self, message: FromWorker) -> None:
        """Queue a message; it is lost when the other side is gone, which its monitor tells."""
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        if self.is_stuck:
            return
        try:
            self.socket.send(data, zmq.NOBLOCK)
        except zmq.Again:
            if self.monitor.poll(0):
                return  # it is gone
            self.is_stuck = True
            _log.error("an API process takes no messages: %d wait, the most that may", MAX_MESSAGES)

    def take(self) -> list[bytes]:
        messages = []
        with contextlib.suppress(zmq.Again):
            while True:
                messages.append(self.socket.recv(zmq.NOBLOCK))
        return messages

    def close(self) -> None:
        self.socket.disable_monitor()
        self.monitor.close(0)
        self.socket.close()
        if not self._is_shared:
            self.context.term()


class FrontLinks:
    """All links of a worker, and which of them each request came by."""

    def __init__(self, owner: FrontLink, facts: ModelFacts) -> None:
        self.owner = owner
        self._facts = facts
        self._fronts: dict[str, FrontLink] = {}
        self._name_of: dict[str, str] = {}  # the front of each request that has not ended
        self._leased: dict[str, str] = {}  # the same of prompts whose KV is held
        self._leaving: dict[str, set[str]] = {}  # requests of dropped fronts, still to be ended
        self._listeners: set[FrontLink] = set()  # who wants to hear of the prefix cache
        self._lost: set[FrontLink] = set()  # that the owner was told of
        self._packer = OutputPacker()
        self._load = LoadAccount(facts.block_size)
        self._was_busy = self._has_new = False
        self._poller = zmq.Poller()
        self._watch(owner)
        owner.send(Ready(facts, time.monotonic_ns(), os.getpid()))

    def receive(self, wait_ms: int | None) -> tuple[list[tuple[str, bytes]], bool]:
        """(front, message) for all that arrived, and whether the owner is still there.

        The owner's name is "".
        """
        ready = dict(self._poller.poll(wait_ms))
        found: list[tuple[str, bytes]] = []
        if self.owner.socket in ready:
            found += [("", data) for data in self.owner.take()]
        for name, link in list(self._fronts.items()) if self._fronts else ():
            if link.socket in ready:
                found += [(name, data) for data in link.take()]
            if link.monitor in ready or link.is_stuck:
                self._lose(name, link)
        return found, self.owner.monitor not in ready and not self.owner.is_stuck

    def link(self, front: str) -> FrontLink:
        return self._fronts[front] if front else self.owner

    # Fronts come and go.

    def add(self, front: str, address: str) -> None:
        """Connect to a front, without waiting for it, and say Ready there."""
        link = self._fronts[front] = FrontLink(address, self.owner.context)
        self._watch(link)
        self._load.front_joined(front)
        link.send(Ready(self._facts, time.monotonic_ns(), os.getpid()))
        self._report()

    def drop(self, front: str) -> list[str]:
        """Forget a front; returns its requests, which the caller aborts.

        The owner hears of it when the engine has ended all of them.
        """
        link = self._fronts.pop(front, None)
        if link is not None:
            self._listeners.discard(link)
            self._lost.discard(link)
            self._unwatch(link)
            link.socket.linger = 0
            link.close()
        self._load.front_gone(front)
        running = {r for r, name in self._name_of.items() if name == front}
        leased = [r for r, name in self._leased.items() if name == front]
        for request_id in leased:
            del self._leased[request_id]
        self._leaving[front] = running
        self._tell_if_dropped(front)
        return [*running, *leased]

    def _lose(self, name: str, link: FrontLink) -> None:
        if link not in self._lost:
            self._lost.add(link)
            self._unwatch(link)
            self.owner.send(FrontLost(name))

    def _watch(self, link: FrontLink) -> None:
        self._poller.register(link.socket, zmq.POLLIN)
        self._poller.register(link.monitor, zmq.POLLIN)

    def _unwatch(self, link: FrontLink) -> None:
        with contextlib.suppress(KeyError):
            self._poller.unregister(link.socket)
            self._poller.unregister(link.monitor)

    # Requests.

    def submitted(self, front: str, message: Submit) -> None:
        if not front:
            return
        self._has_new = True
        uncached = message.num_uncached or [len(r.task.prompt_token_ids) for r in message.requests]
        hashes = message.hashes or [[]] * len(uncached)
        for request, num_uncached, marks in zip(message.requests, uncached, hashes, strict=True):
            self._name_of[request.request_id] = front
            num_tokens = len(request.task.prompt_token_ids) + len(request.task.output_token_ids)
            kv_tokens = -(-num_tokens // self._facts.block_size) * self._facts.block_size
            self._load.sent(front, request.request_id, num_uncached, kv_tokens, marks)

    def send_outputs(self, outputs: list[RequestOutput]) -> None:
        if not self._name_of:
            self.owner.send(self._packer.pack(outputs))
            return
        for front, own in self._by_front(outputs, lambda output: output.request_id).items():
            self._send(front, self._packer.pack(own))
        for output in outputs:
            if output.finish_reason is not None:
                self._load.ended(output.request_id)
                self._ended(output)
            elif output.token_ids:
                self._load.first_token(output.request_id)

    def _ended(self, output: RequestOutput) -> None:
        front = self._name_of.pop(output.request_id, "")
        if front in self._leaving:
            self._leaving[front].discard(output.request_id)
            self._tell_if_dropped(front)
        elif front and output.stop_reason == PREFILLED:
            self._leased[output.request_id] = front

    def _tell_if_dropped(self, front: str) -> None:
        if not self._leaving[front]:
            del self._leaving[front]
            self.owner.send(FrontDropped(front))

    def released(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self._leased.pop(request_id, None)

    def by_front(
        self, items: list[Item], id_of: Callable[[Item], str]
    ) -> Iterable[tuple[FrontLink, list[Item]]]:
        if not self._fronts:
            return [(self.owner, items)]
        groups = self._by_front(items, id_of)
        return [(self.link(front), own) for front, own in groups.items() if self.is_there(front)]

    def costs(self, front: str, costs: Mapping[str, Cost]) -> dict[str, Cost]:
        if not self._fronts:
            return dict(costs)
        return {r: cost for r, cost in costs.items() if self._name_of.get(r, "") == front}

    def _by_front(self, items: list[Item], id_of: Callable[[Item], str]) -> dict[str, list[Item]]:
        groups: dict[str, list[Item]] = {}
        names, leased = self._name_of, self._leased
        for item in items:
            request_id = id_of(item)
            front = names.get(request_id) or leased.get(request_id, "")
            groups.setdefault(front, []).append(item)
        return groups

    def _send(self, front: str, message: FromWorker) -> None:
        if self.is_there(front):
            self.link(front).send(message)

    def is_there(self, front: str) -> bool:
        """False for a front that was dropped."""
        return not front or front in self._fronts

    def report_load(self, busy: bool) -> None:
        """Tell the fronts between two steps what all of them have here, if it is time to."""
        if len(self._fronts) < 2:
            return
        news = busy or self._was_busy or self._has_new
        at_once = not busy or not self._was_busy  # it begins, or has nothing left to do
        self._was_busy, self._has_new = busy, False
        if news and self._load.is_due(time.monotonic() * 1e3, at_once):
            self._report()

    def _report(self) -> None:
        if len(self._fronts) > 1:
            data = encode(LoadReported(self._load.report(), time.monotonic_ns()))
            for link in self._fronts.values():
                link.send_bytes(data)

    # The prefix cache.

    def listen(self, front: str) -> None:
        """A front wants to hear of the prefix cache from now on."""
        self._listeners.add(self.link(front))

    def send_events(self, message: BlockEvents) -> None:
        """Tell all fronts that listen; it is encoded once."""
        data = encode(message)
        for link in self._listeners:
            link.send_bytes(data)

    def close(self) -> None:
        for link in (*self._fronts.values(), self.owner):
            link.close()
