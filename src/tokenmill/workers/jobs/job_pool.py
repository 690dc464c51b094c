"""A pool of workers whose engine answers jobs: submit, abort, view; it restarts dead workers."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import msgspec

from tokenmill.core.config import PoolConfig
from tokenmill.workers.jobs.open_jobs import OnOutput, OpenJob, OpenJobs
from tokenmill.workers.lifecycle import Lifecycle, PoolError, roles_of
from tokenmill.workers.link import Spawn, WorkerDownError
from tokenmill.workers.slot import WorkerSlot

MAX_OPEN = 4096


class JobWorkerView(msgspec.Struct, frozen=True):
    """One worker, now and since the start of the server."""

    name: str
    state: str
    num_open: int  # jobs that it has
    routed: int  # jobs that were sent to it
    ended: int  # of these, those that it has ended
    restarts: int
    failures: int
    hangs: int
    last_failure: str
    busy: float  # share of the last minute with something to compute
    figures: dict[str, float]  # what its engine says of itself
    warnings: list[str] = []
    pid: int | None = None  # on its machine; None while it has no process

    @property
    def up(self) -> bool:
        return self.state == "ready"


class JobPool:
    """The workers as one engine of jobs.

    `spawner` starts a worker; with a `host` the workers connect by TCP. `max_open` is for callers,
    who refuse a whole call where its jobs would be more. A worker has `max_per_worker` jobs at
    most; those that it cannot take wait until a worker can.
    """

    def __init__(
        self,
        spawner: Spawn,
        config: PoolConfig | None = None,
        host: str | None = None,
        max_open: int = MAX_OPEN,
        max_per_worker: int | None = None,
    ) -> None:
        self.config = config or PoolConfig()
        self.max_open = max_open
        slots: dict[str, WorkerSlot] = {}  # the lifecycle changes it
        self.slots: Mapping[str, WorkerSlot] = MappingProxyType(slots)
        self._jobs = OpenJobs(self.config.max_migrations, max_per_worker)
        self._lifecycle = Lifecycle(
            slots, lambda name, role: spawner, self.config, self._jobs, host
        )
        self.gave_up = self._lifecycle.gave_up  # no slot has a worker, and none can be started
        self._draining = False

    @property
    def facts(self) -> dict[str, Any]:
        """What the first worker told of its engine."""
        return {} if self._lifecycle.facts is None else self._lifecycle.facts.about

    @property
    def ready(self) -> bool:
        """True while a worker is there to take jobs."""
        return self.num_ready > 0

    @property
    def num_ready(self) -> int:
        """Workers that take jobs."""
        return self._jobs.num_taking

    @property
    def num_free(self) -> int:
        """Of these, those without a job."""
        return self._jobs.num_free

    @property
    def num_open(self) -> int:
        """Jobs that were submitted and have not ended."""
        return len(self._jobs.open)

    @property
    def num_held(self) -> int:
        """Jobs that wait for a worker to go on."""
        return self._jobs.num_held

    @property
    def num_migrations(self) -> int:
        """Times that a job went on at another worker."""
        return self._jobs.num_migrations

    @property
    def num_restarts(self) -> int:
        """Times that a worker was started in place of another."""
        return self._lifecycle.num_restarts

    async def start(self) -> dict[str, Any]:
        """Start all workers; raises WorkerStartError when one does not come up."""
        if set(roles_of(self.config)) != {"both"}:
            raise PoolError("workers: an engine of jobs has no prefill or decode workers")
        await self._lifecycle.start(roles_of(self.config))
        return self.facts

    def submit(
        self,
        job_id: str,
        payload: bytes,
        on_output: OnOutput,
        deadline_s: float | None = None,
        cost: float = 1.0,
    ) -> None:
        """Send a job to the worker with the least open work, by the jobs' `cost`.

        `on_output` gets its outputs, of which exactly one is terminal; it may come from abort() or
        close(), and when `deadline_s` seconds have passed. Raises WorkerDownError.
        """
        if job_id in self._jobs.open:
            raise ValueError(f"job_id: {job_id!r} is open already")
        if self._draining:
            raise WorkerDownError("the server is draining and takes no new requests")
        if not self.ready:
            raise WorkerDownError("the engine is restarting; try again shortly")
        job = OpenJob(job_id, payload, on_output, cost)
        if deadline_s is not None:
            late = f"the request was not answered within {deadline_s:g} s; raise its timeout or "
            late += "--request-timeout, or add workers"
            loop = asyncio.get_running_loop()
            job.timer = loop.call_later(deadline_s, self._jobs.end, job_id, late, "deadline")
        self._jobs.submit(job)

    def abort(self, job_id: str) -> None:
        """End a job, which fails as "aborted"; ids of jobs that have ended are ignored."""
        self._jobs.end(job_id, "the request was aborted", "aborted")

    def fail_open(self, message: str, error_kind: str) -> None:
        """End every open job with an error."""
        self._jobs.end_all(message, error_kind)

    def drain(self) -> None:
        """Refuse new jobs from now on; open ones go on, at another worker if need be."""
        self._draining = True

    async def close(self, grace_s: float = 5.0) -> None:
        """Stop the workers; open jobs fail."""
        self._draining = True
        self.fail_open("the server is shutting down", "shutdown")
        await self._lifecycle.close(grace_s)

    async def scale(self, num_workers: int) -> None:
        """Have this many workers: new ones are started, surplus ones drained, youngest first."""
        await self._lifecycle.scale(num_workers, "both")

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        """Take a worker out of the pool when its jobs are done; late ones move elsewhere."""
        await self._lifecycle.drain(name, timeout_s)

    async def stats(self, timeout_s: float = 1.0) -> dict[str, float]:
        """The sums over all workers; last known figures of those that do not answer in time."""
        await asyncio.gather(*(slot.refresh(timeout_s) for slot in self.slots.values()))
        return self.known_stats()

    def known_stats(self) -> dict[str, float]:
        """The sums over all workers as they last told, a heartbeat ago at most; asks nobody."""
        return self._jobs.total()

    def view(self) -> list[JobWorkerView]:
        """The workers as data, for /workers, `tokenmill status` and the dashboard."""
        return [self._worker(slot) for slot in self.slots.values()]

    def _worker(self, slot: WorkerSlot) -> JobWorkerView:
        return JobWorkerView(
            name=slot.name,
            state=slot.state,
            num_open=len(self._jobs.at(slot)),
            routed=slot.num_routed,
            ended=self._jobs.num_ended[slot.name],
            restarts=slot.num_restarts,
            failures=slot.num_failures,
            hangs=slot.num_hangs,
            last_failure=slot.last_failure,
            busy=round(slot.busy(), 3),
            figures=self._jobs.figures(slot),
            warnings=[] if slot.facts is None else slot.facts.warnings,
            pid=slot.pid,
        )
