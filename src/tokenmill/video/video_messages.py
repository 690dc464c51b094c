"""What the ranks that divide a video tell each other beside engine/ranks/rank_messages.py."""

from __future__ import annotations

from tokenmill.core.config import ModelConfig
from tokenmill.core.requests import Request
from tokenmill.core.video_parallel import VideoParallel
from tokenmill.engine.ranks.rank_messages import RankMessage


class VideoOrder(RankMessage):
    """What every rank is to load."""

    model: ModelConfig
    offload: bool
    parallel: VideoParallel


class SubmitVideo(RankMessage):
    """A job that all ranks have, in the same order."""

    request: Request


class AbortVideo(RankMessage):
    """A job that all ranks drop."""

    request_id: str


class StepVideo(RankMessage):
    """One step of every rank."""


class VideoStepOver(RankMessage):
    """A rank has done a step; so many jobs have failed on it so far."""

    num_failed: int


class MeasureVideo(RankMessage):
    request: Request
    num_steps: int | None
