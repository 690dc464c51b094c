"""Responses that later calls refer to, as encoded bytes: one store for all fronts.

The store has at most so many entries and bytes, and keeps none longer than its age limit. Where one
has to go, it is the least recently used of the account that has most: nobody pushes out what others
have stored.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.config import ServerConfig


class ResponseKeeper(Protocol):
    """Who keeps responses, over all fronts; a caller sees those of its own account."""

    def put(self, response_id: str, account: str, item_ids: list[str], payload: bytes) -> None: ...

    async def get(self, response_id: str, account: str) -> bytes | None: ...

    async def find_item(self, item_id: str, account: str) -> bytes | None: ...

    async def delete(self, response_id: str, account: str) -> bool: ...

    def size(self) -> tuple[int, int]: ...


@dataclass(slots=True)
class _Item:
    """An item and the responses that have it, which share this object: ids are long."""

    place: tuple[str, str]
    response_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    items: list[_Item]
    payload: bytes
    expires_s: float


@dataclass(slots=True)
class _Account:
    entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)  # last used last
    num_bytes: int = 0


class StoredResponses:
    def __init__(self, limits: ServerConfig) -> None:
        self._max_entries = limits.max_stored_responses
        self._max_bytes = limits.max_stored_response_bytes
        self._max_age_s = limits.stored_response_age_s
        self._accounts: dict[str, _Account] = {}
        self._account_of: dict[str, str] = {}  # by id, the oldest first
        self._items: dict[tuple[str, str], _Item] = {}
        self._num_bytes = 0

    def size(self) -> tuple[int, int]:
        self._drop_expired()
        return len(self._account_of), self._num_bytes

    def put(self, response_id: str, account: str, item_ids: Iterable[str], payload: bytes) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._drop_expired()
        if response_id in self._account_of:
            self._drop(response_id)
        if len(payload) > self._max_bytes:
            return
        places = [(account, item_id) for item_id in set(item_ids)]
        items = [self._items.setdefault(place, _Item(place)) for place in places]
        for item in items:
            item.response_ids.append(response_id)
        owner = self._accounts.setdefault(account, _Account())
        owner.entries[response_id] = _Entry(items, payload, time.monotonic() + self._max_age_s)
        self._account_of[response_id] = account
        self._count(owner, len(payload))
        while len(self._account_of) > self._max_entries:
            self._make_room(lambda each: len(each.entries))
        while self._num_bytes > self._max_bytes:
            self._make_room(lambda each: each.num_bytes)

    async def get(self, response_id: str, account: str) -> bytes | None:
        self._drop_expired()
        if self._account_of.get(response_id) != account:
            return None
        entries = self._accounts[account].entries
        entries.move_to_end(response_id)
        return entries[response_id].payload

    async def find_item(self, item_id: str, account: str) -> bytes | None:
        """A response of this caller that has an item: of a chain its first, the smallest."""
        self._drop_expired()
        item = self._items.get((account, item_id))
        if item is None:
            return None
        return self._accounts[account].entries[item.response_ids[0]].payload

    async def delete(self, response_id: str, account: str) -> bool:
        """Forget a response of this caller; False where there is none."""
        if await self.get(response_id, account) is None:
            return False
        self._drop(response_id)
        return True

    def _make_room(self, share: Callable[[_Account], int]) -> None:
        """Drop the least recently used response of the account with the largest share."""
        self._drop(next(iter(max(self._accounts.values(), key=share).entries)))

    def _count(self, owner: _Account, num_bytes: int) -> None:
        owner.num_bytes += num_bytes
        self._num_bytes += num_bytes

    def _drop(self, response_id: str) -> None:
        account = self._account_of.pop(response_id)
        owner = self._accounts[account]
        entry = owner.entries.pop(response_id)
        self._count(owner, -len(entry.payload))
        if not owner.entries:
            del self._accounts[account]
        for item in entry.items:
            item.response_ids.remove(response_id)
            if not item.response_ids:
                del self._items[item.place]

    def _drop_expired(self) -> None:
        now_s = time.monotonic()
        while self._account_of:
            response_id, account = next(iter(self._account_of.items()))
            if self._accounts[account].entries[response_id].expires_s > now_s:
                return
            self._drop(response_id)
