"""One HTTP connection over uvicorn: how long a client may take to send, how much, and how many.

uvicorn waits for ever for the rest of a head or a body, and bounds neither a head nor the number of
connections. Here a sweep over all connections (`check`) ends those whose client is late.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from urllib.parse import urlsplit

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from tokenmill.api.call import CHUNK_WRITER, REQUEST_ID, CallRecord, new_request_id
from tokenmill.api.errors import ApiError
from tokenmill.core.config import ServerConfig
from tokenmill.http_connection import ENTRY_BYTES, MAX_HEAD_BYTES

MAX_PIPELINED = 256  # calls that wait for the one before them
LINGER_S = 10.0  # for the rest of a body whose call has been answered
ROOM_SHARE = 16  # a full server closes this part of the connections that wait, so that few search
_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """What a client may take, in seconds, and how many connections there may be."""

    header_timeout_s: float
    body_timeout_s: float
    body_idle_timeout_s: float
    send_timeout_s: float
    keep_alive_timeout_s: float
    max_connections: int

    @classmethod
    def of(cls, config: ServerConfig, max_files: int) -> ConnectionLimits:
        """Those of the settings; a process that may open few files takes fewer connections."""
        return cls(
            config.header_timeout_s,
            config.body_timeout_s,
            config.body_idle_timeout_s,
            config.send_timeout_s,
            config.keep_alive_timeout_s,
            max(1, min(config.max_connections, max_files)),
        )


class UntilClose(int):
    """The length of a body that ends with the connection: anything fits, and nothing is missing.

    uvicorn would send chunks, which HTTP/1.0 does not know.
    """

    def __lt__(self, other: int) -> bool:
        return False

    def __ne__(self, other: object) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return True

    def __sub__(self, other: int) -> UntilClose:
        return self

    __hash__ = int.__hash__


class ServerConnection(HttpToolsProtocol):
    """uvicorn's protocol with deadlines for what the client sends."""

    def __init__(self, limits: ConnectionLimits, **uvicorn_arguments: Any) -> None:
        self._parts: list[bytes] = []  # of a body, until all that one read brought is parsed
        self.on_body = self._parts.append  # type: ignore[assignment, method-assign]
        super().__init__(**uvicorn_arguments)
        self._limits = limits
        self._reading: Literal["idle", "head", "body"] = "idle"
        self._deadline_s = self.loop.time() + limits.keep_alive_timeout_s
        self._body_end_s = 0.0
        self._num_head_bytes = 0
        self._num_useless_bytes = 0  # since something came of what was read
        self._has_parsed = False
        self._num_unsent = 0  # bytes that wait for the client to read
        self._sent_s = 0.0  # when these last became fewer
        self._fault: ApiError | None = None
        self._running: RequestResponseCycle | None = None

    # What uvicorn and its parser call.

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        limit = self._limits.max_connections
        if len(self.connections) > limit and not self._make_room():
            self.connections.discard(self)
            message = f"{limit} connections are open; the limit is {limit}"
            self._refuse(ApiError(503, message, code="max_connections"))

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self._running is not None:  # with calls pipelined, not the one that uvicorn tells
            self._running.disconnected = not self._running.response_complete
            self._running.message_event.set()
        if self.flow is not None:
            self.flow.write_paused = True  # for writers past ASGI; nobody waits for it any more

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        self._has_parsed = False
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            is_ours = isinstance(error, httptools.HttpParserCallbackError)
            why = "its target is not a path" if is_ours else str(error)
            self._refuse(self._fault or _invalid(why))
            return
        self._take_body()
        self._num_useless_bytes = 0 if self._has_parsed else self._num_useless_bytes + len(data)
        if self._num_useless_bytes > MAX_HEAD_BYTES:
            self._refuse(_head_too_large())

    def _feed(self, data: bytes) -> None:
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            # Clients that would rather talk HTTP/2 send the body all the same; the parser left it.
            self.cycle.keep_alive = False
            self.cycle.more_body = True
            self.cycle.message_event.clear()
            self.parser = httptools.HttpRequestParser(_BodyOf(self))
            framing = (b"content-length", b"transfer-encoding")
            lines = [b"%s: %s\r\n" % pair for pair in self.headers if pair[0] in framing]
            self.parser.feed_data(b"".join([b"POST / HTTP/1.1\r\n", *lines, b"\r\n"]))
            self.parser.feed_data(data[upgrade.args[0] :])

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if len(self.pipeline) > MAX_PIPELINED:
            message = f"more than {MAX_PIPELINED} calls wait on this connection; await answers"
            self._fault = ApiError(429, message, code="too_many_pipelined")
            raise self._fault
        self._has_parsed = True
        self._num_head_bytes = 0
        self._expect("head")

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._count_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + ENTRY_BYTES)
        if self._reading == "head":  # a trailer is dropped: the call has been let in without it
            super().on_header(name, value.rstrip(b" \t"))

    def on_headers_complete(self) -> None:
        self._check_head()
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False
            self.cycle.expected_content_length = UntilClose()
        self.scope[CHUNK_WRITER] = ChunkWriter(self.cycle)  # type: ignore[literal-required]
        self._body_end_s = self.loop.time() + self._limits.body_timeout_s
        self._expect("body")

    def _take_body(self) -> None:
        if self._parts:
            super().on_body(b"".join(self._parts))
            self._parts.clear()
            self._has_parsed = True
            self._expect("body")

    def on_message_complete(self) -> None:
        self._take_body()
        super().on_message_complete()
        self._has_parsed = True
        self._expect("idle")

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._reading != "body":
            self._expect(self._reading)
        elif self.expect_100_continue:  # no body may follow: the next call would be taken for it
            self.transport.close()
        else:
            self._deadline_s = min(self._deadline_s, self.loop.time() + LINGER_S)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    # Deadlines.

    @property
    def is_waiting(self) -> bool:
        """True while the client has asked for nothing that is not answered."""
        return self._reading != "body" and not self._is_answering

    @property
    def deadline_s(self) -> float:
        """When the client must have sent more, by the clock of the loop."""
        return self._deadline_s

    def check(self, now_s: float) -> None:
        """End the connection if its client is late, or takes nothing of its answer."""
        if self._is_stuck(now_s):
            _log.debug("%s: the client takes nothing of its answer", self.client)
            self.transport.abort()
        if self.transport.is_closing():
            return
        if self.flow.read_paused or (self._reading != "body" and self._is_answering):
            self._body_end_s = max(self._body_end_s, now_s + self._limits.body_idle_timeout_s)
            self._expect(self._reading)  # it waits for us
        elif now_s >= self._deadline_s:
            self._end_late()

    def _is_stuck(self, now_s: float) -> bool:
        before, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
        if self._num_unsent < before or not before:
            self._sent_s = now_s
        return self._num_unsent > 0 and now_s - self._sent_s > self._limits.send_timeout_s

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _expect(self, part: Literal["idle", "head", "body"]) -> None:
        """Set what the client has to send next, and by when."""
        self._reading, now_s = part, self.loop.time()
        limits = self._limits
        if part == "body":
            self._deadline_s = min(self._body_end_s, now_s + limits.body_idle_timeout_s)
        else:
            is_head = part == "head"
            self._deadline_s = now_s + (
                limits.header_timeout_s if is_head else limits.keep_alive_timeout_s
            )

    def _end_late(self) -> None:
        if self._reading == "idle" or (self._reading == "body" and not self._is_answering):
            self.close()
            return
        part = "head" if self._reading == "head" else "body"
        message = f"the {part} of the request did not come in time"
        self._refuse(ApiError(408, message, code="request_timeout"))

    # Refusals.

    def _check_head(self) -> None:
        try:
            check_framing(self.parser.get_http_version(), self.headers)
            host_of_target(self.url, self.headers)
        except ApiError as fault:
            self._fault = fault
            raise

    def close(self) -> None:
        self.connections.discard(self)
        self.transport.close()

    def _make_room(self) -> bool:
        """Close connections that wait, the most idle first; False: there are none."""
        waiting = [c for c in _connections(self.connections) if c.is_waiting and c is not self]
        waiting.sort(key=lambda each: each.deadline_s)
        leaving = waiting[: -(-len(waiting) // ROOM_SHARE)]
        for connection in leaving:
            connection.close()
        return bool(leaving)

    def _count_head(self, num_bytes: int) -> None:
        self._has_parsed = True
        self._num_head_bytes += num_bytes
        if self._num_head_bytes > MAX_HEAD_BYTES:
            self._fault = _head_too_large()
            raise self._fault

    def _refuse(self, error: ApiError) -> None:
        _log.debug("%s: %s %s", self.client, error.status, error)
        may_answer = not self.pipeline
        if self._is_answering:
            may_answer = may_answer and not self.cycle.response_started
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            record: CallRecord | None = self.cycle.scope.get("call")  # type: ignore[assignment]
            if may_answer and record is not None:
                record.fail(error)
        if may_answer:
            self.transport.write(self._whole(error))
        self.transport.close()

    def _whole(self, error: ApiError) -> bytes:
        record = (self.scope or {}).get("call") if self._is_answering else None
        request_id = record.request_id if isinstance(record, CallRecord) else new_request_id()
        body = error.body()
        headers = [
            *self.server_state.default_headers,
            (b"content-type", b"application/json"),
            (b"content-length", b"%d" % len(body)),
            (b"connection", b"close"),
            (REQUEST_ID, request_id.encode()),
        ]
        lines = [b"%s: %s\r\n" % pair for pair in headers]
        return b"".join([STATUS_LINE[error.status], *lines, b"\r\n", body])


class ChunkWriter:
    """Writes parts of an answer in chunks, past ASGI."""

    __slots__ = ("_cycle", "flow", "transport")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self.flow = cycle.flow  # paused while the client takes nothing, and once it has gone
        self.transport = cycle.transport

    def has_begun(self) -> bool:
        """True once the answer is under way in chunks."""
        return self._cycle.chunked_encoding is True and self._cycle.response_started

    def can_write(self) -> bool:
        """True while the client takes what is written, of an answer that has begun."""
        cycle = self._cycle
        return not (self.flow.write_paused or cycle.disconnected or cycle.response_complete)

    def write(self, body: bytes) -> None:
        self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))


class _BodyOf:
    """Gives a connection the body of a request whose head it has."""

    def __init__(self, connection: ServerConnection) -> None:
        self.on_body = connection.on_body
        self.on_message_complete = connection.on_message_complete


def _head_too_large() -> ApiError:
    message = f"the head of the request is larger than {MAX_HEAD_BYTES} bytes"
    return ApiError(431, message, code="head_too_large")


def _connections(all_of_them: Iterable[Any]) -> Iterable[ServerConnection]:
    return (each for each in all_of_them if isinstance(each, ServerConnection))


def check_all(all_of_them: Iterable[Any], now_s: float) -> None:
    for connection in list(_connections(all_of_them)):
        connection.check(now_s)


# Heads: where a server behind another one could read one differently, it is refused.


def check_framing(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """ApiError for a head that is not to be answered; the names are in lower case."""
    if version not in ("1.0", "1.1"):
        raise _invalid(f"HTTP/{version} is not spoken here; send HTTP/1.1")
    hosts = [value for name, value in headers if name == b"host"]
    if len(hosts) > 1 or (not hosts and version == "1.1"):
        raise _invalid(f"it has {len(hosts)} Host headers; send one")
    if hosts and _HOST.fullmatch(hosts[0]) is None:
        raise _invalid("its Host is neither a name nor an address")
    codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
    if codings and version == "1.0":
        raise _invalid("HTTP/1.0 has no Transfer-Encoding; send a Content-Length")
    if codings not in ([], [b"chunked"]):
        shown = b", ".join(codings)[:60].decode("latin-1")
        message = f"Transfer-Encoding: {shown!r} is not decoded here; send 'chunked' alone"
        raise ApiError(501, message, code="unknown_coding")


def host_of_target(url: bytes, headers: list[tuple[bytes, bytes]]) -> None:
    """Have the Host be that of the target, where the target is a whole URL: it takes precedence."""
    if url.startswith((b"/", b"*")):
        return
    host = urlsplit(url.decode("latin-1")).netloc.encode("latin-1")
    if _HOST.fullmatch(host) is None:
        raise _invalid("the host of its target is neither a name nor an address")
    headers[:] = [pair for pair in headers if pair[0] != b"host"] + [(b"host", host)]


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the request is not valid HTTP: {why}", code="invalid_http")
