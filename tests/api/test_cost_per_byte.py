"""What a body costs is linear in its bytes, in whichever field; long ones cost no event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from starlette.requests import Request

from api import cost_per_byte
from api.cost_per_byte import FACTS, JOB_ROUTES, ROUTES, Meter, TooManyError, bodies_of, encoded
from tokenmill.api.access import Calls
from tokenmill.api.bodies.body_processes import LONG_BODY_BYTES, BodyProcesses
from tokenmill.api.bodies.body_reader import BodyReader
from tokenmill.api.errors import ApiError
from tokenmill.api.ranking import rank_body
from tokenmill.core.config import ServerConfig
from tokenmill.text.tokenizer import TokenizerOrigin

SMALL, LARGE = 2_000, 20_000  # of a field
# For each byte of JSON, and for a call without any. The most by far are ids of one digit, each of
# which is checked in a line of its own, and texts of one character.
LINES, LEAST_LINES = 12, 4_000
BYTES, LEAST_BYTES = 100, 400_000
CHOICE_LINES = 250  # for each choice, which counts against --max-concurrency
LOOP_LINES = 3_000  # on the event loop, for a body of any length


@pytest.fixture(scope="module")
def meter() -> Iterator[Meter]:
    yield Meter(4 * LINES * 1000)


@pytest.mark.parametrize("path", ROUTES | JOB_ROUTES)
def test_every_field_costs_a_bounded_number_of_lines_and_bytes_for_each_byte(
    path: str, meter: Meter
) -> None:
    wrong, route = [], (ROUTES | JOB_ROUTES)[path]
    meter.read(route, encoded(lambda size: route.call, 0))  # what is made once
    fields = list(bodies_of(route))
    assert len(fields) >= 5
    for name, make in fields:
        small, large = (encoded(make, size) for size in (SMALL, LARGE))
        try:
            lines = [
                meter.lines(route, body) - CHOICE_LINES * meter.num_choices
                for body in (small, large)
            ]
        except TooManyError as error:
            wrong.append(f"{name}: {error}")
            continue
        slope = (lines[1] - lines[0]) / (len(large) - len(small))
        if lines[1] > LEAST_LINES + LINES * len(large) or slope > LINES:
            wrong.append(f"{name}: {lines} lines for {len(small)} and {len(large)} bytes")
        peak = meter.peak(route, large)
        if peak > LEAST_BYTES + BYTES * len(large):
            wrong.append(f"{name}: {peak} bytes for {len(large)}")
    assert not wrong, "\n".join(wrong)


def test_a_cost_that_grows_with_the_square_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test can fail: a reader that looks at all items for each of them is told."""

    async def read(body: bytes, *_: Any) -> None:
        items = json.loads(body)["input"]
        for _ in items:
            for _ in items:
                pass

    monkeypatch.setitem(ROUTES, "/slow", ROUTES["/v1/responses"])
    route = cost_per_byte.Route(read, ROUTES["/v1/responses"].kind, {})  # type: ignore[arg-type]
    meter = Meter(LINES * 1000)
    body = json.dumps({"input": [1] * 10_000}).encode()
    with pytest.raises(TooManyError, match="more than"):
        meter.lines(route, body)


@pytest.mark.parametrize("path", ROUTES)
def test_long_bodies_cost_the_event_loop_nothing(
    path: str, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is in them: they are handed to a process as they are."""
    route, handed = ROUTES[path], list[int]()
    tokenizer = meter.tokenizer
    monkeypatch.setattr(tokenizer, "origin", TokenizerOrigin(Path("nowhere"), None))
    bodies = BodyReader(tokenizer, lambda: FACTS, ServerConfig(), "m")

    async def run(account: str, num_bytes: int, *work: Any) -> bytes:
        handed.append(num_bytes)
        raise ApiError(400, "it is read elsewhere")

    monkeypatch.setattr(bodies.processes, "run", run)
    place = Calls(ServerConfig()).enter("a")

    async def read(body: bytes, *_: Any) -> None:
        messages = iter([{"type": "http.request", "body": body}])

        async def receive() -> Any:
            for message in messages:
                return message
            await asyncio.Event().wait()

        scope = {"type": "http", "method": "POST", "path": path, "headers": []}
        await bodies.read(Request(scope, receive), place, route.reader)

    here = cost_per_byte.Route(read, route.kind, route.call)
    for name, make in bodies_of(route):
        body = encoded(make, 2 * LONG_BODY_BYTES)
        assert meter.lines(here, body) < LOOP_LINES, name
        assert handed.pop() == len(body), name
    assert not handed


@pytest.mark.parametrize("in_msgpack", [True, False])
def test_long_bodies_of_users_cost_the_event_loop_nothing(
    in_msgpack: bool, meter: Meter, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes, handed = BodyProcesses(1), list[int]()

    async def run(account: str, num_bytes: int, *work: Any) -> bytes:
        handed.append(num_bytes)
        raise ApiError(400, "it is read elsewhere")

    monkeypatch.setattr(processes, "run", run)
    place, route = Calls(ServerConfig()).enter("a"), JOB_ROUTES["/v1/rank"]

    async def read(body: bytes, *_: Any) -> None:
        await rank_body.read_body(processes, forever, place, body, in_msgpack, None, 9)

    async def forever() -> Any:
        await asyncio.Event().wait()

    here = cost_per_byte.Route(read, route.kind, route.call)
    for name, make in bodies_of(route):
        call = make((8 if in_msgpack else 2) * rank_body.LONG_BODY_BYTES)  # it is shorter there
        body = msgspec.msgpack.encode(call) if in_msgpack else json.dumps(call).encode()
        assert len(body) > rank_body.LONG_BODY_BYTES
        assert meter.lines(here, body) < LOOP_LINES, name
        assert handed.pop() == len(body), name
    assert not handed
