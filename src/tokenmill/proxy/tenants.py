"""Keeps the accounts of a router apart whose calls all reach the backends with one key.

An account gets the ids of what backends store for it with an HMAC of the account behind them. An id
that comes without the right one becomes an id that no backend has.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
from starlette.types import Scope

from tokenmill.api.errors import RESPONSES_PATH, VIDEOS_PATH, ApiError
from tokenmill.proxy.forwarding import stored_in
from tokenmill.proxy.upstream import AnswerError

IDEMPOTENCY_KEY = b"idempotency-key"
MAX_LINE = 16 << 20  # of a stream, and bytes of a whole answer
_TAG_CHARS = 32
# Where ids stand in requests, answers and events, and what else has such fields.
_IDS = ("id", "item_id", "response_id", "previous_response_id", "first_id", "last_id")
_PARTS = ("response", "item", "output", "data", "input")
_PLACE = re.compile(rb"(?:(?<=after=)|(?<=before=))[\w.-]+")  # of items that are listed
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

Change = Callable[[str], str]
Fields = dict[str, msgspec.Raw]


@dataclass(slots=True)
class Tenant:
    """An account during one call."""

    account: str
    salt: bytes
    given_ids: dict[str, str] = field(default_factory=dict)  # as the client has sent them
    _rest: bytes = b""  # of a stream: a line that is not whole

    def seal(self, name: str) -> str:
        return f"{name}-{self._mac('stored', name)}"

    def unseal(self, given: str) -> str:
        """An id as the backend has it; one that is not this account's becomes an unknown one."""
        name = given[: -_TAG_CHARS - 1]
        is_own = name and hmac.compare_digest(self.seal(name).encode(), given.encode())
        # Of another purpose: what a backend repeats of it must not be a sealed id.
        opened = name if is_own else f"{given}-{self._mac('unknown', given)}"
        self.given_ids[opened] = given
        return opened

    def _mac(self, purpose: str, text: str) -> str:
        data = f"{purpose}\0{self.account}\0{text}".encode()
        return hmac.digest(self.salt, data, "sha256").hex()[:_TAG_CHARS]

    def given(self, opened: str) -> str:
        return self.given_ids.get(opened, opened)

    # Requests.

    def request(self, scope: Scope) -> Scope:
        """The head of a call with ids as the backend has them, and the account in its key.

        Answers must come uncompressed: there are ids in them.
        """
        headers = [pair for pair in scope["headers"] if pair[0] != b"accept-encoding"]
        for place, (name, value) in enumerate(headers):
            if name == IDEMPOTENCY_KEY:
                headers[place] = name, self._mac("call", value.decode("latin-1")).encode()
        path, stored = scope["path"], stored_in(scope["path"])
        if stored:
            path = path.replace(stored, self.unseal(stored))
        query = _PLACE.sub(lambda m: self.unseal(m[0].decode()).encode(), scope["query_string"])
        changed = {"path": path, "raw_path": path.encode() if stored else scope["raw_path"]}
        return {**scope, **changed, "headers": headers, "query_string": query}

    def opens(self, path: str) -> bool:
        return path.startswith(RESPONSES_PATH)

    def body(self, path: str, body: bytes) -> bytes:
        """The body of a call with ids as the backend has them; ApiError where it is no JSON."""
        if not self.opens(path) or not body:
            return body
        try:
            if body.lstrip(b" \t\r\n").startswith(b"{"):
                return _change_ids(body, self.unseal)
        except _NOT_JSON:
            pass
        message = "the body is not a JSON object, in which the router looks for stored responses"
        raise ApiError(400, message, code="invalid_json")

    # Answers.

    def whole(self, path: str, status: int, body: bytes) -> bytes:
        """A whole answer with ids as the client gets them; errors name what the client sent."""
        if not has_ids(path):
            return body
        if status >= 400:
            for opened, given in self.given_ids.items():
                body = body.replace(opened.encode(), given.encode())
            return body
        try:
            return _change_ids(body, self.seal)
        except _NOT_JSON:
            raise AnswerError("its answer is not JSON") from None

    def events(self, path: str, data: bytes, is_last: bool) -> bytes:
        """The next whole lines of a stream, with ids as the client gets them."""
        if not has_ids(path):
            return data
        lines = (self._rest + data).splitlines(keepends=True)
        is_cut = bool(lines) and not is_last and not lines[-1].endswith(b"\n")
        self._rest = lines.pop() if is_cut else b""
        if len(self._rest) > MAX_LINE:
            raise AnswerError(f"its answer has an event of more than {MAX_LINE} bytes")
        return b"".join([self._event(line) for line in lines])

    def _event(self, line: bytes) -> bytes:
        name, _, value = line.partition(b":")
        data = value.strip()
        if name != b"data" or not data.startswith(b"{"):
            return line
        end = value[len(value.rstrip()) :]
        try:
            return b"data: " + _change_ids(data, self.seal) + end
        except _NOT_JSON:
            raise AnswerError("its answer has an event that is not JSON") from None


def has_ids(path: str) -> bool:
    """Whether answers of a path name what is stored."""
    return path.startswith((RESPONSES_PATH, VIDEOS_PATH)) and not path.endswith("/content")


def _change_ids(data: bytes, change: Change) -> bytes:
    """JSON with other ids; all but the objects that have them stays as it is."""
    text = data.strip()
    if text.startswith(b"["):
        items = msgspec.json.decode(text, type=list[msgspec.Raw])
        return msgspec.json.encode([_changed(item, change) for item in items])
    if not text.startswith(b"{"):
        return data
    fields = msgspec.json.decode(text, type=Fields)
    for name in _IDS:
        if isinstance(found := msgspec.json.decode(fields.get(name, b"null")), str):
            fields[name] = msgspec.Raw(msgspec.json.encode(change(found)))
    for name in _PARTS:
        if name in fields:
            fields[name] = _changed(fields[name], change)
    return msgspec.json.encode(fields)


def _changed(data: msgspec.Raw, change: Change) -> msgspec.Raw:
    return msgspec.Raw(_change_ids(bytes(data), change))
