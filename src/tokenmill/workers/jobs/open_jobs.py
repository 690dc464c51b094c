"""Owns the open jobs of a pool: sends each to a worker, and to another one when that one dies.

A job is sent again as it came. One that seems to kill workers fails (routing/suspects.py); every
job gets exactly one terminal output, whatever happens.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass

from tokenmill.core.jobs.job_engine import JobOutput, add_figures, is_counter
from tokenmill.routing.suspects import Suspects
from tokenmill.workers.messages import Abort, FromWorker, Job, JobOutputs, Stats, SubmitJobs
from tokenmill.workers.slot import WorkerSlot

_log = logging.getLogger(__name__)

OnOutput = Callable[[JobOutput], None]
Figures = dict[str, float]


@dataclass(slots=True, eq=False)
class OpenJob:
    """A job that has not ended."""

    job_id: str
    payload: bytes
    on_output: OnOutput
    cost: float = 1.0  # of the work at a worker, in whatever unit all jobs have
    slot: WorkerSlot | None = None  # None: it waits for a worker
    timer: asyncio.TimerHandle | None = None
    num_deaths: int = 0  # of workers that it was at
    num_tokens_at_death: int = 0
    token_ids: tuple[()] = ()  # it begins anew elsewhere: progress clears no suspect


class OpenJobs:
    """Owns all jobs that have not ended, and moves them from one worker to the next.

    A worker has `max_per_worker` of them at most; further ones wait here.
    """

    def __init__(self, max_migrations: int, max_per_worker: int | None = None) -> None:
        self.open: dict[str, OpenJob] = {}
        self.num_migrations = 0
        self.num_ended: Counter[str] = Counter()  # by slot
        self._max_per_worker = max_per_worker
        self._suspects: Suspects[OpenJob] = Suspects(max_migrations)
        self._taking: dict[str, WorkerSlot] = {}  # workers that get jobs
        self._work: defaultdict[str, float] = defaultdict(float)  # costs of the jobs at each
        self._held: list[OpenJob] = []
        self._figures: dict[str, Figures] = {}  # as each slot's worker last told
        self._past: Figures = {}  # counters of workers that are gone

    @property
    def num_taking(self) -> int:
        """Workers that get jobs."""
        return len(self._taking)

    @property
    def num_free(self) -> int:
        """Of these, those without a job."""
        busy = {job.slot.name for job in self.open.values() if job.slot is not None}
        return len(self._taking.keys() - busy)

    @property
    def num_held(self) -> int:
        """Jobs that wait for a worker."""
        return sum(job.slot is None for job in self.open.values())

    def submit(self, job: OpenJob) -> None:
        """Take a job and send it to a worker as soon as one has room."""
        self.open[job.job_id] = job
        self._held.append(job)
        self._send_held()

    def end(self, job_id: str, error: str, error_kind: str) -> None:
        """End an open job with this error, wherever it is."""
        job = self.open.get(job_id)
        if job is not None:
            if job.slot is not None:
                job.slot.send(Abort([job_id]))
            self._close(job, JobOutput(job_id, "failed", b"", error, error_kind))

    def end_all(self, error: str, error_kind: str) -> None:
        """End every open job with this error."""
        self._held.clear()
        for job_id in list(self.open):
            self.end(job_id, error, error_kind)

    def figures(self, slot: WorkerSlot) -> Figures:
        """What the engine of a worker last told of itself."""
        return self._figures.get(slot.name, {})

    def total(self) -> Figures:
        """The sums over all workers, with the counters of those that are gone."""
        total = self._past
        for figures in self._figures.values():
            total = add_figures(total, figures)
        return total

    # Workers come and go; the lifecycle tells.

    def check(self, slot: WorkerSlot) -> None:
        """Any worker goes with the others."""

    async def settled(self) -> None:
        """Workers of jobs do not know each other."""

    def worker_ready(self, slot: WorkerSlot) -> None:
        """Let a worker take jobs; those that waited for one go first."""
        if slot.state != "draining":
            self._taking[slot.name] = slot
            self._send_held()

    def worker_down(self, slot: WorkerSlot) -> None:
        """Send the jobs of a worker that died to others, or end them."""
        self._taking.pop(slot.name, None)
        self._keep_counters(slot)
        lost = self.at(slot)
        for job in self._suspects.died(lost):
            message = f"the engine stopped: {slot.last_failure}"
            self._close(job, JobOutput(job.job_id, "failed", b"", message, "worker_died"))
        self._move([job for job in lost if job.job_id in self.open], slot.last_failure)

    def worker_leaving(self, slot: WorkerSlot) -> None:
        """A worker gets no more jobs."""
        self._taking.pop(slot.name, None)

    def worker_left(self, slot: WorkerSlot) -> None:
        """Take back the jobs of a worker that leaves the pool, and send them to others."""
        late = self.at(slot)
        slot.send(Abort([job.job_id for job in late]))
        self._move(late, f"worker {slot.name} left the pool")

    def worker_gone(self, slot: WorkerSlot) -> None:
        """A worker that has left was stopped."""
        self._keep_counters(slot)

    def at(self, slot: WorkerSlot) -> list[OpenJob]:
        """The jobs that a worker has."""
        return [job for job in self.open.values() if job.slot is slot]

    def others_take(self, slot: WorkerSlot) -> bool:
        """True where other workers than this one take jobs."""
        return bool(set(self._taking) - {slot.name})

    def no_worker(self, message: str) -> None:
        """No worker is left: all jobs fail."""
        self.end_all(message, "worker_died")

    def _keep_counters(self, slot: WorkerSlot) -> None:
        last = self._figures.pop(slot.name, {})
        self._past = add_figures(self._past, {k: v for k, v in last.items() if is_counter(k)})

    # Jobs.

    def on_message(self, slot: WorkerSlot, message: FromWorker) -> None:
        match message:
            case JobOutputs(outputs=outputs):
                for output in outputs:
                    self._take(slot, output)
            case Stats(figures=figures):
                self._figures[slot.name] = figures

    def _take(self, slot: WorkerSlot, output: JobOutput) -> None:
        """Pass an output on; one of a job that was aborted or is elsewhere by now is dropped."""
        job = self.open.get(output.job_id)
        if job is None or job.slot is not slot:
            return
        if output.is_terminal:
            self.num_ended[slot.name] += 1
            self._close(job, output)
        else:
            _tell(job, output)

    def _close(self, job: OpenJob, output: JobOutput) -> None:
        """Forget a job and give its terminal output."""
        self._take_back(job)
        del self.open[job.job_id]
        if job.timer is not None:
            job.timer.cancel()
        self._suspects.ended(job)
        self._send_held()
        _tell(job, output)

    def _take_back(self, job: OpenJob) -> None:
        if job.slot is not None:
            self._work[job.slot.name] -= job.cost
        job.slot = None

    def _with_room(self) -> list[WorkerSlot]:
        slots, most = list(self._taking.values()), self._max_per_worker
        return slots if most is None else [slot for slot in slots if len(self.at(slot)) < most]

    def _send(self, job: OpenJob, slots: list[WorkerSlot]) -> None:
        """Send a job to the worker with the least to do; of equal ones to the least used."""
        slot = min(slots, key=lambda s: (self._work[s.name], s.num_routed, s.name))
        job.slot = slot
        slot.num_routed += 1
        self._work[slot.name] += job.cost
        slot.send(SubmitJobs([Job(job.job_id, job.payload)]))

    def _move(self, jobs: list[OpenJob], reason: str) -> None:
        for job in jobs:
            _log.debug("%s goes on elsewhere: %s", job.job_id, reason)
            self._take_back(job)
            _tell(job, JobOutput(job.job_id, "restarted"))
        self._held += jobs
        self.num_migrations += len(jobs)
        self._send_held()

    def _send_held(self) -> None:
        """Send on what waits for a worker, as far as it may go."""
        if not self._taking:
            return
        held, self._held = self._held, []
        for job in held:
            if self.open.get(job.job_id) is not job:
                continue
            slots = self._with_room()
            if slots and self._suspects.may_go(job):
                self._send(job, slots)
            else:
                self._held.append(job)


def _tell(job: OpenJob, output: JobOutput) -> None:
    """Give an output to whoever waits; a fault of theirs is not the fault of other jobs."""
    try:
        job.on_output(output)
    except Exception:
        _log.exception("the output of %s was not taken", job.job_id)
