"""A router in front of other servers: what passes, who is tried, and what is said when none is."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from api.collector import Collector
from api.sim import DEFAULT_TEXT
from api.sim import MODEL as SIM
from api.sim_server import GENEROUS_S, SimServer, sim_server, wait_until
from open_ports import descendants, elsewhere
from proxy.route_server import (
    EVENT,
    MODEL,
    Handler,
    Scripted,
    ask,
    count_to,
    router_process,
    say,
)
from tokenmill.__main__ import run
from tokenmill.core.config import RouteConfig, RouterConfig, ServerConfig
from tokenmill.proxy.backend_address import BackendError, base_url, read_backends
from tokenmill.proxy.call_prompt import read_prompt

QUICK = RouteConfig(health_interval_s=0.2)


@contextlib.contextmanager
def scripted(*models: str) -> Iterator[list[Scripted]]:
    backends = [Scripted(model) for model in models]
    try:
        yield backends
    finally:
        for backend in backends:
            backend.stop()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SimServer, list[Scripted]]]:
    """A router by turns over two backends; each test sets what they do."""
    with scripted(MODEL, MODEL) as backends:
        urls = tuple(backend.url for backend in backends)
        config = ServerConfig(max_concurrency=4)
        route = replace(QUICK, forward=("/v1/anything/", "/pooling"))
        with router_process(urls, config, RouterConfig("round-robin"), route) as router:
            assert elsewhere(descendants(router.process.pid)) == set()
            yield router, backends


@pytest.fixture
def routed(pair: tuple[SimServer, list[Scripted]]) -> tuple[SimServer, list[Scripted]]:
    router, backends = pair
    for backend in backends:
        backend.behaviour = say(200, b"{}")
        backend.calls.clear()
    time.sleep(0.01)
    wait_until(lambda: ready_names(router) == {b.name for b in backends}, "both are up")
    return pair


def ready_names(router: SimServer) -> set[str]:
    workers = router.call("GET", "/workers").json["workers"]
    return {worker["name"] for worker in workers if worker["state"] == "ready"}


# What passes.


def test_bodies_and_answers_pass_as_they_are(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    whole = b'{ "unknown":  [1.50, "\xc3\xa9"], "usage": {"completion_tokens": 7} }'
    for backend in backends:
        backend.behaviour = say(200, whole, x_own="yes")
    sent = b'{"model": "%s",  "vendor_field": {"a": 1e3}, "messages": "not a list"}' % (
        MODEL.encode()
    )
    headers = {"authorization": "Bearer theirs", "x-mine": "1", "content-type": "application/json"}
    answer = router.call("POST", "/v1/anything/at/all?q=1", sent, headers)
    assert (answer.status, answer.body, answer.headers["x-own"]) == (200, whole, "yes")
    (path, got, body), *_ = [call for backend in backends for call in backend.calls]
    assert (path, body) == ("/v1/anything/at/all?q=1", sent)
    lowered = {name.lower(): value for name, value in got.items()}
    assert lowered["authorization"] == "Bearer theirs" and lowered["x-mine"] == "1"
    assert router.metric("generation_tokens_total") >= 7


def test_a_large_answer_passes(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    large = bytes(range(256)) * 20_000
    for backend in backends:
        backend.behaviour = say(200, large)
    assert ask(router).body == large
    assert router.call("GET", "/workers").json["num_open"] == 0


@pytest.mark.parametrize("body", [b"", b"[1]", b"{", b'{"model": 3, "messages": 7}', b"\xff"])
def test_what_is_no_call_is_the_backends_matter(
    routed: tuple[SimServer, list[Scripted]], body: bytes
) -> None:
    router, backends = routed
    for backend in backends:
        backend.behaviour = say(400, b'{"error": "theirs"}')
    answer = router.call("POST", "/v1/completions", body)
    assert (answer.status, answer.body) == (400, b'{"error": "theirs"}')
    assert sum(len(backend.calls) for backend in backends) == 1, "a 400 is an answer"


def test_streams_pass_as_they_come(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    was_read = threading.Event()

    def one_by_one(handler: Handler) -> None:
        handler.start_stream()
        handler.chunk(EVENT % 0)
        assert was_read.wait(GENEROUS_S), "the first event waits for the second"
        handler.chunk(EVENT % 1)

    for backend in backends:
        backend.behaviour = one_by_one
    body = {"model": MODEL, "messages": [], "stream": True}
    with router.open_call("/v1/chat/completions", body) as connection:
        received = b""
        for number in range(2):
            while EVENT % number not in received:
                received += (part := connection.recv(1 << 16))
                assert part, "the stream has ended"
            was_read.set()
    for backend in backends:
        backend.behaviour = count_to(5)
    answer = ask(router, stream=True)
    assert answer.body == b"".join(EVENT % n for n in range(5)) + b"data: [DONE]\n\n"
    assert answer.headers["content-type"] == "text/event-stream"


def test_a_client_that_goes_ends_the_call(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    lost: list[bool] = []

    def until_lost(handler: Handler) -> None:
        handler.start_stream()
        try:
            for number in range(3000):
                handler.chunk(EVENT % number)
                time.sleep(0.01)
        except OSError:
            lost.append(True)

    for backend in backends:
        backend.behaviour = until_lost
    body = {"model": MODEL, "messages": [], "stream": True}
    with router.open_call("/v1/chat/completions", body) as connection:
        assert connection.recv(100)
    wait_until(lambda: lost == [True], "the backend sees it")
    wait_until(lambda: router.call("GET", "/workers").json["num_open"] == 0, "nothing is left")
    assert len(ready_names(router)) == 2, "that was no fault of the backend"


# Who is tried.


def first_then(backends: list[Scripted], first: Any) -> list[str]:
    """Whoever is asked first does `first`, the other answers well."""
    order: list[str] = []

    def behave(handler: Handler) -> None:
        order.append(handler.server.name)
        (first if len(order) == 1 else say(200, b'{"ok": 1}'))(handler)

    for backend in backends:
        backend.behaviour = behave
    return order


def cut_after_head(handler: Handler) -> None:
    handler.start_stream()
    handler.cut()


def cut_in_body(handler: Handler) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "100")
    handler.end_headers()
    handler.wfile.write(b'{"half": ')
    handler.cut()


@pytest.mark.parametrize(
    "first",
    [say(500, b"x"), say(503, b"x"), say(429, b"x"), Handler.cut, cut_after_head, cut_in_body],
    ids=["500", "503", "429", "cut", "cut after head", "cut in body"],
)
def test_another_backend_takes_over(routed: tuple[SimServer, list[Scripted]], first: Any) -> None:
    router, backends = routed
    order = first_then(backends, first)
    moved = router.metric("request_migrations_total")
    answer = ask(router)
    assert (answer.status, answer.json) == (200, {"ok": 1})
    assert len(set(order)) == len(order) == 2
    assert router.metric("request_migrations_total") == moved + 1


def test_a_busy_backend_is_left_alone_for_a_while() -> None:
    with scripted(MODEL, MODEL) as (busy, idle):
        busy.behaviour = say(429, b"x", Retry_After="5")
        urls = (busy.url, idle.url)
        with router_process(urls, router=RouterConfig("round-robin")) as router:
            assert [ask(router).status for _ in range(6)] == [200] * 6
    assert len(busy.calls) == 1 and len(idle.calls) == 6


def test_refusals_of_all(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    for backend in backends:
        backend.behaviour = say(429, b"x", Retry_After="7")
    answer = ask(router)
    assert (answer.status, answer.headers["retry-after"]) == (429, "7")
    assert all(backend.name in answer.error["message"] for backend in backends)
    assert [len(backend.calls) for backend in backends] == [1, 1], "each was tried once"
    for backend in backends:
        backend.behaviour = say(500, b'{"error": "the last one"}')
    answer = ask(router)
    assert (answer.status, answer.body) == (500, b'{"error": "the last one"}')


def test_a_stream_that_breaks_off_says_so(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed

    def break_off(handler: Handler) -> None:
        handler.start_stream()
        handler.chunk(EVENT % 0)
        handler.chunk(b'data: {"half":')
        time.sleep(0.05)
        handler.cut()

    for backend in backends:
        backend.behaviour = break_off
    answer = ask(router, stream=True)
    *_, half, last, rest = answer.body.split(b"\n\n")
    assert half == b'data: {"half":' and rest == b""
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert error["code"] == "backend_lost"
    assert any(backend.name in error["message"] for backend in backends)
    assert b"[DONE]" not in answer.body
    assert sum(len(backend.calls) for backend in backends) == 1, "nobody else begins anew"


def test_a_router_that_stops_ends_open_calls_with_an_error(tmp_path: Path) -> None:
    begun, over = threading.Event(), threading.Event()

    def hang(handler: Handler) -> None:
        handler.start_stream()
        handler.chunk(EVENT % 1)
        begun.set()
        over.wait(GENEROUS_S)

    log = tmp_path / "log"
    with scripted(MODEL) as (backend,), log.open("w") as file:
        backend.behaviour = hang
        config = ServerConfig(drain_timeout_s=0.1)
        with router_process((backend.url,), config, log=file) as router:
            connection = http.client.HTTPConnection(*router.address, timeout=GENEROUS_S)
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/chat/completions", b"{}", headers)
            answer = connection.getresponse()
            assert begun.wait(GENEROUS_S)
            router.process.terminate()
            said = answer.read()  # whole: the last chunk came
            connection.close()
        over.set()
    assert said.startswith(EVENT % 1) and b"the router is shutting down" in said
    assert "Traceback" not in log.read_text()


def test_open_calls_are_bounded(routed: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = routed
    for backend in backends:
        backend.behaviour = count_to(100, gap_s=0.05)
    body = {"model": MODEL, "messages": [], "stream": True}
    with contextlib.ExitStack() as stack:
        for _ in range(4):
            connection = stack.enter_context(router.open_call("/v1/chat/completions", body))
            connection.recv(100)
        answer = ask(router)
        assert answer.status == 429 and answer.error["code"] == "max_concurrency"
        assert answer.headers["retry-after"] == "1"
    wait_until(lambda: router.call("GET", "/workers").json["num_open"] == 0, "all are gone")


# Backends that come and go, and what each of them has.


def test_backends_come_and_go(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        absent = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with scripted("a", "b") as (a, b), router_process((absent, a.url, b.url)) as router:
            assert run(["status", "--url", router.url]) == 0
            assert "backend" in capsys.readouterr().out
            assert ready_names(router) == {a.name, b.name}
            assert router.call("GET", "/health").status == 200
            cards = router.call("GET", "/v1/models").json["data"]
            assert [card["id"] for card in cards] == ["a", "b"]
            assert router.call("GET", "/v1/models/b").json["id"] == "b"
            assert "'a', 'b'" in router.call("GET", "/v1/models/c").error["message"]
            for model in ("a", "b", "b", "a"):  # each goes where its model is
                assert ask(router, model=model).status == 200
            assert (len(a.calls), len(b.calls)) == (2, 2)
            assert ask(router, model="c").status == 200, "whoever is asked may know it"
            b.stop()
            wait_until(lambda: ready_names(router) == {a.name}, "it is noticed")
            answer = ask(router, model="b")
            assert answer.status == 503
            assert f"'b' is up: {absent[7:]}: Connection refused" in answer.error["message"]
            data = router.call("GET", "/dashboard/data").json
            assert data["model"] == "a" and len(data["pool"]["workers"]) == 3
            a.stop()
            wait_until(lambda: not ready_names(router), "nobody is left")
            answer = ask(router, model="a")
            assert answer.status == 503 and answer.error["code"] == "no_backend"
            assert router.call("GET", "/health").status == 503


def test_a_backend_that_was_not_there_was_not_restarted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with scripted(MODEL) as (first,):
        pass
    port = first.server_address[1]
    with contextlib.ExitStack() as stack:
        router = stack.enter_context(router_process((first.url,), route=QUICK))

        def told() -> tuple[str, int, int]:
            (worker,) = router.call("GET", "/workers").json["workers"]
            return worker["state"], worker["restarts"], worker["returns"]

        assert told() == ("failed", 0, 0)
        for times in range(2):
            backend = Scripted(MODEL, port)
            stack.callback(backend.stop)
            wait_until(lambda: told() == ("ready", 0, times), "the backend is up")  # noqa: B023
            backend.behaviour = Handler.cut
            assert ask(router).status == 503
            backend.stop()
            wait_until(lambda: told() == ("failed", 0, times), "the backend is down")  # noqa: B023
        assert run(["status", "--url", router.url]) == 0
        said = "".join(capsys.readouterr())
        assert "restarted" not in said and "was down and came back 1 times" in said
        assert router.call("GET", "/dashboard/data").json["restarts"] == 0
        assert router.metric("worker_restarts_total") == 0


def test_keys(capsys: pytest.CaptureFixture[str]) -> None:
    config = ServerConfig(api_keys=("front",), request_timeout_s=0.3)
    with scripted(MODEL) as (backend,):
        route = replace(QUICK, backend_key="back")
        with router_process((backend.url,), config, route=route) as router:
            assert ask(router).status == 401
            headers = {"authorization": "Bearer front"}
            answer = router.call("POST", "/v1/completions", {"model": MODEL}, headers)
            assert answer.status == 200
            assert backend.calls[0][1]["authorization"] == "Bearer back"
            backend.behaviour = lambda handler: time.sleep(1.0)
            answer = router.call("POST", "/v1/completions", {"model": MODEL}, headers)
            assert answer.status == 408 and answer.error["code"] == "deadline"


# Our own servers, and OpenAI's client.


def test_two_servers_and_a_real_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    with (
        contextlib.closing(Collector()) as collector,
        traced_server(collector) as one,
        traced_server(collector) as two,
        router_process((one.url, f"{two.url}/v1"), traced(collector)) as router,
    ):
        client = openai.OpenAI(base_url=f"{router.url}/v1", api_key="none", max_retries=0)
        assert [model.id for model in client.models.list()] == [SIM]
        first = streamed(client, "Hello there")
        assert first == DEFAULT_TEXT
        with pytest.raises(openai.BadRequestError, match="nope: unknown or unsupported field"):
            streamed(client, "Hello", extra_body={"nope": 1})
        check_affinity(client, router)
        check_trace(client, collector)
        check_killed(client, router, one, two)


def traced(collector: Collector) -> ServerConfig:
    return ServerConfig(port=0, otlp_endpoint=collector.url)


def traced_server(collector: Collector) -> contextlib.AbstractContextManager[SimServer]:
    return sim_server(traced(collector), step_ms=2.0)


def check_trace(client: openai.OpenAI, collector: Collector) -> None:
    """A router and the server behind it share the client's trace."""
    trace_id, parent_id = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    headers = {"traceparent": f"00-{trace_id}-{parent_id}-01"}
    streamed(client, "Hello", extra_headers=headers)
    wait_until(lambda: "chat" in collector.of("tokenmill-route", trace_id), "the router's came")
    wait_until(lambda: len(collector.of("tokenmill", trace_id)) == 7, "the server's came")
    routed, served = (collector.of(s, trace_id) for s in ("tokenmill-route", "tokenmill"))
    (outgoing,) = [span for name, span in routed.items() if name.startswith("POST 127.0.0.1:")]
    assert set(routed) == {"chat", "tokenize", "route", outgoing.name}
    assert routed["chat"].parent_span_id.hex() == parent_id
    assert outgoing.parent_span_id == routed["chat"].span_id
    assert served[f"chat {SIM}"].parent_span_id == outgoing.span_id
    stages = {"parse", "tokenize", "route", "queue", "prefill", "decode"}
    assert set(served) == {f"chat {SIM}", *stages}


def streamed(client: openai.OpenAI, content: str, **more: Any) -> str:
    messages: Any = [{"role": "user", "content": content}]
    stream = client.chat.completions.create(model=SIM, messages=messages, stream=True, **more)
    return "".join(chunk.choices[0].delta.content or "" for chunk in stream)


def check_affinity(client: openai.OpenAI, router: SimServer) -> None:
    """Each of several long beginnings stays with one backend."""
    for topic in range(4):
        told = f"topic {topic} " * 8
        before = {w["name"]: w["routed"] for w in router.call("GET", "/workers").json["workers"]}
        for turn in range(4):
            streamed(client, f"{told} turn {turn}")
        view = router.call("GET", "/workers").json
        took = {w["name"]: w["routed"] - before[w["name"]] for w in view["workers"]}
        assert sorted(took.values()) == [0, 4], took
        last = view["decisions"][-1]
        assert last["cached_tokens"] >= 16 and took[last["worker"]] == 4
        assert set(last["terms"]) == set(took)


def check_killed(client: openai.OpenAI, router: SimServer, one: SimServer, two: SimServer) -> None:
    messages: Any = [{"role": "user", "content": "count: 400"}]
    stream = client.chat.completions.create(model=SIM, messages=messages, stream=True)
    next(iter(stream))
    view = router.call("GET", "/workers").json
    (busy,) = [w["name"] for w in view["workers"] if w["num_requests"]]
    killed = one if busy in one.url else two
    os.kill(killed.process.pid, signal.SIGSTOP)  # nothing more leaves it, then it is gone
    for worker in killed.worker_pids():
        os.kill(worker, signal.SIGKILL)
    killed.process.kill()
    with pytest.raises(openai.APIError, match="was lost in the middle"):
        for _ in stream:
            pass
    killed.process.wait()
    killed.process.returncode = 0  # sim_server asks how it ended
    assert [streamed(client, "on we go") for _ in range(4)] == [DEFAULT_TEXT] * 4


def test_round_robin_scatters(pair: tuple[SimServer, list[Scripted]]) -> None:
    router, backends = pair
    for backend in backends:
        backend.behaviour = say(200, b"{}")
        backend.calls.clear()
    messages = [{"role": "user", "content": "the same " * 50}]
    for _ in range(4):
        ask(router, messages=messages)
    assert [len(backend.calls) for backend in backends] == [2, 2]


# Without processes.


def test_the_length_of_answers_is_learnt() -> None:
    def behave(handler: Handler) -> None:
        if json.loads(handler.body).get("stream"):
            return count_to(1000, gap_s=0.1)(handler)
        handler.reply(200, b'{"usage": {"completion_tokens": 1}}')

    def decode_ms(router: SimServer) -> float:
        """What the open stream costs the next call, in the router's view."""
        ask(router)
        terms = router.call("GET", "/workers").json["decisions"][-1]["terms"]
        return max(worker["decode_ms"] for worker in terms.values())

    with scripted(MODEL, MODEL) as backends:
        for backend in backends:
            backend.behaviour = behave
        urls = tuple(backend.url for backend in backends)
        with router_process(urls, ServerConfig(), RouterConfig("kv")) as router:
            body = {"model": MODEL, "messages": [], "stream": True}
            with router.open_call("/v1/chat/completions", body) as connection:
                connection.recv(1 << 16)
                before = decode_ms(router)
                for _ in range(10):
                    ask(router)
                assert 0 < decode_ms(router) < before / 4


def test_prompts_without_a_tokenizer_begin_alike() -> None:
    def prompt(*contents: str, **more: Any) -> Any:
        messages = [{"role": "user", "content": content} for content in contents]
        return read_prompt(json.dumps({"messages": messages, **more}).encode(), None)

    short, longer = prompt("a" * 40), prompt("a" * 40, "b" * 40)
    common = len(short.token_ids) - 1
    assert common > 10 and list(longer.token_ids[:common]) == list(short.token_ids[:common])
    assert prompt("a", model="x").salt != prompt("a", model="y").salt
    assert prompt("a", cache_salt="x").salt != prompt("a").salt


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ((), "--backend is missing"),
        (("localhost:8000",), "--backend must be http://HOST:PORT"),
        (("http://",), "--backend must be"),
        (("http://h:x",), "--backend must be"),
        (("http://user:pass@h",), "--backend must be"),
        (("http://h:1", "http://H:1/v1/"), "is given twice"),
    ],
)
def test_urls_that_are_none(urls: tuple[str, ...], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        read_backends(urls)


def test_a_base_url_has_no_v1() -> None:
    assert base_url("https://Host:1/x/v1/") == "https://host:1/x"
