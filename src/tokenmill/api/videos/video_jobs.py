"""The jobs of a video server: they wait in order, and each worker makes one video at a time.

A job that waits is held here, not at a worker: the next one goes to whichever worker is free first,
and a worker that dies takes nothing with it but the steps of the video that it was making.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from tokenmill.api.errors import ApiError
from tokenmill.api.videos.video_metrics import VideoMetrics
from tokenmill.api.videos.video_record import (
    Status,
    VideoError,
    VideoObject,
    VideoRecord,
    video_object,
)
from tokenmill.api.videos.video_store import VideoStore
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import TaskProgress, VideoFile
from tokenmill.workers.output_stream import OutputStream, StreamClosedError

TICK_S = 0.25  # between two looks for workers that have come back
# Ends of a job that are not its own: it is still in the store, and runs after a restart.
_SERVER_ENDS = ("shutdown", "draining")

_log = logging.getLogger(__name__)
Picture = tuple[bytes, Literal["frame", "latents"]]


class Pool(Protocol):
    """The workers, as a WorkerPool has them."""

    @property
    def num_free(self) -> int: ...

    @property
    def num_open(self) -> int: ...

    def submit(self, requests: list[Request]) -> OutputStream: ...

    def abort(self, request_ids: list[str]) -> None: ...


@dataclass(slots=True)
class LiveJob:
    """What is known of a job that has not ended, beside its record."""

    owner: str
    is_running: bool = False
    progress: float = 0.0  # the share of its steps that are done
    picture: bytes = b""  # of its latents
    stream: OutputStream | None = None  # of its worker
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def close(self) -> None:
        """Hear no more of it, and tell those who wait."""
        self.ended.set()
        if self.stream is not None:
            self.stream.close()


class VideoJobs:
    """All jobs of a server; it alone changes the store."""

    def __init__(
        self,
        pool: Pool,
        store: VideoStore,
        metrics: VideoMetrics,
        limit: int,
        limit_per_owner: int | None = None,
    ) -> None:
        self.store = store
        self._pool, self._metrics = pool, metrics
        self._limit, self._limit_per_owner = limit, limit_per_owner
        self._live: dict[str, LiveJob] = {}
        self._waiting: deque[str] = deque()
        self._ending: set[asyncio.Task[None]] = set()
        self._is_open = True
        metrics.jobs, metrics.steps = self.counts, self.steps
        metrics.stored_bytes = lambda: store.num_bytes

    async def resume(self, model: str) -> int:
        """Queue the jobs that an earlier server left unfinished; returns how many wait or run."""
        left = [r for r in self.store if not r.is_finished and r.id not in self._live]
        for record in left:
            if record.model == model:
                self._live[record.id] = LiveJob(record.owner)
                self._waiting.append(record.id)
            else:
                why = f"the server was started again with another model, {model!r}"
                await self.store.fail(record, VideoError(code="model_changed", message=why))
        self._send()
        return len(self._waiting) + self._pool.num_open

    async def run(self) -> None:
        """Send jobs to workers that have come back, until it is cancelled."""
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self._send()
            except Exception:
                _log.exception("a video job could not be sent to a worker")

    async def close(self) -> None:
        """Send nothing more, tell those who wait, and finish what is being written."""
        self._is_open = False
        for live in self._live.values():
            live.close()
        while self._ending:
            await asyncio.gather(*self._ending, return_exceptions=True)

    def counts(self) -> dict[str, int]:
        counts = dict.fromkeys(("queued", "in_progress", "completed", "failed"), 0)
        for record in self.store:
            counts[self._status(record)] += 1
        return counts

    def steps(self) -> dict[str, int]:
        """Denoising steps of the jobs that have not ended."""
        live = [self.shown(r) for name in self._live if (r := self.store.get_or_none(name))]
        done = sum(job.steps_done for job in live)
        return {"done": done, "left": sum(job.num_inference_steps for job in live) - done}

    async def create(self, record: VideoRecord) -> None:
        """Take a job; 429 where as many as may be have not ended, 404 for one deleted meanwhile."""
        if not self._is_open:
            raise _shutting_down()
        _check_room(len(self._live), self._limit, "", "queue_full")
        if (limit := self._limit_per_owner) is not None:
            own = sum(live.owner == record.owner for live in self._live.values())
            _check_room(own, limit, "max-concurrency-per-key", "max_concurrency_per_key")
        self._live[record.id] = LiveJob(record.owner)
        try:
            await self.store.add(record)
        except BaseException:
            self._live.pop(record.id, None)
            raise
        self.store.get(record.id, record.owner)
        self._waiting.append(record.id)
        self._send()

    async def wait(self, record: VideoRecord) -> VideoRecord:
        """The record of a job that has ended; 404: it was deleted, 503: the server ends first."""
        if (live := self._live.get(record.id)) is not None:
            await live.ended.wait()
        ended = self.store.get(record.id, record.owner)
        if not self._is_open and not ended.is_finished:
            raise _shutting_down()
        if not ended.is_finished:
            raise ApiError(500, "the end of the job could not be stored", code="storage_failed")
        return ended

    async def delete(self, record: VideoRecord) -> None:
        """Forget a job; one that runs ends between two steps."""
        live = self._live.pop(record.id, None)
        if live is not None:
            with contextlib.suppress(ValueError):
                self._waiting.remove(record.id)
            self._metrics.ended["deleted"] += 1
            live.close()
        self._pool.abort([record.id])
        self._send()
        await self.store.delete(record.id)

    def shown(self, record: VideoRecord) -> VideoObject:
        live = self._live.get(record.id)
        shown = video_object(record, 0.0 if live is None else live.progress)
        shown.status = self._status(record)
        return shown

    async def picture(self, record: VideoRecord) -> Picture | None:
        """A small picture: of the middle frame, or of the latents while the video is made."""
        live = self._live.get(record.id)
        if live is not None:
            return (live.picture, "latents") if live.picture else None
        try:
            path = self.store.path(record, "png")
            return await asyncio.to_thread(path.read_bytes), "frame"
        except OSError:
            return None

    def _status(self, record: VideoRecord) -> Status:
        live = self._live.get(record.id)
        return "in_progress" if live is not None and live.is_running else record.status

    def _send(self) -> None:
        """Give each worker without a video the next one."""
        while self._is_open and self._waiting and self._pool.num_free:
            name = self._waiting.popleft()
            live, record = self._live.get(name), self.store.get_or_none(name)
            if live is None or record is None:
                continue
            live.is_running = True
            live.stream = self._pool.submit([record.request()])
            self._begin(self._follow(live, live.stream))

    async def _follow(self, live: LiveJob, stream: OutputStream) -> None:
        """Take what its worker tells of a job, to its end."""
        with contextlib.suppress(StreamClosedError):  # it is deleted, or the server closes
            while True:
                (output,) = (await stream.get()).values()
                if output.finish_reason is None:
                    self._advance(live, output.delta)
                    continue
                if output.stop_reason not in _SERVER_ENDS:
                    await self._end(output, live)
                return

    def _advance(self, live: LiveJob, told: object) -> None:
        if not isinstance(told, TaskProgress):
            return
        live.progress = told.share
        live.picture = (told.picture or live.picture) if told.share else b""
        if told.is_denoising and told.step_s:
            self._metrics.step_s.observe(told.step_s)

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)

    async def _end(self, output: RequestOutput, live: LiveJob) -> None:
        """Keep what became of a job, then let those know who wait for it, whatever happens."""
        asyncio.get_running_loop().call_soon(self._send)
        ended: VideoRecord | None = None
        try:
            ended = await self._keep(output)
        except Exception:
            _log.exception("%s: its end could not be kept", output.request_id)
        finally:
            if self._live.pop(output.request_id, None) is not None and ended is not None:
                self._metrics.count(ended)
            live.ended.set()

    async def _keep(self, output: RequestOutput) -> VideoRecord | None:
        """The record of a job that has ended; None for one that was deleted."""
        record = self.store.get_or_none(output.request_id)
        if record is None:
            return None
        if isinstance(made := output.delta, VideoFile):
            return await self.store.complete(record, made.video, made.picture, made.seconds)
        code = str(output.stop_reason or output.finish_reason)
        message = output.error or f"the job ended: {code}"
        return await self.store.fail(record, VideoError(code=code, message=message))


def _check_room(count: int, limit: int, flag: str, code: str) -> None:
    if count >= limit:
        whose = " of this key" if "key" in flag else ""
        message = f"{count} videos{whose} wait or are being made; the limit is {limit}"
        message += f" (--{flag})" if flag else ""
        raise ApiError(429, f"{message}; try again when some have ended", code=code)


def _shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down", code="shutdown")
