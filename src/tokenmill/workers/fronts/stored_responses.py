"""Responses that later calls refer to, as encoded bytes: one store for all fronts.

The store has at most so many entries and bytes; the least recently used go first, and none is kept
longer than its age limit.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.config import ServerConfig


class ResponseKeeper(Protocol):
    """Who keeps responses, over all fronts; a caller sees those of its own key."""

    def put(self, response_id: str, key: int, item_ids: list[str], payload: bytes) -> None: ...

    async def get(self, response_id: str, key: int) -> bytes | None: ...

    async def find_item(self, item_id: str, key: int) -> bytes | None: ...

    async def delete(self, response_id: str, key: int) -> bool: ...

    def size(self) -> tuple[int, int]: ...


@dataclass(slots=True)
class _Item:
    """An item and the responses that have it, which share this object: ids are long."""

    place: tuple[int, str]
    response_ids: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Entry:
    key: int
    items: list[_Item]
    payload: bytes


class StoredResponses:
    """Stored responses by id, the least recently used first."""

    def __init__(self, limits: ServerConfig) -> None:
        self._max_entries = limits.max_stored_responses
        self._max_bytes = limits.max_stored_response_bytes
        self._max_age_s = limits.stored_response_age_s
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._expires_s: dict[str, float] = {}  # by id, the oldest first
        self._items: dict[tuple[int, str], _Item] = {}
        self._num_bytes = 0

    def size(self) -> tuple[int, int]:
        """How many responses there are, and their bytes."""
        self._drop_expired()
        return len(self._entries), self._num_bytes

    def put(self, response_id: str, key: int, item_ids: Iterable[str], payload: bytes) -> None:
        """Keep a response; one that is larger than the store is not kept."""
        self._drop_expired()
        if response_id in self._entries:
            self._drop(response_id)
        if len(payload) > self._max_bytes:
            return
        places = [(key, item_id) for item_id in set(item_ids)]
        items = [self._items.setdefault(place, _Item(place)) for place in places]
        for item in items:
            item.response_ids.append(response_id)
        self._expires_s[response_id] = time.monotonic() + self._max_age_s
        self._entries[response_id] = _Entry(key, items, payload)
        self._num_bytes += len(payload)
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    async def get(self, response_id: str, key: int) -> bytes | None:
        """A response of this caller, if it is stored."""
        self._drop_expired()
        entry = self._entries.get(response_id)
        if entry is None or entry.key != key:
            return None
        self._entries.move_to_end(response_id)
        return entry.payload

    async def find_item(self, item_id: str, key: int) -> bytes | None:
        """A response of this caller that has an item: of a chain its first, the smallest."""
        self._drop_expired()
        item = self._items.get((key, item_id))
        return None if item is None else self._entries[item.response_ids[0]].payload

    async def delete(self, response_id: str, key: int) -> bool:
        """Forget a response of this caller; False where there is none."""
        if await self.get(response_id, key) is None:
            return False
        self._drop(response_id)
        return True

    def _drop(self, response_id: str) -> None:
        del self._expires_s[response_id]
        entry = self._entries.pop(response_id)
        self._num_bytes -= len(entry.payload)
        for item in entry.items:
            item.response_ids.remove(response_id)
            if not item.response_ids:
                del self._items[item.place]

    def _drop_expired(self) -> None:
        now_s = time.monotonic()
        while self._expires_s:
            response_id, expires_s = next(iter(self._expires_s.items()))
            if expires_s > now_s:
                return
            self._drop(response_id)
