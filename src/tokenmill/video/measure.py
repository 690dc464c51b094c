"""Times of one video: a whole one, or some of its steps and a decode of what they left."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from tokenmill.core.types import Request
from tokenmill.video.experts import synchronize
from tokenmill.video.pipeline import Pipeline
from tokenmill.video.video_job import VideoJob


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
def measure_video(pipeline: Pipeline, request: Request, num_steps: int | None) -> VideoTimes:
    """Make a video, or run `num_steps` of its steps and decode."""
    pipeline.experts.unload()  # a video before it would have left the other expert there
    job = VideoJob(request, pipeline)
    if num_steps is None or num_steps >= job.params.num_steps:
        return _whole(job)
    for _ in range(num_steps):
        next(job.steps)
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
    return VideoTimes(parts, steps, whole=False)


def _whole(job: VideoJob) -> VideoTimes:
    start = time.perf_counter()
    for _ in job.steps:
        pass
    other = time.perf_counter() - start - sum(job.seconds.values())
    return VideoTimes(job.seconds | {"other": max(0.0, other)}, job.step_seconds, whole=True)
