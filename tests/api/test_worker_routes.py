"""The pool over HTTP: its page, its commands, who may use them, and what an overload is told."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from api.sim import MAX_MODEL_LEN
from api.sim_server import GENEROUS_S, SimServer, sim_server, wait_until
from tokenmill.__main__ import run
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig

HERMES_CALL = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
JSON = {"content-type": "application/json"}
NOBODY = {"authorization": ""}
LIMITS = SchedulerConfig(max_model_len=MAX_MODEL_LEN)
TWO = PoolConfig(workers=2, backoff_s=0.05)


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    config = ServerConfig(port=0, allowed_hosts=("mill.internal",))
    with sim_server(config, LIMITS, step_ms=5.0, pool=TWO) as running:
        yield running


def command(capsys: pytest.CaptureFixture[str], server: SimServer, *words: str) -> dict[str, Any]:
    assert run([*words, "--url", f"{server.url}/v1", "--json"]) == 0
    view: dict[str, Any] = json.loads(capsys.readouterr().out)
    return view


def test_people_get_a_table_and_json_comes_when_asked(
    server: SimServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.chat("count: 3").status == 200
    for words in (["status"], ["scale", "--workers", "2"]):
        assert run([*words, "--url", server.url]) == 0
        shown = capsys.readouterr()
        assert "{" not in shown.out + shown.err
        assert [line.split()[0] for line in shown.out.splitlines()] == ["worker", "w0", "w1"]
        assert max(map(len, shown.out.splitlines())) <= 80
    whole = command(capsys, server, "status")
    assert whole.keys() == server.call("GET", "/workers").json.keys()


def test_commands_change_the_pool_under_load(
    server: SimServer, capsys: pytest.CaptureFixture[str]
) -> None:
    calls = ThreadPoolExecutor(8)
    answers = [calls.submit(server.chat, "count: 200") for _ in range(8)]
    wait_until(lambda: server.metric("num_requests_running") == 8, "all run")
    view = command(capsys, server, "scale", "--workers", "3")
    assert [worker["name"] for worker in view["workers"]] == ["w0", "w1", "w2"]
    view = command(capsys, server, "drain", "w0")
    assert [worker["name"] for worker in view["workers"]] == ["w1", "w2"]
    for answer in answers:
        assert answer.result(GENEROUS_S).json["usage"]["completion_tokens"] == 201
    assert command(capsys, server, "status")["migrations"] == 0
    assert server.metric("worker_up", 'worker="w1"') == 1
    assert server.metric("worker_routed_requests_total", 'worker="w1"') > 0
    assert run(["drain", "w0", "--url", server.url]) == 1
    assert "there is no 'w0'" in capsys.readouterr().err


def test_what_the_front_makes_of_tokens_survives_a_worker(server: SimServer) -> None:
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = "one two " * 20 + "STOP here"
    calls: list[tuple[str, dict[str, Any]]] = [
        (f"say: {text}", {"stop": ["STOP"], "n": 2}),
        (f"say: {HERMES_CALL}", {"tools": [tool]}),
        ("say: 3141592653589793", {"guided_regex": "[0-9]{16}"}),
        ("count: 150", {"logprobs": True, "top_logprobs": 2, "temperature": 1.0}),
    ]
    expected = [server.chat(prompt, **fields).json for prompt, fields in calls]
    pool = ThreadPoolExecutor(8)
    answers = [pool.submit(server.chat, prompt, **fields) for prompt, fields in calls * 2]
    wait_until(lambda: server.metric("num_requests_running") > 0, "some run")
    os.kill(server.worker_pids()[0], signal.SIGKILL)
    for want, answer in zip(expected * 2, answers, strict=True):
        got = answer.result(GENEROUS_S).json
        for choice in (*want["choices"], *got["choices"]):
            for call in choice["message"].get("tool_calls") or ():
                call.pop("id", None)
        assert got["choices"] == want["choices"]
        for name in ("prompt_tokens", "completion_tokens"):
            assert got["usage"][name] == want["usage"][name]
    wait_until(
        lambda: all(w["state"] == "ready" for w in server.call("GET", "/workers").json["workers"]),
        "the worker is back",
    )


def test_strangers_may_not_look_or_change(server: SimServer) -> None:
    for method, path in (("POST", "/workers/fronts"), ("GET", "/floor")):  # gone
        assert server.call(method, path, {"version": "0.1.0"}, JSON).status == 404
    proxied = server.call("GET", "/workers", headers={**NOBODY, "x-forwarded-for": "192.0.2.1"})
    assert proxied.status == 403 and proxied.error["code"] == "not_local"
    form = server.call("POST", "/workers/scale", b"workers=1", {"content-type": "text/plain"})
    assert form.status == 415
    for path, body in (("scale", {"workers": 9}), ("drain", {"worker": "w0"}), ("router", {})):
        for headers in (NOBODY, {"authorization": "Bearer guess"}):  # though it is on this machine
            refused = server.call("POST", f"/workers/{path}", body, {**JSON, **headers})
            assert refused.status == 401 and refused.error["code"] == "invalid_token"
    wrong = server.call("POST", "/workers/scale", {"workers": 0}, JSON)
    assert wrong.status == 400 and wrong.error["param"] == "workers"
    for body, param in (({"decode": 1}, "decode"), ({}, "workers")):
        refused = server.call("POST", "/workers/scale", body, JSON)
        assert refused.status == 400 and refused.error["param"] == param
    policy = server.call("POST", "/workers/router", {"policy": "best"}, JSON)
    assert policy.status == 400 and policy.error["param"] == "policy"
    assert server.call("POST", "/workers/router", {}, JSON).json["router"] == "kv"
    unknown = server.call("POST", "/workers/scale", {"decoders": 1}, JSON)
    assert unknown.status == 400 and unknown.error["code"] == "unknown_field"


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"host": "evil.example:8000"}, "unknown_host"),  # a name that was pointed at this machine
        ({"host": ""}, "unknown_host"),
        ({"origin": "https://evil.example"}, "foreign_origin"),
        ({"origin": "http://localhost:3000"}, "foreign_origin"),  # another server's page
        ({"origin": "null"}, "foreign_origin"),
        ({"sec-fetch-site": "cross-site"}, "foreign_origin"),
        ({"host": "localhost:1", "origin": "http://localhost:1"}, None),
        ({"host": "[::1]:1"}, None),
        ({"host": "mill.internal", "origin": "https://mill.internal"}, None),
    ],
)
def test_pages_in_a_browser_here_may_not_either(
    server: SimServer, headers: dict[str, str], code: str | None
) -> None:
    call = server.call("GET", "/workers", headers={**NOBODY, **headers})
    assert call.status == (200 if code is None else 403)
    assert code is None or call.error["code"] == code


def test_a_token_opens_the_pool_to_others_and_overload_is_told() -> None:
    config = ServerConfig(port=0, control_token="secret", max_concurrency=3)
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_seqs=1)
    with sim_server(config, limits, step_ms=20.0) as server:
        assert server.call("GET", "/workers", headers=NOBODY).status == 401
        token = {"authorization": "Bearer secret", "x-forwarded-for": "192.0.2.1"}
        token |= {"host": "mill.example", "origin": "https://mill.example"}
        assert server.call("GET", "/workers", headers=token).status == 200
        streams = [server.open_stream("count: 400", n=2)]
        wait_until(lambda: server.metric("num_requests_running") == 1, "one of two runs")
        streams += [server.open_stream("count: 400")]
        wait_until(lambda: server.metric("num_requests_waiting") == 2, "one runs, two wait")
        refused = server.chat("hi")
        assert refused.status == 429 and refused.error["code"] == "max_concurrency"
        assert int(refused.headers["retry-after"]) >= 1
        for stream in streams:
            stream.close()
        wait_until(lambda: server.chat("say: hi").status == 200, "there is room again")


def test_a_key_has_a_limit_of_its_own() -> None:
    with sim_server(ServerConfig(port=0, max_concurrency_per_key=1), step_ms=20.0) as server:
        stream = server.open_stream("count: 400")
        wait_until(lambda: server.metric("num_requests_running") == 1, "it runs")
        refused = server.chat("hi")
        assert refused.status == 429 and refused.error["code"] == "max_concurrency_per_key"
        stream.close()
        wait_until(lambda: server.chat("say: hi").status == 200, "there is room again")
