"""Several API processes over the same workers: sums, limits, and the death of one of them."""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from api.sim import BLOCK_SIZE, DEFAULT_TEXT, MODEL, make_tokenizer
from api.sim_server import SimServer, sim_server, wait_until
from api.streams import GENEROUS_S, Spawner, read
from open_ports import descendants, elsewhere
from tokenmill.core.config import PoolConfig, RouterConfig, ServerConfig
from tokenmill.core.images import VisionConfig
from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.routing.load_report import Announcement, FrontLoad, LoadReport
from tokenmill.routing.router import Router
from tokenmill.workers.fronts import owner as owner_module
from tokenmill.workers.fronts.control import Announced, FrontSetup, decode_to_front, encode
from tokenmill.workers.fronts.front_process import front_spawner
from tokenmill.workers.fronts.member import MemberPool
from tokenmill.workers.fronts.owner import FrontOwner
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
    pool = PoolConfig(workers=2, heartbeat_s=0.2)
    config = ServerConfig(port=0, fronts=2, api_keys=KEYS, max_concurrency_per_key=6)
    vision = VisionConfig()
    with sim_server(config, step_ms=STEP_MS, pool=pool, vision=vision, ends_well=False) as running:
        assert elsewhere(descendants(running.process.pid)) == set()
        yield running


def view(server: SimServer) -> dict[str, Any]:
    found: dict[str, Any] = server.call("GET", "/workers").json
    return found


def open_calls(server: SimServer) -> dict[str, int]:
    return {front["name"]: front["num_open"] for front in view(server)["fronts"]}


def stream(server: SimServer, content: str, key: str = KEYS[0], **fields: Any) -> socket.socket:
    call = {"model": MODEL, "messages": [{"role": "user", "content": content}], "stream": True}
    call["stream_options"] = {"include_usage": True}
    head = f"Authorization: Bearer {key}\r\n"
    return server.open_call("/v1/chat/completions", call | fields, head)


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
        prompt = f"{LONG}{attempt} count: "
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


@asynccontextmanager
async def owned(spawner: Spawner) -> AsyncIterator[tuple[WorkerPool, FrontOwner]]:
    """A worker and the owner of fronts, which the test itself is."""
    pool = WorkerPool(spawner, PoolConfig(backoff_s=0.01, max_restarts=1))
    setup = FrontSetup("1", MODEL, "", "", ServerConfig(port=0), KeyRing(b"", b""))
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
            front = MemberPool(await link.join(owner._issue("f0"), "1"), link, None)
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


def test_a_link_that_a_worker_cannot_make_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owner_module, "LINK_S", 0.01)
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
                    if len(tries) == 1:
                        key = message.address.partition("#")[2]
                        message = AddFront(message.front, refused + key)
                send(message)

            monkeypatch.setattr(slot, "send", mislead)
            link = OwnerLink(owner._socket.address)
            front = MemberPool(await link.join(owner._issue("f0"), "1"), link, "127.0.0.1")
            async with asyncio.timeout(GENEROUS_S):
                await front.start()
            assert len(tries) > 1
            await front.close()
            link.close()

    asyncio.run(main())


class At:
    """A connection to one front, kept open."""

    def __init__(self, server: SimServer) -> None:
        self._connection = http.client.HTTPConnection(*server.address, timeout=GENEROUS_S)

    def front(self, pids: list[int]) -> int:
        """Which of these processes has accepted it."""
        own = f":{self._connection.sock.getsockname()[1]:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()]
        name = next(f"socket:[{row[9]}]" for row in rows if row[2].endswith(own))
        links = {pid: Path(f"/proc/{pid}/fd").iterdir() for pid in pids}
        return next(pid for pid, fds in links.items() if any(link_of(fd) == name for fd in fds))

    def call(self, method: str, path: str, body: Any = None, key: str = KEYS[0]) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
        data = None if body is None else json.dumps({"model": MODEL} | body)
        self._connection.request(method, path, data, headers)
        answer = self._connection.getresponse()
        return answer.status, json.loads(answer.read())


def link_of(descriptor: Path) -> str:
    try:
        return os.readlink(descriptor)
    except OSError:
        return ""


def both_fronts(server: SimServer) -> list[At]:
    """A connection to each front: the kernel chooses one for each connection."""
    pids, found = [front["pid"] for front in view(server)["fronts"]], dict[int, At]()
    while len(found) < len(pids):
        connection = At(server)
        assert connection.call("GET", "/v1/models")[0] == 200  # it is accepted by now
        found[connection.front(pids)] = connection
    return list(found.values())


def test_a_stored_response_is_found_at_every_front_and_outlives_its_own(server: SimServer) -> None:
    before = server.metric("stored_responses")
    first, second = both_fronts(server)
    for maker, other in ((first, second), (second, first)):
        stored = chain(maker, other)
        path = f"/v1/responses/{stored['id']}"
        assert other.call("GET", path, key=KEYS[1])[0] == 404, "of another key"
        assert other.call("DELETE", path, key=KEYS[1])[0] == 404
    pid = second.front([front["pid"] for front in view(server)["fronts"]])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: first.call("GET", path) == (200, stored), "the other front has it")

    def another_is_there() -> bool:
        fronts = first.call("GET", "/workers", key=server.token)[1]["fronts"]
        states, pids = [f["state"] for f in fronts], [f["pid"] for f in fronts]
        return states == ["ready"] * 2 and pid not in pids

    wait_until(another_is_there, "a new one is there")
    for at in both_fronts(server):
        assert at.call("GET", path) == (200, stored)
    assert server.metric("stored_responses") == before + 2 * 10


def chain(maker: At, other: At) -> Any:
    """Use one front's responses at another one; returns the last of the 10 that are stored."""

    def create(at: At, **fields: Any) -> Any:
        status, response = at.call("POST", "/v1/responses", fields)
        assert status == 200, response
        return response

    for _ in range(8):
        first = create(maker, input="say: one")
        assert other.call("GET", f"/v1/responses/{first['id']}") == (200, first), "at once"
    second = create(other, input="say: two", previous_response_id=first["id"])
    reference = {"type": "item_reference", "id": second["output"][0]["id"]}
    third = create(maker, input=[reference, {"role": "user", "content": "say: three"}])
    assert [each["output"][0]["content"][0]["text"] for each in (second, third)] == ["two", "three"]
    path = f"/v1/responses/{second['id']}/input_items?order=asc"
    listed = maker.call("GET", path)[1]["data"]
    assert [item["type"] for item in listed] == ["message"] * 3
    assert listed[1]["id"] == first["output"][0]["id"]
    assert other.call("DELETE", f"/v1/responses/{first['id']}")[0] == 200
    assert maker.call("GET", f"/v1/responses/{first['id']}")[0] == 404
    last = create(maker, input="say: last")
    assert other.call("GET", f"/v1/responses/{last['id']}") == (200, last)
    return last


def test_fronts_end_with_their_owner(server: SimServer) -> None:
    """The last test: it leaves no server."""
    pids = [front["pid"] for front in view(server)["fronts"] if front["name"].startswith("f")]
    server.process.kill()
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "they have ended")
