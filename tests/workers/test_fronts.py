"""Several API processes over the same workers: sums, limits, and the death of one of them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import NotFoundError, OpenAI, UnprocessableEntityError
from openai.types.responses import Response

from api.sim import BLOCK_SIZE, DEFAULT_TEXT, MODEL, make_tokenizer
from api.sim_server import SimServer, sim_server, wait_until
from api.streams import GENEROUS_S, Spawner, read, until
from tokenmill import __version__
from tokenmill.api.front_server import own_host
from tokenmill.core.config import PoolConfig, RouterConfig, ServerConfig
from tokenmill.core.vision_config import VisionConfig
from tokenmill.routing.load_report import Announcement, FrontLoad, LoadReport
from tokenmill.routing.router import Router
from tokenmill.workers.fronts import member
from tokenmill.workers.fronts import owner as owner_module
from tokenmill.workers.fronts.control import Announced, FrontSetup, decode_to_front, encode
from tokenmill.workers.fronts.front_process import front_spawner
from tokenmill.workers.fronts.member import MemberPool
from tokenmill.workers.fronts.owner import FrontError, FrontOwner
from tokenmill.workers.fronts.owner_link import OwnerLink
from tokenmill.workers.messages import AddFront, ToWorker
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.pool_routers import Routers
from vision.pictures import data_url, file_of, photo
from workers.pools import kill, request

STEP_MS = 15.0
KEYS = ("alpha", "beta")
COUNTING = [sys.executable, str(Path(__file__).with_name("counting_engine.py"))]
PICTURE = {"type": "image_url", "image_url": {"url": data_url(file_of(photo(64, 64), "PNG"))}}
LONG = "the lazy dog jumps over the quick brown fox " * 8


@pytest.fixture(scope="module")
def server() -> Iterator[SimServer]:
    pool = PoolConfig(workers=2, placement="process", heartbeat_s=0.2)
    config = ServerConfig(port=0, fronts=2, api_keys=KEYS, max_concurrency_per_key=6)
    vision = VisionConfig()
    with sim_server(config, step_ms=STEP_MS, pool=pool, vision=vision, ends_well=False) as running:
        yield running


def view(server: SimServer) -> dict[str, Any]:
    found: dict[str, Any] = server.call("GET", "/workers").json
    return found


def open_calls(server: SimServer) -> dict[str, int]:
    return {front["name"]: front["num_open"] for front in view(server)["fronts"]}


def stream(server: SimServer, content: str, key: str = KEYS[0], **fields: Any) -> socket.socket:
    call = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
    call["stream_options"] = {"include_usage": True}
    headers = f"Authorization: Bearer {key}\r\nIdempotency-Key: {content[-12:]}\r\n"
    return server.open_call("/v1/chat/completions", call | fields, headers)


def text_of(connection: socket.socket) -> tuple[str, bool]:
    """The text of a stream, and whether it came to its end."""
    data = b""
    with connection:
        try:
            while b"[DONE]" not in data and (part := connection.recv(65536)):
                data += part
        except OSError:
            return "", False
    lines = [line.removeprefix("data: ") for line in data.decode().splitlines()]
    events = [json.loads(line) for line in lines if line.startswith('{"id"')]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    return "".join(delta.get("content") or "" for delta in deltas), b"[DONE]" in data


def answer(num_tokens: int) -> str:
    """What the simulated engine answers to `count: NUM_TOKENS`."""
    tokenizer = make_tokenizer()
    return tokenizer.decode((tokenizer.encode(DEFAULT_TEXT) * num_tokens)[:num_tokens])


def test_a_front_hears_where_another_one_sends() -> None:
    first, second = fronts = [Routers(RouterConfig(), {}, name) for name in ("f0.1", "f1.2")]
    for name, routers in zip(("f0.1", "f1.2"), fronts, strict=True):
        routers.main = Router(RouterConfig(policy="kv", block_size=BLOCK_SIZE), name)
        for worker in ("w0", "w1"):
            routers.main.add_worker(worker)
            idle = LoadReport({"f0.1": FrontLoad(), "f1.2": FrontLoad()})
            routers.main.report(worker, idle, time.monotonic(), time.monotonic())

    def pass_on(told: Announcement) -> None:
        message = decode_to_front(encode(Announced(told, time.monotonic())))
        assert isinstance(message, Announced)
        for routers in fronts:  # a front ignores its own
            routers.heard(message.told, message.sent_s)

    first.announce = pass_on
    taken = {"w0": 0, "w1": 0}
    for i in range(4):
        decision = first.main.route(
            f"a{i}", list(range(1000 * i, 1000 * i + 400)), time.monotonic()
        )
        first.tell(decision)
        taken[decision.worker] += 1
    by_second = {load.num_requests for load in second.main.loads()}
    assert sum(taken.values()) == 4 and by_second == set(taken.values())
    assert {load.num_requests for load in first.main.loads()} == set(taken.values())


def test_fronts_answer_alike_and_add_up(server: SimServer) -> None:
    before = server.metric("request_success_total", 'reason="stop"')
    texts = set()
    for _ in range(8):  # the kernel chooses a front for each connection
        with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
            chunks = client.chat.completions.create(
                model=MODEL, messages=[{"role": "user", "content": "count: 20"}], stream=True
            )
            parts = [chunk.choices[0].delta.content or "" for chunk in chunks]
            texts.add("".join(parts))
    assert texts == {answer(20)}
    wait_until(
        lambda: server.metric("request_success_total", 'reason="stop"') - before == 8,
        "all fronts report",
    )
    pool = view(server)
    assert [front["state"] for front in pool["fronts"]] == ["ready", "ready"]
    assert sum(worker["routed"] for worker in pool["workers"]) >= 8
    receipts = server.call("GET", "/workers/receipts").json
    assert receipts["keys"][0]["num_requests"] >= 8
    parts = [key["receipt"]["gpu_seconds"] for key in receipts["keys"]]
    parts += [receipts["idle_gpu_seconds"], receipts["untold_gpu_seconds"]]
    assert sum(parts) == pytest.approx(receipts["gpu_seconds"], rel=1e-6)


def test_images_are_counted_over_all_fronts(server: SimServer) -> None:
    before = server.metric("images_total")
    messages: Any = [{"role": "user", "content": [PICTURE]}]
    for _ in range(4):  # the kernel chooses a front for each connection
        with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
            client.chat.completions.create(model=MODEL, messages=messages)
    assert server.metric("images_total") - before == 4
    images = view(server)["images"]
    assert images["images"] == before + 4 and images["tokens"] > 0 and images["encoded"] > 0


def test_a_killed_front_takes_only_its_own_streams_with_it(server: SimServer) -> None:
    for attempt in range(10):
        prompt = f"{LONG}{attempt} count: "  # a call that came to its end would be answered at once
        streams = [stream(server, f"{prompt}{220 + i}") for i in range(6)]
        wait_until(lambda: sum(open_calls(server).values()) == 6, "all streams run")
        counts = open_calls(server)
        if all(counts.values()):
            break
        for connection in streams:  # all of them at one front: try again
            connection.close()
        wait_until(lambda: not any(open_calls(server).values()), "the front has noticed")
    dead = next(front for front in view(server)["fronts"] if front["name"] == "f0")
    os.kill(dead["pid"], signal.SIGKILL)

    def freed() -> bool:
        try:
            return view(server)["num_open"] == sum(
                w["num_running"] for w in view(server)["workers"]
            )
        except OSError:
            return False

    wait_until(lambda: freed() and open_calls(server)["f0"] == 0, "its requests are aborted")
    ends = [text_of(connection) for connection in streams]
    whole = [text for text, ended in ends if ended]
    assert len(whole) == counts["f1"]
    assert set(whole) <= {answer(220 + i) for i in range(6)} and len(set(whole)) == len(whole)
    wait_until(lambda: server.metric("kv_cache_usage") == 0, "its blocks are free")

    def back() -> bool:
        fronts = {front["name"]: front for front in view(server)["fronts"]}
        return fronts["f0"]["state"] == "ready" and fronts["f0"]["pid"] != dead["pid"]

    wait_until(back, "it is back")
    number = next(i for i, (_, ended) in enumerate(ends) if not ended)
    with stream(server, f"{prompt}{220 + number}") as again:  # the same call once more
        data = b""
        while b"[DONE]" not in data:
            data += again.recv(65536)
    last = next(line for line in data.decode().splitlines() if '"prompt_tokens"' in line)
    usage = json.loads(last.removeprefix("data: "))["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    assert cached > usage["prompt_tokens"] - 2 * BLOCK_SIZE, "the prompt is not computed again"


def test_limits_per_key_hold_over_all_fronts(server: SimServer) -> None:
    streams = [stream(server, "count: 450", KEYS[1]) for _ in range(6)]
    wait_until(lambda: sum(open_calls(server).values()) == 6, "all of them run")
    headers = {"authorization": f"Bearer {KEYS[1]}"}
    call = {"model": MODEL, "messages": [{"role": "user", "content": "count: 1"}]}

    def is_refused() -> bool:
        answer = server.call("POST", "/v1/chat/completions", call, headers)
        assert answer.status == 200 or answer.error["code"] == "max_concurrency_per_key"
        return answer.status == 429

    wait_until(lambda: all(is_refused() for _ in range(4)), "whichever front is called refuses")
    for connection in streams:
        connection.close()


def test_a_repeated_call_gets_the_answer_that_was_given(server: SimServer) -> None:
    def ask(content: str) -> tuple[str, str | None]:
        with OpenAI(base_url=f"{server.url}/v1", api_key=KEYS[0], max_retries=0) as client:
            answer = client.chat.completions.with_raw_response.create(
                model=MODEL,
                messages=[{"role": "user", "content": content}],
                extra_headers={"Idempotency-Key": "one"},
            )
            return answer.text, answer.headers.get("idempotent-replayed")

    first, replayed = ask("say: hello")
    assert replayed is None
    routed = [worker["routed"] for worker in view(server)["workers"]]
    assert {ask("say: hello") for _ in range(4)} == {(first, "true")}
    assert [worker["routed"] for worker in view(server)["workers"]] == routed
    with pytest.raises(UnprocessableEntityError, match="used for another call"):
        ask("say: something else")


@asynccontextmanager
async def owned(spawner: Spawner) -> AsyncIterator[tuple[WorkerPool, FrontOwner]]:
    """A worker and the owner of fronts, which the test itself is."""
    pool = WorkerPool(spawner, PoolConfig(backoff_s=0.01, max_restarts=1))
    setup = FrontSetup("1", MODEL, "", "", "", ServerConfig(port=0))
    owner = FrontOwner(pool, setup, front_spawner(()), 1)
    try:
        async with asyncio.timeout(GENEROUS_S):
            await pool.start()
            yield pool, owner
    finally:
        await owner.close()
        await pool.close()


def test_open_requests_end_at_once_when_the_workers_are_given_up() -> None:
    async def main() -> None:
        spawner = Spawner(COUNTING)
        async with owned(spawner) as (pool, owner):
            link = OwnerLink(owner._socket.address)
            front = MemberPool(await link.join(owner._issue("f0"), "1", None), link, None)
            await front.start()
            stream = front.submit([request("x", 10**9)])
            spawner.argv = [*COUNTING, "--exit-code", "5"]
            kill(spawner)
            await pool.gave_up.wait()
            owner._begin(owner.drain(pool.failure))
            (output,) = await read(stream)
            assert (output.finish_reason, output.stop_reason) == ("error", "worker_died")
            assert output.error is not None and output.error.startswith("the engine stopped: ")
            await front.close()
            link.close()

    asyncio.run(main())


def test_a_front_that_workers_cannot_reach_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "SILENT_S", 0.01)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        refused = f"tcp://127.0.0.1:{probe.getsockname()[1]}#"  # nobody listens there
    tries: list[AddFront] = []

    async def main() -> None:
        async with owned(Spawner(COUNTING)) as (pool, owner):
            slot = pool.slots["w0"]
            send = slot.send

            def mislead(message: ToWorker) -> None:
                if isinstance(message, AddFront):
                    tries.append(message)
                    key = message.address.partition("#")[2]
                    message = AddFront(message.front, refused + key)
                send(message)

            monkeypatch.setattr(slot, "send", mislead)
            for limit_s in (GENEROUS_S, 0.01):
                monkeypatch.setattr(member, "LINK_TIMEOUT_S", limit_s)
                joins = OwnerLink(owner._socket.address)
                welcome = await joins.join(owner._issue(), "1", None)
                front = MemberPool(welcome, joins, "127.0.0.1")
                starts = asyncio.create_task(front.start())
                if limit_s == GENEROUS_S:  # the worker tells, and the front tries again
                    await until(lambda: len(tries) > 1)
                    starts.cancel()
                else:
                    with pytest.raises(FrontError, match=r"w0 did not connect .* 127\.0\.0\.1 "):
                        await starts
                await front.close()
                joins.close()

    asyncio.run(main())


JOIN = """
import sys
from api.sim import load
from tokenmill.__main__ import run
from tokenmill.cli import front
front.load = lambda setup: load(setup, True)
sys.exit(run(["front", "--join", sys.argv[1], "--port", *sys.argv[2:]]))
"""


def join(server: SimServer, port: str, **options: Any) -> subprocess.Popen[str]:
    path = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", JOIN, server.url.removeprefix("http://"), port]
    return subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL, text=True, **options)


def test_a_front_that_cannot_reach_the_server_says_so() -> None:
    with socket.socket() as taken:  # nobody listens there
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        with pytest.raises(FrontError, match=f"cannot reach the server at 127.0.0.1:{port}"):
            own_host("127.0.0.1", port)


def test_a_front_joins_and_leaves(server: SimServer) -> None:
    with join(server, "0") as process:
        try:
            wait_until(lambda: "j0" in open_calls(server), "the owner knows of it")

            def joined() -> dict[str, Any]:
                return next(f for f in view(server)["fronts"] if f["name"] == "j0")

            wait_until(lambda: joined()["state"] == "ready", "it listens")
            with OpenAI(base_url=f"{joined()['url']}/v1", api_key=KEYS[0]) as client:
                completion = client.completions.create(model=MODEL, prompt="count: 9")
            assert completion.choices[0].text == answer(9)
        finally:
            process.kill()
    wait_until(lambda: "j0" not in open_calls(server), "the owner has noticed its death")


def open_client(url: str, key: str = KEYS[0]) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


def far_front(server: SimServer) -> dict[str, Any]:
    """The front that has joined, if there is one."""
    return next((f for f in view(server)["fronts"] if f["name"][0] == "j"), {})


def test_a_stored_response_is_found_at_every_front_and_outlives_its_own(server: SimServer) -> None:
    before = server.metric("stored_responses")
    with join(server, "0") as process:
        try:
            wait_until(lambda: far_front(server).get("state") == "ready", "it listens")
            urls = [server.url, far_front(server)["url"]]
            for url, other_url in (urls, urls[::-1]):
                with open_client(url) as maker, open_client(other_url) as other:
                    first = chain(maker, other)
                unknown = pytest.raises(NotFoundError, match="no response")
                with open_client(other_url, KEYS[1]) as foreign, unknown:
                    foreign.responses.retrieve(first.id)
        finally:
            process.kill()
    wait_until(lambda: not far_front(server), "the owner has noticed its death")
    for _ in range(6):  # the kernel chooses a front for each connection
        with open_client(server.url) as again:
            assert again.responses.retrieve(first.id).to_dict() == first.to_dict()
    assert server.metric("stored_responses") == before + 2 * 10


def chain(maker: OpenAI, other: OpenAI) -> Response:
    """Use one front's responses at another one; returns the last of the 10 that are stored."""
    for _ in range(8):
        first = maker.responses.create(model=MODEL, input="say: one")
        assert other.responses.retrieve(first.id).to_dict() == first.to_dict(), "at once"
    second = other.responses.create(model=MODEL, input="say: two", previous_response_id=first.id)
    reference: Any = {"type": "item_reference", "id": second.output[0].id}
    third = maker.responses.create(
        model=MODEL, input=[reference, {"role": "user", "content": "say: three"}]
    )
    assert (second.output_text, third.output_text) == ("two", "three")
    listed = maker.responses.input_items.list(second.id, order="asc").data
    assert [item.type for item in listed] == ["message"] * 3
    assert listed[1].id == first.output[0].id
    other.responses.delete(first.id)
    with pytest.raises(NotFoundError, match="no response"):
        maker.responses.retrieve(first.id)
    last = maker.responses.create(model=MODEL, input="say: last")
    assert other.responses.retrieve(last.id).output_text == "last"
    return last


def test_a_front_whose_port_is_taken_says_so_and_leaves(server: SimServer) -> None:
    taken = server.url.rpartition(":")[2]
    with join(server, taken, stderr=subprocess.PIPE) as process:
        _, said = process.communicate(timeout=GENEROUS_S)
    assert process.returncode == 1
    (line,) = [line for line in said.splitlines() if "error" in line]
    assert f"cannot listen on 127.0.0.1:{taken}" in line
    wait_until(lambda: not [f for f in view(server)["fronts"] if f["name"][0] == "j"], "it left")


def test_a_front_that_does_not_fit_is_refused(server: SimServer) -> None:
    def refusal(version: str, model: str | None) -> str:
        call = {"version": version, "model": model}
        headers = {"content-type": "application/json"}
        answer = server.call("POST", "/workers/fronts", call, headers)
        assert answer.status == 409
        return str(answer.error["message"])

    assert "pip install tokenmill==" in refusal("0.0.1", None)
    assert f"the server has the model '{MODEL}'" in refusal(__version__, "other")

    async def use_twice() -> None:
        call, headers = {"version": __version__}, {"content-type": "application/json"}
        ticket = server.call("POST", "/workers/fronts", call, headers).json
        for expected in (contextlib.nullcontext(), pytest.raises(FrontError, match="used before")):
            owner = OwnerLink(ticket["address"], ticket["key"])
            with expected, contextlib.closing(owner):
                await owner.join(ticket["ticket"], __version__, None)

    asyncio.run(use_twice())


def test_fronts_end_with_their_owner(server: SimServer) -> None:
    """The last test: it leaves no server."""
    pids = [front["pid"] for front in view(server)["fronts"] if front["name"].startswith("f")]
    server.process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended")
