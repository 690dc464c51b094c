"""A side that takes no messages: what waits for it is bounded, and it is treated as dead."""

from __future__ import annotations

import asyncio
import tempfile
from typing import Any

import pytest
import zmq

from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason
from tokenmill.workers.fronts import control_socket, front_link
from tokenmill.workers.fronts.control_socket import FrontSocket
from tokenmill.workers.fronts.front_link import FrontLink, FrontLinks
from tokenmill.workers.link import MAX_MESSAGES
from tokenmill.workers.messages import (
    FrontDropped,
    FrontLost,
    Submit,
    decode_from_worker,
)
from workers.counting_engine import FACTS

FEW = 8
LONG = "x" * 100_000  # few of these fit into the kernel's buffers
MANY = 1000  # messages, none of which would be lost with room for all of them


@pytest.fixture
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sockets with room for few messages."""
    for module in (front_link, control_socket):
        monkeypatch.setattr(module, "MAX_MESSAGES", FEW)


def test_the_bound_is_far_from_what_ordinary_load_needs() -> None:
    """Ten minutes of a hundred steps a second, or five of announcements of other fronts."""
    assert MAX_MESSAGES >= 600 * 100


def _messages(socket: zmq.Socket[bytes], until: type) -> list[Any]:
    found: list[Any] = []
    while not found or not isinstance(found[-1], until):
        assert socket.poll(20_000)
        found.append(decode_from_worker(socket.recv()))
    return found


def test_a_front_that_takes_no_messages_loses_its_link_alone(
    few: None, caplog: pytest.LogCaptureFixture
) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, zmq.Context() as context:
        address = f"ipc://{folder}/owner"
        owner, front = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        for socket, where in ((owner, address), (front, f"{address}1")):
            socket.set(zmq.LINGER, 0)
            socket.bind(where)
        links = FrontLinks(FrontLink(address), FACTS)
        try:
            links.add("f0.1", f"{address}1")
            links.submitted(
                "f0.1", Submit([Request(LONG, Generate([1])), Request("short", Generate([1]))])
            )
            for _ in range(MANY):
                links.send_outputs([RequestOutput(LONG, token_ids=[1])])
            links.receive(0)
            links.receive(0)
            assert [type(m) for m in _messages(owner, FrontLost)].count(FrontLost) == 1
            assert set(links.drop("f0.1")) == {LONG, "short"}
            for name in (LONG, "short"):
                links.send_outputs([RequestOutput(name, [], finish_reason=FinishReason.ABORT)])
            assert FrontLost not in [type(m) for m in _messages(owner, FrontDropped)]
        finally:
            links.close()
            owner.close()
            front.close()
    assert [r.getMessage() for r in caplog.records] == [
        f"an API process takes no messages: {FEW} wait, the most that may"
    ]


def test_a_worker_ends_whose_owner_takes_no_messages(few: None) -> None:
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, zmq.Context() as context:
        owner = context.socket(zmq.PAIR)
        owner.set(zmq.LINGER, 0)
        owner.bind(f"ipc://{folder}/owner")
        links = FrontLinks(FrontLink(f"ipc://{folder}/owner"), FACTS)
        try:
            assert links.receive(0) == ([], True)
            for _ in range(MANY):
                links.send_outputs([RequestOutput(LONG, token_ids=[1])])
            assert links.receive(0) == ([], False)
        finally:
            links.owner.socket.linger = 0
            links.close()
            owner.close()


def test_a_front_ends_whose_owner_takes_no_messages(few: None) -> None:
    async def main() -> None:
        with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder, zmq.Context() as context:
            socket = context.socket(zmq.ROUTER)
            socket.set(zmq.LINGER, 0)
            socket.set(zmq.RCVHWM, FEW)
            socket.bind(f"ipc://{folder}/owner")
            front = FrontSocket(lambda data: None, f"ipc://{folder}/owner")
            try:
                for _ in range(MANY):
                    front.send(LONG.encode())
                await asyncio.wait_for(front.gone.wait(), 20)
            finally:
                front.close()
                socket.close()

    asyncio.run(main())
