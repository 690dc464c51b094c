"""Rank 0 of several that make videos together: what it does, it tells the others first.

Every rank has all jobs and runs the same steps; what is computed in them is divided. A step that
runs out of memory does so on all ranks, since they have equal shares, and ends its job on all.
"""

from __future__ import annotations

import os
from dataclasses import replace

from tokenmill.core.config import ModelConfig
from tokenmill.core.requests import Engine, Request, RequestOutput
from tokenmill.core.types import EngineStats, RanksLostError
from tokenmill.core.video_parallel import VideoParallel, check_ranks
from tokenmill.engine.ranks.group import RankGroup, check_gpus
from tokenmill.engine.ranks.rank_messages import CallOver, leaving
from tokenmill.models.checkpoints.diffusers_folder import WanCheckpoint
from tokenmill.models.checkpoints.weights import Progress
from tokenmill.parallel import all_or_none
from tokenmill.video.measure import Told, VideoTimes, measure_video
from tokenmill.video.pipeline import Pipeline, choose_device, load_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_messages import (
    AbortVideo,
    MeasureVideo,
    StepVideo,
    SubmitVideo,
    VideoOrder,
    VideoStepOver,
)

PROGRAM = "tokenmill.video.video_rank_process"


def load_ranks(
    checkpoint: WanCheckpoint,
    config: ModelConfig,
    parallel: VideoParallel,
    offload: bool = False,
    progress: Progress | None = None,
) -> Pipeline:
    check_ranks(parallel, checkpoint.spec)
    if parallel.num_ranks == 1:
        return load_pipeline(checkpoint, config, offload, progress)
    threads = config.num_threads or max(1, (os.cpu_count() or 1) // parallel.num_ranks)
    config = replace(config, num_threads=threads)
    device = choose_device(config).type
    if device == "cuda":
        check_gpus(parallel.num_ranks, config.share_gpus)
    group = RankGroup(parallel.num_ranks, device, PROGRAM)
    with group.together():
        group.tell(VideoOrder(config, offload, parallel))
        pipeline = load_pipeline(checkpoint, config, offload, progress, parallel, group.ranks)
        group.hear(CallOver)
        group.forget_place()
    return replace(pipeline, group=group)


def make_engine(pipeline: Pipeline) -> Engine:
    engine = VideoEngine(pipeline)
    return engine if pipeline.group is None else LeadingVideoEngine(engine, pipeline.group)


def measure_ranks(
    pipeline: Pipeline, request: Request, num_steps: int | None, told: Told | None = None
) -> VideoTimes:
    """The times of a video by the clock of rank 0, which the others keep up with."""
    group = pipeline.group
    if group is None:
        return measure_video(pipeline, request, num_steps, told)
    with group.together(), all_or_none():
        group.tell(MeasureVideo(request, num_steps))
        return measure_video(pipeline, request, num_steps, told)


class LeadingVideoEngine:
    """The engine of rank 0; one thread calls it."""

    def __init__(self, engine: VideoEngine, group: RankGroup) -> None:
        self._engine, self._group = engine, group
        self.has_work = engine.has_work

    def submit(self, request: Request) -> None:
        """Queue a job on all ranks; deadlines are for rank 0 to see."""
        with self._group.together():
            self._group.tell(SubmitVideo(replace(leaving(request), deadline_ns=None)))
            self._engine.submit(request)

    def abort(self, request_id: str) -> None:
        """End a job between two steps on all ranks."""
        with self._group.together():
            self._group.tell(AbortVideo(request_id))
            self._engine.abort(request_id)

    def step(self) -> list[RequestOutput]:
        if not self.has_work():
            self._group.check()
            return []
        with self._group.together(), all_or_none():
            for request_id in self._engine.expire():
                self._group.tell(AbortVideo(request_id))
            self._group.tell(StepVideo())
            outputs = self._engine.advance()
            others = {over.num_failed for over in self._group.hear(VideoStepOver)}
        if others != {self._engine.num_failed}:
            self._group.close()
            raise RanksLostError("a job failed on some of its ranks alone: the ranks were ended")
        return outputs

    def stats(self) -> EngineStats:
        """Counters since start, and gauges now."""
        self._group.check()
        return self._engine.stats()
