"""Responses that later calls refer to, as a keeper of encoded responses has them.

Every entry has the whole context of its response, so that a chain of responses does not break when
its first ones are gone.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import json_encode
from tokenmill.api.responses.response_items import InputItem, Item, ItemReference, as_stored
from tokenmill.api.responses.response_object import ItemList, ResponseObject
from tokenmill.core.config import ServerConfig
from tokenmill.workers.fronts.stored_responses import ResponseKeeper


class StoredResponse(msgspec.Struct):
    """A response and what its model saw."""

    response: ResponseObject
    context: list[Item]  # input of this and earlier turns, and the earlier turns' output

    @property
    def conversation(self) -> list[Item]:
        """What the next turn begins with."""
        return [*self.context, *self.response.output]


_decode = msgspec.json.Decoder(StoredResponse).decode


class ResponseStore:
    """Stored responses of all fronts; what is not there is answered with a 404."""

    def __init__(self, keeper: ResponseKeeper, limits: ServerConfig) -> None:
        self._keeper = keeper
        self._limits = limits

    def put(self, response: ResponseObject, context: Sequence[Item], account: str) -> None:
        """Keep a response that has ended."""
        if not self._limits.max_stored_responses:
            return
        stored = StoredResponse(response, [as_stored(item) for item in context])
        item_ids = [item.id for item in stored.conversation if item.id is not None]
        self._keeper.put(response.id, account, item_ids, json_encode(stored))

    async def get(
        self, response_id: str, account: str, param: str = "response_id"
    ) -> StoredResponse:
        """The entry of this caller's response."""
        payload = await self._keeper.get(response_id, account)
        if payload is None:
            raise self._no_response(response_id, param)
        return _decode(payload)

    async def delete(self, response_id: str, account: str) -> None:
        """Forget a response."""
        if not await self._keeper.delete(response_id, account):
            raise self._no_response(response_id, "response_id")

    async def resolve(self, items: Sequence[InputItem], account: str) -> list[Item]:
        """The items with references replaced by what they refer to."""
        found: dict[str | None, Item] = {}
        for index, item in enumerate(items):
            if isinstance(item, ItemReference) and item.id not in found:
                payload = await self._keeper.find_item(item.id, account)
                if payload is None:
                    what = f"no item {item.id!r} is stored here"
                    raise self._unknown(what, f"input[{index}].id")
                found |= {each.id: each for each in _decode(payload).conversation}
        return [found[item.id] if isinstance(item, ItemReference) else item for item in items]

    def _no_response(self, response_id: str, param: str) -> ApiError:
        return self._unknown(f"no response {response_id!r} is stored here", param)

    def _unknown(self, what: str, param: str) -> ApiError:
        limits = self._limits
        message = (
            f"{param}: {what}: it is unknown, was deleted or not stored (store false), or was "
            f"dropped (this server keeps at most {limits.max_stored_responses} responses of all "
            f"keys, {limits.max_stored_response_bytes} bytes, for {limits.stored_response_age_s:g} "
            "s); "
            "send the conversation as input"
        )
        return ApiError(404, message, param, "response_not_found")


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
