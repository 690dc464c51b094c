"""A pool of workers that answer jobs: whatever happens to them, a job ends exactly once."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenmill.core.config import PoolConfig
from tokenmill.core.jobs.job_engine import JobOutput, add_figures, is_counter
from tokenmill.workers.jobs.job_pool import JobPool
from tokenmill.workers.jobs.job_worker import JobLoop
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerDownError
from tokenmill.workers.messages import Job, Shutdown, SubmitJobs, ToWorker, encode
from workers.echo_jobs import EchoJobs

WORKER = [sys.executable, str(Path(__file__).with_name("echo_jobs.py"))]
GENEROUS_S = 180.0
LONG = 1_000_000  # steps: it ends by what the test does


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that is a coroutine."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class Workers:
    """Starts worker processes and remembers them."""

    def __init__(self) -> None:
        self.processes: list[asyncio.subprocess.Process] = []

    async def __call__(self, address: str) -> asyncio.subprocess.Process:
        null = asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            *WORKER, "--address", address, stdout=null, stderr=null
        )
        self.processes.append(process)
        return process

    def kill(self, number: int) -> None:
        os.kill(self.processes[number].pid, signal.SIGKILL)


class Jobs:
    """Submits jobs to a pool and keeps all that comes back."""

    def __init__(self, pool: JobPool) -> None:
        self.pool = pool
        self.outputs: dict[str, list[JobOutput]] = {}

    def submit(self, job_id: str, deadline_s: float | None = None, **payload: Any) -> None:
        mine = self.outputs.setdefault(job_id, [])
        self.pool.submit(job_id, json.dumps(payload).encode(), mine.append, deadline_s)

    def ends(self, job_id: str) -> list[JobOutput]:
        return [output for output in self.outputs[job_id] if output.is_terminal]

    async def end(self, job_id: str) -> JobOutput:
        """The only terminal output of a job."""
        await self.until(lambda: bool(self.ends(job_id)))
        (end,) = self.ends(job_id)
        return end

    def num_open(self) -> list[int]:
        """The jobs at each worker."""
        return [worker.num_open for worker in self.pool.view()]

    async def begun(self, *job_ids: str) -> None:
        await self.until(lambda: all(self.outputs[job_id] for job_id in job_ids))

    async def until(self, holds: Any) -> None:
        while not holds():
            await asyncio.sleep(0.005)


class Calm(NamedTuple):
    """A pool that several tests share, and the loop that it lives in."""

    runner: asyncio.Runner
    jobs: Jobs
    workers: Workers


@asynccontextmanager
async def running(
    workers: int = 1, max_per_worker: int | None = None, **config: Any
) -> AsyncIterator[tuple[Jobs, Workers]]:
    spawner = Workers()
    settings = {"backoff_s": 0.01, "heartbeat_s": 60.0} | config
    given = PoolConfig(workers=workers, **settings)
    pool = JobPool(spawner, given, max_per_worker=max_per_worker)
    jobs = Jobs(pool)
    try:
        async with asyncio.timeout(GENEROUS_S):
            assert await pool.start() == {"echo": True}
            yield jobs, spawner
    finally:
        await pool.close()
    assert all(p.returncode is not None for p in spawner.processes)
    for job_id in jobs.outputs:  # once more, when nothing can come any more
        assert len(jobs.ends(job_id)) == 1


@pytest.fixture(scope="module")
def calm() -> Iterator[Calm]:
    """One pool for the tests after which both its workers live and nothing is open."""
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        opened = stack.enter_async_context(running(workers=2))
        try:
            yield Calm(runner, *runner.run(opened))
        finally:
            runner.run(stack.aclose())


def in_calm(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[Calm], None]:
    """A test that is a coroutine over the shared pool."""

    def run(calm: Calm) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(GENEROUS_S):
                await test(calm.jobs, calm.workers)
                assert calm.jobs.pool.num_open == 0 and len(calm.workers.processes) == 2

        calm.runner.run(bounded())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_calm
async def test_jobs_go_where_least_is_open_and_progress_comes_before_their_end(
    jobs: Jobs, workers: Workers
) -> None:
    before = [worker.ended for worker in jobs.pool.view()]
    for number in range(4):
        jobs.submit(f"job-{number}", steps=3)
    assert jobs.num_open() == [2, 2]
    pids = {(await jobs.end(f"job-{number}")).payload for number in range(4)}
    assert pids == {str(process.pid).encode() for process in workers.processes}
    assert [o.payload for o in jobs.outputs["job-0"][:2]] == [b"2", b"1"]
    assert [worker.ended for worker in jobs.pool.view()] == [n + 2 for n in before]
    jobs.submit("twice", steps=5)
    with pytest.raises(ValueError, match="'twice' is open already"):
        jobs.submit("twice", steps=5)
    await jobs.end("twice")


@in_calm
async def test_a_wrong_job_fails_alone_and_its_worker_lives(jobs: Jobs, workers: Workers) -> None:
    for number in range(2):  # one beside each worker's wrong one
        jobs.submit(f"good-{number}", steps=10)
    for number in range(2):
        jobs.submit(f"bad-{number}", bad=3)
    for number in range(2):
        end = await jobs.end(f"bad-{number}")
        assert (end.error, end.error_kind) == ("bad: 3 is wrong", "invalid")
        assert (await jobs.end(f"good-{number}")).kind == "done"


@in_calm
async def test_abort_and_deadline_free_the_worker(jobs: Jobs, workers: Workers) -> None:
    aborted = 'aborted_total{by="front"}'
    before = (await jobs.pool.stats(GENEROUS_S))[aborted]
    jobs.submit("left", steps=LONG)
    jobs.submit("late", steps=LONG, deadline_s=0.02)
    await jobs.begun("left")
    jobs.pool.abort("left")
    jobs.pool.abort("left")
    assert (await jobs.end("left")).error_kind == "aborted"
    assert (await jobs.end("late")).error_kind == "deadline"
    stats = await jobs.pool.stats(GENEROUS_S)
    assert stats["num_running"] == 0
    assert stats[aborted] == before + 2


@in_calm
async def test_a_fault_of_who_waits_is_not_a_fault_of_other_jobs(
    jobs: Jobs, workers: Workers
) -> None:
    def fails(output: JobOutput) -> None:
        raise RuntimeError("the client went")

    jobs.pool.submit("faulty", b"{}", fails)
    jobs.submit("beside", steps=1)
    jobs.submit("behind", steps=1)  # at the same worker as the faulty one
    assert (await jobs.end("beside")).kind == (await jobs.end("behind")).kind == "done"
    await jobs.until(lambda: jobs.pool.num_open == 0)


@in_loop
async def test_the_jobs_of_a_killed_worker_are_answered_by_another(tmp_path: Path) -> None:
    async with running(workers=2) as (jobs, workers):
        for number in range(4):
            jobs.submit(f"job-{number}", until=str(tmp_path / "end"))
        await jobs.begun(*jobs.outputs)
        workers.kill(0)
        await jobs.until(lambda: jobs.pool.num_migrations == 2)
        (tmp_path / "end").touch()
        ends = [await jobs.end(f"job-{number}") for number in range(4)]
        assert {end.kind for end in ends} == {"done"}
        assert {end.payload for end in ends} == {str(workers.processes[1].pid).encode()}
        anew = [sum(o.kind == "restarted" for o in told) for told in jobs.outputs.values()]
        assert sorted(anew) == [0, 0, 1, 1]  # whose worker died is told so
        await jobs.until(lambda: jobs.pool.num_restarts == 1)
        (dead,) = (worker for worker in jobs.pool.view() if worker.failures)
        assert (dead.restarts, dead.failures) == (1, 1)
        assert "exited with code -9" in dead.last_failure


@in_loop
async def test_the_only_worker_comes_back_for_its_job_and_counters_outlive_it(
    tmp_path: Path,
) -> None:
    async with running() as (jobs, workers):
        jobs.submit("before", steps=3)
        await jobs.end("before")
        assert (await jobs.pool.stats(GENEROUS_S))["steps_total"] == 3
        jobs.submit("a", until=str(tmp_path / "end"))
        await jobs.begun("a")
        workers.kill(0)
        await jobs.until(lambda: not jobs.pool.ready)
        (tmp_path / "end").touch()
        with pytest.raises(WorkerDownError, match="restarting"):
            jobs.pool.submit("b", b"{}", print)
        assert jobs.pool.num_held == 1
        assert (await jobs.end("a")).kind == "done"
        stats = await jobs.pool.stats(GENEROUS_S)
        assert stats["steps_total"] == 3 + 1  # what the dead one had told, and the new one's
        assert stats["num_running"] == 0


@in_loop
async def test_a_worker_that_has_its_share_gets_no_job_of_another(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    async with running(workers=2, max_per_worker=1) as (jobs, workers):
        for name in "abc":
            jobs.submit(name, until=str(first))
        assert (jobs.num_open(), jobs.pool.num_held, jobs.pool.num_free) == ([1, 1], 1, 0)
        await jobs.begun("a", "b")
        workers.kill(0)
        await jobs.until(lambda: jobs.pool.num_migrations == 1)
        assert (sum(jobs.num_open()), jobs.pool.num_held, jobs.pool.num_free) == (1, 2, 0)
        await jobs.until(lambda: jobs.pool.num_restarts == 1)
        assert (jobs.num_open(), jobs.pool.num_held) == ([1, 1], 1)
        first.touch()
        assert {(await jobs.end(name)).kind for name in "abc"} == {"done"}
        jobs.submit("last", until=str(second))
        (slot,) = (worker.name for worker in jobs.pool.view() if worker.num_open)
        draining = asyncio.create_task(jobs.pool.drain_worker(slot, GENEROUS_S))
        await jobs.until(lambda: jobs.pool.num_ready == 1)
        assert jobs.pool.num_free == 1
        jobs.submit("beside", steps=1)
        assert (await jobs.end("beside")).kind == "done"
        second.touch()
        await draining
        assert (await jobs.end("last")).kind == "done"
        assert jobs.pool.num_migrations == 1


@in_loop
async def test_a_worker_that_hangs_or_fails_is_replaced_and_other_jobs_go_on() -> None:
    config = {"heartbeat_s": 3600.0, "hang_timeout_s": 3600.0, "max_migrations": 0}
    async with running(workers=2, **config) as (jobs, _):
        jobs.submit("hangs", end="hang")
        jobs.submit("raises", end="raise")
        hanging, other = jobs.pool.slots.values()
        end = await jobs.end("raises")
        assert (end.kind, end.error_kind) == ("failed", "worker_died")
        assert "the echo failed" in end.error
        while not jobs.ends("hangs"):  # a heartbeat that is not answered until the next is a hang
            hanging.beat()
            await asyncio.sleep(0.005)
        end = await jobs.end("hangs")
        assert (end.kind, end.error_kind) == ("failed", "worker_died")
        assert "no sign of life for 3600 s" in end.error
        assert (hanging.num_hangs, other.num_hangs) == (1, 0)
        await jobs.until(lambda: jobs.pool.ready)
        jobs.submit("next", steps=1)
        assert (await jobs.end("next")).kind == "done"


@in_loop
async def test_a_job_that_kills_every_worker_fails_alone() -> None:
    async with running(workers=2, max_migrations=1) as (jobs, _):
        jobs.submit("killer", steps=4, end="exit")
        jobs.submit("good", steps=40)
        jobs.submit("beside", steps=40)  # at the killer's worker at first
        end = await jobs.end("killer")
        assert (end.kind, end.error_kind) == ("failed", "worker_died")
        assert "code 7" in end.error
        assert (await jobs.end("good")).kind == (await jobs.end("beside")).kind == "done"
        assert sum(worker.failures for worker in jobs.pool.view()) == 2


@in_loop
async def test_workers_are_scaled_and_drained_without_losing_a_job(tmp_path: Path) -> None:
    async with running() as (jobs, _):
        with pytest.raises(PoolError, match="the only one"):
            await jobs.pool.drain_worker("w0")
        await jobs.pool.scale(2)
        jobs.submit("a", until=str(tmp_path / "end"))
        await jobs.begun("a")
        await jobs.pool.drain_worker("w0", timeout_s=0.0)
        (tmp_path / "end").touch()
        assert [worker.name for worker in jobs.pool.view()] == ["w1"]
        assert (await jobs.end("a")).kind == "done"
        assert jobs.pool.num_migrations == 1
        jobs.submit("short", steps=5)
        jobs.submit("long", steps=LONG)
        jobs.pool.drain()
        assert (await jobs.end("short")).kind == "done"
        with pytest.raises(WorkerDownError, match="draining"):
            jobs.pool.submit("c", b"{}", print)
    assert jobs.ends("long")[0].error_kind == "shutdown"


class Messages:
    """What an owner sends to a worker: all of it at once."""

    def __init__(self, *messages: ToWorker, is_there: bool = True) -> None:
        self.messages, self.is_there = messages, is_there

    def receive(self, wait_ms: int | None) -> tuple[list[tuple[str, bytes]], bool]:
        return [("", encode(message)) for message in self.messages], self.is_there


def test_a_worker_that_shall_end_runs_no_further_step() -> None:
    job = SubmitJobs([Job("a", b'{"steps": 9}')])
    for links in (Messages(job, Shutdown()), Messages(job, is_there=False)):
        engine = EchoJobs()
        JobLoop(engine, links).run()  # type: ignore[arg-type]
        assert engine.has_work() and engine.num_steps == 0


def test_figures_add_up_and_counters_are_known_by_their_names() -> None:
    assert is_counter('keys_total{tier="host"}') and is_counter("batch_bucket")
    assert not is_counter("num_running")
    assert add_figures({"a": 1, "b": 2}, {"b": 3, "c": 4}) == {"a": 1, "b": 5, "c": 4}
