"""Which backend has which stored response or video, as far as a router has seen them pass."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from tokenmill.api.errors import RESPONSES_PATH, VIDEOS_PATH

MAX_KNOWN = 100_000
_ID = re.compile(rb'"id"\s*:\s*"((?:resp|video)_[\w.-]{1,128})"')
# Paths below which a name is that of something stored, but for these.
_STORED = {RESPONSES_PATH: ("input_tokens",), VIDEOS_PATH: ("sync", "generations")}


class ResponseOwners:
    """Backends by the ids of what they stored; the least recently used ids are forgotten first."""

    def __init__(self) -> None:
        self._owners: OrderedDict[str, str] = OrderedDict()
        self.on_new: Callable[[str, str], None] = lambda response_id, backend: None

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
        """Remember who has a response, and tell others if it is news."""
        if self._owners.get(response_id) != backend:
            self.on_new(response_id, backend)
        self.hear(response_id, backend)

    def hear(self, response_id: str, backend: str) -> None:
        """Remember who has a response."""
        self._owners[response_id] = backend
        self._owners.move_to_end(response_id)
        if len(self._owners) > MAX_KNOWN:
            self._owners.popitem(last=False)


def stored_in(path: str) -> str:
    """The id of the stored response or video that a path names; "" for other paths."""
    for above, others in _STORED.items():
        name = path.removeprefix(above + "/").partition("/")[0]
        if path.startswith(above + "/") and name not in others:
            return name
    return ""
