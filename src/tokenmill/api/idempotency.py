"""Calls with an Idempotency-Key: repeated within a minute, they get the answer that was given.

A call that had no whole answer, because its front died or its client went, is computed again with
the same seed, and its prompt is found in the prefix cache.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Awaitable
from dataclasses import replace
from typing import Protocol

from starlette.requests import Request as HttpRequest
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from tokenmill.api.access import authorizer, read_bytes
from tokenmill.api.call import CHUNK_WRITER, REPLAYED, record_of
from tokenmill.api.errors import ApiError
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import Request
from tokenmill.workers.fronts.kept_answers import KeptAnswer

HEADER = b"idempotency-key"
SEED = "idempotency_seed"  # in the scope of such a call
PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"})
WHO = (b"authorization", b"x-api-key")
MAX_KEY_BYTES = 255


class Keeper(Protocol):
    """Who keeps answers, over all fronts."""

    async def kept(self, name: bytes) -> KeptAnswer | None: ...

    def keep(self, name: bytes, answer: KeptAnswer) -> None: ...


def seeded_by(scope: Scope, requests: list[Request]) -> list[Request]:
    """The requests of a call; one with an idempotency key has the seeds that follow from it."""
    base: int | None = scope.get(SEED)
    if base is None:
        return requests
    return [_seeded(request, base + index) for index, request in enumerate(requests)]


def _seeded(request: Request, seed: int) -> Request:
    sampling = request.sampling
    if sampling.seed is not None or sampling.greedy:
        return request
    return replace(request, sampling=replace(sampling, seed=seed))


class Idempotent:
    """An ASGI app around another one; calls without the header pass untouched."""

    def __init__(self, app: ASGIApp, keeper: Keeper, config: ServerConfig) -> None:
        self._app = app
        self._keeper = keeper
        self._limit = config.max_body_bytes
        self._authorize = authorizer(config)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST" and scope["path"] in PATHS:
            headers = dict(scope["headers"])
            if HEADER in headers:
                return await self._answer(headers, scope, receive, send)
        return await self._app(scope, receive, send)

    async def _answer(
        self, headers: dict[bytes, bytes], scope: Scope, receive: Receive, send: Send
    ) -> None:
        record = record_of(scope)
        record.endpoint = scope["path"]  # the route is noted in another scope, the app's
        try:
            await self._authorize(HttpRequest(scope))
            if not 0 < len(headers[HEADER]) <= MAX_KEY_BYTES:
                message = f"Idempotency-Key: must have 1 to {MAX_KEY_BYTES} characters"
                raise ApiError(400, message, code="invalid_idempotency_key")
            declared = headers.get(b"content-length", b"").decode("latin-1")
            body = await read_bytes(receive, declared, self._limit)
            # Another caller's key, path or idempotency key is another name.
            who = [headers.get(name, b"") for name in WHO]
            name = hashlib.sha256(b"\0".join([scope["path"].encode(), *who, headers[HEADER]]))
            digest = (await asyncio.to_thread(hashlib.sha256, body)).digest()
            answer = await self._keeper.kept(name.digest())
            if answer is not None and answer.digest != digest:
                message = "Idempotency-Key: it was used for another call within the last minute"
                raise ApiError(422, message, code="idempotency_key_reused")
        except ApiError as error:
            record.fail(error)
            extra = [(k.encode(), v.encode()) for k, v in error.answer_headers().items()]
            own = [(b"content-type", b"application/json"), *extra]
            return await _send(send, error.status, own, error.body(scope["path"]))
        if answer is not None:
            return await _send(send, 200, [*answer.headers, (REPLAYED, b"true")], answer.body)
        seed = int.from_bytes(name.digest()[:7], "big")
        inner = {key: value for key, value in scope.items() if key != CHUNK_WRITER} | {SEED: seed}
        recorder = _Recorder(send)
        await self._app(inner, _body_first(body, receive), recorder.send)
        if recorder.is_whole and record.error is None:
            kept = KeptAnswer(digest, recorder.headers, b"".join(recorder.parts))
            self._keeper.keep(name.digest(), kept)


class _Recorder:
    """Passes an answer on, and remembers it."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self.parts: list[bytes] = []
        self.is_whole = False  # it is a success, and has come to its end

    def send(self, message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            self.status, self.headers = message["status"], list(message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self.parts.append(message.get("body", b""))
            self.is_whole = self.status == 200 and not message.get("more_body", False)
        return self._send(message)


def _body_first(body: bytes, receive: Receive) -> Receive:
    """`receive` that gives a body which was read already, and then what comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_next() -> Message:
        return first.pop() if first else await receive()

    return receive_next


async def _send(send: Send, status: int, headers: list[tuple[bytes, bytes]], body: bytes) -> None:
    own = [pair for pair in headers if pair[0] != b"content-length"]
    own.append((b"content-length", b"%d" % len(body)))
    await send({"type": "http.response.start", "status": status, "headers": own})
    await send({"type": "http.response.body", "body": body})
