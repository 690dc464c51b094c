"""The app of a video server in this process, over workers that do what a test says."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
from fastapi import FastAPI

from api.sim_server import Answer, SimServer
from tokenmill.api.keys import Keys
from tokenmill.api.middleware import CallMiddleware
from tokenmill.api.server import bind, listening, url_of
from tokenmill.api.videos.video_record import VideoRecord
from tokenmill.api.videos.video_routes import VideoState
from tokenmill.api.videos.video_server import create_app, resume, running, video_state
from tokenmill.api.videos.video_store import VideoStore
from tokenmill.core.config import ServerConfig
from tokenmill.core.keys.run_folder import key_salt
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.specs.wan import TINY
from tokenmill.core.tasks import TaskProgress, VideoFile
from tokenmill.core.types import FinishReason
from tokenmill.core.video import VideoServerConfig
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.output_stream import OutputStream

MODEL = "wan-tiny"
TOKEN = "control"  # the control token
WAIT_S = 120.0  # at most, for what takes milliseconds on an idle machine
SMALL = {"prompt": "a red fox", "size": "32x16", "num_frames": 5, "num_inference_steps": 4}


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """A test that runs in an event loop of its own."""

    @functools.wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


class FakePool:
    """Workers without a model; a test says what they bring forth."""

    def __init__(self, num_ready: int = 1) -> None:
        self.num_ready, self.num_restarts, self.num_migrations = num_ready, 0, 0
        self.open: dict[str, OutputStream] = {}
        self.slots: dict[str, Any] = {}
        self.open_requests: dict[str, Any] = {}
        self.leaving: set[str] = set()  # jobs at workers that drain
        self.requests: list[Request] = []  # in the order in which they came
        self.aborted: list[str] = []
        self.picture = b"png"  # of finished videos

    @property
    def num_open(self) -> int:
        return len(self.open)

    @property
    def num_free(self) -> int:
        return max(0, self.num_ready - len(self.open.keys() - self.leaving))

    @property
    def ready(self) -> bool:
        return self.num_ready > 0

    @property
    def facts(self) -> Any:
        return ModelFacts()

    def submit(self, requests: list[Request]) -> OutputStream:
        (request,) = requests
        assert request.request_id not in self.open
        self.requests.append(request)
        stream = self.open[request.request_id] = OutputStream([request.request_id])
        return stream

    def abort(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            if self.open.pop(request_id, None) is not None:
                self.aborted.append(request_id)

    def step(self, job_id: str, progress: float, picture: bytes = b"") -> None:
        self._put(job_id, delta=TaskProgress(progress, 0.5, True, picture))

    def restart(self, job_id: str) -> None:
        self._put(job_id, delta=TaskProgress(0.0))

    def done(self, job_id: str, video: bytes = b"mp4") -> None:
        made = VideoFile(video, self.picture, {"denoise": 2.0})
        self._put(job_id, delta=made, finish_reason=FinishReason.STOP)

    def fail(self, job_id: str, kind: str, error: str = "") -> None:
        why = error or f"it is {kind}"
        self._put(job_id, finish_reason=FinishReason.ERROR, stop_reason=kind, error=why)

    def _put(self, job_id: str, **fields: Any) -> None:
        output = RequestOutput(job_id, [], **fields)
        (self.open[job_id] if output.finish_reason is None else self.open.pop(job_id)).put(
            0, output
        )


class VideoApp:
    """The server, as a client on a connection of its own sees it."""

    def __init__(self, url: str, pool: Any, state: VideoState, app: FastAPI) -> None:
        self._server = SimServer(None, url)  # type: ignore[arg-type]
        self.url, self.pool, self.state, self.app = url, pool, state, app

    async def call(self, method: str, path: str, body: Any = None, key: str = "") -> Answer:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        if isinstance(body, dict):
            headers["content-type"] = "application/json"
        return await asyncio.to_thread(self._server.call, method, path, body, headers)

    async def create(self, key: str = "", **fields: Any) -> str:
        answer = await self.call("POST", "/v1/videos", SMALL | fields, key)
        assert answer.status == 200, answer.body
        return str(answer.json["id"])

    async def get(self, video_id: str) -> Any:
        return (await self.call("GET", f"/v1/videos/{video_id}")).json

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not holds():
                await asyncio.sleep(0.005)

    def record(self, video_id: str) -> VideoRecord:
        """A job that is stored."""
        return next(record for record in self.state.jobs.store if record.id == video_id)

    async def finish(self, video_id: str, video: bytes = b"mp4") -> None:
        """Let a job have its video, and wait until it is stored."""
        await self.until(lambda: video_id in self.pool.open)
        self.pool.done(video_id, video)
        await self.until(lambda: self.record(video_id).is_finished)


@contextlib.asynccontextmanager
async def video_app(
    folder: Path,
    config: ServerConfig | None = None,
    pool: Any = None,
    **videos: Any,
) -> AsyncIterator[VideoApp]:
    """A server over a folder of jobs while the block runs."""
    config = config or ServerConfig(port=0)
    given = VideoServerConfig(video_dir=str(folder), **videos)
    facts: dict[str, Any] = {"tokenizer": None, "dtype": "fp32", "device": "cpu"}
    facts |= {"spec": msgspec.to_builtins(TINY), "parallel": {"cfg": 1, "ulysses": 1}}
    pool = pool or FakePool()
    with (
        contextlib.closing(bind(config.host, config.port)) as listener,
        contextlib.closing(VideoStore(folder, given.video_storage_bytes)) as store,
    ):
        keys = Keys.of(config, TOKEN, key_salt(folder))
        state = video_state(pool, store, keys, given, MODEL, facts)
        app = create_app(pool, state, facts)
        await resume(state.jobs, MODEL)
        async with (
            listening(CallMiddleware(app, keys, state.metrics), listener, keys),
            running(state.jobs),
        ):
            yield VideoApp(url_of(listener, keys), pool, state, app)
