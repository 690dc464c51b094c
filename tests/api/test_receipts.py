"""Receipts of a server: who pays for which GPU time, and that all of it is accounted for."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from typer.testing import CliRunner

from api.sim import MODEL
from api.sim_server import Answer, Json, SimServer, sim_server, wait_until
from tokenmill.cli.app import app
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig

KEYS = ("first-key", "second-key")
PRICE = 3.6  # dollars an hour: a thousandth of a dollar a second
CONFIG = ServerConfig(port=0, api_keys=KEYS, price_per_gpu_hour=PRICE, drain_timeout_s=0.2)
LIMITS = SchedulerConfig(max_model_len=512, max_num_seqs=16, max_num_batched_tokens=256)


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    """A prefill and two decode workers, with room for few requests."""
    pool = PoolConfig(prefill=1, decode=2, heartbeat_s=0.2, remote_prefill_tokens=16)
    with sim_server(CONFIG, LIMITS, step_ms=8.0, pool=pool, num_blocks=48) as running:
        yield running


def call(server: SimServer, path: str, body: Json, key: str = KEYS[0]) -> Answer:
    headers = {"authorization": f"Bearer {key}"}
    return server.call("POST", path, {"model": MODEL, "include_receipt": True, **body}, headers)


def chat(server: SimServer, text: str, key: str = KEYS[0], **fields: object) -> Json:
    messages = [{"role": "user", "content": text}]
    answer = call(server, "/v1/chat/completions", {"messages": messages, **fields}, key)
    assert answer.status == 200, answer.body
    receipt: Json = answer.json["usage"]["receipt"]
    return receipt


def receipts(server: SimServer) -> Json:
    view: Json = server.call("GET", "/workers/receipts").json
    return view


def settled(server: SimServer) -> Json:
    """The receipts once no worker has anything more to tell."""
    found: list[Json] = []

    def told() -> bool:
        found.append(receipts(server))
        return abs(found[-1]["untold_gpu_seconds"]) < 1e-3

    wait_until(told, "every worker has told what its requests took")
    return found[-1]


def spent(view: Json) -> float:
    return float(sum(key["receipt"]["gpu_seconds"] for key in view["keys"]))


def test_all_time_of_all_workers_is_paid_for_or_idle(server: SimServer) -> None:
    """Aborts, preemption, prefix hits, prompts that other workers compute, a worker that leaves."""
    first_s = time.monotonic()
    before = settled(server)
    second_s = time.monotonic()

    def one(i: int) -> Json | None:
        key, text = KEYS[i % 2], f"count: {100 + 17 * i}"
        if i % 5 == 0:  # leaves in the middle
            head = f"authorization: Bearer {key}\r\n"
            message = {"role": "user", "content": text}
            body = {"model": MODEL, "stream": True, "messages": [message]}
            with server.open_call("/v1/chat/completions", body, head) as connection:
                connection.recv(1)
            return None
        return chat(server, ("one and the same beginning " * 3) + text, key, max_tokens=200)

    with ThreadPoolExecutor(24) as threads:
        answers = threads.map(one, range(24))
        wait_until(lambda: server.metric("worker_requests", 'worker="d1"') > 2, "d1 has requests")
        head = {"content-type": "application/json"}
        assert server.call("POST", "/workers/drain", {"worker": "d1"}, head).status == 200
        paid = [answer for answer in answers if answer is not None]
    wait_until(lambda: server.metric("num_requests_running") == 0, "all requests have ended")
    third_s = time.monotonic()
    after = settled(server)
    fourth_s = time.monotonic()

    passed = after["gpu_seconds"] - before["gpu_seconds"]
    idle = after["idle_gpu_seconds"] - before["idle_gpu_seconds"]
    assert spent(after) - spent(before) + idle == pytest.approx(passed, rel=0.01)
    # Two workers were there all the time, the third for a part of it.
    assert 2 * (third_s - second_s) * 0.99 < passed < 3 * (fourth_s - first_s) * 1.01
    for receipt in paid:
        parts = [receipt[f"{part}_gpu_seconds"] for part in ("prefill", "decode", "drafts")]
        assert sum(parts) == pytest.approx(receipt["gpu_seconds"], abs=1e-8)
        assert receipt["usd"] == pytest.approx(receipt["gpu_seconds"] * PRICE / 3600)
    assert 0 < sum(r["gpu_seconds"] for r in paid) < spent(after) - spent(before)
    assert any(receipt["saved_gpu_seconds"] for receipt in paid)
    for name in ("num_preemptions_total", "prefix_cache_hits_total", "kv_transfers_total"):
        assert server.metric(name) > 0, name
    assert server.metric("request_migrations_total") > 0
    assert after["num_gpus"] == 2
    assert [key["num_requests"] for key in after["keys"]] == [12, 12]


def test_two_workers_that_live_are_paid_for_to_the_second() -> None:
    """What they tell is the time that passes, be they busy or not."""
    pool = PoolConfig(workers=2)
    with sim_server(ServerConfig(port=0), LIMITS, step_ms=2.0, pool=pool) as server:
        first_s = time.monotonic()
        before = receipts(server)
        second_s = time.monotonic()
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda i: server.chat(f"count: {100 + i}"), range(16)))
        time.sleep(0.5)
        third_s = time.monotonic()
        after = receipts(server)
        fourth_s = time.monotonic()
    passed = after["gpu_seconds"] - before["gpu_seconds"]
    assert 2 * (third_s - second_s) * 0.99 < passed < 2 * (fourth_s - first_s) * 1.01
    idle = after["idle_gpu_seconds"] - before["idle_gpu_seconds"]
    assert spent(after) + idle == pytest.approx(passed, rel=0.01)
    assert [key["key"] for key in after["keys"]] == ["none"]
    assert "usd" not in after and "usd" not in after["keys"][0]["receipt"]


def test_a_stop_string_waits_for_what_the_worker_says(server: SimServer) -> None:
    """The answer ends at the front, its work a step later."""
    receipt = chat(server, "say: one two three four five six", stop=["three"])
    assert receipt["decode_gpu_seconds"] > 0


def test_the_four_apis_have_receipts_where_they_are_asked_for(server: SimServer) -> None:
    messages = [{"role": "user", "content": "say: hello"}]
    wholes = {
        "/v1/chat/completions": {"messages": messages},
        "/v1/completions": {"prompt": ["say: one", "say: two"], "max_tokens": 8},
        "/v1/responses": {"input": "say: hello"},
        "/v1/messages": {"messages": messages, "max_tokens": 8},
    }
    for path, body in wholes.items():
        answer = call(server, path, body)
        assert answer.status == 200, answer.body
        assert answer.json["usage"]["receipt"]["gpu_seconds"] > 0
        without = call(server, path, body | {"include_receipt": None})
        assert "receipt" not in without.json["usage"]
        streamed = call(server, path, body | {"stream": True}).body
        assert streamed.count(b'"receipt":{"gpu_seconds"') == 1, path
        wrong = call(server, path, body | {"include_receipt": "yes"})
        assert wrong.status == 400 and "include_receipt" in wrong.json["error"]["message"]


def test_metrics_have_the_keys_sums_and_no_key(server: SimServer) -> None:
    chat(server, "say: hello", KEYS[1])
    text = server.call("GET", "/metrics").body.decode()
    view = receipts(server)
    for name in (key["key"] for key in view["keys"]):
        assert f'tokenmill_gpu_seconds_total{{key="{name}",model_name="{MODEL}",part="de' in text
        assert f'tokenmill_gpu_usd_total{{key="{name}"' in text
    assert not any(key in text or key in json.dumps(view) for key in KEYS)


def test_the_command_shows_keys_idle_time_and_requests(server: SimServer) -> None:
    chat(server, "say: hello")
    flags = ["receipts", "--url", server.url, "--latest", "2"]
    found = CliRunner().invoke(app, flags)
    lines = found.stdout.splitlines()
    assert found.exit_code == 0 and lines[0].split()[-1] == "$"
    view = json.loads(lines[-1])
    assert view["price_per_gpu_hour"] == PRICE and len(view["requests"]) == 2
    assert {"idle", "all"} <= {line.split()[0] for line in lines if line}
    dearer = CliRunner().invoke(app, [*flags, "--price-per-gpu-hour", "7.2", "--json"])
    again = json.loads(dearer.stdout)
    assert again["usd"] == pytest.approx(again["gpu_seconds"] * 0.002)
