"""Many workers behind one front: routing, migration, hangs, restarts, scaling and draining."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock

import msgspec
import pytest
import zmq

from api.sim import BLOCK_SIZE, MAX_MODEL_LEN, make_tokenizer, worker_argv
from api.streams import GENEROUS_S, Spawner, read, until
from tokenmill.cli.worker_commands import notes_of
from tokenmill.core.config import PoolConfig, RouterConfig, SchedulerConfig
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import (
    FinishReason,
    FreeText,
    SamplingParams,
    StructuredOutput,
    TokenmillError,
)
from tokenmill.workers.fronts import front_link
from tokenmill.workers.fronts.front_link import KEY_VARIABLE, FrontLink
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerLink
from tokenmill.workers.messages import FromWorker, Outputs, Ready, Submit, decode_to_worker
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.slot import WorkerSlot
from workers.counting_engine import EXIT, FACTS
from workers.pools import kill, request, states

COUNTING = [sys.executable, str(Path(__file__).with_name("counting_engine.py"))]
SIM = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0)
PROMPT = list(range(3, 3 + 6 * BLOCK_SIZE))
# Without heartbeats no rates are learnt: how busy the machine is decides nothing.
UNMEASURED = PoolConfig(workers=2, backoff_s=0.01, heartbeat_s=3600.0)


@asynccontextmanager
async def running(
    spawner: Spawner, pool: PoolConfig | None = None, router: RouterConfig | None = None
) -> AsyncIterator[WorkerPool]:
    client = WorkerPool(spawner, pool or PoolConfig(workers=2, backoff_s=0.01), router)
    try:
        async with asyncio.timeout(GENEROUS_S):
            await client.start()
            yield client
    finally:
        await client.close()
    assert not spawner.live


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded"])
def test_load_is_spread(policy: str) -> None:
    async def main() -> None:
        router = RouterConfig(policy=policy)  # type: ignore[arg-type]
        async with running(Spawner(SIM), PoolConfig(workers=2), router) as pool:
            streams = [pool.submit([request(f"r{i}", 20)]) for i in range(8)]
            for stream in streams:
                (output,) = await read(stream)
                assert len(output.token_ids) == 20
            view = pool.view()
            assert view.router == policy and [w.routed for w in view.workers] == [4, 4]
            assert view.decisions[0].terms.keys() == {"w0", "w1"}
            stats = await pool.stats()
            assert stats.num_output_tokens == 160 and pool.num_open == 0

    asyncio.run(main())


def test_prompts_that_begin_alike_meet_at_one_worker() -> None:
    async def main() -> None:
        async with running(Spawner(SIM), UNMEASURED) as pool:
            other = [t + 100 for t in PROMPT]
            homes: dict[str, set[str]] = {"a": set(), "b": set()}
            for turn in range(4):
                for family, prompt in (("a", PROMPT), ("b", other)):
                    name = f"{family}{turn}"
                    (output,) = await read(pool.submit([request(name, 3, [*prompt, turn])]))
                    assert output.num_cached_tokens == (len(PROMPT) if turn else 0)
                    homes[family].add(pool.view().decisions[-1].worker)
            assert len(homes["a"]) == len(homes["b"]) == 1
            view = pool.view()
            assert sum(w.cached_blocks for w in view.workers) == 2 * len(PROMPT) // BLOCK_SIZE
            assert sum(w.overlap_tokens for w in view.workers) == 6 * len(PROMPT)

    asyncio.run(main())


@pytest.mark.parametrize("fault_rate", [0.0, 2.0])  # none, all: half of them would only be late
def test_only_handovers_that_began_can_fail(fault_rate: float) -> None:
    """A prompt that a full prefill worker refused is none of them; each ends in one way."""
    limits = SchedulerConfig(max_num_seqs=1, max_waiting=1, max_model_len=MAX_MODEL_LEN)
    prefill = Spawner(worker_argv(limits, step_ms=5.0))
    decode = Spawner(
        worker_argv(replace(limits, max_num_seqs=16, max_waiting=64), 5.0, 512, fault_rate)
    )
    config = PoolConfig(prefill=1, decode=1, remote_prefill_tokens=16, backoff_s=0.01)

    async def main() -> None:
        pool = WorkerPool(decode, config, RouterConfig(), prefill_spawn=prefill)
        try:
            await pool.start()
            asked = [request(f"h{i}", 4, [3 + i] * 4 * BLOCK_SIZE) for i in range(8)]
            outputs = await read(pool.submit(asked))
            assert [len(output.token_ids) for output in outputs] == [4] * 8
            view = pool.view()
        finally:
            await pool.close()
        begun = view.workers[0].routed - view.migrations + view.failed_transfers
        assert view.workers[0].routed == 8 and 0 < begun < 8
        assert view.transfers + view.failed_transfers == begun
        assert view.failed_transfers == (begun if fault_rate else 0)
        said = list(notes_of(msgspec.to_builtins(view)))[1]
        assert said.startswith(f"{view.transfers} prompts went from prefill to decode workers, ")
        assert said.endswith(f"{view.failed_transfers} more were lost on the way")

    asyncio.run(main())


@pytest.mark.parametrize(("num_requests", "num_shared"), [(24, 400), (8, 96)])
def test_requests_that_come_at_once_with_one_prefix_are_spread(
    num_requests: int, num_shared: int
) -> None:
    shared = [3 + number % 300 for number in range(num_shared)]

    async def main() -> None:
        async with running(Spawner(SIM), UNMEASURED) as pool:
            await read(pool.submit([request("first", 3, shared)]))
            whole = num_shared // BLOCK_SIZE  # blocks come in several events
            await until(lambda: any(w.cached_blocks >= whole for w in pool.view().workers))
            before = [w.routed for w in pool.view().workers]
            with mock.patch("time.monotonic", return_value=time.monotonic()):  # at one instant
                streams = [
                    pool.submit([request(f"r{i}", 10, [*shared, 3 + i])])
                    for i in range(num_requests)
                ]
            after = [w.routed for w in pool.view().workers]
            share = [(b - a) / num_requests for a, b in zip(before, after, strict=True)]
            assert max(share) <= 3 / 4, share
            for stream in streams:
                await read(stream)

    asyncio.run(main())


def test_a_prefix_that_takes_long_attracts_to_a_worker_that_runs_others() -> None:
    shared = [3 + number % 300 for number in range(400)]
    slow = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0, prefill_ms=0.5)

    async def main() -> None:
        config = PoolConfig(workers=2, heartbeat_s=0.05)
        async with running(Spawner(slow), config) as pool:
            await read(pool.submit([request("first", 20, shared)]))
            home = pool.view().decisions[-1].worker
            await until(lambda: pool.routers.main.rates.prefill > 0.3)
            others = [pool.submit([request(f"o{i}", 200, [7 + i] * 20)]) for i in range(4)]
            again = pool.submit([request("again", 3, [*shared, 3])])
            last = pool.view().decisions[-1]
            assert last.worker == home and last.terms[home]["num_requests"] > 0
            assert last.terms[home]["prefill_ms"] < last.terms[home]["cost_ms"]
            for stream in [*others, again]:
                await read(stream)

    asyncio.run(main())


CHOICES = ["red", "blue"]


def reasoning(name: str) -> Request:
    """Free text, then one of the choices, by a script that has another answer."""
    tokenizer = make_tokenizer()
    first, last = (tokenizer.token_to_id(tag) for tag in ("<think>", "</think>"))
    assert first is not None and last is not None
    free = FreeText(last, opening=first, banned=tokenizer.eos_token_ids)
    structured = StructuredOutput("choice", json.dumps(CHOICES), after=free)
    prompt = tokenizer.encode("say: <think>" + "the lazy dog " * 40 + "</think>green")
    return Request(name, Generate(prompt, SamplingParams(max_tokens=300, structured=structured)))


def test_a_killed_worker_loses_no_token() -> None:
    async def main() -> None:
        spawner = Spawner(SIM)
        async with running(spawner, PoolConfig(workers=3, backoff_s=0.01)) as pool:
            (whole,) = await read(pool.submit([request("whole", 300)]))
            (reasoned,) = await read(pool.submit([reasoning("reasoned")]))
            streams = [
                pool.submit([request(f"{i}a", 100 + i), request(f"{i}b", 300)]) for i in range(6)
            ]
            thoughts = pool.submit([reasoning(f"{i}r") for i in range(3)])
            reading = [asyncio.create_task(read(stream)) for stream in [*streams, thoughts]]
            await asyncio.sleep(0.2)
            kill(spawner)
            for output in await reading.pop():
                assert output.token_ids == reasoned.token_ids
                assert output.finish_reason is FinishReason.STOP
            assert make_tokenizer().decode(reasoned.token_ids).split("</think>")[1] in CHOICES
            for i, task in enumerate(reading):
                short, long = await task
                assert short.token_ids == whole.token_ids[: 100 + i]
                assert long.token_ids == whole.token_ids
                assert short.finish_reason is long.finish_reason is FinishReason.LENGTH
            assert pool.num_migrations > 0
            await until(lambda: states(pool) == ["ready"] * 3)
            assert pool.num_restarts == 1 and pool.num_ready == 3

    asyncio.run(main())


def test_a_request_that_kills_workers_ends_in_error() -> None:
    async def main() -> None:
        config = PoolConfig(workers=2, backoff_s=0.01, max_migrations=2)
        async with running(Spawner(COUNTING), config) as pool:
            (output,) = await read(pool.submit([request("bad", 9, [EXIT])]))
            assert (output.finish_reason, output.stop_reason) == ("error", "worker_died")
            assert set(output.token_ids) <= {0}  # this engine does not resume
            assert pool.num_migrations == 2
            await until(lambda: states(pool) == ["ready"] * 2)
            (healthy,) = await read(pool.submit([request("h", 3)]))
            assert healthy.token_ids == [0, 1, 2]

    asyncio.run(main())


@pytest.mark.parametrize("num_workers", [1, 2])
def test_bystanders_of_a_request_that_kills_workers_go_on(num_workers: int) -> None:
    async def main() -> None:
        config = PoolConfig(workers=num_workers, backoff_s=0.01, stable_s=0.0)
        poison = make_tokenizer().encode("exit: now")
        async with running(Spawner(SIM), config) as pool:
            (whole,) = await read(pool.submit([request("whole", 150)]))
            streams = [pool.submit([request(f"b{i}", 150)]) for i in range(6)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.1)
            (bad,) = await read(pool.submit([request("bad", 9, poison)]))
            assert (bad.finish_reason, bad.stop_reason) == ("error", "worker_died")
            await until(lambda: pool.ready)
            late = asyncio.create_task(read(pool.submit([request("late", 150)])))
            for task in (*reading, late):
                (output,) = await task
                assert output.finish_reason is FinishReason.LENGTH, output
                assert output.token_ids == whole.token_ids
            assert sum(w.failures for w in pool.view().workers) == config.max_migrations + 1

    asyncio.run(main())


def test_a_hung_worker_is_replaced() -> None:
    async def main() -> None:
        spawner = Spawner(SIM)
        config = PoolConfig(workers=2, backoff_s=0.01, heartbeat_s=0.1, hang_timeout_s=1.5)
        async with running(spawner, config) as pool:
            streams = [pool.submit([request(f"r{i}", 200)]) for i in range(4)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.1)
            os.kill(spawner.live[0], signal.SIGSTOP)
            for task in reading:
                (output,) = await task
                assert len(output.token_ids) == 200
            await until(lambda: states(pool) == ["ready"] * 2)
            assert sum(w.hangs for w in pool.view().workers) >= 1
            assert any("no sign of life" in w.last_failure for w in pool.view().workers)

    asyncio.run(main())


def test_a_new_router_knows_what_the_old_one_knew() -> None:
    async def main() -> None:
        async with running(Spawner(SIM), UNMEASURED) as pool:
            await read(pool.submit([request("first", 3, PROMPT)]))
            await until(lambda: any(w.cached_blocks for w in pool.view().workers))
            home = next(w.name for w in pool.view().workers if w.cached_blocks)
            streams = [pool.submit([request(f"r{i}", 60, [i + 3] * 40)]) for i in range(4)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            loads = sorted((x.num_requests, x.kv_tokens) for x in pool.routers.main.loads())
            pool.renew_router()  # its workers may come in another order
            new = sorted((x.num_requests, x.kv_tokens) for x in pool.routers.main.loads())
            assert new == loads
            for task in reading:
                (output,) = await task
                assert len(output.token_ids) == 60
            await until(lambda: {w.name: w.cached_blocks for w in pool.view().workers}[home] >= 6)
            (again,) = await read(pool.submit([request("again", 3, [*PROMPT, 1])]))
            assert pool.view().decisions[-1].terms[home]["uncached_tokens"] == 1
            assert again.num_cached_tokens == len(PROMPT)
            assert pool.view().decisions[-1].worker == home
            assert pool.routers.main.num_open == 0
            pool.renew_router("least-loaded")
            assert pool.view().router == "least-loaded"

    asyncio.run(main())


def test_scale_and_drain_lose_nothing() -> None:
    async def main() -> None:
        spawner = Spawner(SIM)
        async with running(spawner, PoolConfig(workers=1)) as pool:
            streams = [pool.submit([request(f"r{i}", 100)]) for i in range(4)]
            await pool.scale(3)
            assert [w.name for w in pool.view().workers] == ["w0", "w1", "w2"]
            assert pool.view().router == "kv"
            streams += [pool.submit([request(f"s{i}", 100)]) for i in range(6)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await pool.drain_worker("w0")
            await pool.scale(1)
            assert [w.name for w in pool.view().workers] == ["w1"] and len(spawner.live) == 1
            for task in reading:
                (output,) = await task
                assert len(output.token_ids) == 100
            assert pool.num_migrations == 0
            with pytest.raises(PoolError, match="only one"):
                await pool.drain_worker("w1")
            with pytest.raises(PoolError, match="'w0'; the pool has w1"):
                await pool.drain_worker("w0")
            with pytest.raises(PoolError, match="at least 1"):
                await pool.scale(0)

    asyncio.run(main())


def test_a_drain_that_takes_too_long_moves_the_rest() -> None:
    async def main() -> None:
        async with running(Spawner(SIM)) as pool:
            streams = [pool.submit([request(f"r{i}", 300)]) for i in range(4)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.2)
            await pool.drain_worker("w0", timeout_s=0.0)
            for task in reading:
                (output,) = await task
                assert len(output.token_ids) == 300
            assert pool.num_migrations == 2

    asyncio.run(main())


def test_a_pool_whose_workers_keep_dying_is_given_up() -> None:
    async def main() -> None:
        spawner = Spawner(COUNTING)
        config = PoolConfig(workers=2, backoff_s=0.01, max_restarts=1)
        async with running(spawner, config) as pool:
            stream = pool.submit([request("x", 10**9)])
            spawner.argv = [*COUNTING, "--exit-code", "5"]
            for pid in spawner.live:
                os.kill(pid, signal.SIGKILL)
            (output,) = await read(stream)
            assert (output.finish_reason, output.stop_reason) == ("error", "worker_died")
            await pool.gave_up.wait()
            assert states(pool) == ["failed"] * 2 and not pool.ready

    asyncio.run(main())


@asynccontextmanager
async def two_in_order() -> AsyncIterator[tuple[WorkerPool, Spawner]]:
    """Workers w0 and w1, whose processes are the first and the second."""
    spawner = Spawner(COUNTING)
    async with running(spawner, PoolConfig(workers=1, backoff_s=0.01, max_restarts=1)) as pool:
        await pool.scale(2)
        yield pool, spawner


async def give_up_oldest(pool: WorkerPool, spawner: Spawner) -> None:
    """Kill the oldest worker and let its restart fail."""
    spawner.argv = [*COUNTING, "--exit-code", "5"]
    kill(spawner)
    await until(lambda: states(pool)[0] == "failed")
    spawner.argv = COUNTING


def test_slots_that_were_given_up_do_not_count_as_workers() -> None:
    async def main() -> None:
        async with two_in_order() as (pool, spawner):
            await give_up_oldest(pool, spawner)
            await pool.scale(1)
            assert [w.name for w in pool.view().workers] == ["w1"] and pool.ready
            await pool.scale(2)
            await give_up_oldest(pool, spawner)
            await pool.scale(2)
            assert [w.name for w in pool.view().workers] == ["w2", "w3"]
            assert states(pool) == ["ready"] * 2 and not pool.gave_up.is_set()

    asyncio.run(main())


def test_a_pool_ends_when_its_last_worker_leaves_beside_slots_that_were_given_up() -> None:
    async def main() -> None:
        async with two_in_order() as (pool, spawner):
            streams = {name: pool.submit([request(name, 10**9)]) for name in ("x", "y")}
            at = {entry.slot: name for name, entry in pool.open_requests.items()}
            draining = asyncio.create_task(pool.drain_worker("w1", GENEROUS_S))
            await until(lambda: states(pool)[1] == "draining")
            await give_up_oldest(pool, spawner)
            assert not pool.gave_up.is_set()
            pool.abort([at[pool.slots["w1"]]])
            await draining
            assert pool.gave_up.is_set() and states(pool) == ["failed"]
            (output,) = await read(streams[at[pool.slots["w0"]]])
            assert (output.finish_reason, output.stop_reason) == ("error", "worker_died")

    asyncio.run(main())


def test_a_worker_on_another_host_has_another_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        link = WorkerLink(lambda message: received.append(message), "127.0.0.2")
        address, _, key = link.address.partition("#")
        monkeypatch.setenv(KEY_VARIABLE, key)
        peer = await asyncio.to_thread(FrontLink, address)
        try:
            link.handle(Ready(FACTS, time.monotonic_ns() + 10**15))
            link.send(Submit([Request("r", Generate([1]), arrival_ns=5, deadline_ns=7)]))
            await asyncio.to_thread(peer.socket.poll)
            (data,) = peer.take()
            sent = decode_to_worker(data)
            assert isinstance(sent, Submit)
            assert abs(sent.requests[0].arrival_ns - 10**15) < 10**9
            assert sent.requests[0].deadline_ns == sent.requests[0].arrival_ns + 2
            link.handle(Outputs([RequestOutput("r", [1], scheduled_ns=10**15 + 9)]))
            (message,) = received
            assert isinstance(message, Outputs) and abs(message.outputs[0].scheduled_ns) < 10**9
        finally:
            peer.close()
            await link.close(0.0)

    received: list[FromWorker] = []
    asyncio.run(main())


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_a_link_by_tcp_needs_its_key(monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    if ":" in host and not _has_ipv6():
        pytest.skip("this machine has no IPv6 loopback address")

    async def main() -> None:
        link = WorkerLink(lambda message: None, host)
        address, _, key = link.address.partition("#")
        try:
            monkeypatch.setattr(front_link, "CONNECT_TIMEOUT_MS", 300)
            monkeypatch.setenv(KEY_VARIABLE, bytes(40).hex())
            with pytest.raises((TokenmillError, zmq.ZMQError)):
                await asyncio.to_thread(FrontLink, address)
            monkeypatch.setenv(KEY_VARIABLE, key)
            (await asyncio.to_thread(FrontLink, address)).close()
        finally:
            await link.close(0.0)

    asyncio.run(main())


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


def test_a_worker_is_there_once_its_facts_are() -> None:
    """Two that get ready in one turn of the loop: neither may be seen with facts of nobody."""
    asyncio.run(_two_get_ready())


async def _two_get_ready() -> None:
    seen: list[tuple[bool, bool]] = []
    links: list[WorkerLink] = []

    async def start(link: WorkerLink, spawn: object) -> object:
        links.append(link)
        return await link.ready

    async def launch(slot: WorkerSlot) -> None:
        await slot.launch()
        seen.extend((other.ready, other.facts is not None) for other in slots)

    slots = [WorkerSlot(name, None, PoolConfig(), None) for name in ("a", "b")]  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WorkerLink, "start", start)
        starts = [asyncio.create_task(launch(slot)) for slot in slots]
        await asyncio.sleep(0)
        for slot, link in zip(slots, links, strict=True):
            assert not slot.ready
            link.ready.set_result(FACTS)
        await asyncio.gather(*starts)
    for slot in slots:
        await slot.stop(0.0)
    assert seen == [(True, True), (False, False), (True, True), (True, True)]
