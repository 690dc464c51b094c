"""The client that measures the HTTP server: events, failures and delays."""

from __future__ import annotations

import socket
import sys
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from api.sim import MODEL
from api.sim_server import sim_server
from benchmarks import front_peers
from benchmarks.front_client import (
    TICK_NS,
    FrontendBenchError,
    FrontLoad,
    Probe,
    Stream,
    Streamed,
)
from benchmarks.frontend import measure
from tokenmill.core.metrics import RequestTimes

ANSWER = (
    b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
    b'20\r\ndata: {"role"}\n\ndata: {"a"}\n\n\r\n'
    b'10\r\ndata: {"b"}\n\n\r\n'
    b'50\r\ndata: {"end"}\n\ndata: {"usage":{"completion_tokens":17}}\n\ndata: [DONE]\n\n\r\n'
    b"0\r\n\r\n"
)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_counted_wherever_the_bytes_are_cut(size: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        stream = Stream(ours, RequestTimes(1))
        ends = []
        first = len(b"HTTP/1.1 200 ")
        cuts = [0, *range(first, len(ANSWER), size), len(ANSWER)]
        for start, end in pairwise(cuts):
            theirs.sendall(ANSWER[start:end])
            ends.append(stream.receive())
    assert ends == [False] * (len(ends) - 1) + [True]
    assert stream.num_events == 5 and stream.num_tokens == 17


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"HTTP/1.1 429 Too Many Requests\r\n\r\n", "refused a stream"),
        (b"HTTP/1.1 200 OK\r\n\r\n0\r\n\r\n", "without usage"),
        (b"", "closed a stream"),
    ],
)
def test_streams_that_go_wrong(data: bytes, message: str) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(data)
        theirs.close()
        with pytest.raises(FrontendBenchError, match=message):
            Stream(ours, RequestTimes(1)).receive()


def test_a_small_run_against_the_server() -> None:
    with sim_server() as server:
        for num_processes in (1, 2):
            with closing(FrontLoad(server.url, MODEL, num_processes)) as load:
                point = measure(load, 8, 30, server.process.pid)
            assert point["num_streams"] == 8 and point["num_tokens"] == 8 * 30
            assert point["tok_s"] > 0 and point["tokens_per_chunk"] >= 1.0
            assert point["ttft_ms"]["p99"] >= point["ttft_ms"]["p50"] > 0
            request_us, cores = point["us_per_request"], point["server_cpu"]
            assert request_us is not None and request_us > 0 and cores is not None and cores > 0
        with pytest.raises(FrontendBenchError, match="404 Not Found"):
            measure(FrontLoad(server.url, "other"), 2, 5)
    with pytest.raises(FrontendBenchError, match="expected http"):
        FrontLoad("localhost", MODEL)


def test_both_fronts_are_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of a Python with vLLM stands one that serves our own front."""
    stand_in = tmp_path / "python"
    server = f"{sys.executable} -m benchmarks.frontend --role frontend-server --num-streams 4"
    stand_in.write_text(f"#!/bin/sh\nexec {server}\n")
    stand_in.chmod(0o700)
    monkeypatch.setattr(front_peers, "LOADS", ((4, 10, 1000),))
    report = front_peers.BENCHMARK.call(["--vllm-python", str(stand_in)])
    assert [row["server"] for row in report["rows"]] == ["tokenmill", "vllm"]
    assert all(row["us_per_token"] and row["us_per_request"] > 0 for row in report["rows"])


def test_delays_count_once_all_streams_have_begun() -> None:
    first = Streamed(delays_ms=[9.0, 8.0, 1.0], read_ns=[10, 20, 40], begun_ns=10)
    first.add(Streamed(delays_ms=[7.0, 2.0], read_ns=[30, 50], begun_ns=30))
    assert first.steady_delays_ms == [1.0, 2.0]


@pytest.mark.parametrize("size", [1, 5, 64, 1000])
def test_a_probe_reads_the_time_from_the_words(size: int) -> None:
    words = [b"zero", b"one", b"two", b"three", b"four"]
    probe = Probe({word: tick for tick, word in enumerate(words)})
    data = b'data: {"choices":[{"delta":{"content":" four"}}]}\n\n'
    data += b'data: {"choices":[{"delta":{"content": " one two"}}]}\n\ndata: {"usage":null}\n\n'
    for start in range(0, len(data), size):
        probe.read(data[start : start + size], 13 * TICK_NS + 1)  # tick 3 of the third round
    delays = [round(ms / TICK_NS * 1e6) for ms in probe.delays_ms]
    assert delays == [4, 2, 1]
