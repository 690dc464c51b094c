"""A router as a hop: what it passes on, what it adds and removes, and what it takes back."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from api.sim_server import KIND, SimServer, wait_until
from proxy.route_server import MODEL, Behaviour, Handler, Scripted, ask, router_process, say
from tokenmill.core.config import RouteConfig
from tokenmill.http_connection import MAX_HEAD_BYTES
from tokenmill.proxy.backend_address import BackendError
from tokenmill.proxy.forwarding import Forwarding

ROUTE = RouteConfig(health_interval_s=0.2, forward=("/pooling", "/v1/audio/"))
HI = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[SimServer, Scripted]]:
    backend = Scripted(MODEL)
    try:
        with router_process((backend.url,), route=ROUTE) as router:
            yield router, backend
    finally:
        backend.stop()


@pytest.fixture
def hop(pair: tuple[SimServer, Scripted]) -> tuple[SimServer, Scripted]:
    router, backend = pair
    backend.behaviour = say(200, b"{}")
    backend.calls.clear()
    states = lambda: [w["state"] for w in router.call("GET", "/workers").json["workers"]]  # noqa: E731
    wait_until(lambda: states() == ["ready"], "the backend is up")
    return pair


def write(*parts: bytes) -> Behaviour:
    """What a backend says instead of a well-made answer."""

    def behave(handler: Handler) -> None:
        handler.wfile.write(b"".join(parts))

    return behave


# What is passed on.


def exchange(router: SimServer, head: str) -> bytes:
    """The first bytes of the answer to a call of {}."""
    data = f"{head} HTTP/1.1\r\nHost: localhost\r\n{KIND}Connection: close\r\nContent-Length: 2\r\n"
    with socket.create_connection(router.address, timeout=30) as connection:
        connection.sendall(f"{data}\r\n{{}}".encode())
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize(
    "path",
    [
        *("/v1/../metrics", "/v1/./completions", "/v1/completions/..", "/v1/completions/.", "/.."),
        *(
            "/v1/%2e%2e/metrics",
            "/v1/.%2E/metrics",
            "/v1/chat%2fcompletions",
            "/v1/completions/%2e",
        ),
        *("/v1/chat%2Fcompletions", "/v1/..;/metrics", "/v1/..%5cmetrics"),
        "/v1\\..\\metrics",
        *("/v1/audio/../../metrics", "/v1/responses/%2e%2e%2fmodels", "/pooling/..%2f..%2fx"),
        "http://localhost/v1/../metrics",
    ],
)
def test_dot_segments_are_refused(hop: tuple[SimServer, Scripted], path: str) -> None:
    router, backend = hop
    for method in ("POST", "GET"):
        answer = exchange(router, f"{method} {path}")
        assert answer.startswith(b"HTTP/1.1 400 ") and b'"invalid_path"' in answer
    assert not backend.calls


def test_only_known_and_listed_routes_are_passed_on(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    for path in ("/v1/chat/completions", "/v1/audio/of/next/year?q=1", "/pooling", "/v1/score"):
        assert router.call("POST", path, {}).status == 200
    assert [path for path, _, _ in backend.calls][1] == "/v1/audio/of/next/year?q=1"
    assert router.call("GET", "/pooling").status == 200
    num_calls = len(backend.calls)
    for path in ("/v1/anything", "/v1/load_lora_adapter", "/poolings", "/sleep", "/v1/audio"):
        answer = router.call("POST", path, {})
        assert (answer.status, answer.error["code"]) == (404, "unknown_route")
    assert router.call("TRACE", "/pooling").status in (404, 405)
    assert len(backend.calls) == num_calls
    assert router.metric("requests_total", 'endpoint="/v1/audio/"') == 1


def test_a_wrong_method_is_told_the_right_ones(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    wrong = [
        ("GET", "/v1/chat/completions", "POST"),
        ("DELETE", "/v1/responses", "POST"),
        ("GET", "/v1/responses/input_tokens", "POST"),
        ("GET", "/v1/videos/sync", "POST"),
        ("GET", "/v1/videos", "POST"),
        ("POST", "/v1/responses/resp_1/input_items", "GET, HEAD"),
        ("POST", "/v1/models", "GET, HEAD"),
    ]
    for method, path, allowed in wrong:
        answer = router.call(method, path)
        assert (answer.status, answer.headers.get("allow")) == (405, allowed), path
    answer = router.call("PUT", "/v1/responses/resp_1")
    assert set(answer.headers["allow"].split(", ")) == {"GET", "DELETE"}
    assert not backend.calls


@pytest.mark.parametrize("listed", ["/metrics", "/", "/v1/", "/workers/", "/dashboard"])
def test_routes_of_the_router_itself_are_not_passed_on(listed: str) -> None:
    own = ("/", "/metrics", "/v1/models", "/workers", "/workers/scale", "/dashboard")
    with pytest.raises(BackendError, match=f"--forward {listed}: the router answers /"):
        Forwarding((listed,)).check(own)
    Forwarding(("/v1/x", "/dash", "/metric/")).check(own)


# Headers.


def test_headers_of_one_connection_end_there(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    backend.behaviour = say(
        200, b"{}", Connection="X-Theirs , keep-alive", X_Theirs="1", X_Kept="1"
    )
    sent = {"Connection": "x-ours, Keep-Alive", "X-Ours": "1", "Keep-Alive": "9", "TE": "trailers"}
    answer = router.call("POST", "/v1/completions", {}, sent | {"X-Mine": "1"})
    names = {name.lower() for name in backend.calls[0][1]}
    assert "x-mine" in names and names.isdisjoint({"x-ours", "keep-alive", "te", "connection"})
    assert answer.headers["x-kept"] == "1" and "x-theirs" not in answer.headers


def test_the_hop_is_named(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    backend.behaviour = say(200, b"{}", Via="1.1 theirs")
    answer = router.call("POST", "/v1/completions", {})
    assert answer.headers["via"] == "1.1 theirs, 1.1 tokenmill"
    given = {"X-Forwarded-For": "203.0.113.7, 10.0.0.1", "Via": "2.0 edge"}
    router.call("POST", "/v1/completions", {}, given)
    first, second = ({n.lower(): v for n, v in call[1].items()} for call in backend.calls)
    assert (first["x-forwarded-for"], first["via"]) == ("127.0.0.1", "1.1 tokenmill")
    assert second["x-forwarded-for"] == "203.0.113.7, 10.0.0.1, 127.0.0.1"
    assert second["via"] == "2.0 edge, 1.1 tokenmill"


def test_an_answer_has_one_date(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    for status in (200, 404, 500):
        backend.behaviour = say(status, b"{}", Date="Thu, 01 Jan 1970 00:00:00 GMT")
        answer = exchange(router, "POST /v1/completions").partition(b"\r\n\r\n")[0].lower()
        assert answer.startswith(b"http/1.1 %d" % status) and answer.count(b"\ndate: ") == 1
        assert b"1970" not in answer


def test_the_docs_say_what_is_passed_on(hop: tuple[SimServer, Scripted]) -> None:
    router, _ = hop
    assert router.call("GET", "/").json["docs"] == "/docs"
    page, api = router.call("GET", "/docs"), router.call("GET", "/openapi.json").json
    assert (page.status, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    for path in ("/v1/chat/completions", "/v1/rerank", "/pooling", "/v1/videos/{video_id}"):
        assert path in api["paths"] and path in page.body.decode()
    assert list(api["paths"]["/v1/videos/{video_id}"]) == ["get", "delete"]
    assert "enum" not in str(
        api["components"]["schemas"]["CompletionRequest"]["properties"]["model"]
    )


# What backends answer.

OK = b"HTTP/1.1 200 OK\r\n"
MANY = b"".join(b"a%d: b\r\n" % number for number in range(MAX_HEAD_BYTES // 32))


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        ([OK, MANY, HI[len(OK) :]], "the head has more than 65536 bytes"),
        ([OK, b"a: ", b"b" * MAX_HEAD_BYTES, HI[len(OK) - 2 :]], "the head has more than 65536"),
        ([b"HTTP/1.1 100 Continue\r\n\r\n" * 8000, HI], "the head has more than 65536 bytes"),
        ([OK, b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * (1 << 18)], "the head has more than"),
        ([OK, b"Transfer-Encoding: chunked\r\n\r\n0\r\n", MANY, b"\r\n"], "the head has more than"),
        ([b"HTTP/1.1 999 What\r\nContent-Length: 0\r\n\r\n"], "its status is 999"),
        ([b"HTTP/1.1 101 No\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n"], "not HTTP"),
        ([OK, b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}"], "not HTTP"),
        ([b"SSH-2.0-x\r\n"], "not HTTP"),
        ([b"HTTP/1.1 500 No\r\nContent-Length: 3000000\r\n\r\n", b"x" * 3_000_000], "1048576"),
    ],
)
def test_an_answer_without_bounds_is_a_502(
    hop: tuple[SimServer, Scripted], said: list[bytes], reason: str
) -> None:
    router, backend = hop
    backend.behaviour = write(*said)
    answer = ask(router)
    assert (answer.status, answer.error["code"]) == (502, "bad_backend_answer")
    assert reason in answer.error["message"] and backend.name in answer.error["message"]


def test_trailers_of_an_answer_are_no_headers(hop: tuple[SimServer, Scripted]) -> None:
    router, backend = hop
    chunks = b"Transfer-Encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nX-Late: 1\r\nSet-Cookie: a\r\n\r\n"
    backend.behaviour = write(OK, chunks)
    answer = ask(router)
    assert (answer.status, answer.body) == (200, b"{}")
    assert answer.headers.keys().isdisjoint({"x-late", "set-cookie", "transfer-encoding"})


@pytest.mark.parametrize("extra", [OK + b"Content-Length: 4\r\n\r\nevil", OK + b"Conte"])
def test_an_answer_that_nobody_asked_for_is_not_that_of_the_next_call(
    hop: tuple[SimServer, Scripted], extra: bytes
) -> None:
    router, backend = hop
    used: list[object] = []

    def behave(handler: Handler) -> None:
        used.append(handler.client_address)
        if len(used) == 1:
            handler.wfile.write(HI + extra)
        else:
            late = b"nt-Length: 4\r\n\r\nevil"
            handler.wfile.write(late if used[1] == used[0] else HI)

    backend.behaviour = behave
    assert [ask(router).body for _ in range(2)] == [b"{}", b"{}"]


def test_the_models_of_a_backend_are_bounded() -> None:
    backend = Scripted("m" * (5 << 20))
    try:
        with router_process((backend.url,), route=ROUTE) as router:
            (worker,) = router.call("GET", "/workers").json["workers"]
            assert worker["state"] == "failed"
            assert "answer 200 has more than 4194304 bytes" in worker["last_failure"]
    finally:
        backend.stop()
