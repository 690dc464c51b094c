"""The process that owns an engine of jobs: it takes messages, runs a step and sends its outputs."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

from tokenmill.core.jobs.job_engine import JobEngine, JobOutput
from tokenmill.core.types import EngineStats
from tokenmill.workers.fronts.front_link import FrontLink, FrontLinks
from tokenmill.workers.messages import (
    Abort,
    Failed,
    GetStats,
    Job,
    JobOutputs,
    ModelFacts,
    Shutdown,
    Stats,
    SubmitJobs,
    ToWorker,
    decode_to_worker,
)
from tokenmill.workers.worker_process import describe, take_signals


def run_job_worker(
    engine: JobEngine, address: str, facts: dict[str, Any], warnings: Sequence[str] = ()
) -> None:
    """Announce the engine at `address` and run its step loop until the API process ends it.

    `facts` are what the API has to know, as plain data. The API process is told of an exception out
    of the engine before it is raised; a ValueError of submit() fails that job alone.
    """
    take_signals()
    told = ModelFacts(0, 0, 0, 0, dtype="none", about=facts, warnings=list(warnings))
    links = FrontLinks(FrontLink(address), told)
    try:
        gc.freeze()  # the loaded model is not garbage; do not scan it on every collection
        JobLoop(engine, links).run()
    except Exception as error:
        links.owner.send(Failed(describe(error)))
        raise
    finally:
        links.close()


class JobLoop:
    """What a worker does until its owner ends it or is gone."""

    def __init__(self, engine: JobEngine, links: FrontLinks) -> None:
        self._engine, self._links = engine, links
        self._refused: list[JobOutput] = []
        self._running = True

    def run(self) -> None:
        """Receive, step, send; sleep in poll while there is nothing to do."""
        while self._running:
            self._receive(0 if self._engine.has_work() else None)
            if not self._running:
                return
            outputs, self._refused = self._refused, []
            if self._engine.has_work():
                outputs += self._engine.step()
            if outputs:
                self._links.owner.send(JobOutputs(outputs))

    def _receive(self, wait_ms: int | None) -> None:
        messages, self._running = self._links.receive(wait_ms)
        for _, data in messages:
            self._apply(decode_to_worker(data))

    def _apply(self, message: ToWorker) -> None:
        match message:
            case SubmitJobs(jobs=jobs):
                for job in jobs:
                    self._submit(job)
            case Abort(request_ids=job_ids):
                for job_id in job_ids:
                    self._engine.abort(job_id)
            case GetStats():
                self._links.owner.send(_stats(self._engine.stats()))
            case Shutdown():
                self._running = False

    def _submit(self, job: Job) -> None:
        try:
            self._engine.submit(job.job_id, job.payload)
        except ValueError as wrong:
            self._refused.append(JobOutput(job.job_id, "failed", b"", str(wrong), "invalid"))


def _stats(figures: dict[str, float]) -> Stats:
    running, waiting = (int(figures.get(name, 0)) for name in ("num_running", "num_waiting"))
    return Stats(EngineStats(num_running=running, num_waiting=waiting), figures=figures)
