"""A video engine as an engine of jobs: requests in, steps, an mp4 file and a picture of it out."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from tokenmill.core.jobs.job_engine import JobOutput
from tokenmill.core.types import Engine, FinishReason, Request, RequestOutput
from tokenmill.core.video import Video, VideoParams

PICTURE_S = 1.0  # between two pictures of the latents

_log = logging.getLogger(__name__)
encode_request = msgspec.msgpack.Encoder().encode
_decode_request = msgspec.msgpack.Decoder(Request).decode
_encode = msgspec.msgpack.Encoder().encode


class VideoProgress(msgspec.Struct):
    """After a step."""

    progress: float  # the share of the job's steps that are done
    step_s: float
    is_denoising: bool  # otherwise frames are decoded
    picture: bytes = b""  # PNG of the latents, now and then


class VideoResult(msgspec.Struct):
    """A finished video."""

    video: bytes  # mp4
    picture: bytes  # PNG of the middle frame
    seconds: dict[str, float]  # by part


class VideoWorker:
    """A JobEngine over an Engine that makes videos.

    `write` makes a file of a video, `picture` one of its middle frame, and `latents_picture` one of
    the latents of the job that runs.
    """

    def __init__(
        self,
        engine: Engine,
        write: Callable[[Video], bytes],
        picture: Callable[[Video], bytes],
        latents_picture: Callable[[], bytes],
    ) -> None:
        self._engine, self._write, self._picture = engine, write, picture
        self._latents_picture = latents_picture
        self._params: dict[str, VideoParams] = {}  # by job
        self._pictured_s = 0.0
        self._busy_s = 0.0

    def submit(self, job_id: str, payload: bytes) -> None:
        """Queue a job; ValueError says what is wrong with it."""
        try:
            request = _decode_request(payload)
        except msgspec.DecodeError as error:
            raise ValueError(f"the job cannot be read: {error}") from None
        if request.video is None or request.request_id != job_id:
            raise ValueError("the job asks for no video")
        self._params[job_id] = request.video
        self._engine.submit(request)

    def abort(self, job_id: str) -> None:
        """End a job between two steps."""
        self._engine.abort(job_id)

    def has_work(self) -> bool:
        """True while a step would do something."""
        return self._engine.has_work()

    def step(self) -> list[JobOutput]:
        """Run one denoising step, or decode one latent frame."""
        start = time.monotonic()
        outputs = self._engine.step()
        step_s = time.monotonic() - start
        self._busy_s += step_s
        return [self._told(output, step_s) for output in outputs]

    def stats(self) -> dict[str, float]:
        """The engine's own figures."""
        stats = self._engine.stats()
        return {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "engine_steps_total": stats.num_steps,
            "busy_seconds_total": self._busy_s,
        }

    def _told(self, output: RequestOutput, step_s: float) -> JobOutput:
        job_id = output.request_id
        if output.finish_reason is None:
            return JobOutput(job_id, "progress", _encode(self._progress(output, step_s)))
        params = self._params.pop(job_id)
        if output.finish_reason is FinishReason.STOP and output.video is not None:
            return self._made(job_id, output.video)
        if output.finish_reason is FinishReason.REJECT:
            return JobOutput(job_id, "failed", b"", _refusal(output, params), "invalid")
        kind = str(output.stop_reason or output.finish_reason.value)
        error = output.error or f"the job ended: {kind}"
        return JobOutput(job_id, "failed", b"", error, kind)

    def _progress(self, output: RequestOutput, step_s: float) -> VideoProgress:
        progress, num_steps = output.progress or 0.0, self._params[output.request_id].num_steps
        now, picture = time.monotonic(), b""
        if now - self._pictured_s >= PICTURE_S:
            self._pictured_s, picture = now, self._latents_picture()
        is_denoising = progress * (num_steps + 1) < num_steps + 1e-6
        return VideoProgress(progress, step_s, is_denoising, picture)

    def _made(self, job_id: str, video: Video) -> JobOutput:
        """The files of a video; where they cannot be made its job fails alone."""
        try:
            result = VideoResult(self._write(video), self._picture(video), video.seconds)
        except Exception as error:
            _log.exception("%s: its video cannot be written", job_id)
            return JobOutput(job_id, "failed", b"", f"writing the video failed: {error}", "encode")
        return JobOutput(job_id, "done", _encode(result))


def _refusal(output: RequestOutput, params: VideoParams) -> str:
    """What is wrong with a job, for a client: it knows fields and no paths of the server."""
    field, message = output.stop_reason, output.error or "the job is refused"
    if field != "latent" or params.latent is None:
        return f"{field}: {message}"
    name = Path(params.latent).name
    return f"latent_path: {message.removeprefix('latent ').replace(params.latent, name)}"
