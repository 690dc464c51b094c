"""The outputs of one API call, passed from the pool to the code that writes the answer."""

from __future__ import annotations

import asyncio
import contextlib

from tokenmill.core.cost import Cost
from tokenmill.core.types import RequestOutput


class StreamClosedError(Exception):
    """The reader of an OutputStream was told to stop."""


class OutputStream:
    """Outputs of one API call's requests. Unread outputs of a request are merged into one."""

    __slots__ = ("_closed", "_costs", "_pending", "_settled", "_waiter", "request_ids", "workers")

    def __init__(self, request_ids: list[str]) -> None:
        self.request_ids = request_ids
        self.workers: dict[int, str] = {}  # who has each of them, or had it last
        self._pending: dict[int, RequestOutput] = {}
        self._waiter: asyncio.Future[None] | None = None
        self._closed = False
        self._costs: dict[int, Cost] = {}  # of requests of which no worker has more to tell
        self._settled: asyncio.Future[None] | None = None

    def put(self, index: int, output: RequestOutput) -> None:
        """Add what request `index` produced and wake the reader."""
        earlier = self._pending.get(index)
        if earlier is None:
            self._pending[index] = output
        else:
            _merge(earlier, output)
        self._wake()

    def close(self) -> None:
        """Make the reader's current or next get() raise StreamClosedError."""
        self._closed = True
        self._wake()

    async def get(self) -> dict[int, RequestOutput]:
        """Wait for outputs; returns all there are, by request index."""
        while not self._pending and not self._closed:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        if self._closed:
            raise StreamClosedError
        pending, self._pending = self._pending, {}
        return pending

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
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _merge(into: RequestOutput, output: RequestOutput) -> None:
    """Append a later output of the same request."""
    into.token_ids.extend(output.token_ids)
    if into.logprobs is None:
        into.logprobs = output.logprobs
    else:
        into.logprobs.extend(output.logprobs or [])
    into.prompt_logprobs = into.prompt_logprobs or output.prompt_logprobs
    into.finish_reason = output.finish_reason
    into.stop_reason = output.stop_reason
    into.error = output.error
    into.num_cached_tokens = max(into.num_cached_tokens, output.num_cached_tokens)
    into.scheduled_ns = into.scheduled_ns or output.scheduled_ns
