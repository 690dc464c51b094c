"""The routes of OpenAI's Videos API, and those by which others ask for a video and wait for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import TypeVar

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse, Response
from starlette.types import Receive, Scope, Send

from tokenmill.api.access import CallPlace, Calls
from tokenmill.api.errors import ApiError, unknown_model
from tokenmill.api.keys import Keys, caller
from tokenmill.api.operations import json_response
from tokenmill.api.protocol import answers
from tokenmill.api.routes import EVERYWHERE, JSON, OPENAPI, PAGE, PING, Route
from tokenmill.api.sites import FORM
from tokenmill.api.videos.form_fields import read_call
from tokenmill.api.videos.video_jobs import VideoJobs
from tokenmill.api.videos.video_metrics import VideoMetrics
from tokenmill.api.videos.video_record import (
    DeletedVideo,
    VideoError,
    VideoList,
    VideoObject,
    VideoRecord,
    new_record,
)
from tokenmill.api.videos.video_request import GenerationRequest, VideoPreparer, VideoRequest
from tokenmill.api.videos.video_store import StoreError, VideoStore
from tokenmill.core.config import ServerConfig

Call = TypeVar("Call", bound=VideoRequest)

MAX_PAGE, DEFAULT_PAGE = 100, 20
PICTURE_OF = "x-picture-of"  # what a picture shows: a frame, or latents
VIDEO_ID = "x-video-id"
# Failures that the call itself causes; all others are the server's.
_FAILED_STATUS = {"invalid": 400, "out_of_memory": 400}
_GONE = "was removed meanwhile, by a call or to make room (--video-storage); ask for it again"


class VideoPath(answers.AnswerSchema, kw_only=True):
    video_id: str
    video_path: str


class VideoBytes(answers.AnswerSchema, kw_only=True):
    video_id: str
    video_bytes: str  # base64


MP4, PNG = "video/mp4", "image/png"
_CREATE_ERRORS = (400, 401, 404, 413, 429, 500, 503)
_FORMS = (JSON, FORM)

CREATE = Route(
    *("POST", "/v1/videos", "Ask for a video", VideoObject, _CREATE_ERRORS),
    body=VideoRequest,
    kinds=_FORMS,
)
LIST = Route("GET", "/v1/videos", "Your videos", VideoList, (400, 401, 404), query=PAGE)
SYNC = Route(
    *("POST", "/v1/videos/sync", "Ask for a video and wait for it", MP4, (*_CREATE_ERRORS, 408)),
    body=VideoRequest,
    kinds=_FORMS,
)
GENERATIONS = Route(
    *("POST", "/v1/videos/generations", "The same for MLPerf's client", (VideoPath, VideoBytes)),
    (*_CREATE_ERRORS, 408),
    body=GenerationRequest,
    kinds=_FORMS,
)
VIDEO = Route("GET", "/v1/videos/{video_id}", "A video's state", VideoObject, (401, 404))
DELETE = Route("DELETE", "/v1/videos/{video_id}", "Forget it", DeletedVideo, (401, 404))
CONTENT = Route(
    *("GET", "/v1/videos/{video_id}/content", "Its file, or a small picture", (MP4, PNG)),
    (400, 401, 404),
    query={"variant": {"type": "string", "enum": ["video", "thumbnail"]}},
)
VIDEOS = (
    *(CREATE, LIST, SYNC, GENERATIONS, VIDEO, DELETE, CONTENT),
    *(route for route in EVERYWHERE if route not in (PING, OPENAPI)),
)


@dataclass(slots=True)
class VideoState:
    """What all handlers of a video server share."""

    keys: Keys
    model: str
    metrics: VideoMetrics
    calls: Calls  # that wait for a video
    jobs: VideoJobs
    preparer: VideoPreparer

    @property
    def config(self) -> ServerConfig:
        return self.keys.config

    def enter(self, request: Request) -> CallPlace:
        """Let in a call whose head has come, or raise what it is to be answered with."""
        self.calls.check_draining()
        return self.calls.enter(request.state.account)

    def record(self, request: Request) -> VideoRecord:
        """The caller's own job that the path names."""
        return self.jobs.store.get(request.path_params["video_id"], request.state.account)

    async def create(self, request: Request, call: VideoRequest, waits: bool) -> VideoRecord:
        self.calls.check_draining()
        if call.model is not None and call.model != self.model:
            raise unknown_model(call.model, self.model)
        fields = await asyncio.to_thread(self.preparer.prepare, call)
        record = new_record(request.state.account, self.model, fields | {"is_waited_for": waits})
        try:
            await self.jobs.create(record)
        except StoreError as error:
            raise ApiError(500, str(error), code="storage_failed") from None
        return record

    async def delete(self, record: VideoRecord) -> None:
        try:
            await self.jobs.delete(record)
        except StoreError as error:
            raise ApiError(500, str(error), code="storage_failed") from None


def add_videos(app: FastAPI, state: VideoState) -> None:
    """Add /v1/videos and what lies below it."""
    guard = caller(state.keys)
    limit, jobs = state.config.max_body_bytes, state.jobs

    @CREATE.on(app, guard)
    async def create(request: Request) -> Response:
        with state.enter(request) as place:
            call = await read_call(request, VideoRequest, limit, place.body)
            return json_response(jobs.shown(await state.create(request, call, False)))

    @LIST.on(app, guard)
    async def list_videos(request: Request) -> Response:
        return json_response(_page(state, request))

    @SYNC.on(app, guard)
    async def sync(request: Request) -> Response:
        async with _made(state, request, VideoRequest) as (_, ended):
            return _file(state, ended)

    @GENERATIONS.on(app, guard)
    async def generations(request: Request) -> Response:
        async with _made(state, request, GenerationRequest) as (call, ended):
            path = jobs.store.path(ended).resolve()
            if call.response_format == "video_path":
                return json_response({"video_id": ended.id, "video_path": str(path)})
            try:
                data = await asyncio.to_thread(path.read_bytes)
            except FileNotFoundError:
                raise _gone(ended.id) from None
            encoded = base64.b64encode(data).decode()
            return json_response({"video_id": ended.id, "video_bytes": encoded})

    @VIDEO.on(app, guard)
    async def retrieve(request: Request) -> Response:
        return json_response(jobs.shown(state.record(request)))

    @DELETE.on(app, guard)
    async def delete(request: Request) -> Response:
        record = state.record(request)
        await state.delete(record)
        return json_response(DeletedVideo(id=record.id))

    @CONTENT.on(app, guard)
    async def content(request: Request) -> Response:
        record, variant = state.record(request), request.query_params.get("variant", "video")
        if variant == "thumbnail":
            return await _picture(jobs, record)
        if variant != "video":
            message = f"variant: {variant[:60]!r} is not valid; send 'video' or 'thumbnail'"
            raise ApiError(400, message, "variant", "invalid_value")
        return _file(state, record)


@contextlib.asynccontextmanager
async def _made(
    state: VideoState, request: Request, kind: type[Call]
) -> AsyncIterator[tuple[Call, VideoRecord]]:
    """A call that waits for its job, and the completed job, which no other pushes out meanwhile."""
    with state.enter(request) as place:
        call = await read_call(request, kind, state.config.max_body_bytes, place.body)
        place.body.release()
        record = await state.create(request, call, True)
        with state.jobs.store.pinned(record.id):
            ended = await _waited(state, request, record)
            if ended.error is not None:
                raise _failure(ended.error)
            yield call, ended


async def _waited(state: VideoState, request: Request, record: VideoRecord) -> VideoRecord:
    """A job's record once it has ended; the job ends when its client goes, or is too late."""
    timeout_s = state.config.request_timeout_s
    waiter = asyncio.create_task(state.jobs.wait(record))
    left = asyncio.create_task(_left(request))
    try:
        await asyncio.wait((waiter, left), timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        if waiter.done():
            return waiter.result()
        await state.delete(record)
        if left.done():
            raise ClientDisconnect
        message = f"the video took more than {timeout_s:g} s, the limit; send "
        message += "the call to POST /v1/videos, which answers at once"
        raise ApiError(408, message, "timeout", "deadline")
    finally:
        waiter.cancel()
        left.cancel()


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _failure(error: VideoError) -> ApiError:
    field, _, rest = error.message.partition(": ")
    if error.code == "invalid" and rest:
        return ApiError(400, error.message, field, "invalid_value")
    return ApiError(_FAILED_STATUS.get(error.code, 500), error.message, code=error.code)


def _gone(video_id: str) -> ApiError:
    return ApiError(404, f"video_id: {video_id!r} {_GONE}", "video_id", "video_not_found")


class _VideoFile(FileResponse):
    """The file of a job, which stays until it is sent."""

    def __init__(self, store: VideoStore, record: VideoRecord) -> None:
        path, name = store.path(record), f"{record.id}.mp4"
        super().__init__(path, headers={VIDEO_ID: record.id}, media_type=MP4, filename=name)
        self._store, self._video_id = store, record.id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._store.pinned(self._video_id):
            # A job that is known now and pinned keeps its file, whoever deletes it from here on.
            is_known = self._video_id in self._store
            if not is_known or not await asyncio.to_thread(os.path.isfile, self.path):
                raise _gone(self._video_id)
            await super().__call__(scope, receive, send)


def _file(state: VideoState, record: VideoRecord) -> Response:
    """The video of a job; 404 where it has none."""
    if record.error is not None:
        message = f"video_id: {record.id!r} has failed: {record.error.message}"
        raise ApiError(404, message, "video_id", "video_failed")
    if record.status != "completed":
        message = f"video_id: {record.id!r} is not completed yet; ask for its status first"
        raise ApiError(404, message, "video_id", "video_not_ready")
    return _VideoFile(state.jobs.store, record)


async def _picture(jobs: VideoJobs, record: VideoRecord) -> Response:
    found = await jobs.picture(record)
    if found is None:
        message = f"video_id: there is no picture of {record.id!r} yet"
        raise ApiError(404, message, "video_id", "video_not_ready")
    picture, of = found
    headers = {PICTURE_OF: of, "cache-control": "no-store"}
    return Response(picture, media_type="image/png", headers=headers)


def _page(state: VideoState, request: Request) -> VideoList:
    """The caller's jobs, newest first unless they are to be in order."""
    query, owner = request.query_params, request.state.account
    records = [record for record in state.jobs.store if record.owner == owner]
    if _one_of("order", query.get("order", "desc"), ("asc", "desc")) == "desc":
        records.reverse()
    if (after := query.get("after")) is not None:
        names = [record.id for record in records]
        if after not in names:
            message = f"after: there is no video {after[:100]!r}"
            raise ApiError(404, message, "after", "video_not_found")
        records = records[names.index(after) + 1 :]
    count = _limit(query.get("limit", str(DEFAULT_PAGE)))
    data = [state.jobs.shown(record) for record in records[:count]]
    ends = (data[0].id, data[-1].id) if data else (None, None)
    more = len(records) > count
    return VideoList(data=data, first_id=ends[0], last_id=ends[1], has_more=more)


def _one_of(name: str, value: str, choices: tuple[str, ...]) -> str:
    if value not in choices:
        message = f"{name}: {value[:60]!r} is not valid; send {' or '.join(map(repr, choices))}"
        raise ApiError(400, message, name, "invalid_value")
    return value


def _limit(text: str) -> int:
    if not (text.isascii() and text.isdigit() and len(text) < 5 and 0 < int(text) <= MAX_PAGE):
        message = f"limit: {text[:60]!r} is not valid; send a whole number from 1 to {MAX_PAGE}"
        raise ApiError(400, message, "limit", "invalid_value")
    return int(text)
