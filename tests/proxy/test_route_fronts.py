"""Several processes of a router on one port: sums, limits, and the death of one of them."""

from __future__ import annotations

import os
import re
import signal
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from api.sim_server import SimServer, wait_until
from proxy.route_server import EVENT, MODEL, Handler, Scripted, router_process, say
from tokenmill.__main__ import run
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.proxy.backends import Attempt, Backends
from tokenmill.proxy.call_prompt import RoutedPrompt
from tokenmill.workers.fronts.control import CallNews, decode_to_front, encode

KEYS = ("alpha", "beta")
NUM_STREAMS = 6
URLS = ("http://127.0.0.1:1", "http://127.0.0.1:2")
PROMPT = RoutedPrompt(list(range(200)), MODEL)


class Fronts:
    """Two fronts whose messages reach each other as over the wire."""

    def __init__(self) -> None:
        config, router = RouteConfig(backends=URLS), RouterConfig()
        self.first = Backends(config, router, "f0.1", lambda news: self._pass(self.second, news))
        self.second = Backends(config, router, "f1.2", lambda news: self._pass(self.first, news))
        for front in (self.first, self.second):
            for backend in front._all.values():
                backend.state = "ready"
                front._on_change(backend)

    def _pass(self, to: Backends, news: CallNews) -> None:
        message: Any = decode_to_front(encode(news))
        to.heard(message)

    def loads(self, front: Backends) -> list[tuple[int, int]]:
        return [(load.num_requests, load.num_pending) for load in front._router.loads()]

    def begin(self, front: Backends) -> Attempt:
        attempt = front.choose(front.new_call(), PROMPT, ())
        assert attempt is not None
        return attempt


def test_a_front_knows_of_the_calls_of_another() -> None:
    fronts = Fronts()
    first, second = fronts.first, fronts.second
    attempt = fronts.begin(first)
    assert fronts.loads(second) == fronts.loads(first) and sum(fronts.loads(second), ()).count(1)
    other = fronts.begin(second)
    assert other.decision.cached_tokens, "the prompt is known to be at the first one's backend"
    assert other.call_id != attempt.call_id
    first.first_byte(attempt)
    assert fronts.loads(second) == fronts.loads(first)
    third = Backends(RouteConfig(backends=URLS), RouterConfig(), "f2.3", lambda news: None)
    for backend in third._all.values():
        third._on_change(backend)
        backend.state = "ready"
        third._on_change(backend)
    first._tell = second._tell = third.heard
    first.tell_open()
    second.tell_open()
    assert fronts.loads(third) == fronts.loads(first)
    third.front_gone("f1.2")
    second.end(other)
    first.end(attempt)
    assert fronts.loads(third) == [(0, 0), (0, 0)]


def test_a_stored_response_is_found_at_every_front() -> None:
    fronts = Fronts()
    fronts.first.owners.learn(b'{"id": "resp_1"}', "127.0.0.1:2")
    assert fronts.second.owners.find("resp_1") == "127.0.0.1:2"


@pytest.fixture(scope="module")
def routed() -> Iterator[tuple[SimServer, list[Scripted]]]:
    backends = [Scripted(), Scripted()]
    config = ServerConfig(fronts=2, api_keys=KEYS, max_concurrency_per_key=NUM_STREAMS)
    try:
        with router_process(tuple(backend.url for backend in backends), config) as router:
            yield router, backends
    finally:
        for backend in backends:
            backend.stop()


def view(router: SimServer) -> dict[str, Any]:
    found: dict[str, Any] = router.call("GET", "/workers").json
    return found


def fronts_of(router: SimServer) -> dict[str, dict[str, Any]]:
    return {front["name"]: front for front in view(router)["fronts"]}


def open_calls(router: SimServer) -> dict[str, int]:
    return {name: front["num_open"] for name, front in fronts_of(router).items()}


def call(router: SimServer, key: str) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    body = {"model": MODEL, "messages": []}
    return router.call("POST", "/v1/chat/completions", body, headers)


def test_fronts_add_up(
    routed: tuple[SimServer, list[Scripted]], capsys: pytest.CaptureFixture[str]
) -> None:
    router, backends = routed
    for backend in backends:
        backend.behaviour = say(200, b'{"usage": {"completion_tokens": 3}}')
    for _ in range(12):  # the kernel chooses a front for each connection
        assert call(router, KEYS[0]).status == 200
    chats = 'endpoint="/v1/chat'
    wait_until(lambda: router.metric("requests_total", chats) == 12, "all fronts report")
    assert router.metric("generation_tokens_total") == 36
    text = router.call("GET", "/metrics").body.decode()
    attempts = re.findall(r"^tokenmill_backend_attempts_total\{.*\} (.*)$", text, re.M)
    assert sum(map(float, attempts)) == 12
    pool = view(router)
    assert sum(worker["routed"] for worker in pool["workers"]) == 12
    assert [front["state"] for front in pool["fronts"]] == ["ready", "ready"]
    assert run(["status", "--url", router.url]) == 0
    assert "front f1 is ready" in capsys.readouterr().err


def test_a_killed_front_takes_only_its_own_streams_with_it(
    routed: tuple[SimServer, list[Scripted]],
) -> None:
    router, backends = routed
    go_on = threading.Event()

    def until_told(handler: Handler) -> None:
        if b"stream" not in handler.body:
            return handler.reply(200, b"{}")
        handler.start_stream()
        handler.chunk(EVENT % 0)
        go_on.wait(60)
        handler.chunk(b"data: [DONE]\n\n")
        handler.chunk(b"")

    for backend in backends:
        backend.behaviour = until_told
    body = {"model": MODEL, "messages": [], "stream": True}
    header = f"Authorization: Bearer {KEYS[0]}\r\n"
    for _ in range(10):
        path = "/v1/chat/completions"
        streams = [router.open_call(path, body, header) for _ in range(NUM_STREAMS)]
        for connection in streams:
            assert connection.recv(1 << 16)
        wait_until(lambda: sum(open_calls(router).values()) == NUM_STREAMS, "all streams run")
        counts = open_calls(router)
        if all(counts.values()):
            break
        for connection in streams:  # all of them at one front: try again
            connection.close()
        wait_until(lambda: not any(open_calls(router).values()), "the front has noticed")
    wait_until(
        lambda: {call(router, KEYS[0]).status for _ in range(4)} == {429},
        "fronts hear of each other's calls",
    )
    dead = fronts_of(router)["f0"]
    os.kill(dead["pid"], signal.SIGKILL)

    def others_run() -> bool:
        try:
            return bool(view(router)["num_open"] == counts["f1"])
        except OSError:  # the kernel gave the connection to the one that died
            return False

    wait_until(others_run, "its calls are gone")
    go_on.set()
    ends = [_rest(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for connection in streams]
    assert sum(ends) == counts["f1"]

    def back() -> bool:
        front = fronts_of(router)["f0"]
        return bool(front["state"] == "ready" and front["pid"] != dead["pid"])

    wait_until(back, "it is back")
    assert fronts_of(router)["f0"]["restarts"] == 1
    for backend in backends:
        backend.behaviour = say(200, b"{}")
    assert {call(router, KEYS[0]).status for _ in range(8)} == {200}


def _rest(connection: socket.socket) -> bytes:
    data = b""
    with connection:
        try:
            while not data.endswith(b"\r\n0\r\n\r\n") and (part := connection.recv(1 << 16)):
                data += part
        except OSError:
            return b""
    return data


def test_what_cannot_be_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    backend = ["--backend", "http://127.0.0.1:1"]
    assert run(["route", *backend, "--fronts", "0"]) == 2
    assert "--fronts" in capsys.readouterr().err
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert run(["route", *backend, "--fronts", "2", "--port", str(port)]) == 1
    said = capsys.readouterr().err.strip()
    assert "cannot listen on" in said and str(port) in said and "\n" not in said
