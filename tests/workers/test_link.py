"""What a worker sends is read, whole and in order, however it arrives."""

from __future__ import annotations

import asyncio
import select
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import zmq

from tokenmill.core.requests import Generate, Request
from tokenmill.workers import link as link_module
from tokenmill.workers.link import MAX_AT_ONCE, WorkerLink
from tokenmill.workers.messages import FromWorker, GetStats, Outputs, Submit, encode


class _Silent:
    """A worker process that runs until it is killed."""

    def __init__(self) -> None:
        self._end = asyncio.Event()

    async def wait(self) -> int:
        await self._end.wait()
        return 0

    def kill(self) -> None:
        self._end.set()


@asynccontextmanager
async def linked() -> AsyncIterator[tuple[WorkerLink, zmq.Socket[bytes], list[str]]]:
    """A link, the worker's socket, and the names of the outputs that were read."""
    seen: list[str] = []

    def take(message: FromWorker) -> None:
        assert isinstance(message, Outputs)
        seen.extend(message.tokens)

    async def spawn(address: str) -> _Silent:
        return _Silent()

    link = WorkerLink(take)
    starting = asyncio.create_task(link.start(spawn))
    with zmq.Context() as context, context.socket(zmq.PAIR) as worker:
        worker.linger = 0
        worker.connect(link.address)
        try:
            yield link, worker, seen
        finally:
            starting.cancel()
            link.kill("the test is over")
            await link.close(0.0)


def say(worker: zmq.Socket[bytes], names: range) -> None:
    for number in names:
        worker.send(encode(Outputs([], {str(number): [1]})))


def test_messages_that_come_together_and_apart_are_all_read_in_order() -> None:
    """The socket's descriptor tells once that there is something: nothing may be left behind."""

    async def read() -> list[str]:
        async with linked() as (_, worker, seen), asyncio.timeout(180):
            number = 0
            for size in (1, 3 * MAX_AT_ONCE, 1, 2, 5 * MAX_AT_ONCE):
                say(worker, range(number, number + size))
                number += size
                while len(seen) < number:
                    await asyncio.sleep(0.001)
        return seen

    assert asyncio.run(read()) == [str(i) for i in range(2 + 2 + 8 * MAX_AT_ONCE)]


def test_messages_that_come_after_a_send_are_read_by_one_reader() -> None:
    """A send has a read scheduled when the descriptor tells of messages: others get their turns."""

    async def read() -> tuple[list[str], int]:
        async with linked() as (link, worker, seen), asyncio.timeout(180):
            say(worker, range(1))
            while not seen:
                await asyncio.sleep(0.001)
            most, total = 0, 1
            for _ in range(5):
                link.send(GetStats())
                say(worker, range(total, total + 20 * MAX_AT_ONCE))
                total += 20 * MAX_AT_ONCE
                select.select([link._socket.fileno()], [], [], 20)
                while len(seen) < total:
                    before = len(seen)
                    await asyncio.sleep(0)
                    most = max(most, len(seen) - before)
        return seen, most

    seen, most = asyncio.run(read())
    assert seen == [str(i) for i in range(1 + 5 * 20 * MAX_AT_ONCE)]
    assert most < 2 * MAX_AT_ONCE


def test_a_worker_that_takes_no_messages_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_MESSAGES", 8)
    monkeypatch.setattr(link_module, "EXIT_AFTER_S", 0.05)

    async def fill() -> str:
        async with linked() as (link, _, _), asyncio.timeout(60):
            await asyncio.sleep(0.2)  # it connects
            for number in range(1000):
                link.send(Submit([Request(f"{number:100000}", Generate([1]))]))
            await link.dead.wait()
            return link.reason

    assert asyncio.run(fill()) == "it takes no messages: 8 wait for it, the most that may"
