"""Which backend has which stored response or video, as far as a router has seen them pass."""

from __future__ import annotations

import re
from collections import OrderedDict

MAX_KNOWN = 100_000
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|video)_[\w.-]{1,128})"')


class ResponseOwners:
    """Backends by the ids of what they stored; the least recently used ids are forgotten first."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()

    def find(self, response_id: str) -> str | None:
        """The backend that has the response; None where it is not known."""
        owner = self._owners.get(response_id)
        if owner is not None:
            self._owners.move_to_end(response_id)
        return owner

    def learn(self, data: bytes, backend: str) -> None:
        """Read the id of a new response or video in the first bytes of its answer."""
        found = _ID.search(data)
        if found is not None:
            self.note(found[1].decode(), backend)

    def note(self, response_id: str, backend: str) -> None:
        """Remember who has a response."""
        self._owners[response_id] = backend
        self._owners.move_to_end(response_id)
        if len(self._owners) > MAX_KNOWN:
            self._owners.popitem(last=False)
