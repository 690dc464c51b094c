"""What every answer passes, of the server and of the router: ids, HEAD, CORS, counts, log lines.

Calls that come at once begin one by one, and so do their answers: a burst of prompts would
otherwise hold up every stream of the process until all of them are read.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable
from typing import Protocol

from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.api.call import GONE, REQUEST_ID, WARNING, CallRecord
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Keys
from tokenmill.api.sites import CORS_PATHS, SiteGuard

# Asked again and again by machines: logged only when they fail.
POLLED = frozenset({"/health", "/ping", "/metrics", "/dashboard/data"})
TURNS = "turns"  # in the scope of a call
UNKNOWN = "unknown"  # endpoint of calls that no route took: what clients invent makes no labels

_log = logging.getLogger(__name__)


class Turns:
    """One of those who wait goes on in each turn of the event loop; between them streams do.

    Calls that have begun come first: else the first prompt of a burst would wait for all the heads.
    """

    def __init__(self) -> None:
        self._begun: deque[asyncio.Future[None]] = deque()
        self._new: deque[asyncio.Future[None]] = deque()
        self._is_taken = False  # somebody goes on in this turn

    async def take(self, has_begun: bool = False) -> None:
        """Wait for a turn, behind those who came before."""
        loop = asyncio.get_running_loop()
        if self._is_taken:
            waiter = loop.create_future()
            (self._begun if has_begun else self._new).append(waiter)
            await waiter
        else:
            self._is_taken = True
            loop.call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._begun or self._new:
            waiter = (self._begun or self._new).popleft()
            if not waiter.done():  # it was not cancelled
                waiter.set_result(None)
                asyncio.get_running_loop().call_soon(self._pass_on)
                return
        self._is_taken = False


async def take_turn(scope: Scope) -> None:
    """Wait for a turn before the next part of a call; an app that stands alone has none."""
    turns: Turns | None = scope.get(TURNS)
    if turns is not None:
        await turns.take(has_begun=True)


class CallCounter(Protocol):
    def count_call(self, endpoint: str, status: int, error: str | None) -> None: ...


class CallMiddleware:
    """An ASGI app around another one; calls of a server that streams nothing need no turns."""

    def __init__(
        self, app: ASGIApp, keys: Keys, metrics: CallCounter, streams: bool = True
    ) -> None:
        config, self._app = keys.config, app
        self._shared = _with_cors(app, config.cors_origins) if config.cors_origins else app
        self._guard = SiteGuard(keys)
        self._metrics = metrics
        self._logs_requests = config.log_requests
        self._turns = Turns() if streams else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        record = scope["call"] = CallRecord.begin(scope)
        if scope["method"] == "HEAD":  # uvicorn leaves out the body, by its own scope
            scope = {**scope, "method": "GET"}
        if scope["method"] == "POST" and self._turns is not None:
            scope[TURNS] = self._turns
            await self._turns.take()
        app = self._app_for(record, scope)
        try:
            await app(scope, receive, _named(record, send))
        except ClientDisconnect:
            _log.debug("%s: the client has gone", record.request_id)
        finally:
            self._end(record, scope)

    def _app_for(self, record: CallRecord, scope: Scope) -> ASGIApp:
        path: str = scope["path"]
        try:
            self._guard.check(scope["method"], path, scope["headers"])
        except ApiError as error:
            record.fail(error)
            return Response(
                error.body(path), error.status, error.answer_headers(), "application/json"
            )
        return self._shared if path.startswith(CORS_PATHS) else self._app

    def _end(self, record: CallRecord, scope: Scope) -> None:
        record.status = record.status or GONE
        record.endpoint = record.endpoint or getattr(scope.get("route"), "path", UNKNOWN)
        error = record.error if record.endpoint != UNKNOWN else None
        self._metrics.count_call(record.endpoint, record.status, error)
        if self._logs_requests and (record.status >= 400 or record.path not in POLLED):
            _log.info(record.line())


def _with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "DELETE"),
        allow_headers=("*",),
        expose_headers=(REQUEST_ID.decode(), WARNING.decode(), "retry-after"),
    )


def _named(record: CallRecord, send: Send) -> Send:
    """`send` with the call's id in the head of the answer."""
    request_id = (REQUEST_ID, record.request_id.encode())

    def send_named(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            record.status = record.status or message["status"]  # of a refusal, what was sent
            others = [pair for pair in message.get("headers", ()) if pair[0] != REQUEST_ID]
            message = {**message, "headers": [*others, request_id]}
        return send(message)

    return send_named
