"""An engine of jobs without a model: a job takes some steps and answers with its worker's pid.

Its payload is JSON: {"steps": 3}, and "exit", "hang" or "raise" at the last of them, or "bad". With
"until" it ends at the first step that finds a file of this name.
Run as a script it is a worker process.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time

from tokenmill.core.jobs.job_engine import JobOutput
from tokenmill.workers.jobs.job_worker import run_job_worker

STEP_S = 0.005


class EchoJobs:
    def __init__(self) -> None:
        self.left: dict[str, int] = {}
        self.ends: dict[str, str] = {}
        self.files: dict[str, str] = {}
        self.num_steps = self.num_aborted = 0

    def submit(self, job_id: str, payload: bytes) -> None:
        job = json.loads(payload)
        if "bad" in job:
            raise ValueError(f"bad: {job['bad']} is wrong")
        self.left[job_id] = sys.maxsize if "until" in job else job.get("steps", 1)
        self.files[job_id] = job.get("until", "")
        self.ends[job_id] = job.get("end", "")

    def abort(self, job_id: str) -> None:
        self.num_aborted += self.left.pop(job_id, None) is not None

    def has_work(self) -> bool:
        return bool(self.left)

    def step(self) -> list[JobOutput]:
        time.sleep(STEP_S)
        self.num_steps += 1
        return [self._advance(job_id) for job_id in list(self.left)]

    def _advance(self, job_id: str) -> JobOutput:
        self.left[job_id] -= 1
        if self.left[job_id] and not os.path.exists(self.files[job_id]):
            return JobOutput(job_id, "progress", str(self.left[job_id]).encode())
        del self.left[job_id]
        match self.ends[job_id]:
            case "exit":
                os._exit(7)
            case "hang":
                time.sleep(3600)
            case "raise":
                raise RuntimeError("the echo failed")
        return JobOutput(job_id, "done", str(os.getpid()).encode())

    def stats(self) -> dict[str, float]:
        return {
            "num_running": len(self.left),
            "steps_total": self.num_steps,
            'aborted_total{by="front"}': self.num_aborted,
        }


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    run_job_worker(EchoJobs(), parser.parse_args().address, {"echo": True})
