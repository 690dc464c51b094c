"""The endpoint client against a server of known delays and known faults."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from bench.scripted_server import (
    FIRST_S,
    NEXT_S,
    NUM_TOKENS,
    PAUSE_S,
    ScriptedServer,
    scripted_server,
)
from tokenmill.bench.client import connections as client_module
from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.connections import Client, route_url
from tokenmill.bench.client.records import Endpoint, LoadRecord, SseError, SseScanner, request_body
from tokenmill.bench.client.summary import summarize_point, times_of, usage_fault
from tokenmill.bench.results.reports import as_json
from tokenmill.bench.workload import BenchError
from tokenmill.http_connection import ConnectionPool


def summarized(*args: Any, **options: Any) -> dict[str, Any]:
    return as_json(summarize_point(*args, **options))


def ask(server: ScriptedServer, model: str, times: int = 1, **fields: object) -> list[LoadRecord]:
    """So many requests, one after another on one client."""
    url = route_url(str(fields.pop("url", server.url)), "chat")
    target = Endpoint(url, model, keep_text=True, **fields)  # type: ignore[arg-type]
    return asyncio.run(_ask(target, times))


async def _ask(target: Endpoint, times: int) -> list[LoadRecord]:
    client = Client(target)
    try:
        return [
            await client.call(
                LoadRecord(index, 0, 0, max_tokens=64), request_body(target, "hello", 64)
            )
            for index in range(times)
        ]
    finally:
        client.close()


def test_stamps_are_those_of_the_server(server: ScriptedServer) -> None:
    before = len(server.seen)
    records = ask(server, "ok", 12)
    seen = server.seen[before:]
    errors_ms = []
    for record, truth in zip(records, seen, strict=True):
        assert record.error is None and record.num_outputs == NUM_TOKENS
        times = times_of(record, stream=True)
        assert record.sent_ns <= truth.arrived_ns
        assert record.first_ns >= truth.wrote_ns[0] and record.last_ns >= truth.wrote_ns[-1]
        assert times.ttft_ms is not None and times.ttft_ms >= FIRST_S * 1e3 - 1
        true_ms = (truth.wrote_ns[0] - truth.arrived_ns) / 1e6
        true_tpot = (truth.wrote_ns[-1] - truth.wrote_ns[0]) / 1e6 / (NUM_TOKENS - 1)
        assert times.tpot_ms is not None
        errors_ms += [times.ttft_ms - true_ms, abs(times.tpot_ms - true_tpot)]
        assert len(record.gaps_ns) == NUM_TOKENS - 1
        assert sum(record.gaps_ns) == record.last_ns - record.first_ns
    assert statistics.median(errors_ms) < 5
    point = summarized(ClientLoad(concurrency=1, num_sessions=12), records)
    assert point["tpot_ms"]["p50"] >= NEXT_S * 1e3 - 1
    assert point["num_output_tokens"] == 12 * NUM_TOKENS and point["num_prompt_tokens"] == 12 * 7
    assert point["errors"] == {} and point["doubts"] == {}


def test_one_connection_is_kept(server: ScriptedServer) -> None:
    before = len(server.seen)
    ask(server, "ok", 3)
    assert len({seen.connection for seen in server.seen[before:]}) == 1


@pytest.mark.parametrize(
    ("model", "error", "detail"),
    [
        ("http500", "http_500", "broken: http500"),
        ("http429", "http_429", "broken: http429"),
        ("drop", "dropped", "after 3 outputs"),
        ("no-finish", "dropped", f"after {NUM_TOKENS} outputs"),
        ("hang-up", "dropped", "after 0 outputs"),
        ("malformed", "malformed_sse", "delta"),
        ("garbage-line", "malformed_sse", "<html>"),
        ("error-event", "error_in_stream", "out of memory"),
        ("not-http", "malformed_body", "not HTTP"),
    ],
)
def test_misbehaviour_has_its_class(
    server: ScriptedServer, model: str, error: str, detail: str
) -> None:
    records = ask(server, model, 2)
    assert [record.error for record in records] == [error] * 2
    assert detail in records[0].detail
    point = summarized(ClientLoad(concurrency=1, num_sessions=2), records)
    assert point["errors"] == {error: {"count": 2, "first": records[0].detail}}
    assert point["num_completed"] == 0 and point["ttft_ms"] == {}


def test_stall_is_a_timeout(server: ScriptedServer) -> None:
    (record,) = ask(server, "stall", timeout_s=0.2)
    assert record.error == "timeout"


def test_nobody_listens(server: ScriptedServer) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        (record,) = ask(server, "ok", url=f"http://127.0.0.1:{taken.getsockname()[1]}")
    assert record.error == "connect" and record.sent_ns == 0


@pytest.mark.parametrize(
    ("model", "doubt", "tokens"),
    [
        ("no-usage", "usage_missing", NUM_TOKENS),
        ("lies-low", "usage_inconsistent", NUM_TOKENS),
        ("lies-high", "usage_inconsistent", NUM_TOKENS),
        ("lies-bytes", "usage_inconsistent", NUM_TOKENS),
        ("lies-total", "usage_inconsistent", NUM_TOKENS),
    ],
)
def test_a_lie_about_usage_moves_no_rate(
    server: ScriptedServer, model: str, doubt: str, tokens: int
) -> None:
    point = summarized(ClientLoad(concurrency=1, num_sessions=1), ask(server, model))
    assert point["doubts"][doubt]["count"] == 1
    assert point["num_output_tokens"] == tokens and point["errors"] == {}


def test_a_tokenizer_is_believed_over_usage(server: ScriptedServer) -> None:
    (record,) = ask(server, "ok")
    assert record.text == " abcdef" * NUM_TOKENS
    record.counted_tokens = NUM_TOKENS + 1
    assert usage_fault(record) is None
    record.counted_tokens = 3 * NUM_TOKENS
    assert usage_fault(record) is not None
    point = summarized(ClientLoad(concurrency=1, num_sessions=1), [record])
    assert point["num_output_tokens"] == 3 * NUM_TOKENS


@pytest.mark.parametrize("model", ["crlf", "split", "no-done"])
def test_other_ways_to_write_a_stream(server: ScriptedServer, model: str) -> None:
    (record,) = ask(server, model)
    assert record.error is None and record.num_outputs == NUM_TOKENS
    assert record.completion_tokens == NUM_TOKENS and record.finish_reason == "stop"


def test_faults_of_a_stream_that_is_answered_are_doubts(server: ScriptedServer) -> None:
    """A pause, a missing end, a missing reason and a usage that counts double; one each."""
    names = {"pauses": "stalled", "no-done": "no_done", "no-reason": "no_finish_reason"}
    for model, doubt in {**names, "lies-double": "tokens_per_output"}.items():
        stall_s = PAUSE_S / 2 if model == "pauses" else 60.0
        load = ClientLoad(concurrency=1, num_sessions=1)
        point = summarized(load, ask(server, model), stall_s=stall_s)
        assert set(point["doubts"]) == {doubt} and point["num_completed"] == 1, model
    assert summarized(load, ask(server, "ok"), stall_s=60.0)["doubts"] == {}


def test_coalesced_chunks_have_both_tpots(server: ScriptedServer) -> None:
    """Three tokens a chunk: over n - 3 tokens, and by LoadGen's rule over n - 1."""
    before = len(server.seen)
    (record,) = ask(server, "coalesced")
    wrote = server.seen[before].wrote_ns
    times = times_of(record, stream=True)
    assert record.num_outputs == NUM_TOKENS and times.num_tokens == 3 * NUM_TOKENS
    span_ms = (record.last_ns - record.first_ns) / 1e6
    assert times.tpot_ms == pytest.approx(span_ms / (3 * NUM_TOKENS - 3))
    assert times.tpot_n1_ms == pytest.approx(span_ms / (3 * NUM_TOKENS - 1))
    assert record.first_ns >= wrote[0] and record.last_ns >= wrote[-1]


def test_a_connection_that_went_stale_is_replaced(server: ScriptedServer) -> None:
    records = ask(server, "close-after", 4)
    assert [record.error for record in records] == [None] * 4
    records = ask(server, "hang-up-later", 3)
    assert [record.error for record in records] == [None] * 3
    assert [record.retried for record in records] == [False, True, True]


def test_not_streamed(server: ScriptedServer) -> None:
    (record,) = ask(server, "ok", stream=False)
    assert record.error is None and record.num_outputs == 1
    point = summarized(ClientLoad(concurrency=1, num_sessions=1), [record], stream=False)
    assert "ttft_ms" not in point and point["e2e_ms"]["p50"] >= FIRST_S * 1e3 - 1
    assert point["num_output_tokens"] == NUM_TOKENS


def test_what_is_sent(server: ScriptedServer) -> None:
    ask(server, "ok", api_key="secret", fields={"ignore_eos": True})
    seen = server.seen[-1]
    assert seen.head.startswith("POST /v1/chat/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer secret\r\n" in seen.head
    assert seen.body == {
        "model": "ok",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 64,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


@pytest.mark.parametrize(
    ("url", "api", "expected"),
    [
        ("http://h:1", "chat", "http://h:1/v1/chat/completions"),
        ("http://h:1/v1/", "completions", "http://h:1/v1/completions"),
        ("https://h/x/v2", "chat", "https://h/x/v2/chat/completions"),
        ("http://h/chat/completions", "chat", "http://h/chat/completions"),
    ],
)
def test_routes(url: str, api: str, expected: str) -> None:
    assert route_url(url, api) == expected


@pytest.mark.parametrize("url", ["h:1", "ftp://h", "http://", "http://h:x"])
def test_urls_that_are_none(url: str) -> None:
    with pytest.raises(BenchError, match="--url must be"):
        route_url(url, "chat")


def test_events_however_they_are_cut() -> None:
    text = (
        b": hello\r\n\r\nevent: x\r\ndata: 1\r\n\r\ndata:2\n\ndata: 3\ndata: 4\n\nid: 7\n\ndata: 5"
    )
    for cut in range(len(text)):
        scanner = SseScanner()
        found = scanner.feed(text[:cut]) + scanner.feed(text[cut:]) + scanner.feed(b"\n\n")
        assert found == [b"1", b"2", b"3\n4", b"5"], cut
    with pytest.raises(SseError):
        SseScanner().feed(b"nonsense\n\n")


def test_stale_means_used_before_and_unanswered() -> None:
    connection = client_module.ClientConnection()
    client = Client(Endpoint("http://h:1/v1/chat/completions", "ok"))
    record = LoadRecord(0, 0, 0, error="dropped")
    assert not client._went_stale(record, connection)
    connection.reused_ns = 1
    assert client._went_stale(record, connection)
    record.error = "timeout"
    assert not client._went_stale(record, connection)
    record.error, connection.got_bytes = "dropped", True
    assert not client._went_stale(record, connection)


def test_a_pool_gives_the_connection_used_last() -> None:
    async def check() -> None:
        pool: ConnectionPool[client_module.ClientConnection] = ConnectionPool(
            "http://h:1", stale_s=1.0
        )
        first, second, old = (client_module.ClientConnection() for _ in range(3))
        for connection in (old, first, second):
            connection.is_open, connection.read_ns = True, time.monotonic_ns()
            pool.give(connection)
        assert pool.take() is second and not pool.went_stale(second), "it was used a moment ago"
        first.read_ns -= 2 * 10**9
        assert pool.take() is first and pool.went_stale(first)
        old.read_ns -= 5 * 10**9
        assert pool.take() is None and not old.is_open

    asyncio.run(check())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes the certificate")
def test_https(tmp_path: Path) -> None:
    key, certificate = str(tmp_path / "key.pem"), str(tmp_path / "cert.pem")
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 1 -subj /CN=localhost"
    command = [*make.split(), "-keyout", key, "-out", certificate]
    subprocess.run(command, check=True, capture_output=True)
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    with scripted_server(tls) as server:
        (refused,) = ask(server, "ok")
        assert refused.error == "connect" and "certificate" in refused.detail.lower()
        records = ask(server, "ok", 2, insecure=True)
    assert [(r.error, r.num_outputs) for r in records] == [(None, NUM_TOKENS)] * 2
