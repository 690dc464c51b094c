"""Calls that come at once begin one by one: streams get their tokens between them."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from tokenmill.api.keys import Keys
from tokenmill.api.middleware import CallMiddleware, Turns, take_turn
from tokenmill.core.config import ServerConfig


class LoopTurns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.number = 0
        self._tick()

    def _tick(self) -> None:
        self.number += 1
        asyncio.get_running_loop().call_soon(self._tick)


class Uncounted:
    def count_call(self, endpoint: str, status: int, error: str | None) -> None:
        pass


def test_one_of_those_who_wait_goes_on_in_each_turn() -> None:
    async def main() -> None:
        turns, loop_turns = Turns(), LoopTurns()
        went: list[tuple[int, int]] = []

        async def go(number: int) -> None:
            await turns.take()
            went.append((number, loop_turns.number))

        tasks = [asyncio.create_task(go(number)) for number in range(6)]
        await asyncio.sleep(0)
        tasks[2].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        assert [number for number, _ in went] == [0, 1, 3, 4, 5]
        assert len({turn for _, turn in went}) == 5
        for _ in range(3):
            await asyncio.sleep(0)
        before = loop_turns.number
        await turns.take()
        assert loop_turns.number == before, "nobody waits for a turn that is free"

    asyncio.run(main())


def test_calls_that_have_begun_come_before_new_ones() -> None:
    async def main() -> list[str]:
        turns, went = Turns(), []

        async def call(name: str) -> None:
            for part in ("head", "body"):
                await turns.take(has_begun=part == "body")
                went.append(f"{name} {part}")

        await asyncio.gather(*(call(name) for name in "abc"))
        return went

    assert asyncio.run(main()) == ["a head", "a body", "b head", "b body", "c head", "c body"]


def test_each_part_of_a_call_has_a_turn_of_its_own() -> None:
    parts: list[tuple[str, int]] = []

    async def main() -> None:
        loop_turns = LoopTurns()

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            parts.append((scope["method"], loop_turns.number))
            await take_turn(scope)
            parts.append((scope["method"], loop_turns.number))

        async def receive() -> Message:
            raise AssertionError("no body is read")

        async def send(message: Message) -> None:
            raise AssertionError("nothing is answered")

        front = CallMiddleware(app, Keys.of(ServerConfig(), "t", b"s"), Uncounted())

        def call(method: str) -> Any:
            scope = {"type": "http", "method": method, "path": "/v1/models", "headers": []}
            return front(scope, receive, send)

        await asyncio.gather(*(call(method) for method in ("POST",) * 8 + ("GET",) * 2))

    asyncio.run(main())
    posts = [turn for method, turn in parts if method == "POST"]
    assert len(posts) == len(set(posts)) == 16
    gets = [turn for method, turn in parts if method == "GET"]
    assert len(gets) == 4 and max(gets) < sorted(posts)[3], "looks at the server do not wait"
