"""The memory of the bodies of all calls, and of the images that are fetched for them.

The first bytes of a body are free: `--max-concurrency` bounds the calls. What is more is taken from
one amount that the accounts share, before it is read.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator

from tokenmill.api.bodies.fair_share import FairShare
from tokenmill.api.errors import ApiError
from tokenmill.core.config import ServerConfig

FREE_BYTES = 65_536  # of each body
LEAST_BODIES = 4  # of the largest size that fit: two keys can send one at once
WAIT_S = 10.0  # for room; what is not read yet waits at the client
SLOW_BYTES_PER_S = 32_768  # a slower body is ended while others wait for its room
SLOW_AFTER_S = 5.0


class BodyMemory:
    def __init__(self, config: ServerConfig) -> None:
        least = LEAST_BODIES * config.max_body_bytes
        self.share = FairShare(max(config.max_body_memory_bytes // config.fronts, least))
        self._reading: set[BodyRoom] = set()

    def of_body(self, account: str) -> BodyRoom:
        return BodyRoom(self, account, FREE_BYTES)

    @contextlib.contextmanager
    def of_image(self, account: str) -> Iterator[BodyRoom]:
        room = BodyRoom(self, account, 0)
        try:
            yield room
        finally:
            room.release()

    async def take(self, account: str, num_bytes: int) -> None:
        """Wait a while for room; ApiError where there is none."""
        if self.share.take_now(account, num_bytes):
            return
        self._end_slow()
        try:
            async with asyncio.timeout(WAIT_S):
                await self.share.take(account, num_bytes)
        except TimeoutError:
            raise self._no_room(account) from None

    @contextlib.contextmanager
    def reading(self, room: BodyRoom) -> Iterator[None]:
        """While the block runs, the room is taken back where its client sends too slowly."""
        self._reading.add(room)
        try:
            yield
        finally:
            self._reading.discard(room)

    def _end_slow(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for room in list(self._reading):
            room.end_if_slow(now_s)

    def _no_room(self, account: str) -> ApiError:
        held, most = self.share.held(account), self.share.capacity
        whose = f"of this key hold {held}" if held else "of other keys hold most"
        message = f"long bodies {whose} of {most} bytes; try again when some "
        return ApiError(429 if held else 503, message + "have been read", code="max_body_memory")


class BodyRoom:
    def __init__(self, memory: BodyMemory, account: str, num_free: int) -> None:
        self._memory = memory
        self._account = account
        self._num_free = num_free
        self._num_taken = 0
        self.num_received = 0
        self._began_s = 0.0
        self._patience: asyncio.Timeout | None = None

    async def grow(self, num_bytes: int) -> None:
        """Have room for so many bytes; ApiError where there is none."""
        more = num_bytes - self._num_free - self._num_taken
        if more > 0:
            patience, self._patience = self._patience, None  # it waits for us
            await self._memory.take(self._account, more)
            self._num_taken += more
            self._patience = patience

    def release(self) -> None:
        taken, self._num_taken = self._num_taken, 0
        if taken:
            self._memory.share.give(self._account, taken)

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[None]:
        """The body is read while the block runs; ApiError where it is too slow."""
        self._began_s = asyncio.get_running_loop().time()
        try:
            with self._memory.reading(self):
                async with asyncio.timeout(None) as self._patience:
                    yield
        except TimeoutError:
            self.release()
            message = "the body came too slowly while others waited for its room"
            raise ApiError(408, message, code="request_timeout") from None

    def end_if_slow(self, now_s: float) -> None:
        took_s = now_s - self._began_s
        is_slow = took_s > SLOW_AFTER_S and self.num_received < took_s * SLOW_BYTES_PER_S
        if self._num_taken and is_slow and self._patience is not None:
            self._patience.reschedule(now_s)
            self._patience = None
