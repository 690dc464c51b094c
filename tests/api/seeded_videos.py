"""A worker process that makes videos without a model: their bytes follow from the seed.

A video ends when the folder `--may-end` has a file with the name of its seed, and no sooner. Its
pictures of latents are the id of its process.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from pathlib import Path

from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import TaskProgress, VideoFrames
from tokenmill.core.types import EngineStats, FinishReason
from tokenmill.video import video_task_engine
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker

STEP_S = 0.002


class SeededVideos:
    def __init__(self, may_end: Path) -> None:
        self.may_end = may_end
        self.jobs: list[tuple[Request, int]] = []
        self.ended: list[RequestOutput] = []

    def submit(self, request: Request) -> None:
        self.jobs.append((request, 0))

    def abort(self, request_id: str) -> None:
        self.jobs = [job for job in self.jobs if job[0].request_id != request_id]

    def has_work(self) -> bool:
        return bool(self.jobs)

    def step(self) -> list[RequestOutput]:
        if not self.jobs:
            return []
        time.sleep(STEP_S)
        request, done = self.jobs.pop(0)
        params = request.task.params
        if done < params.num_steps or not (self.may_end / str(params.seed)).exists():
            done = min(done + 1, params.num_steps)
            self.jobs.insert(0, (request, done))
            share = done / (params.num_steps + 1)
            return [RequestOutput(request.request_id, [], delta=TaskProgress(share))]
        data = random.Random(params.seed).randbytes(64)
        return [
            RequestOutput(
                request.request_id,
                [],
                finish_reason=FinishReason.STOP,
                delta=VideoFrames(*params.size, params.fps, params.num_frames, data),
            )
        ]

    def stats(self) -> EngineStats:
        return EngineStats()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--address", required=True)
    parser.add_argument("--may-end", type=Path, required=True)
    given = parser.parse_args()
    video_task_engine.PICTURE_S = 0.0
    videos, process_id = SeededVideos(given.may_end), str(os.getpid()).encode()
    engine = video_task_engine.VideoTaskEngine(
        videos, lambda v: v.data, lambda v: b"png", lambda: process_id
    )
    run_worker(engine, given.address, ModelFacts())
