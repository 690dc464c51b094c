"""Which backend has which stored response, as far as a router has seen them pass."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Callable

from tokenmill.api.errors import RESPONSES_PATH

MAX_KNOWN = 100_000
_ID = re.compile(rb'"id"\s*:\s*"(resp_[\w.-]{1,128})"')


class ResponseOwners:
    """Backends by the ids of their responses; the least recently used ids are forgotten first."""

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
        """Read the id of a new response in the first bytes of its answer."""
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


def response_in(path: str) -> str:
    """The id of the stored response that a path names; "" for other paths."""
    name = path.removeprefix(RESPONSES_PATH + "/").partition("/")[0]
    is_one = path.startswith(RESPONSES_PATH + "/") and name != "input_tokens"
    return name if is_one else ""
