"""The outputs of one API call, passed from the pool to the code that writes the answer."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from tokenmill.core.cost import Cost
from tokenmill.core.requests import RequestOutput


class StreamClosedError(Exception):
    """The reader of an OutputStream was told to stop."""


Direct = Callable[[dict[int, list[int]], int], bool]  # tokens by request, and the time in ns
DirectOne = Callable[[list[int], int], bool]  # those of an only request


class WriteTurn:
    """Streams to write once the messages that came together are read."""

    __slots__ = ("streams",)

    def __init__(self) -> None:
        self.streams: list[OutputStream] = []  # the first of them has to call `begin`

    def begin(self) -> None:
        """Have the streams written once the callbacks that are due have run."""
        asyncio.get_running_loop().call_soon(self._end)

    def _end(self) -> None:
        streams, self.streams = self.streams, []
        now_ns = time.monotonic_ns()
        for stream in streams:
            stream.write(now_ns)


class OutputStream:
    """Outputs of one API call's requests. Unread outputs of a request are merged into one.

    With `direct`, tokens of requests that have begun and go on do not wake the reader: `direct`
    takes them, all of a turn at once. Where it returns False, the reader has to. `direct_one` takes
    the tokens of an only request where they are read, unless there is more to read.
    """

    __slots__ = (
        "_begun",
        "_closed",
        "_costs",
        "_fault",
        "_is_due",
        "_is_parked",
        "_is_ready",
        "_pending",
        "_ready_one",
        "_settled",
        "_tokens",
        "_turn",
        "_waiter",
        "direct",
        "direct_one",
        "interval",
        "request_ids",
        "workers",
    )

    def __init__(self, request_ids: list[str], turn: WriteTurn | None = None) -> None:
        self.request_ids = request_ids
        self.workers: dict[int, str] = {}  # who has each of them, or had it last
        self.direct: Direct | None = None
        self.direct_one: DirectOne | None = None
        self.interval = 1  # tokens to wait for, after the first, before they are passed on
        self._turn = turn or WriteTurn()
        self._is_due = False  # the turn has it
        self._is_parked = False  # the reader waits, and nothing but `_tokens` is there for it
        self._ready_one: DirectOne | None = None  # direct_one, while no turn has the stream either
        self._is_ready = False  # there is something to read now
        self._begun: set[int] = set()  # of which something was passed on; for intervals
        self._pending: dict[int, RequestOutput] = {}
        self._tokens: dict[int, list[int]] = {}  # after those of _pending
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._fault: Exception | None = None  # of `direct`
        self._costs: dict[int, Cost] = {}  # of requests of which no worker has more to tell
        self._settled: asyncio.Future[None] | None = None

    def put(self, index: int, output: RequestOutput) -> None:
        """Add what request `index` produced and wake the reader."""
        if index in self._tokens:
            output.token_ids = self._tokens.pop(index) + output.token_ids
        self._add(index, output)
        if self.interval == 1 or not self._is_early(index):
            self._wake()

    def _add(self, index: int, output: RequestOutput) -> None:
        self._is_parked, self._ready_one = False, None
        earlier = self._pending.get(index)
        if earlier is None:
            self._pending[index] = output
        else:
            _merge(earlier, output)

    def extend(self, index: int, token_ids: list[int], now_ns: int = 0) -> None:
        """Add tokens of a request that has begun and goes on; `now_ns`: they may be passed on."""
        direct_one = self._ready_one
        if now_ns and direct_one is not None:
            try:
                if direct_one(token_ids, now_ns):
                    return
            except Exception as fault:  # it ends this stream, by its reader, and no other one
                self._fault = fault
            self._tokens[index] = token_ids
            self._wake()
            return
        unread = self._tokens.get(index)
        if unread is None:
            unread = self._tokens[index] = token_ids
        else:
            unread += token_ids
        if len(unread) < self.interval or self._is_due:
            return
        if self.direct is None:
            self._wake()
        else:
            self._is_due, self._ready_one = True, None
            streams = self._turn.streams
            if not streams:
                self._turn.begin()
            streams.append(self)

    def write(self, now_ns: int) -> None:
        """Pass on the tokens of a turn, past the reader if it waits and nothing else came."""
        self._is_due = False
        tokens, direct = self._tokens, self.direct
        if not tokens:  # the reader was faster
            self._ready_one = self.direct_one if self._is_parked else None
            return
        try:
            if self._is_parked and direct is not None and direct(tokens, now_ns):
                self._tokens, self._ready_one = {}, self.direct_one
                return
        except Exception as fault:  # it ends this stream, by its reader, and no other one
            self._fault = fault
        self._wake()

    def close(self) -> None:
        """Make the reader's current or next get() raise StreamClosedError."""
        self._closed = True
        self._wake()

    async def get(self) -> dict[int, RequestOutput]:
        """Wait for outputs; returns all there are, by request index."""
        while not self._is_ready and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            self._is_parked = not self._pending
            self._ready_one = self.direct_one if self._is_parked and not self._is_due else None
            try:
                await self._waiter
            finally:
                self._is_parked, self._ready_one = False, None
        if self._closed:
            raise StreamClosedError
        if self._fault is not None:
            raise self._fault
        self._is_ready = False
        tokens, self._tokens = self._tokens, {}
        for index, token_ids in tokens.items():
            self._add(index, RequestOutput(self.request_ids[index], token_ids))
        pending, self._pending = self._pending, {}
        return pending

    def _is_early(self, index: int) -> bool:
        """True where more tokens have to come before these are passed on."""
        output, has_begun = self._pending[index], index in self._begun
        self._begun.add(index)
        goes_on = has_begun and output.finish_reason is None
        return goes_on and len(output.token_ids) < self.interval

    def settle(self, index: int, cost: Cost) -> None:
        """Note what request `index` took: all workers have told."""
        self._costs[index] = cost
        if self._settled is not None and not self._settled.done() and self._has_all_costs():
            self._settled.set_result(None)

    async def cost(self, timeout_s: float) -> Cost:
        """What all requests took; waits for workers that have not told, but not for ever."""
        if not self._has_all_costs():
            self._settled = asyncio.get_running_loop().create_future()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._settled
        total = Cost()
        for cost in self._costs.values():
            total.add(cost)
        return total

    def _has_all_costs(self) -> bool:
        return len(self._costs) == len(self.request_ids)

    def _wake(self) -> None:
        self._is_ready, self._is_parked, self._ready_one = True, False, None
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(into: RequestOutput, output: RequestOutput) -> None:
    into.token_ids.extend(output.token_ids)
    if into.logprobs is None:
        into.logprobs = output.logprobs
    else:
        into.logprobs.extend(output.logprobs or [])
    into.prompt_logprobs = into.prompt_logprobs or output.prompt_logprobs
    into.delta = into.delta if output.delta is None else output.delta
    into.finish_reason = output.finish_reason
    into.stop_reason = output.stop_reason
    into.error = output.error
    into.num_cached_tokens = max(into.num_cached_tokens, output.num_cached_tokens)
    into.scheduled_ns = into.scheduled_ns or output.scheduled_ns
