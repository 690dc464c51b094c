"""The engine of a video worker: an mp4 file and a picture in place of a video's frames."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from tokenmill.core.requests import Engine, Request, RequestOutput
from tokenmill.core.tasks import TaskProgress, VideoFile, VideoFrames
from tokenmill.core.types import EngineStats, FinishReason
from tokenmill.core.video import VideoParams

PICTURE_S = 1.0  # between two pictures of the latents

_log = logging.getLogger(__name__)


class VideoTaskEngine:
    """An Engine over one that makes frames.

    `write` makes a file of a video, `picture` one of its middle frame, and `latents_picture` one of
    the latents of the job that runs.
    """

    def __init__(
        self,
        engine: Engine,
        write: Callable[[VideoFrames], bytes],
        picture: Callable[[VideoFrames], bytes],
        latents_picture: Callable[[], bytes],
    ) -> None:
        self._engine, self._write, self._picture = engine, write, picture
        self._latents_picture = latents_picture
        self._requests: dict[str, Request] = {}  # that have not ended
        self._pictured_s = 0.0
        self._busy_s = 0.0
        self.abort, self.has_work = engine.abort, engine.has_work

    def submit(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._engine.submit(request)

    def step(self) -> list[RequestOutput]:
        """Run one denoising step, or decode one latent frame."""
        start = time.monotonic()
        outputs = self._engine.step()
        step_s = time.monotonic() - start
        self._busy_s += step_s
        return [self._told(output, step_s) for output in outputs]

    def stats(self) -> EngineStats:
        stats = self._engine.stats()
        figures = {
            "num_running": stats.num_running,
            "num_waiting": stats.num_waiting,
            "engine_steps_total": stats.num_steps,
            "busy_seconds_total": self._busy_s,
        }
        return replace(stats, figures=figures)

    def _told(self, output: RequestOutput, step_s: float) -> RequestOutput:
        if output.finish_reason is None and isinstance(output.delta, TaskProgress):
            return replace(output, delta=self._progress(output.request_id, output.delta, step_s))
        request = self._requests.pop(output.request_id)
        if isinstance(output.delta, VideoFrames):
            return self._made(output, output.delta)
        if output.finish_reason is FinishReason.REJECT:
            message = _refusal(output, getattr(request.task, "params", None))
            return replace(output, stop_reason="invalid", error=message)
        return output

    def _progress(self, request_id: str, told: TaskProgress, step_s: float) -> TaskProgress:
        num_steps = self._requests[request_id].task.params.num_steps
        now, picture = time.monotonic(), b""
        if now - self._pictured_s >= PICTURE_S:
            self._pictured_s, picture = now, self._latents_picture()
        is_denoising = told.share * (num_steps + 1) < num_steps + 1e-6
        return TaskProgress(told.share, step_s, is_denoising, picture)

    def _made(self, output: RequestOutput, frames: VideoFrames) -> RequestOutput:
        """The files of a video; where they cannot be made its request fails alone."""
        try:
            made = VideoFile(self._write(frames), self._picture(frames), frames.seconds)
        except Exception as error:
            _log.exception("%s: its video cannot be written", output.request_id)
            message = f"writing the video failed: {error}"
            ended = replace(output, delta=None, stop_reason="encode", error=message)
            ended.finish_reason = FinishReason.ERROR
            return ended
        return replace(output, delta=made)


def _refusal(output: RequestOutput, params: VideoParams | None) -> str:
    """What is wrong with a job, for a client: it knows fields and no paths of the server."""
    field, message = output.stop_reason, output.error or "the job is refused"
    if field != "latent" or params is None or params.latent is None:
        return f"{field}: {message}"
    name = Path(params.latent).name
    return f"latent_path: {message.removeprefix('latent ').replace(params.latent, name)}"
