"""Responses that later calls refer to, in the memory of the API process.

The store has at most so many entries and bytes; the least recently used go first, and none is kept
longer than its age limit. Every entry has the whole context of its response, so that a chain of
responses does not break when its first ones are gone.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.responses.response_items import InputItem, Item, ItemReference, as_stored
from tokenmill.api.responses.response_object import ItemList, ResponseObject
from tokenmill.core.config import ServerConfig


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response and what its model saw."""

    response: ResponseObject
    context: list[Item]  # input of this and earlier turns, and the earlier turns' output
    key: int  # of the caller: nobody else sees it
    num_bytes: int

    @property
    def conversation(self) -> list[Item]:
        """What the next turn begins with."""
        return [*self.context, *self.response.output]


class ResponseStore:
    """Stored responses by id, the least recently used first."""

    def __init__(self, config: ServerConfig) -> None:
        self._max_entries = config.max_stored_responses
        self._max_bytes = config.max_stored_response_bytes
        self._max_age_s = config.stored_response_age_s
        self._entries: OrderedDict[str, StoredResponse] = OrderedDict()
        self._expires_s: dict[str, float] = {}  # by id, the oldest first
        self._num_bytes = 0
        # (item, entries that have it) by key and id: finding an item is no search.
        self._items: dict[tuple[int, str], tuple[Item, int]] = {}

    def size(self) -> tuple[int, int]:
        """How many responses there are, and their bytes."""
        self._drop_expired()
        return len(self._entries), self._num_bytes

    def put(self, response: ResponseObject, context: Sequence[Item], key: int) -> None:
        """Keep a response that has ended; one that is larger than the store is not kept."""
        stored = [as_stored(item) for item in context]
        num_bytes = len(json_encode(response)) + len(json_encode(stored))
        self._drop_expired()
        if num_bytes > self._max_bytes or not self._max_entries:
            return
        self._expires_s[response.id] = time.monotonic() + self._max_age_s
        self._entries[response.id] = StoredResponse(response, stored, key, num_bytes)
        self._num_bytes += num_bytes
        self._count_items(self._entries[response.id], 1)
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def get(self, response_id: str, key: int, param: str = "response_id") -> StoredResponse:
        """The entry of this caller's response; 404 where there is none."""
        self._drop_expired()
        entry = self._entries.get(response_id)
        if entry is None or entry.key != key:
            raise self._unknown(f"no response {response_id!r} is stored here", param)
        self._entries.move_to_end(response_id)
        return entry

    def delete(self, response_id: str, key: int) -> None:
        """Forget a response; 404 where there is none."""
        self.get(response_id, key)
        self._drop(response_id)

    def resolve(self, items: Sequence[InputItem], key: int) -> list[Item]:
        """The items with references replaced by what they refer to."""
        return [
            self._item(index, item.id, key) if isinstance(item, ItemReference) else item
            for index, item in enumerate(items)
        ]

    def _item(self, index: int, item_id: str, key: int) -> Item:
        self._drop_expired()
        found = self._items.get((key, item_id))
        if found is None:
            raise self._unknown(f"no item {item_id!r} is stored here", f"input[{index}].id")
        return found[0]

    def _count_items(self, entry: StoredResponse, change: int) -> None:
        for item in entry.conversation:
            place = (entry.key, item.id or "")
            count = self._items.get(place, (item, 0))[1] + change
            if count:
                self._items[place] = (item, count)
            else:
                del self._items[place]

    def _unknown(self, what: str, param: str) -> ApiError:
        message = (
            f"{param}: {what}: it is unknown, was deleted or not stored (store false), or was "
            f"dropped (this server keeps the last {self._max_entries} responses, at most "
            f"{self._max_bytes} bytes, for {self._max_age_s:g} s); send the conversation as input"
        )
        return ApiError(404, message, param, "response_not_found")

    def _drop(self, response_id: str) -> None:
        del self._expires_s[response_id]
        entry = self._entries.pop(response_id)
        self._num_bytes -= entry.num_bytes
        self._count_items(entry, -1)

    def _drop_expired(self) -> None:
        now_s = time.monotonic()
        while self._expires_s:
            response_id, expires_s = next(iter(self._expires_s.items()))
            if expires_s > now_s:
                return
            self._drop(response_id)


def page_of(items: Sequence[Item], limit: int, descending: bool, after: str | None) -> ItemList:
    """One page of a list of items; `after` is the id of the last item of the page before."""
    ordered = list(reversed(items)) if descending else list(items)
    if after is not None:
        places = [index for index, item in enumerate(ordered) if item.id == after]
        if not places:
            message = f"after: no input item has the id {after!r}; send the last_id of a page"
            raise ApiError(400, message, "after", "invalid_value")
        ordered = ordered[places[0] + 1 :]
    page = ordered[:limit]
    return ItemList(
        data=page,
        first_id=page[0].id if page else None,
        last_id=page[-1].id if page else None,
        has_more=len(ordered) > len(page),
    )
