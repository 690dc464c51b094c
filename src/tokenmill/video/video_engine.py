"""The video engine: jobs wait in order, and every step() is one denoising step of the first."""

from __future__ import annotations

import gc
import time
from collections import Counter

import torch

from tokenmill.core.cost import Cost
from tokenmill.core.requests import End, Request, RequestOutput
from tokenmill.core.tasks import TaskProgress
from tokenmill.core.types import EngineStats, FinishReason, InvalidRequestError
from tokenmill.video.pipeline import Pipeline
from tokenmill.video.video_job import VideoJob


class VideoEngine:
    """An Engine over a pipeline; one thread calls it.

    One job runs at a time, the most urgent one that waits, then the one that came first. A step
    that runs out of memory ends its job alone.
    """

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.running: VideoJob | None = None
        self._waiting: list[VideoJob] = []
        self._ended: list[RequestOutput] = []
        self._num_finished: Counter[str] = Counter()
        self._num_steps, self._busy_s, self._since = 0, 0.0, time.monotonic()

    def submit(self, request: Request) -> None:
        """Queue a job. Never raises for a bad one: the next step() yields its REJECT."""
        try:
            self._waiting.append(VideoJob(request, self.pipeline))
        except InvalidRequestError as error:
            self._end(request.request_id, End(FinishReason.REJECT, error.param, str(error)))

    def step(self) -> list[RequestOutput]:
        """Run one denoising step, or decode one latent frame; [] when there is nothing to do."""
        self.expire()
        return self.advance()

    def advance(self) -> list[RequestOutput]:
        """A step without a look at the clock, which ranks may see differently."""
        if self.running is None and self._waiting:
            self.running = min(self._waiting, key=lambda job: job.request.priority)
            self._waiting.remove(self.running)
        if self.running is not None:
            start = time.monotonic()
            self._advance(self.running)
            self._busy_s += time.monotonic() - start
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_id: str) -> None:
        """End a job between two steps; unknown or finished ids are ignored."""
        for job in self._jobs():
            if job.request.request_id == request_id:
                self._drop(job, End(FinishReason.ABORT))

    def has_work(self) -> bool:
        """True while a step() would do something."""
        return bool(self.running or self._waiting or self._ended)

    def stats(self) -> EngineStats:
        """Counters since start, and gauges now."""
        passed = time.monotonic() - self._since
        return EngineStats(
            num_waiting=len(self._waiting),
            num_running=int(self.running is not None),
            num_steps=self._num_steps,
            num_finished=dict(self._num_finished),
            num_gpus=self.pipeline.parallel.num_ranks,
            gpu_s=passed * self.pipeline.parallel.num_ranks,
            gpu_idle_s=max(0.0, passed - self._busy_s) * self.pipeline.parallel.num_ranks,
        )

    @property
    def num_failed(self) -> int:
        return self._num_finished[FinishReason.ERROR.value]

    def _jobs(self) -> list[VideoJob]:
        return [*([self.running] if self.running else []), *self._waiting]

    def expire(self) -> list[str]:
        """End the jobs whose deadline has passed; their ids."""
        now, ended = time.monotonic_ns(), []
        for job in self._jobs():
            deadline = job.request.deadline_ns
            if deadline is not None and now > deadline:
                self._drop(job, End(FinishReason.ABORT, "deadline"))
                ended.append(job.request.request_id)
        return ended

    def _advance(self, job: VideoJob) -> None:
        end: End | None = None
        try:
            with torch.inference_mode():
                next(job.steps, None)
        except (RuntimeError, MemoryError) as error:
            if not _out_of_memory(error):
                raise
            end = End(FinishReason.ERROR, "out_of_memory", _too_large(job))
        self._num_steps += 1
        if job.video is not None:
            end = End(FinishReason.STOP)
        if end is not None:  # out of the except clause: the error's frames hold the job's tensors
            self._drop(job, end)
        else:
            progress = TaskProgress(job.progress)
            self._ended.append(RequestOutput(job.request.request_id, [], delta=progress))

    def _drop(self, job: VideoJob, end: End) -> None:
        """Take a job out, free what it holds and give its terminal output."""
        if job is self.running:
            self.running = None
        else:
            self._waiting.remove(job)
        text, rest = job.seconds["text"], sum(job.seconds.values()) - job.seconds["text"]
        self._end(job.request.request_id, end, Cost(prefill_s=text, decode_s=rest), job)
        job.release()
        if end.reason is FinishReason.ERROR:
            gc.collect()
            if self.pipeline.device.type == "cuda":
                torch.cuda.empty_cache()

    def _end(
        self, request_id: str, end: End, cost: Cost | None = None, job: VideoJob | None = None
    ) -> None:
        self._num_finished[end.reason.value] += 1
        output = end.output(request_id, cost=cost)
        if job is not None:
            output.delta = job.video or TaskProgress(job.progress)
        self._ended.append(output)


def _out_of_memory(error: Exception) -> bool:
    """The allocator of a GPU has an error of its own; that of the host says so in words."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        "not enough memory" in str(error) or "can't allocate memory" in str(error)
    )


def _too_large(job: VideoJob) -> str:
    width, height = job.params.size
    asked = f"{job.params.num_frames} frames of {width}x{height}"
    return f"{asked} do not fit the memory; ask for a smaller size or fewer frames"
