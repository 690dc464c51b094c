"""A pool of workers of another task than text: whatever happens, a request ends exactly once."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tokenmill.api.errors import ApiError
from tokenmill.api.jobs.task_call import run_tasks
from tokenmill.api.telemetry.job_view import worker_views
from tokenmill.core.config import PoolConfig
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import Scores, TaskProgress
from tokenmill.core.types import EngineStats, add_stats, is_counter
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerDownError
from tokenmill.workers.messages import Abort, Shutdown, Submit, ToWorker, encode
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.worker_process import WorkerLoop
from workers.echo_engine import EchoEngine, task

WORKER = [sys.executable, str(Path(__file__).with_name("echo_engine.py"))]
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
    """Submits tasks to a pool and keeps all that comes back."""

    def __init__(self, pool: WorkerPool) -> None:
        self.pool = pool
        self.outputs: dict[str, list[RequestOutput]] = {}
        self.aborted: set[str] = set()
        self._readers: list[asyncio.Task[None]] = []

    def abort(self, name: str) -> None:
        self.pool.abort([name])
        self.aborted.add(name)

    def submit(self, name: str, **actions: Any) -> None:
        self.outputs[name] = []
        stream = self.pool.submit([Request(name, task(**actions))])
        self._readers.append(asyncio.create_task(self._read(name, stream)))

    async def _read(self, name: str, stream: OutputStream) -> None:
        while not self.ends(name):
            self.outputs[name] += (await stream.get()).values()

    def ends(self, name: str) -> list[RequestOutput]:
        return [output for output in self.outputs[name] if output.finish_reason is not None]

    async def end(self, name: str) -> RequestOutput:
        """The only terminal output of a request."""
        await self.until(lambda: bool(self.ends(name)))
        (end,) = self.ends(name)
        return end

    def at(self, name: str) -> str:
        """The worker that has a request; "" where none has."""
        slot = self.pool.open_requests[name].slot
        return slot.name if slot is not None else ""

    def num_open(self) -> list[int]:
        """The requests at each worker."""
        return [worker.num_open for worker in worker_views(self.pool)]

    async def begun(self, *names: str) -> None:
        await self.until(lambda: all(self.outputs[name] for name in names))

    async def until(self, holds: Any) -> None:
        while not holds():
            await asyncio.sleep(0.005)


def pid_of(end: RequestOutput) -> bytes:
    """The process of the worker that answered."""
    assert isinstance(end.delta, Scores), end.error
    return end.delta.scores


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
    pool = WorkerPool(spawner, given, max_per_worker=max_per_worker)
    jobs = Jobs(pool)
    try:
        async with asyncio.timeout(GENEROUS_S):
            assert (await pool.start()).about == {"echo": True}
            yield jobs, spawner
    finally:
        await pool.close()
    assert all(p.returncode is not None for p in spawner.processes)
    await asyncio.sleep(0)
    for name in jobs.outputs.keys() - jobs.aborted:  # once more, when nothing can come any more
        assert len(jobs.ends(name)) == 1


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
    before = [worker.ended for worker in worker_views(jobs.pool)]
    for number in range(4):
        jobs.submit(f"job-{number}", steps=3)
    assert jobs.num_open() == [2, 2]
    pids = {pid_of(await jobs.end(f"job-{number}")) for number in range(4)}
    assert pids == {str(process.pid).encode() for process in workers.processes}
    told = [o.delta.picture for o in jobs.outputs["job-0"] if isinstance(o.delta, TaskProgress)]
    assert told == [b"2", b"1"]
    assert [worker.ended for worker in worker_views(jobs.pool)] == [n + 2 for n in before]
    jobs.submit("twice", steps=5)
    with pytest.raises(ValueError, match="'twice' is open already"):
        jobs.pool.submit([Request("twice", task(steps=5))])
    await jobs.end("twice")


@in_calm
async def test_a_wrong_job_fails_alone_and_its_worker_lives(jobs: Jobs, workers: Workers) -> None:
    for number in range(2):  # one beside each worker's wrong one
        jobs.submit(f"good-{number}", steps=10)
    for number in range(2):
        jobs.submit(f"bad-{number}", bad=3)
    for number in range(2):
        end = await jobs.end(f"bad-{number}")
        assert (end.error, end.stop_reason) == ("bad: 3 is wrong", "invalid")
        assert pid_of(await jobs.end(f"good-{number}"))


@in_calm
async def test_abort_and_deadline_free_the_worker(jobs: Jobs, workers: Workers) -> None:
    aborted = 'aborted_total{by="front"}'
    before = (await jobs.pool.stats(GENEROUS_S)).figures[aborted]
    jobs.submit("left", steps=LONG)
    await jobs.begun("left")
    jobs.abort("left")
    jobs.abort("left")

    async def never() -> Any:
        await asyncio.Event().wait()

    with pytest.raises(ApiError, match=r"not answered within 0\.02 s") as late:
        await run_tasks(jobs.pool, [task(steps=LONG)], never, 9, timeout_s=0.02)
    assert (late.value.status, late.value.code) == (408, "deadline")
    stats = (await jobs.pool.stats(GENEROUS_S)).figures
    assert stats["num_running"] == 0
    assert stats[aborted] == before + 2


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
        assert {pid_of(end) for end in ends} == {str(workers.processes[1].pid).encode()}
        anew = [sum(o.delta == TaskProgress(0.0) for o in told) for told in jobs.outputs.values()]
        assert sorted(anew) == [0, 0, 1, 1]  # whose worker died is told so
        await jobs.until(lambda: jobs.pool.num_restarts == 1)
        (dead,) = (worker for worker in worker_views(jobs.pool) if worker.failures)
        assert (dead.restarts, dead.failures) == (1, 1)
        assert "exited with code -9" in dead.last_failure


@in_loop
async def test_the_only_worker_comes_back_for_its_job_and_counters_outlive_it(
    tmp_path: Path,
) -> None:
    async with running() as (jobs, workers):
        jobs.submit("before", steps=3)
        await jobs.end("before")
        assert (await jobs.pool.stats(GENEROUS_S)).figures["steps_total"] == 3
        jobs.submit("a", until=str(tmp_path / "end"))
        await jobs.begun("a")
        workers.kill(0)
        await jobs.until(lambda: not jobs.pool.ready)
        (tmp_path / "end").touch()
        with pytest.raises(WorkerDownError, match="restarting"):
            jobs.pool.submit([Request("b", task())])
        assert jobs.pool.num_held == 1
        assert pid_of(await jobs.end("a"))
        stats = (await jobs.pool.stats(GENEROUS_S)).figures
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
        assert all([pid_of(await jobs.end(name)) for name in "abc"])
        jobs.submit("last", until=str(second))
        (slot,) = (worker.name for worker in worker_views(jobs.pool) if worker.num_open)
        draining = asyncio.create_task(jobs.pool.drain_worker(slot, GENEROUS_S))
        await jobs.until(lambda: jobs.pool.num_ready == 1)
        assert jobs.pool.num_free == 1
        jobs.submit("beside", steps=1)
        assert pid_of(await jobs.end("beside"))
        second.touch()
        await draining
        assert pid_of(await jobs.end("last"))
        assert jobs.pool.num_migrations == 1


@in_loop
async def test_a_worker_that_hangs_or_fails_is_replaced_and_other_jobs_go_on() -> None:
    config = {"heartbeat_s": 3600.0, "hang_timeout_s": 3600.0, "max_migrations": 0}
    async with running(workers=2, **config) as (jobs, _):
        jobs.submit("hangs", end="hang")
        jobs.submit("raises", end="raise")
        hanging, other = jobs.pool.slots.values()
        end = await jobs.end("raises")
        assert (end.finish_reason, end.stop_reason) == ("error", "worker_died")
        assert "the echo failed" in (end.error or "")
        while not jobs.ends("hangs"):  # a heartbeat that is not answered until the next is a hang
            hanging.beat()
            await asyncio.sleep(0.005)
        end = await jobs.end("hangs")
        assert (end.finish_reason, end.stop_reason) == ("error", "worker_died")
        assert "no sign of life for 3600 s" in (end.error or "")
        assert (hanging.num_hangs, other.num_hangs) == (1, 0)
        await jobs.until(lambda: jobs.pool.ready)
        jobs.submit("next", steps=1)
        assert pid_of(await jobs.end("next"))


@in_loop
async def test_a_job_that_kills_every_worker_fails_alone() -> None:
    async with running(workers=2, max_migrations=1) as (jobs, _):
        jobs.submit("killer", steps=4, end="exit")
        jobs.submit("good", steps=40)
        jobs.submit("beside", steps=40)  # at the killer's worker at first
        end = await jobs.end("killer")
        assert (end.finish_reason, end.stop_reason) == ("error", "worker_died")
        assert "code 7" in (end.error or "")
        assert pid_of(await jobs.end("good")) and pid_of(await jobs.end("beside"))
        assert sum(worker.failures for worker in worker_views(jobs.pool)) == 2


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
        assert [worker.name for worker in worker_views(jobs.pool)] == ["w1"]
        assert pid_of(await jobs.end("a"))
        assert jobs.pool.num_migrations == 1
        jobs.submit("short", steps=5)
        jobs.submit("long", steps=LONG)
        jobs.pool.drain()
        assert pid_of(await jobs.end("short"))
        jobs.submit("c")
        assert (await jobs.end("c")).stop_reason == "draining"
    assert jobs.ends("long")[0].stop_reason == "shutdown"


@in_loop
async def test_a_new_job_does_not_overtake_one_that_lost_its_worker() -> None:
    async with running(workers=2, max_per_worker=1, backoff_s=3600.0) as (jobs, workers):
        for name in "xy":
            jobs.submit(name, steps=LONG)
        await jobs.begun("x", "y")
        workers.kill([slot.name for slot in jobs.pool.slots.values()].index(jobs.at("x")))
        await jobs.until(lambda: jobs.at("x") == "")
        jobs.abort("y")  # and before its room is given to x
        jobs.submit("z", steps=LONG)
        assert jobs.at("x") and not jobs.at("z")
        for name in "xz":
            jobs.abort(name)


@in_loop
async def test_counters_do_not_fall_while_a_worker_leaves() -> None:
    async with running(workers=2, heartbeat_s=0.1) as (jobs, _):
        for index in range(8):
            jobs.submit(f"j{index}", steps=3)
        for index in range(8):
            await jobs.end(f"j{index}")
        seen = [(await jobs.pool.stats(GENEROUS_S)).figures["steps_total"]]
        drained = asyncio.create_task(jobs.pool.drain_worker("w1"))
        while not drained.done():
            seen.append(jobs.pool.known_stats().figures["steps_total"])
            await asyncio.sleep(0.001)
        assert set(seen) == {seen[0]} and seen[0] > 0


@in_loop
async def test_ids_that_are_open_take_no_request_of_their_call() -> None:
    async with running() as (jobs, _):
        jobs.submit("b", steps=LONG)
        for names in (["a", "b"], ["a", "a"]):
            with pytest.raises(ValueError, match="is open already"):
                jobs.pool.submit([Request(name, task()) for name in names])
        assert list(jobs.pool.open_requests) == ["b"]
        jobs.abort("b")


class Messages:
    """What an owner sends to a worker: all of it at once."""

    def __init__(self, *messages: ToWorker, is_there: bool = True) -> None:
        self.messages, self.is_owner_there = messages, is_there
        self.sent: list[RequestOutput] = []

    def receive(self, wait_ms: int | None) -> tuple[list[tuple[str, bytes]], bool]:
        return [("", encode(message)) for message in self.messages], self.is_owner_there

    def is_there(self, front: str) -> bool:
        return True

    def submitted(self, front: str, message: Submit) -> None: ...

    def released(self, request_ids: list[str]) -> None: ...

    def report_load(self, busy: bool) -> None: ...

    def send_outputs(self, outputs: list[RequestOutput]) -> None:
        self.sent += outputs


def test_a_worker_that_shall_end_runs_no_further_step_but_says_what_was_aborted() -> None:
    submit = Submit([Request("a", task(steps=9))])
    for links in (Messages(submit, Shutdown()), Messages(submit, is_there=False)):
        engine = EchoEngine()
        WorkerLoop(engine, links, None).run()  # type: ignore[arg-type]
        assert engine.has_work() and engine.num_steps == 0
    links = Messages(submit, Abort(["a"]), Shutdown())
    engine = EchoEngine()
    WorkerLoop(engine, links, None).run()  # type: ignore[arg-type]
    assert [output.finish_reason for output in links.sent] == ["abort"] and engine.num_steps == 0


def test_figures_add_up_and_counters_are_known_by_their_names() -> None:
    assert is_counter('keys_total{tier="host"}') and is_counter("batch_bucket")
    assert not is_counter("num_running")
    one, other = EngineStats(figures={"a": 1, "b": 2}), EngineStats(figures={"b": 3, "c": 4})
    assert add_stats(one, other).figures == {"a": 1, "b": 5, "c": 4}
