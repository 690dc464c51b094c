"""Times of one video: a whole one, or some of its steps and a decode of what they left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.core.requests import Request
from tokenmill.video.experts import synchronize
from tokenmill.video.pipeline import Pipeline
from tokenmill.video.video_job import VideoJob

Told = Callable[[str, float], None]  # what was done, and its seconds


@dataclass(frozen=True, slots=True)
class VideoTimes:
    """Seconds of a video's parts; steps that were not run count as long as those that were."""

    parts_s: dict[str, float]
    steps_s: list[float]  # of the steps that were run
    whole: bool

    @property
    def total_s(self) -> float:
        return sum(self.parts_s.values())


@torch.inference_mode()
def measure_video(
    pipeline: Pipeline, request: Request, num_steps: int | None, told: Told | None = None
) -> VideoTimes:
    """Make a video, or run `num_steps` of its steps and decode; `told` hears of each."""
    pipeline.experts.unload()  # a video before it would have left the other expert there
    job = VideoJob(request, pipeline)
    if num_steps is None or num_steps >= job.params.num_steps:
        return _whole(job, told)
    for _ in range(num_steps):
        next(job.steps)
        _tell(job, told)
    latents = job.latents
    assert latents is not None
    steps, parts = list(job.step_seconds), dict(job.seconds)
    job.release()
    parts["denoise"] *= job.params.num_steps / num_steps
    parts["load"] *= job.num_experts() / job.num_experts(num_steps)
    start = time.perf_counter()
    for piece in job.decode(latents):
        del piece
    synchronize(pipeline.device)
    parts["decode"] = time.perf_counter() - start
    if told is not None:
        told("decode", parts["decode"])
    return VideoTimes(parts, steps, whole=False)


def _whole(job: VideoJob, told: Told | None) -> VideoTimes:
    start, num_told = time.perf_counter(), 0
    for _ in job.steps:
        if len(job.step_seconds) > num_told:
            num_told += 1
            _tell(job, told)
    other = time.perf_counter() - start - sum(job.seconds.values())
    if told is not None:
        told("decode", job.seconds["decode"])
    return VideoTimes(job.seconds | {"other": max(0.0, other)}, job.step_seconds, whole=True)


def _tell(job: VideoJob, told: Told | None) -> None:
    if told is not None:
        told(f"step {len(job.step_seconds)} of {job.params.num_steps}", job.step_seconds[-1])
