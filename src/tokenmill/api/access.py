"""Who may call, how many at once, and the body of a call."""

from __future__ import annotations

import hashlib
import hmac
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope

from tokenmill.api.call import record_of
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import IgnoredFields, decode_call
from tokenmill.core.config import ServerConfig
from tokenmill.workers.fronts.control import OpenCalls

# A body over the limit is read on and dropped up to this many times the limit: a client that is
# still sending when the connection is closed would not see the answer.
DISCARD_FACTOR = 8
NO_KEY = "none"  # who pays where calls need no key

T = TypeVar("T")


def authorizer(config: ServerConfig) -> Callable[[Request], Awaitable[None]]:
    """A dependency that wants a known key, and notes which one it is in request.state.key.

    It is a coroutine: FastAPI would call a plain function on another thread.
    """
    key_number = key_matcher(config.api_keys)

    async def authorize(request: Request) -> None:
        request.state.key = key_number(request) if config.api_keys else 0
        if request.state.key is None:
            raise wrong_key()
        note_key(request.scope, config, request.state.key)

    return authorize


def note_key(scope: Scope, config: ServerConfig, number: int) -> None:
    """Have the call's log line tell keys apart without telling them."""
    if config.api_keys and config.log_requests:
        record_of(scope).key_hash = account_name(config, number)


def account_name(config: ServerConfig, number: int) -> str:
    """Who pays: a hash of the key with this number, which tells keys apart without telling them."""
    return _hash(config.api_keys[number]) if config.api_keys else NO_KEY


@cache
def _hash(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]


def wrong_key() -> ApiError:
    """401 for a call without a known key."""
    return ApiError(
        401,
        "missing or wrong API key; send the header 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
        code="invalid_api_key",
    )


def key_matcher(keys: Sequence[str]) -> Callable[[Request], int | None]:
    """Which of the keys a request bears; each is compared, in constant time."""
    digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def key_number(request: Request) -> int | None:
        digest = hashlib.sha256(_key_of(request).encode()).digest()
        matches = [hmac.compare_digest(digest, known) for known in digests]
        return matches.index(True) if any(matches) else None

    return key_number


def _key_of(request: Request) -> str:
    """The key of a request, where OpenAI's clients or Anthropic's send it."""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


class Calls:
    """The choices being generated, in all and by key; once draining, no more are taken.

    Limits hold over all fronts, as far as this one has heard of the others.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.draining = False
        self.num_open = 0
        self.others = OpenCalls()
        self._config = config
        self._by_key: Counter[int] = Counter()

    def open_calls(self) -> OpenCalls:
        """What this front has open."""
        return OpenCalls(self.num_open, {key: n for key, n in self._by_key.items() if n})

    def check_draining(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is draining and takes no new requests", code="draining")

    def check_limits(self, key: int, num_choices: int = 1) -> None:
        """429 where `num_choices` more do not fit now."""
        limit, others = self._config.max_concurrency, self.others
        if (num_open := self.num_open + others.num_open) + num_choices > limit:
            raise _no_room(num_choices, num_open, "", limit, "max_concurrency")
        per_key = self._config.max_concurrency_per_key
        num_open = self._by_key[key] + others.by_key.get(key, 0)
        if per_key is not None and num_open + num_choices > per_key:
            raise _no_room(
                num_choices, num_open, " of this key", per_key, "max_concurrency_per_key"
            )

    def begin(self, key: int, num_choices: int = 1) -> None:
        self.num_open += num_choices
        self._by_key[key] += num_choices

    def end(self, key: int, num_choices: int = 1) -> None:
        self.num_open -= num_choices
        self._by_key[key] -= num_choices


def _no_room(num_choices: int, num_open: int, whose: str, limit: int, code: str) -> ApiError:
    wanted = f"this call asks for {num_choices} answers; " if num_choices > 1 else ""
    flag = "--" + code.replace("_", "-")
    message = f"{wanted}{num_open} requests{whose} are running; the limit is {limit} ({flag}); "
    return ApiError(429, message + "try again when some have ended", code=code)


async def read_body(
    request: Request, kind: type[T], limit: int, ignored: IgnoredFields | None = None
) -> T:
    """The body as `kind`; too large, malformed or unfit bodies raise ApiError."""
    declared = request.headers.get("content-length", "")
    body = await read_bytes(request.receive, declared, limit)
    return decode_call(body, kind, ignored)


async def read_bytes(receive: Receive, declared: str, limit: int) -> bytes:
    """The body as it is; one that is too large, be it only `declared` so, raises ApiError."""
    problem = f"the body is larger than {limit} bytes (--max-body-size)"
    too_large = ApiError(413, problem, code="body_too_large")
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
