from __future__ import annotations

import socket
from itertools import pairwise

import pytest

from api.sim import MODEL
from api.sim_server import sim_server
from tokenmill.bench.commands.frontend import FrontendBenchError, Stream, measure_frontend
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
        report = measure_frontend(server.url, MODEL, 8, 30, server.process.pid)
        assert report["num_streams"] == 8 and report["num_tokens"] == 8 * 30
        assert report["tok_s"] > 0 and report["tokens_per_chunk"] >= 1.0
        assert report["ttft_ms"]["p99"] >= report["ttft_ms"]["p50"] > 0
        assert {"client_cpu", "server_cpu", "worker_cpu"} <= set(report)
        with pytest.raises(FrontendBenchError, match="404 Not Found"):
            measure_frontend(server.url, "other", 2, 5)
    with pytest.raises(FrontendBenchError, match="expected http"):
        measure_frontend("localhost", MODEL)
