"""What goes wrong around a server: clients that leave or stall, floods, signals, dead workers."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import resource
import signal
import socket
import subprocess
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from api.sim import DEFAULT_TEXT, MAX_MODEL_LEN, MODEL
from api.sim_server import GENEROUS_S, KIND, SimServer, sim_server, wait_until
from tokenmill.api.errors import of_output
from tokenmill.api.keys import Keys
from tokenmill.api.server import bind, listening, serve
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig
from tokenmill.core.requests import End
from tokenmill.core.types import FinishReason, TokenmillError

USER = [{"role": "user", "content": "count: 400"}]


def idle(server: SimServer) -> bool:
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage")
    return all(server.metric(gauge) == 0 for gauge in gauges)


def read_all(connection: socket.socket) -> bytes:
    """The body of a chunked answer, to the end of the connection's stream."""
    response = http.client.HTTPResponse(connection)
    response.begin()
    return response.read()


def events(body: bytes) -> list[Any]:
    parts = [p.removeprefix("data: ") for p in body.decode().split("\n\n") if p]
    return [p if p == "[DONE]" else json.loads(p) for p in parts]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_disconnects_is_aborted(stream: bool) -> None:
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    call = {"model": MODEL, "messages": USER, "stream": stream, "n": 2}
    with sim_server(limits=limits, step_ms=50.0) as server:
        running = server.open_call("/v1/chat/completions", call)
        wait_until(lambda: server.metric("num_requests_running") == 1, "one runs")
        queued = server.open_call("/v1/chat/completions", call)
        wait_until(lambda: server.metric("num_requests_waiting") == 3, "three wait")
        queued.close()
        wait_until(lambda: server.metric("num_requests_waiting") == 1, "the queued are gone")
        running.close()
        wait_until(lambda: idle(server), "all blocks are back")
        assert server.metric("request_failure_total", 'finished_reason="abort"') == 4
        assert server.chat("say: ok").json["choices"][0]["message"]["content"] == "ok"


def test_a_slow_reader_gets_merged_events() -> None:
    limits = SchedulerConfig(max_model_len=8192)
    num_tokens = 8000
    with sim_server(limits=limits) as server:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(GENEROUS_S)
        connection.connect(server.address)
        call = {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"count: {num_tokens}"}],
            "stream": True,
            "logprobs": True,
            "top_logprobs": 20,
        }
        body = json.dumps(call).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\n"
        connection.sendall(f"{head}{KIND}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
        wait_until(lambda: idle(server), "the engine is done with it")
        assert server.chat("say: ok").status == 200
        assert resident_mib(server.process.pid) < 300
        *chunks, done = events(read_all(connection))
        connection.close()
    assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    parts = [c["choices"][0]["logprobs"]["content"] for c in chunks if c["choices"][0]["logprobs"]]
    assert sum(map(len, parts)) == num_tokens + 1
    assert len(parts) < num_tokens, "nothing was merged"
    text = "".join(c["choices"][0]["delta"].get("content", "") for c in chunks)
    assert text.startswith(DEFAULT_TEXT * 3)


def resident_mib(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_thousand_requests_against_a_queue_of_64() -> None:
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=32, max_waiting=64)
    call = {"model": MODEL, "messages": [{"role": "user", "content": "count: 20"}]}

    async def one(address: tuple[str, int], number: int) -> tuple[int, dict[str, Any], bytes]:
        body = json.dumps(call | {"stream": number % 2 == 0}).encode()
        reader, writer = await asyncio.open_connection(*address)
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        writer.write(f"{head}{KIND}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        raw = await reader.read()
        writer.close()
        header, _, answer = raw.partition(b"\r\n\r\n")
        lines = header.decode().lower().split("\r\n")
        headers = dict(line.split(": ", 1) for line in lines[1:])
        return int(lines[0].split()[1]), headers, answer

    async def flood(address: tuple[str, int]) -> list[tuple[int, dict[str, Any], bytes]]:
        return await asyncio.gather(*(one(address, number) for number in range(1000)))

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 4096)), hard))
    # Steps are so slow that the queue fills up even where clients take half a minute to connect.
    with sim_server(limits=limits, step_ms=30.0) as server:
        answers = asyncio.run(flood(server.address))
        statuses = Counter(status for status, _, _ in answers)
        assert set(statuses) == {200, 429} and statuses.total() == 1000
        for status, headers, body in answers:
            if status == 429:
                assert int(headers["retry-after"]) >= 1
                assert json.loads(body)["error"]["code"] == "queue_full"
            elif "event-stream" in headers["content-type"]:
                assert b"data: [DONE]" in body and b'"error"' not in body
            else:
                assert json.loads(body)["usage"]["completion_tokens"] == 21
        wait_until(lambda: idle(server), "everything is done")
        stopped, rejected = 'finished_reason="stop"', 'finished_reason="reject"'
        assert server.metric("request_success_total", stopped) == statuses[200]
        assert server.metric("request_failure_total", rejected) == statuses[429]
        assert server.metric("requests_total", 'status="429"') == statuses[429]
        assert server.metric("requests_rejected_total", 'reason="queue_full"') == statuses[429]


def test_the_concurrency_limit() -> None:
    with sim_server(ServerConfig(port=0, max_concurrency=2), step_ms=20.0) as server:
        streams = [server.open_stream("count: 400") for _ in range(2)]
        wait_until(lambda: server.metric("num_requests_running") == 2, "two run")
        answer = server.chat("hi")
        assert answer.status == 429 and answer.error["code"] == "max_concurrency"
        assert int(answer.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        wait_until(lambda: server.chat("hi").status == 200, "there is room again")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains(number: signal.Signals) -> None:
    with sim_server(step_ms=20.0) as server:
        pid = server.worker_pid()
        open_stream = server.open_stream("count: 60")
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
        server.process.send_signal(number)
        wait_until(lambda: server.call("GET", "/health").status == 503, "health turns")
        refused = server.chat("hi")
        assert refused.status == 503 and refused.error["code"] == "draining"
        assert int(refused.headers["retry-after"]) >= 1
        *chunks, done = events(read_all(open_stream))
        assert done == "[DONE]" and chunks[-1]["choices"][0]["finish_reason"] == "stop"
        assert server.process.wait(GENEROUS_S) == 0
        assert not Path(f"/proc/{pid}").exists()


def test_a_drain_has_an_end() -> None:
    with sim_server(ServerConfig(port=0, drain_timeout_s=0.2), step_ms=50.0) as server:
        stream = server.open_stream("count: 400")
        waiting = ThreadPoolExecutor(1).submit(server.chat, "count: 400")
        wait_until(lambda: server.metric("num_requests_running") == 2, "both run")
        server.process.terminate()
        last = events(read_all(stream))[-1]
        assert last["error"]["code"] == "shutdown"
        answer = waiting.result(GENEROUS_S)
        assert answer.status == 500 and answer.error["code"] == "shutdown"
        assert server.process.wait(GENEROUS_S) == 0


def test_a_killed_worker_is_replaced_and_its_requests_go_on() -> None:
    with sim_server(step_ms=10.0) as server:
        streams = [server.open_stream("count: 400", n=2) for _ in range(3)]
        whole = ThreadPoolExecutor(1).submit(server.chat, "count: 400")
        wait_until(lambda: server.metric("num_requests_running") == 7, "all run")
        worker = server.worker_pid()
        os.kill(worker, signal.SIGKILL)
        for stream in streams:
            *chunks, last = events(read_all(stream))
            assert last == "[DONE]" and not any("error" in chunk for chunk in chunks)
        answer = whole.result(GENEROUS_S)
        assert answer.json["usage"]["completion_tokens"] == 401
        assert server.worker_pid() != worker
        assert server.chat("say: back").json["choices"][0]["message"]["content"] == "back"
        assert server.metric("worker_restarts_total") == 1


def test_health_turns_while_there_is_no_worker() -> None:
    with sim_server() as server:
        os.kill(server.worker_pid(), signal.SIGKILL)
        wait_until(lambda: server.call("GET", "/health").status == 503, "health turns")
        refused = server.chat("hi")
        assert refused.status == 503 and refused.error["code"] == "restarting"
        wait_until(lambda: server.call("GET", "/health").status == 200, "it is back")
        assert server.chat("hi").status == 200


def test_a_request_that_ends_every_worker_does_not_end_the_server() -> None:
    with sim_server(pool=PoolConfig(max_migrations=1)) as server:
        answer = server.chat("exit: now")
        assert answer.status == 500 and "code 9" in answer.error["message"]
        wait_until(lambda: server.call("GET", "/health").status == 200, "it is back")


def test_connections_are_kept_alive() -> None:
    with sim_server() as server:
        connection = http.client.HTTPConnection(*server.address, timeout=GENEROUS_S)
        kind = {"content-type": "application/json"}
        for stream in (True, False, True):
            call = {"prompt": "say: again", "stream": stream}
            connection.request("POST", "/v1/completions", json.dumps(call), kind)
            response = connection.getresponse()
            assert response.status == 200 and b'"finish_reason":"stop"' in response.read()
            connection.request("POST", "/v1/completions", "{", kind)
            response = connection.getresponse()
            assert response.status == 400 and response.read()
        connection.close()


START = """
import sys
from api.sim import MODEL, make_tokenizer
from tokenmill.core.config import ServerConfig
from tokenmill.core.requests import End
from tokenmill.core.types import FinishReason, TokenmillError
from tokenmill.api.server import serve
try:
    argv = [sys.executable, "-c", "raise SystemExit(3)"]
    serve(argv, make_tokenizer(), ServerConfig(port=0), MODEL)
except TokenmillError as error:
    sys.exit(str(error))
"""


def test_a_worker_that_does_not_start_is_told() -> None:
    paths = f"{Path(__file__).parents[1]}:{os.environ.get('PYTHONPATH', '')}"
    env = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", START],
        capture_output=True,
        text=True,
        env=env,
        timeout=GENEROUS_S,
    )
    assert done.returncode == 1
    assert done.stderr.strip() == "the worker process exited with code 3"


def test_a_port_in_use_is_told() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(TokenmillError, match=f"cannot listen on 127.0.0.1:{port}"):
            serve([], None, ServerConfig(port=port), MODEL)  # type: ignore[arg-type]


def test_a_port_taken_while_the_model_loaded_is_told() -> None:
    async def listen(listener: socket.socket) -> None:
        async with listening(None, listener, Keys.of(ServerConfig(), "t", b"s")):
            raise AssertionError("both listen")

    with bind("127.0.0.1", 0) as late, bind("127.0.0.1", late.getsockname()[1]) as other:
        other.listen()
        port = late.getsockname()[1]
        with pytest.raises(TokenmillError, match=f"cannot listen on 127.0.0.1:{port}: Address"):
            asyncio.run(listen(late))


@pytest.mark.parametrize(
    ("reason", "stop_reason", "status"),
    [
        (FinishReason.REJECT, "invalid_grammar", 400),
        (FinishReason.REJECT, "grammar_busy", 503),
        (FinishReason.ERROR, "grammar", 400),
        (FinishReason.ERROR, None, 500),
    ],
)
def test_whose_fault_a_grammar_is(
    reason: FinishReason, stop_reason: str | None, status: int
) -> None:
    error = of_output(End(reason, stop_reason, "why").output("r"))
    assert error is not None and (error.status, str(error)) == (status, "why")
