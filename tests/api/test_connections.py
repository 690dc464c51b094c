"""Hostile and clumsy clients: what never comes, comes late, is too much, or is no HTTP at all."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from api.framing_cases import CASES, Case
from api.sim_server import GENEROUS_S, KIND, SimServer, sim_server, wait_until
from proxy.route_server import MODEL, Scripted, router_process
from tokenmill.core.config import SchedulerConfig, ServerConfig

HASTY = ServerConfig(
    port=0,
    header_timeout_s=0.5,
    body_timeout_s=2.0,
    body_idle_timeout_s=0.5,
    keep_alive_timeout_s=1.5,
    max_connections=64,
)
HALF_HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConte"
HALF_BODY = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
)
HALF_BODY += b'Content-Length: 99\r\n\r\n{"prompt'


@pytest.fixture(scope="module")
def backend() -> Iterator[Scripted]:
    """Behind the router."""
    scripted = Scripted(MODEL)
    yield scripted
    scripted.stop()


@pytest.fixture(scope="module", params=["serve", "route"])
def server(request: pytest.FixtureRequest, backend: Scripted) -> Iterator[SimServer]:
    """The server and the router, each with its stderr in a file; both have the same front."""
    with tempfile.TemporaryFile("w+") as log, contextlib.ExitStack() as stack:
        if request.param == "serve":
            running = stack.enter_context(sim_server(HASTY, log=log))
        else:
            running = stack.enter_context(router_process((backend.url,), HASTY, log=log))
        yield running
        stack.close()
        log.seek(0)
        written = log.read()
        assert "Traceback" not in written and "Exception" not in written, written


def send(server: SimServer, data: bytes) -> socket.socket:
    connection = socket.create_connection(server.address, timeout=GENEROUS_S)
    connection.sendall(data)
    return connection


def read(connection: socket.socket) -> bytes:
    """All that comes until the server closes; a reset is an end, too."""
    parts = []
    with connection, contextlib.suppress(ConnectionResetError):
        while part := connection.recv(65536):
            parts.append(part)
    return b"".join(parts)


def answer(raw: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = raw.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    return int(first.split()[1]), dict(line.split(": ", 1) for line in lines), body


def error_code(raw: bytes) -> tuple[int, str]:
    """Status and code of an answer, which must be JSON, have an id and end the connection."""
    status, headers, body = answer(raw)
    assert headers["connection"] == "close" and headers["x-request-id"]
    return status, json.loads(body)["error"]["code"]


def trickle(connection: socket.socket, piece: bytes) -> None:
    """Send a piece again and again until the server will have no more of it."""
    with contextlib.suppress(OSError):
        for _ in range(int(GENEROUS_S / 0.1)):
            connection.sendall(piece)
            connection.settimeout(0.1)
            with contextlib.suppress(TimeoutError):
                if connection.recv(1, socket.MSG_PEEK) is not None:
                    break
    connection.settimeout(GENEROUS_S)


def test_half_a_head_and_half_a_body_get_a_408(server: SimServer) -> None:
    for half in (HALF_HEAD, HALF_BODY):
        assert error_code(read(send(server, half))) == (408, "request_timeout")
    wait_until(lambda: server.metric("requests_total", 'status="408"') >= 1, "not as a 499")


def test_a_byte_now_and_then_does_not_help(server: SimServer) -> None:
    for begin, piece in ((HALF_HEAD, b"x"), (HALF_BODY, b" ")):
        connection = send(server, begin)
        trickle(connection, piece)
        assert error_code(read(connection)) == (408, "request_timeout")


def test_silent_connections_are_closed_without_a_word(server: SimServer) -> None:
    silent = send(server, b"")
    blank = send(server, b"\r\n\r\n")
    kept = send(server, b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
    status, headers, body = answer(read(kept))
    assert (status, "connection" in headers, body) == (200, False, b'{"status":"ok"}')
    assert read(silent) == read(blank) == b""


def test_an_answer_does_not_wait_for_the_rest_of_the_body(server: SimServer) -> None:
    status, _, body = answer(read(send(server, HALF_BODY.replace(b"/v1/completions", b"/nothing"))))
    assert status == 404 and json.loads(body)["error"]["code"] == "unknown_route"


def test_clients_that_drop_a_body_leave_no_traceback(server: SimServer) -> None:
    for linger in (struct.pack("ii", 0, 0), struct.pack("ii", 1, 0)):  # an end, and a reset
        connection = send(server, HALF_BODY)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        connection.close()
    wait_until(lambda: server.metric("requests_total", 'status="499"') >= 2, "both are counted")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc", (400, "invalid_http")),
        (b"CONNECT example.com:443 HTTP/1.1\r\nHost: localhost\r\n\r\n", (400, "invalid_http")),
        (b"GET / HTTP/1.1\r\n" + b"a: %s\r\n" % (b"x" * 999) * 99, (431, "head_too_large")),
        (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 70_000), (431, "head_too_large")),
        (b"GET / HTTP/1.1\r\na: %s" % (b"x" * 600_000), (431, "head_too_large")),
    ],
    ids=lambda value: repr(value)[:40] if isinstance(value, bytes) else "",
)
def test_what_is_no_http_is_told(server: SimServer, data: bytes, expected: tuple[int, str]) -> None:
    connection = socket.create_connection(server.address, timeout=GENEROUS_S)
    with contextlib.suppress(OSError):  # it may be closed before all is sent
        connection.sendall(data)
    assert error_code(read(connection)) == expected


@pytest.mark.parametrize("case", CASES, ids=str)
def test_requests_are_framed_as_the_cases_say(
    server: SimServer, backend: Scripted, case: Case
) -> None:
    """None is answered that is to be refused, and a backend sees no more than the router did."""
    backend.calls.clear()
    connection = send(server, case.data)
    if not case.calls:
        status, code = error_code(read(connection))
        assert status == case.status and code in ("invalid_http", "unknown_coding")
        assert not backend.calls
        return
    with connection, connection.makefile("rb") as file:
        for _ in case.calls:
            head = list(iter(file.readline, b"\r\n"))
            (length,) = [int(line.split()[1]) for line in head if b"content-length" in line]
            assert b"invalid_http" not in file.read(length)
    for path, headers, body in backend.calls:
        assert ("POST", path, body) in case.calls
        names = [name.lower() for name in headers]
        assert names.count("host") == names.count("content-length") == 1
        assert {"x-api-key", "a", "transfer-encoding"}.isdisjoint(names)


def test_pages_of_other_sites_get_nothing(server: SimServer, backend: Scripted) -> None:
    backend.calls.clear()
    for path in ("/v1/models", "/dashboard/data", "/metrics"):
        refused = server.call("GET", path, headers={"host": "evil.example"})
        assert (refused.status, refused.error["code"]) == (403, "unknown_host")
        assert "--allowed-hosts evil.example" in refused.error["message"]
    calls = [
        ({"content-type": "text/plain"}, 415, "unsupported_media_type"),
        ({"origin": "https://evil.example"}, 403, "foreign_origin"),
        ({"host": "evil.example", "origin": "https://evil.example"}, 403, "unknown_host"),
    ]
    for headers, status, code in calls:
        refused = server.call("POST", "/v1/completions", {"prompt": "say: hi"}, headers)
        assert (refused.status, refused.error["code"]) == (status, code)
        assert refused.headers["x-request-id"] and not backend.calls
    page = {
        "origin": f"http://{server.address[0]}:{server.address[1]}",
        "sec-fetch-site": "same-origin",
    }
    taken = server.call("POST", "/v1/completions", {"model": MODEL, "prompt": "say: hi"}, page)
    assert taken.status in (200, 404)
    assert not any({"origin", "sec-fetch-site"} & set(headers) for _, headers, _ in backend.calls)


def test_an_upgrade_that_is_not_taken_does_not_lose_the_body(server: SimServer) -> None:
    body = json.dumps({"model": MODEL, "prompt": "say: hi"}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{KIND}"
    head += "Connection: Upgrade, HTTP2-Settings\r\n"
    head += f"Upgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\nContent-Length: {len(body)}\r\n\r\n"
    for cut in (len(head), len(head) + 5):
        connection = send(server, (head.encode() + body)[:cut])
        connection.sendall((head.encode() + body)[cut:])
        status, _, answered = answer(read(connection))
        assert status in (200, 404) and b"invalid_json" not in answered


def test_pipelined_calls_are_answered_in_order(server: SimServer) -> None:
    paths = (b"/health", b"/nothing", b"/version")
    calls = [b"GET %s HTTP/1.1\r\nHost: localhost\r\n\r\n" % path for path in paths]
    calls[-1] = calls[-1].replace(b"Host", b"Connection: close\r\nHost")
    raw = read(send(server, b"".join(calls)))
    assert [int(part[:3]) for part in raw.split(b"HTTP/1.1 ")[1:]] == [200, 404, 200]


def test_others_are_served_while_hundreds_send_half_a_head(server: SimServer) -> None:
    """More half heads than there may be connections: the oldest make room."""
    halves = [send(server, HALF_HEAD) for _ in range(4 * HASTY.max_connections)]
    assert server.call("GET", "/health").status == 200
    for half in halves:
        half.close()


def test_heads_of_every_route(server: SimServer) -> None:
    for path in ("/", "/health", "/ping", "/version", "/metrics", "/dashboard", "/v1/models"):
        head, whole = (server.call(method, path) for method in ("HEAD", "GET"))
        assert head.status == whole.status == 200 and head.body == b""
        assert head.headers["content-type"] == whole.headers["content-type"]
    assert server.call("POST", "/ping").status == 200
    refused = server.call("PUT", "/health")
    assert refused.status == 405 and refused.error["code"] == "method_not_allowed"
    assert refused.headers["allow"] == "GET, HEAD"
    root = server.call("GET", "/").json
    assert root["service"].startswith("tokenmill") and root["version"]
    for name in ("api", "dashboard", "metrics", "health"):
        assert server.call("GET", root[name].replace("/v1", "/v1/models")).status == 200


def test_request_ids_are_echoed_or_made(server: SimServer) -> None:
    own = server.call("GET", "/nothing", headers={"x-request-id": "job-17/a:b"})
    assert own.status == 404 and own.headers["x-request-id"] == "job-17/a:b"
    seen = set()
    for given in ("", "two words", "x" * 129, 'quoted"', "\xe9"):
        seen.add(
            server.call("GET", "/health", headers={"x-request-id": given}).headers["x-request-id"]
        )
    assert len(seen) == 5 and all(each.startswith("req-") for each in seen)


def test_http_1_0_streams_end_with_the_connection() -> None:
    body = json.dumps({"prompt": "say: hi there", "stream": True}).encode()
    head = f"POST /v1/completions HTTP/1.0\r\n{KIND}Content-Length: {len(body)}\r\n\r\n"
    with sim_server() as server:
        _, headers, events = answer(read(send(server, head.encode() + body)))
        assert "transfer-encoding" not in headers and headers["connection"] == "close"
        assert events.startswith(b"data: {") and events.endswith(b"data: [DONE]\n\n")


def test_a_client_that_pipelines_and_leaves_is_aborted() -> None:
    call = {"prompt": "count: 400", "max_tokens": 400, "stream": True}
    with sim_server(step_ms=50.0) as server:
        connection = server.open_call("/v1/completions", call)
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        time.sleep(0.1)
        connection.close()
        wait_until(lambda: server.metric("num_requests_running") == 0, "it is aborted")
        assert server.metric("request_failure_total", 'finished_reason="abort"') == 1


def test_pages_elsewhere_may_call_if_their_origin_is_named() -> None:
    origin = {"origin": "https://chat.example"}
    ask = {**origin, "access-control-request-method": "POST"}
    ask |= {"access-control-request-headers": "authorization, content-type"}
    config = ServerConfig(port=0, cors_origins=("https://chat.example",), api_keys=("k",))
    with sim_server(config) as server:
        allowed = server.call("OPTIONS", "/v1/chat/completions", headers=ask)
        assert allowed.status == 200
        assert allowed.headers["access-control-allow-origin"] == "https://chat.example"
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        models = server.call("GET", "/v1/models", headers=origin)
        assert models.status == 401
        assert "x-request-id" in models.headers["access-control-expose-headers"]
        assert models.headers["access-control-allow-origin"] == "https://chat.example"
        other = server.call("GET", "/health", headers={"origin": "https://evil.example"})
        assert "access-control-allow-origin" not in other.headers
        pool = server.call("OPTIONS", "/workers/scale", headers=ask)
        assert pool.status == 405 and "access-control-allow-origin" not in pool.headers
    with sim_server() as server:
        assert server.call("OPTIONS", "/v1/chat/completions", headers=ask).status == 405


def test_a_client_that_reads_nothing_is_dropped() -> None:
    call: dict[str, Any] = {"stream": True, "logprobs": True, "top_logprobs": 20}
    call["messages"] = [{"role": "user", "content": "count: 8000"}]
    limits = SchedulerConfig(max_model_len=8192)
    with sim_server(ServerConfig(port=0, send_timeout_s=0.5), limits) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(server.address)
        body = json.dumps(call).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{head}{KIND}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        labels = 'endpoint="/v1/chat/completions"'
        wait_until(lambda: server.metric("requests_total", labels) == 1, "the call is over")
        connection.settimeout(GENEROUS_S)
        assert b"[DONE]" not in read(connection)


def descriptors(server: SimServer) -> int:
    return len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


def test_connections_are_bounded() -> None:
    config = ServerConfig(port=0, max_connections=50)
    with sim_server(config) as server:
        before = descriptors(server)
        idle = [send(server, b"") for _ in range(300)]
        assert server.call("GET", "/health").status == 200
        wait_until(lambda: descriptors(server) <= before + 51, "the surplus is closed")
        for connection in idle:
            connection.close()
