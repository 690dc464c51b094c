"""Calls count from their heads on, and the memory of their bodies is shared fairly by key."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from api.sim import MODEL
from api.sim_server import GENEROUS_S, KIND, SimServer, sim_server, wait_until
from api.video_app import in_loop, video_app
from tokenmill.api.access import CallPlace, Calls, read_bytes
from tokenmill.api.bodies import body_memory
from tokenmill.api.bodies.body_memory import FREE_BYTES
from tokenmill.api.bodies.body_processes import BodyProcesses
from tokenmill.api.bodies.fair_share import FairShare
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Keys
from tokenmill.api.ranking.rank_routes import make_rank_service
from tokenmill.core.config import ServerConfig
from tokenmill.vision.addresses import AllowedHosts
from tokenmill.vision.fetching import fetch
from tokenmill.workers.messages import ModelFacts

MIB = 2**20
CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say: hi"}], "max_tokens": 4}
KEYS: dict[str, Any] = {"port": 0, "api_keys": ("one", "two"), "max_concurrency_per_key": 1}


# What accounts share.


def run(work: Awaitable[Any]) -> Any:
    async def main() -> Any:
        return await work

    return asyncio.run(main())


def test_an_account_leaves_as_much_as_it_holds() -> None:
    share = FairShare(100)
    assert share.take_now("a", 50) and not share.take_now("a", 1)
    assert share.take_now("b", 25) and not share.take_now("b", 1)
    share.give("a", 50)
    assert share.take_now("b", 25) and share.take_now("c", 25)
    assert share.num_held == 75 <= share.capacity


@in_loop
async def test_who_holds_least_comes_first_and_nobody_is_forgotten() -> None:
    share, order = FairShare(40), list[str]()
    await share.take("a", 20)
    await share.take("c", 10)

    async def wait(account: str, name: str, amount: int) -> None:
        await share.take(account, amount)
        order.append(name)

    greedy = [asyncio.create_task(wait("a", f"a{i}", 10)) for i in range(3)]
    other = asyncio.create_task(wait("b", "b0", 10))
    leaver = asyncio.create_task(wait("b", "b1", 1))
    await asyncio.sleep(0)
    leaver.cancel()
    share.give("a", 20)
    await asyncio.sleep(0)
    assert order == ["a0", "b0"]  # then it holds less than the other
    share.give("b", 10)
    share.give("c", 10)
    await asyncio.sleep(0)
    assert order == ["a0", "b0", "a1"]
    share.give("a", 10)
    await asyncio.gather(*greedy, other)
    assert order[-1] == "a2" and share.num_held == 20


@in_loop
async def test_what_was_granted_to_a_waiter_that_left_is_given_back() -> None:
    share = FairShare(2)
    await share.take("a", 1)
    waiting = asyncio.create_task(share.take("a", 1))
    await asyncio.sleep(0)
    share.give("a", 1)  # it is granted
    waiting.cancel()  # before it runs
    await asyncio.gather(waiting, return_exceptions=True)
    assert share.num_held == 0


# The bodies of calls.


def parts_of(*parts: bytes | float) -> Callable[[], Awaitable[dict[str, Any]]]:
    """What a client sends; a number is a pause in seconds, and the end of them is one for ever."""
    given = list(parts)

    async def receive() -> dict[str, Any]:
        while given and isinstance(given[0], float):
            await asyncio.sleep(given.pop(0))  # type: ignore[arg-type]
        if not given:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": given.pop(0), "more_body": bool(given)}

    return receive


def read(place: CallPlace, *parts: bytes | float, declared: str = "") -> Awaitable[bytes]:
    return read_bytes(parts_of(*parts), declared, MIB, place.body)


def small_memory(monkeypatch: pytest.MonkeyPatch, **times: float) -> Calls:
    """Room for four bodies of a megabyte, two of them of one key."""
    monkeypatch.setattr(body_memory, "WAIT_S", 0.05)
    for name, value in times.items():
        monkeypatch.setattr(body_memory, name, value)
    return Calls(ServerConfig(max_body_bytes=MIB, max_body_memory_bytes=1))


@in_loop
async def test_bodies_take_room_before_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = small_memory(monkeypatch)
    share = calls.memory.share
    first = calls.enter("a")
    part = bytes(FREE_BYTES)
    reading = asyncio.create_task(read(first, part, b"x", 9.0, b"", declared=str(MIB)))
    await asyncio.sleep(0.01)
    assert share.held("a") == MIB - FREE_BYTES  # though little has come
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    first.leave()
    assert share.num_held == 0 and calls.num_open == 0


@in_loop
async def test_a_key_that_fills_the_memory_stops_itself_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, body = small_memory(monkeypatch), bytes(MIB)
    greedy = [calls.enter("a") for _ in range(8)]
    ended = await asyncio.gather(*(read(p, body, b"") for p in greedy), return_exceptions=True)
    refused = [error for error in ended if isinstance(error, ApiError)]
    assert len(refused) == 6 and len(ended) == 8
    assert {(e.status, e.code) for e in refused} == {(429, "max_body_memory")}
    assert all(e.answer_headers() == {"retry-after": "1"} for e in refused)
    assert calls.memory.share.num_held <= 2 * MIB
    assert await read(calls.enter("a"), bytes(FREE_BYTES), b"") == bytes(FREE_BYTES)
    other = calls.enter("b")
    assert await read(other, body, b"") == body
    others = [calls.enter(name) for name in "cd"]
    found = await asyncio.gather(*(read(p, body, b"") for p in others), return_exceptions=True)
    (crowded,) = {(e.status, e.code) for e in found if isinstance(e, ApiError)}
    assert crowded == (503, "max_body_memory")
    for place in (*greedy, other, *others):
        place.leave()
    assert await read(calls.enter("c"), body, b"") == body


@in_loop
async def test_a_body_waits_for_room_and_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, body = small_memory(monkeypatch, WAIT_S=60.0), bytes(MIB)
    first, second, third = (calls.enter("a") for _ in range(3))
    await asyncio.gather(read(first, body, b""), read(second, body, b""))
    waiting = asyncio.create_task(read(third, body, b"", declared=str(MIB)))
    await asyncio.sleep(0.01)
    assert not waiting.done()
    first.body.release()
    assert await waiting == body


@in_loop
async def test_slow_bodies_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = small_memory(monkeypatch, WAIT_S=60.0, SLOW_AFTER_S=0.02)
    part = bytes(FREE_BYTES + 1)
    slow = [
        asyncio.create_task(read(calls.enter("a"), part, 60.0, b"x", declared=str(MIB)))
        for _ in range(2)
    ]
    monkeypatch.setattr(body_memory, "SLOW_BYTES_PER_S", 1e9)
    await asyncio.sleep(0.05)
    assert not any(task.done() for task in slow)  # while nobody wants their room
    body = bytes(MIB)
    assert await read(calls.enter("a"), body, b"", declared=str(MIB)) == body
    for error in await asyncio.gather(*slow, return_exceptions=True):
        assert isinstance(error, ApiError) and (error.status, error.code) == (
            408,
            "request_timeout",
        )


@in_loop
async def test_a_body_that_is_too_large_keeps_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = small_memory(monkeypatch)
    place = calls.enter("a")
    with pytest.raises(ApiError, match="larger than"):
        await read(place, bytes(MIB), bytes(MIB), b"")
    assert calls.memory.share.num_held == 0


@in_loop
async def test_long_bodies_of_one_key_leave_a_process_to_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    processes, begun = BodyProcesses(1_000), list[str]()
    go_on = asyncio.Event()

    async def work(_: Any, name: str) -> bytes:
        begun.append(name)
        await go_on.wait()
        return b""

    monkeypatch.setattr(processes, "_in_process", work)
    greedy = [asyncio.create_task(processes.run("a", 1, bytes, f"a{i}")) for i in range(6)]
    await asyncio.sleep(0)
    other = asyncio.create_task(processes.run("b", 1, bytes, "b"))
    await asyncio.sleep(0.01)
    assert begun == ["a0", "b"]
    go_on.set()
    await asyncio.gather(*greedy, other)
    assert len(begun) == 7


def test_an_image_is_fetched_once_there_is_room_for_it() -> None:
    data, wanted = bytes(3 * MIB), list[int]()
    sent = 0

    def answer(listener: socket.socket) -> None:
        nonlocal sent
        connection, _ = listener.accept()
        with connection:
            connection.recv(65_536)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(data))
            view = memoryview(data)
            while sent < len(data):
                sent += connection.send(view[sent : sent + 65_536])

    class Room:
        async def grow(self, num_bytes: int) -> None:
            wanted.append(num_bytes)
            before = -1
            while before < sent:  # until the sender stands still
                before = sent
                await asyncio.sleep(0.3)
            assert sent < len(data)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
        threading.Thread(target=answer, args=(listener,), daemon=True).start()
        origin = f"http://127.0.0.1:{listener.getsockname()[1]}"
        got = run(fetch(f"{origin}/a.png", AllowedHosts((origin,)), 4 * MIB, 0.2, Room()))
    assert got == data and wanted == [len(data)]


# Servers.


def test_every_call_counts_from_its_head_on() -> None:
    with sim_server(ServerConfig(**KEYS)) as server:
        paths = server.call("GET", "/openapi.json").json["paths"]
        calls = [p for p, methods in paths.items() if "requestBody" in methods.get("post", {})]
        assert {"/v1/chat/completions", "/tokenize", "/v1/messages/count_tokens"} < set(calls)
        calls = [path for path in calls if not path.startswith("/workers")]
        assert len(calls) == 8, calls
        for path in calls:
            check_served(server, path)


def check_served(server: SimServer, path: str) -> None:
    def status(key: str) -> int:
        return server.call("POST", path, {}, {"x-api-key": key}).status

    with send_head(server, "one", path, b'{"model'):
        wait_until(lambda: status_of_head(server, "one", path) == 429, f"{path} counts")
        assert status_of_head(server, "one", "/tokenize") == 429
        assert status("two") == 400
    wait_until(lambda: status("one") == 400, f"{path} has ended")


def send_head(
    server: SimServer, key: str, path: str, part: bytes = b"", length: int = 99
) -> socket.socket:
    """A call whose body does not come, or only a part of it."""
    connection = socket.create_connection(server.address, timeout=GENEROUS_S)
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\n{KIND}X-API-Key: {key}\r\n"
    connection.sendall(f"{head}Content-Length: {length}\r\n\r\n".encode() + part)
    return connection


def status_of_head(server: SimServer, key: str, path: str) -> int:
    """The answer to a call that sends its head alone; 0: there is none yet."""
    with send_head(server, key, path) as connection:
        connection.settimeout(0.2)
        try:
            return int(connection.recv(100).split()[1])
        except TimeoutError:
            return 0


def resident_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmRSS")]
    return int(line.split()[1]) * 1024


def test_bodies_of_one_key_fill_no_memory_and_stop_no_other_key() -> None:
    config = ServerConfig(
        port=0, api_keys=("one", "two"), max_body_bytes=4 * MIB, max_body_memory_bytes=16 * MIB
    )
    with sim_server(config) as server:
        headers = {"x-api-key": "two"}
        assert server.call("POST", "/v1/chat/completions", CHAT, headers).status == 200
        before = resident_bytes(server.process.pid)
        held = [send_head(server, "one", "/tokenize", length=4 * MIB) for _ in range(60)]
        sent, deadline_s = [0] * len(held), time.monotonic() + 4
        part = b"x" * 65_536
        while time.monotonic() < deadline_s:
            for index, connection in enumerate(held):
                connection.setblocking(False)
                try:
                    if sent[index] < 4 * MIB - len(part):
                        sent[index] += connection.send(part)
                except BlockingIOError:
                    pass
        grown = resident_bytes(server.process.pid) - before
        long = {**CHAT, "messages": [{"role": "user", "content": "x " * MIB}]}
        answer = server.call("POST", "/v1/chat/completions", long, headers)
        assert answer.error["code"] == "context_length_exceeded"
        assert server.call("POST", "/v1/chat/completions", CHAT, headers).status == 200
        for connection in held:
            connection.close()
    assert grown < 60 * MIB, f"{grown} bytes for {sum(sent)} bytes of bodies"


async def ask_app(app: Any, path: str, key: str, *parts: bytes | float) -> int:
    """The status that an app answers a call with."""
    status = list[int]()
    headers = [(b"content-type", b"application/json"), (b"x-api-key", key.encode())]
    scope = {
        "type": "http",
        "method": "POST",
        "path": path,
        "headers": headers,
        "query_string": b"",
    }
    scope |= {"http_version": "1.1", "scheme": "http", "server": ("a", 1), "client": ("b", 1)}

    async def send(message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            status.append(message["status"])

    await app(scope, parts_of(*parts), send)
    return status[0]


async def check_counting(app: Any, path: str) -> None:
    held = asyncio.create_task(ask_app(app, path, "one", b'{"', 99.0))
    await asyncio.sleep(0.05)
    assert not held.done()
    assert await ask_app(app, path, "one") == 429
    assert await ask_app(app, path, "two", b"{}") == 400
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)
    assert await ask_app(app, path, "one", b"{}") == 400


@pytest.mark.parametrize("path", ["/v1/videos", "/v1/videos/sync", "/v1/videos/generations"])
@in_loop
async def test_calls_for_videos_count_from_their_heads_on(path: str, tmp_path: Path) -> None:
    async with video_app(tmp_path, ServerConfig(**KEYS)) as app:
        await check_counting(app.app, path)


@in_loop
async def test_calls_for_ranks_count_from_their_heads_on() -> None:
    facts = ModelFacts(about={"max_seq_len": 8, "scaling_seqlen": "fixed"})
    pool: Any = SimpleNamespace(facts=facts, ready=True, drain=None, fail_open=None)
    keys = Keys.of(ServerConfig(**KEYS), "token", b"salt")
    service = await make_rank_service("m", 9, keys, pool)
    await check_counting(service.app, "/v1/rank")
