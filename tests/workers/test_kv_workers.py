"""A prefill and a decode worker, each a process, and the least front that makes them one engine."""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from light_processes import LightProcess, start_program
from tiny_configs import write_config
from tokenmill.core.kv import PREFILLED, KVAddress, KVNotice
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.workers.link import WorkerLink
from tokenmill.workers.messages import (
    Abort,
    ConnectKV,
    DisconnectKV,
    FromWorker,
    GetStats,
    KVConnected,
    KVNotices,
    KVReceived,
    LeasesExpired,
    Outputs,
    ReleaseKV,
    Stats,
    Submit,
)
from workers.pools import KV_WORKER

GENEROUS_S = 180.0
GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


class Worker:
    """A link, its process, and what it has said."""

    def __init__(self, on_message: Callable[[FromWorker], None]) -> None:
        self.link = WorkerLink(on_message)
        self.process: LightProcess | None = None

    async def start(self, *arguments: str) -> KVAddress:
        async def spawn(address: str) -> LightProcess:
            self.process = start_program(KV_WORKER, "--address", address, *arguments)
            return self.process

        facts = await self.link.start(spawn)
        assert facts.kv is not None
        return facts.kv


class Front:
    """Passes messages between two workers as workers/messages.py says."""

    def __init__(self) -> None:
        self.prefill, self.decode = Worker(self.on_prefill), Worker(self.on_decode)
        self.source: KVAddress | None = None
        self.requests: dict[str, Request] = {}  # that were sent to the prefill worker alone
        self.outputs: list[RequestOutput] = []
        self.said: list[FromWorker] = []
        self.notices: list[KVNotice] = []
        self.relay = True
        self.changed = asyncio.Event()

    async def start(self, folder: Path, connector: str) -> None:
        common = ("--model", str(folder), "--connector", connector)
        self.source, _ = await asyncio.gather(
            self.prefill.start(*common, "--budget", "32"), self.decode.start(*common)
        )
        self.decode.link.send(ConnectKV(self.source))
        (answer,) = await self.wait_for(KVConnected)
        assert answer.error is None

    async def close(self) -> None:
        await asyncio.gather(*(w.link.close(5.0) for w in (self.prefill, self.decode)))

    def on_prefill(self, message: FromWorker) -> None:
        match message:
            case KVNotices(notices=notices):
                self.notices += notices
                for notice in notices if self.relay else ():
                    self.pass_on(notice)
            case Outputs():
                outputs = message.all()
                for output in outputs:
                    if output.stop_reason == PREFILLED:
                        output.finish_reason = output.stop_reason = None
                self.outputs += outputs
            case _:
                self.said.append(message)
        self.changed.set()

    def pass_on(self, notice: KVNotice) -> None:
        request = self.requests.pop(notice.request_id, None)
        if request is not None:
            assert self.source is not None
            self.decode.link.send(Submit([request.with_task(kv_from=self.source.engine_id)]))
        self.decode.link.send(KVNotices([notice]))

    def on_decode(self, message: FromWorker) -> None:
        match message:
            case KVReceived(request_ids=request_ids):
                self.prefill.link.send(ReleaseKV(request_ids))
            case Outputs():
                self.outputs += message.all()
        self.said.append(message)
        self.changed.set()

    async def wait_for(self, kind: type, count: int = 1) -> list[Any]:
        """The next messages of a kind."""
        while len(found := [m for m in self.said if isinstance(m, kind)]) < count:
            self.changed.clear()
            await self.changed.wait()
        self.said = [m for m in self.said if not isinstance(m, kind)]
        return found

    def send(self, request: Request, hold_s: float = 30.0) -> None:
        self.requests[request.request_id] = request
        self.prefill.link.send(Submit([request.with_task(hold_kv_s=hold_s)]))

    async def answer(self, request_id: str) -> tuple[list[int], RequestOutput]:
        """All tokens of a request and its terminal output, which is the last."""
        while True:
            own = [o for o in self.outputs if o.request_id == request_id]
            if own and own[-1].finish_reason is not None:
                assert [o.finish_reason for o in own[:-1]] == [None] * (len(own) - 1)
                return [token for o in own for token in o.token_ids], own[-1]
            self.changed.clear()
            await self.changed.wait()

    async def num_tokens(self, request_id: str, count: int) -> None:
        """Wait until a request has so many tokens."""
        while sum(len(o.token_ids) for o in self.outputs if o.request_id == request_id) < count:
            self.changed.clear()
            await self.changed.wait()

    async def unused(self) -> None:
        """Wait until neither worker holds a block."""
        for worker in (self.prefill, self.decode):
            while True:
                worker.link.send(GetStats())
                (answer,) = await self.wait_for(Stats)
                if answer.stats.num_kv_blocks_used == 0 and answer.stats.num_leases == 0:
                    break
                await asyncio.sleep(0.01)


@dataclass
class WorkerPool:
    runner: asyncio.Runner
    front: Front

    def run(self, scenario: Callable[[Front], Coroutine[Any, Any, None]]) -> None:
        async def main() -> None:
            async with asyncio.timeout(GENEROUS_S):
                await scenario(self.front)

        self.runner.run(main())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_config(tmp_path_factory.mktemp("kv"), max_position_embeddings=1024)


@pytest.fixture(scope="module", params=["nixl" if sys.platform == "linux" else "shm", "cuda-ipc"])
def pool(folder: Path, request: pytest.FixtureRequest) -> Iterator[WorkerPool]:
    async def start() -> Front:
        front = Front()
        await front.start(folder, request.param)
        return front

    with asyncio.Runner() as runner:
        front = runner.run(start())
        yield WorkerPool(runner, front)
        runner.run(front.close())


def prompt(length: int, seed: int = 0) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(64) for _ in range(length)]


def test_answers_are_those_of_one_worker(pool: WorkerPool) -> None:
    async def scenario(front: Front) -> None:
        seeded = SamplingParams(temperature=0.8, seed=5, max_tokens=10)
        cases = [(prompt(n, n), GREEDY) for n in (5, 16, 100, 300)] + [(prompt(40), seeded)]
        for i, (tokens, sampling) in enumerate(cases):
            front.send(Request(f"two-{i}", Generate(tokens, sampling)))
            front.prefill.link.send(Submit([Request(f"one-{i}", Generate(tokens, sampling))]))
        for i in range(len(cases)):
            assert (await front.answer(f"two-{i}"))[0] == (await front.answer(f"one-{i}"))[0]
        early = [n for n in front.notices if n.request_id == "two-3" and n.token_id is None]
        assert len(early) > 3, "KV did not move while later chunks were computed"
        await front.unused()

    pool.run(scenario)


def test_aborts_and_leases_free_both_sides(pool: WorkerPool) -> None:
    async def scenario(front: Front) -> None:
        front.send(Request("aborted", Generate(prompt(200, 8), replace(GREEDY, max_tokens=500))))
        await front.num_tokens("aborted", 3)
        for worker in (front.prefill, front.decode):
            worker.link.send(Abort(["aborted"]))
        assert (await front.answer("aborted"))[1].finish_reason is FinishReason.ABORT
        front.relay = False  # the front forgets the request, and so does everybody
        front.send(Request("forgotten", Generate(prompt(50, 9), GREEDY)), hold_s=0.05)
        (expired,) = await front.wait_for(LeasesExpired)
        assert expired.request_ids == ["forgotten"]
        front.relay = True
        await front.unused()

    pool.run(scenario)


def test_workers_that_do_not_match_are_refused_at_start(pool: WorkerPool) -> None:
    async def scenario(front: Front) -> None:
        assert front.source is not None
        geometry = replace(front.source.geometry, block_size=64)
        front.decode.link.send(ConnectKV(replace(front.source, geometry=geometry)))
        (answer,) = await front.wait_for(KVConnected)
        assert answer.error == "block size: the prefill engine has 64, the decode engine 16"

    pool.run(scenario)


def test_a_killed_prefill_worker_costs_the_decode_worker_nothing(pool: WorkerPool) -> None:
    async def scenario(front: Front) -> None:
        assert front.source is not None and front.prefill.process is not None
        front.send(Request("halfway", Generate(prompt(600, 10), GREEDY)))
        while not any(n.request_id == "halfway" for n in front.notices):
            front.changed.clear()
            await front.changed.wait()
        front.prefill.process.kill()
        await front.prefill.link.dead.wait()
        front.decode.link.send(DisconnectKV(front.source.engine_id))
        terminal = (await front.answer("halfway"))[1]
        assert (terminal.finish_reason, terminal.stop_reason) == ("error", "kv_transfer")
        front.prefill = front.decode
        await front.unused()
        front.decode.link.send(Submit([Request("next", Generate(prompt(30), GREEDY))]))
        assert len((await front.answer("next"))[0]) == 10

    pool.run(scenario)
