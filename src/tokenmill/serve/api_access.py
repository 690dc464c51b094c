"""Who may call, and the body of a call."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.core.config import ServerConfig
from tokenmill.serve.errors import ApiError, of_decoding

# A body over the limit is read on and dropped up to this many times the limit: a client that is
# still sending when the connection is closed would not see the answer.
DISCARD_FACTOR = 8

T = TypeVar("T")


def authorizer(config: ServerConfig) -> Callable[[Request], None]:
    """A dependency that wants a known key, and notes which one it is in request.state.key."""
    key_number = key_matcher(config.api_keys)

    def authorize(request: Request) -> None:
        request.state.key = key_number(request) if config.api_keys else 0
        if request.state.key is None:
            raise wrong_key()

    return authorize


def wrong_key() -> ApiError:
    """401 for a call without a known key."""
    return ApiError(401, "missing or wrong API key", code="invalid_api_key")


def key_matcher(keys: Sequence[str]) -> Callable[[Request], int | None]:
    """Which of the keys a request bears; each is compared, in constant time."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def key_number(request: Request) -> int | None:
        scheme, _, key = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(key.encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in digests]
        return matches.index(True) if scheme.lower() == "bearer" and any(matches) else None

    return key_number


async def read_body(request: Request, kind: type[T], limit: int) -> T:
    """The body as `kind`; too large, malformed or unfit bodies raise ApiError."""
    declared = request.headers.get("content-length", "")
    body = await read_bytes(request.receive, declared, limit)
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise of_decoding(error) from None


async def read_bytes(receive: Receive, declared: str, limit: int) -> bytes:
    """The body as it is; one that is too large, be it only `declared` so, raises ApiError."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="body_too_large")
    if declared.isdigit() and int(declared) > DISCARD_FACTOR * limit:
        raise too_large
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= DISCARD_FACTOR * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if size <= limit:
            parts.append(part)
    if size > limit:
        raise too_large
    return b"".join(parts)
