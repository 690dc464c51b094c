"""One video job as the store keeps it, and as clients see it."""

from __future__ import annotations

import os
import time
from typing import Any, Literal

import msgspec

from tokenmill.api.protocol.answers import AnswerSchema
from tokenmill.core.requests import Request
from tokenmill.core.tasks import Video
from tokenmill.core.video import VideoParams

Status = Literal["queued", "in_progress", "completed", "failed"]
FINISHED = ("completed", "failed")


class VideoError(AnswerSchema, kw_only=True):
    """Why a job failed."""

    code: str
    message: str


class VideoRecord(msgspec.Struct, kw_only=True):
    """A job: all that it takes to make its video again, and what became of it.

    On disk it is "queued" until it is finished: a server that starts again runs it from its seed.
    """

    id: str
    owner: str  # the account that asked for it
    created_ns: int  # Unix time; the order of jobs
    model: str
    prompt: str
    prompt_token_ids: list[int]
    params: VideoParams
    negative_prompt: str | None = None
    is_waited_for: bool = False  # a call waits for it: it ends with that call
    status: Status = "queued"
    error: VideoError | None = None
    completed_ns: int | None = None
    num_bytes: int = 0  # of the mp4 file
    seconds_of_parts: dict[str, float] = {}  # that making it took

    @property
    def is_finished(self) -> bool:
        return self.status in FINISHED

    def request(self) -> Request[Video]:
        return Request(self.id, Video(self.prompt_token_ids, self.params))


class VideoObject(AnswerSchema, kw_only=True):
    """A job as clients see it."""

    id: str
    object: Literal["video"] = "video"
    model: str
    status: Status
    progress: int  # percent
    created_at: int
    completed_at: int | None = None
    expires_at: int | None = None
    seconds: str
    size: str
    prompt: str
    negative_prompt: str | None = None
    remixed_from_video_id: str | None = None
    error: VideoError | None = None
    seed: int
    num_frames: int
    fps: int
    steps_done: int  # of the denoising steps
    num_inference_steps: int
    guidance_scale: float
    guidance_scale_2: float
    schedule: str
    approximations: list[str]  # the server's flags by which the video is not exact
    inference_seconds: dict[str, float]  # by part, once it is completed


class VideoList(AnswerSchema, kw_only=True):
    object: Literal["list"] = "list"
    data: list[VideoObject]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False


class DeletedVideo(AnswerSchema, kw_only=True):
    id: str
    object: Literal["video.deleted"] = "video.deleted"
    deleted: bool = True


def new_record(owner: str, model: str, fields: dict[str, Any]) -> VideoRecord:
    """A job that was asked for just now."""
    name = f"video_{os.urandom(16).hex()}"
    return VideoRecord(id=name, owner=owner, created_ns=time.time_ns(), model=model, **fields)


def video_object(record: VideoRecord, progress: float = 0.0) -> VideoObject:
    """The record for its owner; `progress` is the share of its steps that are done."""
    params = record.params
    if record.status == "completed":
        progress = 1.0
    width, height = params.size
    # Decoding counts as one step beside the denoising ones.
    steps_done = min(params.num_steps, int(progress * (params.num_steps + 1) + 1e-6))
    return VideoObject(
        id=record.id,
        model=record.model,
        status=record.status,
        progress=int(100 * progress + 1e-6),
        created_at=record.created_ns // 10**9,
        completed_at=None if record.completed_ns is None else record.completed_ns // 10**9,
        seconds=f"{(params.num_frames - 1) / params.fps:g}",
        size=f"{width}x{height}",
        prompt=record.prompt,
        negative_prompt=record.negative_prompt,
        error=record.error,
        seed=params.seed,
        num_frames=params.num_frames,
        fps=params.fps,
        steps_done=steps_done,
        num_inference_steps=params.num_steps,
        guidance_scale=params.guidance_scale,
        guidance_scale_2=params.guidance_scale_2,
        schedule=params.schedule,
        approximations=params.approximations,
        inference_seconds=record.seconds_of_parts,
    )
