"""An amount that accounts share: each may hold as much as it leaves free, and nobody all of it."""

from __future__ import annotations

import asyncio
from collections import Counter, deque


class FairShare:
    """Grants parts of an amount; who holds least comes first, and of one account the first one."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_held = 0
        self._by_account: Counter[str] = Counter()
        self._waiting: dict[str, deque[tuple[asyncio.Future[None], int]]] = {}

    def held(self, account: str) -> int:
        return self._by_account[account]

    def take_now(self, account: str, amount: int) -> bool:
        """Hold so much more if it is free, and nobody of the account waits."""
        is_free = account not in self._waiting and self._fits(account, amount)
        if is_free:
            self._add(account, amount)
        return is_free

    async def take(self, account: str, amount: int) -> None:
        if self.take_now(account, amount):
            return
        granted: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(account, deque()).append((granted, amount))
        try:
            await granted
        except BaseException:
            if granted.done() and not granted.cancelled():
                self._add(account, -amount)
            granted.cancel()
            self._grant()
            raise

    def give(self, account: str, amount: int) -> None:
        self._add(account, -amount)
        self._grant()

    def _fits(self, account: str, amount: int) -> bool:
        free = self.capacity - self.num_held - amount
        return self._by_account[account] + amount <= free

    def _add(self, account: str, amount: int) -> None:
        self.num_held += amount
        self._by_account[account] += amount
        if not self._by_account[account]:
            del self._by_account[account]

    def _grant(self) -> None:
        while (account := self._next()) is not None:
            granted, amount = self._waiting[account].popleft()
            self._add(account, amount)
            granted.set_result(None)

    def _next(self) -> str | None:
        for account, queue in list(self._waiting.items()):
            while queue and queue[0][0].done():
                queue.popleft()
            if not queue:
                del self._waiting[account]
        fitting = (a for a, queue in self._waiting.items() if self._fits(a, queue[0][1]))
        return min(fitting, key=self.held, default=None)
