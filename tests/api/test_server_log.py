"""What a server says on stderr of requests, of its end and of a context that is cut."""

from __future__ import annotations

import contextlib
import re
import signal
import tempfile
from collections.abc import Iterator
from typing import IO

import pytest

from api.sim import BLOCK_SIZE, MODEL
from api.sim_server import GENEROUS_S, SimServer, sim_server, wait_until
from proxy.route_server import router_process
from tokenmill.__main__ import run
from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig, ServerConfig
from tokenmill.workers.lifecycle import agreed, of_role
from tokenmill.workers.messages import ModelFacts


class Log:
    """The stderr of a process."""

    def __init__(self, file: IO[str]) -> None:
        self.file = file

    def lines(self, start: str) -> list[str]:
        self.file.seek(0)
        return [line for line in self.file.read().splitlines() if line.startswith(start)]


@contextlib.contextmanager
def logged() -> Iterator[Log]:
    with tempfile.TemporaryFile("w+") as file:
        yield Log(file)


def fields(line: str) -> dict[str, str]:
    return dict(part.split("=", 1) for part in line.split()[1:])


def requests(log: Log, number: int) -> list[dict[str, str]]:
    wait_until(lambda: len(log.lines("request id=")) >= number, f"{number} lines")
    return [fields(line) for line in log.lines("request id=")]


def test_a_line_for_every_request() -> None:
    config = ServerConfig(port=0, log_requests=True, api_keys=("secret", "other"))
    bearer = {"authorization": "Bearer secret", "x-request-id": "mine"}
    with logged() as log, sim_server(config, log=log.file) as server:
        call = {"prompt": "say: hi", "stream": True}
        assert server.call("POST", "/v1/completions", call, bearer).status == 200
        assert server.call("POST", "/v1/completions", {"prompt": "hi"}).status == 401
        key = {"x-api-key": "secret"}
        said = {"messages": [{"role": "user", "content": "hi"}], "model": MODEL, "max_tokens": 5}
        assert server.call("POST", "/v1/messages", said, key).status == 200
        assert server.call("GET", "/v1/responses/resp_1", headers=key).status == 404
        whole, refused, message, missing = requests(log, 4)
    assert whole["id"] == "mine" and re.fullmatch("[0-9a-f]{16}", whole["key"])
    assert (whole["endpoint"], whole["status"]) == ("/v1/completions", "200")
    assert (whole["finish"], whole["worker"], whole["error"]) == ("stop", "w0", "-")
    assert int(whole["prompt_tokens"]) > 0 and int(whole["output_tokens"]) > 0
    assert 0 < float(whole["ttft_ms"]) <= float(whole["duration_ms"])
    assert (refused["status"], refused["error"]) == ("401", "invalid_api_key")
    assert refused["key"] == "-" and refused["output_tokens"] == "0"
    assert (message["endpoint"], message["finish"]) == ("/v1/messages", "length")
    assert message["key"] == whole["key"] and int(message["output_tokens"]) == 5
    stored = "/v1/responses/{response_id}"
    assert (missing["endpoint"], missing["error"]) == (stored, "response_not_found")


def test_a_router_passes_the_id_on() -> None:
    config = ServerConfig(port=0, log_requests=True)
    with logged() as behind, logged() as before, sim_server(config, log=behind.file) as server:
        urls, policy = (f"{server.url}/v1",), RouterConfig("round-robin")
        with router_process(urls, config, policy, log=before.file) as router:
            assert router.complete("say: hi").status == 200
            (at_router,) = requests(before, 1)
        (at_server,) = [r for r in requests(behind, 1) if r["endpoint"] == "/v1/completions"]
    assert at_router["id"] == at_server["id"] and at_router["endpoint"] == "/v1/completions"
    assert (at_router["finish"], at_router["worker"]) == ("answered", server.url[7:])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_says_what_it_waits_for_and_a_second_stops(
    number: signal.Signals,
) -> None:
    with logged() as log, sim_server(step_ms=200.0, log=log.file) as server:
        stream = server.open_stream("count: 400")
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
        server.process.send_signal(number)
        wait_until(lambda: bool(log.lines("stopping: ")), "it says so")
        (line,) = log.lines("stopping: ")
        assert "waiting for 1 running request, up to 30 s" in line and "again" in line
        assert server.process.poll() is None
        server.process.send_signal(number)
        assert server.process.wait(GENEROUS_S) == 0
        (line,) = log.lines("stopping now")
        assert "interrupted again" in line
        stream.close()


def announced(server: SimServer) -> int:
    length: int = server.call("GET", "/v1/models").json["data"][0]["max_model_len"]
    return length


def test_the_context_is_what_the_cache_can_hold(capsys: pytest.CaptureFixture[str]) -> None:
    num_blocks = 4
    room = num_blocks * BLOCK_SIZE
    pool = PoolConfig(workers=2)
    with logged() as log, sim_server(pool=pool, num_blocks=num_blocks, log=log.file) as server:
        assert announced(server) == room
        lines = sorted(log.lines("worker w"))
        assert lines == [f"worker w{i}: the context is {room} tokens" for i in range(2)]
        workers = server.call("GET", "/workers").json["workers"]
        assert [w["warnings"] for w in workers] == [[f"the context is {room} tokens"]] * 2
        assert run(["status", "--url", server.url]) == 0
        assert f"w1 warns: the context is {room} tokens\n" in capsys.readouterr().err
        token_ids = [5] * room
        refused = server.complete(token_ids, max_tokens=1)
        assert refused.status == 400 and refused.error["code"] == "context_length_exceeded"
        assert str(room) in refused.error["message"]
        refused = server.complete(token_ids[:-2], max_tokens=3)
        assert refused.status == 400 and refused.error["param"] == "max_tokens"
        fits = server.complete(token_ids[:-2], max_tokens=2, ignore_eos=True).json
        assert fits["usage"]["total_tokens"] == room
        limit = server.call("POST", "/tokenize", {"prompt": "hi"}).json["max_model_len"]
        assert limit == room


def test_of_several_workers_the_smallest_context_counts() -> None:
    large, small = (
        ModelFacts(
            max_model_len=length, vocab_size=400, num_kv_blocks=9, block_size=16, dtype="none"
        )
        for length in (1600, 320)
    )
    for one, other in ((large, small), (small, large)):
        assert agreed(one, other).max_model_len == 320
        binding = [of_role(one, "decode"), of_role(other, "prefill")]
        for pair in (binding, binding[::-1]):
            assert agreed(*pair).max_model_len == one.max_model_len


def test_a_cache_with_room_does_not_cut_the_context() -> None:
    limits = SchedulerConfig(max_model_len=48)
    with logged() as log, sim_server(limits=limits, num_blocks=4, log=log.file) as server:
        assert announced(server) == 48 and log.lines("worker w") == []
