"""How many calls there may be at once, and the body of a call."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from functools import partial
from typing import TypeVar

from fastapi import Request
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.api.bodies.body_memory import FREE_BYTES, BodyMemory, BodyRoom
from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.decoding import IgnoredFields, decode_call
from tokenmill.core.config import ServerConfig
from tokenmill.workers.fronts.control import OpenCalls

# A body over the limit is read on and dropped up to this many times the limit: a client that is
# still sending when the connection is closed would not see the answer.
DISCARD_FACTOR = 8

T = TypeVar("T")


class Calls:
    """The calls under way, in all and by account; once draining, no more are taken.

    A call counts from its head on, first as one choice, and then as those that it asks for.

    Limits hold over all fronts, as far as this one has heard of the others.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.draining = False
        self.num_open = 0
        self.others = OpenCalls()
        self.memory = BodyMemory(config)
        self._config = config
        self._by_account: Counter[str] = Counter()

    def open_calls(self) -> OpenCalls:
        return OpenCalls(self.num_open, {who: n for who, n in self._by_account.items() if n})

    def check_draining(self) -> None:
        if self.draining:
            raise ApiError(503, "the server is draining and takes no new requests", code="draining")

    def check_limits(self, account: str, num_choices: int = 1) -> None:
        """429 where `num_choices` more do not fit now."""
        limit, others = self._config.max_concurrency, self.others
        if (num_open := self.num_open + others.num_open) + num_choices > limit:
            raise _no_room(num_choices, num_open, "", limit, "max_concurrency")
        per_key = self._config.max_concurrency_per_key
        num_open = self._by_account[account] + others.by_account.get(account, 0)
        if per_key is not None and num_open + num_choices > per_key:
            raise _no_room(
                num_choices, num_open, " of this key", per_key, "max_concurrency_per_key"
            )

    def enter(self, account: str) -> CallPlace:
        """Let in a call whose head has come; 429 where there is no room for it."""
        place = CallPlace(self, account)
        place.take(1)
        return place

    def count(self, account: str, num_choices: int) -> None:
        """Count choices that began, or ended if the number is negative."""
        self.num_open += num_choices
        self._by_account[account] += num_choices


class CallPlace:
    """A call that was let in: the choices that it counts for, and the memory of its body."""

    def __init__(self, calls: Calls, account: str) -> None:
        self.account = account
        self.body = calls.memory.of_body(account)
        self.image_room = partial(calls.memory.of_image, account)
        self._calls = calls
        self._num_choices = 0

    def take(self, num_choices: int) -> None:
        """Count for so many choices; 429, and it counts for none, where they do not fit."""
        self._count(0)
        self._calls.check_limits(self.account, num_choices)
        self._count(num_choices)

    def leave(self) -> None:
        self._count(0)
        self.body.release()

    def _count(self, num_choices: int) -> None:
        self._calls.count(self.account, num_choices - self._num_choices)
        self._num_choices = num_choices

    def __enter__(self) -> CallPlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


@contextlib.contextmanager
def handing_on(place: CallPlace) -> Iterator[CallPlace]:
    """A call whose answer leaves its place, unless the block fails."""
    try:
        yield place
    except BaseException:
        place.leave()
        raise


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


async def read_bytes(
    receive: Receive, declared: str, limit: int, room: BodyRoom | None = None
) -> bytes:
    """The body as it is; one that is too large, be it only `declared` so, raises ApiError.

    A long one wants `room`, before it is read.
    """
    problem = f"the body is larger than {limit} bytes (--max-body-size)"
    too_large = ApiError(413, problem, code="body_too_large")
    length = int(declared) if declared.isdigit() else 0
    if length > DISCARD_FACTOR * limit:
        raise too_large
    if room is None:
        body = await _collect(receive, limit, length)
    else:
        async with room.reading():
            body = await _collect(receive, limit, length, room)
    if body is None:
        raise too_large
    return body


async def _collect(
    receive: Receive, limit: int, length: int, room: BodyRoom | None = None
) -> bytes | None:
    """The body; None, and its room is free again, where it is too large."""
    parts: list[bytes] = []
    size, more = 0, True
    while more and size <= DISCARD_FACTOR * limit:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part, more = message.get("body", b""), message.get("more_body", False)
        size += len(part)
        if max(size, length) > limit:
            parts.clear()
            continue
        if room is not None and size > FREE_BYTES:
            room.num_received = size
            # Of a body whose length is not known, there is room for twice what has come.
            await room.grow(length or min(limit, 2 * size if more else size))
        parts.append(part)
    if max(size, length) > limit:
        if room is not None:
            room.release()
        return None
    return b"".join(parts)
