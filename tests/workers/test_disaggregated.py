"""Prefill and decode workers behind one front, with a tiny GPT-OSS: the answers of one engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from api.streams import Spawner, read, until
from tiny_configs import write_config
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    PoolConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.routing.role_balance import match_rates
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.pool import WorkerPool
from workers.pools import KVSpawner, kill, prompt, told

GENEROUS_S = 180.0
MIN_TOKENS = 40
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, seed=7, max_tokens=12, ignore_eos=True)
LONG = replace(GREEDY, max_tokens=300)
# Its windows, sinks and experts are the most that a request takes along when it moves.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "max_position_embeddings": 1024,
}


@dataclass
class Pair:
    """A pool, its processes, and an engine that knows the right answers."""

    runner: asyncio.Runner
    pool: WorkerPool
    prefill: Spawner
    decode: Spawner
    answer: Callable[[Request], list[int]]

    def run(self, scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(GENEROUS_S):
                await until(lambda: all(w.state == "ready" for w in self.pool.view().workers))
                await self.pool.handovers.settled()
                await scenario()
                await self.unused()

        self.runner.run(main())

    async def unused(self) -> None:
        """Nothing is left behind, on either side."""
        assert self.pool.num_open == 0
        while True:
            stats = await self.pool.stats()
            if stats.num_kv_blocks_used == stats.num_leases == stats.num_receiving == 0:
                break
            await asyncio.sleep(0.02)
        for router in (self.pool.routers.main, self.pool.routers.prefill):
            assert router.num_open == 0, "the router believes in requests that are over"

    def check(self, requests: list[Request]) -> asyncio.Task[None]:
        """Send all at once; every answer is that of one engine."""
        return asyncio.create_task(self._compare(requests, self.pool.submit(requests)))

    async def _compare(self, requests: list[Request], stream: OutputStream) -> None:
        outputs = await read(stream)
        for request, output in zip(requests, outputs, strict=True):
            assert output.finish_reason is FinishReason.LENGTH, output
            assert output.token_ids == self.answer(request), request.request_id


def requests(tag: str) -> list[Request]:
    """Long and short ones, greedy and seeded."""
    cases = [(300, GREEDY), (MIN_TOKENS - 5, GREEDY), (100, SEEDED), (64, GREEDY), (7, SEEDED)]
    cases += [(200, replace(GREEDY, max_tokens=1)), (90, replace(SEEDED, max_tokens=2))]
    return [
        Request(f"{tag}-{i}", Generate(prompt(n, f"{tag} {n}"), sampling))
        for i, (n, sampling) in enumerate(cases)
    ]


def whole_engine(folder: Path) -> Callable[[Request], list[int]]:
    """The same model in one engine."""
    engine = build_engine(
        resolve_setup(
            Setup(
                ModelConfig(str(folder), "fp32", "cpu", random_weights=True, num_threads=1),
                CacheConfig(num_blocks=256),
                SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=16),
                ExecutionConfig(fused_kernels=False),
            )
        )
    ).engine

    def answer(request: Request) -> list[int]:
        engine.submit(request)
        tokens: list[int] = []
        while engine.has_work():
            for output in engine.step():
                tokens += output.token_ids
        return tokens

    return answer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("model"), **GPT_OSS)


@asynccontextmanager
async def running(
    prefill: Spawner, decode: Spawner, config: PoolConfig
) -> AsyncIterator[WorkerPool]:
    pool = WorkerPool(decode, config, prefill_spawn=prefill)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.close()


@pytest.fixture(scope="module")
def pair(folder: Path) -> Iterator[Pair]:
    config = PoolConfig(
        prefill=1,
        decode=1,
        remote_prefill_tokens=MIN_TOKENS,
        backoff_s=0.01,
        heartbeat_s=0.2,
        max_migrations=5,
    )
    prefill, decode = KVSpawner(folder, "--budget", "16"), KVSpawner(folder)
    answer = whole_engine(folder)
    with asyncio.Runner() as runner:
        context = running(prefill, decode, config)
        pool = runner.run(context.__aenter__())
        yield Pair(runner, pool, prefill, decode, answer)
        runner.run(context.__aexit__(None, None, None))


def test_one_and_one_answer_as_one_engine(pair: Pair) -> None:
    async def scenario() -> None:
        pool = pair.pool
        await pair.check(requests("one"))
        view = pool.view()
        assert [(w.name, w.role) for w in view.workers] == [("p0", "prefill"), ("d0", "decode")]
        assert view.transfers == 4 and view.failed_transfers == 0  # not the short, not the single
        assert view.workers[0].routed == 5 and view.workers[1].routed == 7
        assert view.rates is not None
        num_tokens = sum(len(r.task.prompt_token_ids) for r in requests("one"))
        assert sum(w.routed_tokens for w in view.workers) == num_tokens
        stats = await pool.stats()
        assert stats.num_prompt_tokens == num_tokens, "a handed-over prompt counts once"
        assert pool.view().transferred_bytes > 0
        # The second time the decode worker has the prompts cached.
        again = [replace(r, request_id="again" + r.request_id) for r in requests("one")]
        await pair.check(again)
        assert pool.view().transfers < 8

    pair.run(scenario)


def test_an_abort_on_the_way_frees_both_sides(pair: Pair) -> None:
    async def scenario() -> None:
        pool = pair.pool
        pool.submit([Request("a", Generate(prompt(900, 11), LONG))])
        assert pool.open_requests["a"].source is not None
        pool.abort(["a"])
        pool.submit([Request("b", Generate(prompt(900, 12), LONG))])
        await until(lambda: told(pool, "b"))
        pool.abort(["b"])

    pair.run(scenario)


def test_a_prefill_worker_killed_on_the_way(pair: Pair) -> None:
    async def scenario() -> None:
        pool, before = pair.pool, pair.pool.view().failed_transfers
        wanted = [Request(f"k{i}", Generate(prompt(900, 50 + i), LONG)) for i in range(2)]
        checking = pair.check(wanted)
        await until(lambda: told(pool, "k0"))
        kill(pair.prefill)
        await checking
        assert pool.view().failed_transfers > before
        await until(lambda: pool.view().workers[0].state == "ready")
        await until(lambda: pool.handovers.num_connecting == 0)
        transfers = pool.view().transfers
        await pair.check(requests("after"))
        assert pool.view().transfers > transfers

    pair.run(scenario)


def test_a_decode_worker_killed_in_the_stream(pair: Pair) -> None:
    async def scenario() -> None:
        pool = pair.pool
        wanted = [Request(f"d{i}", Generate(prompt(300, 70 + i), LONG)) for i in range(3)]
        checking = pair.check(wanted)
        await until(lambda: len(pool.open_requests["d0"].token_ids) > 20)
        kill(pair.decode)  # the only one: the prefill worker goes on with it all
        await checking
        assert pool.num_migrations >= 3

    pair.run(scenario)


def test_a_decode_worker_killed_on_the_way(pair: Pair) -> None:
    async def scenario() -> None:
        wanted = [Request("t", Generate(prompt(900, 90), LONG))]
        checking = pair.check(wanted)
        await until(lambda: told(pair.pool, "t"))
        kill(pair.decode)
        await checking

    pair.run(scenario)


def test_one_and_two_and_two_and_one(pair: Pair) -> None:
    async def scenario() -> None:
        pool = pair.pool
        await pool.scale(2, "decode")
        await pair.check(requests("1:2"))
        assert all(w.routed for w in pool.view().workers)
        running = pair.check([Request("long", Generate(prompt(400, 3), LONG))])
        await pool.scale(1, "decode")
        await running
        await pool.scale(2, "prefill")
        await pair.check(requests("2:1"))
        assert [w.role for w in pool.view().workers] == ["prefill", "decode", "prefill"]
        with pytest.raises(
            PoolError,
            match="workers: this server has none of these; give a number of decode and prefill",
        ):
            await pool.scale(2)
        pair.decode.argv += ["--block-size", "32"]
        with pytest.raises(WorkerStartError, match="block size: the prefill engine has 16"):
            await pool.scale(2, "decode")
        assert len(pool.view().workers) == 3
        with pytest.raises(PoolError, match="only one"):
            await pool.drain_worker(next(w.name for w in pool.view().workers if w.name[0] == "d"))

    pair.run(scenario)


@pytest.mark.parametrize(
    ("prefill", "decode", "starving", "fitting"),
    [
        ([1.0], [0.2, 0.2], "decode", (2, 1)),
        ([0.1, 0.1], [0.9], "prefill", (1, 2)),
        ([0.5], [0.5, 0.5], "", (1, 2)),
        ([0.0], [0.0], "", (1, 1)),
        ([0.0], [1.0], "prefill", (1, 1)),
    ],
)
def test_rates_are_matched(
    prefill: list[float], decode: list[float], starving: str, fitting: tuple[int, int]
) -> None:
    match = match_rates(prefill, decode)
    assert match.starving == starving
    assert (match.fitting_prefill, match.fitting_decode) == fitting
