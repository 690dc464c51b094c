"""Raw HTTP/1.1 to others: keep-alive connections, a pool of idle ones, and which of them are stale.

Each user handles answers in its own way: the load client stamps every read and never pauses it, the
router stops reading from a backend until its client takes the answer, and images wait for memory.
"""

from __future__ import annotations

import asyncio
import resource
import ssl
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Generic, TypeVar
from urllib.parse import SplitResult, urlsplit

import httptools

Headers = list[tuple[bytes, bytes]]
MAX_FILES = 65_536
MAX_IDLE = 1024  # connections of a pool
MAX_IDLE_NS = 4_000_000_000  # many servers close theirs after five seconds
LENGTH = frozenset((b"content-length", b"transfer-encoding"))
MAX_HEAD_BYTES = 65_536  # of a head and its trailers; also bytes that amount to nothing
ENTRY_BYTES = 32  # that a header counts beside its name and value, as in HTTP/2 and HTTP/3
HEAD_TOO_LARGE = f"too large: the head has more than {MAX_HEAD_BYTES} bytes"


def tls_of(parts: SplitResult, insecure: bool = False) -> ssl.SSLContext | None:
    """The encryption that a URL asks for; `insecure` leaves certificates unchecked."""
    if parts.scheme != "https":
        return None
    context = ssl.create_default_context()
    if insecure:
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


class HttpConnection(asyncio.Protocol, ABC):
    """At most one request at a time; a subclass takes the head, the body and the end of its answer.

    The parser calls the methods that begin with `on_`; a body's parts of one read come together.
    """

    def __init__(self) -> None:
        self.is_open = False
        self.reused_ns = 0  # when it was taken from a pool for the current request
        self.got_bytes = False  # of the current answer
        self.read_ns = 0  # when it was made, or the last read came: taken before any parsing
        self.transport: Any = None
        self._parser: Any = None
        self._headers: Headers = []
        self._num_head_bytes = 0  # of the current answer
        self._num_empty_bytes = 0  # read since the last part of a body
        self._has_head = False
        self._ends_with_connection = False  # the answer, which has no length
        self._parts: list[bytes] = []
        self.on_body = self._parts.append

    @abstractmethod
    def take_head(self, status: int, headers: Headers) -> None:
        """The status and the headers, their names in lower case."""

    @abstractmethod
    def take_body(self, parts: list[bytes]) -> None:
        """What one read has brought of the body."""

    @abstractmethod
    def finish(self, keep_alive: bool) -> None:
        """The answer is whole; the connection can be used again if `keep_alive`."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """What came cannot be read."""

    @abstractmethod
    def answer_cut_off(self, error: Exception | None) -> None:
        """The connection has ended, and an answer on it is not whole."""

    def write(self, request: bytes) -> None:
        """Send a request; what comes from now on is its answer."""
        self.got_bytes, self._ends_with_connection, self._headers = False, False, []
        self._has_head, self._num_head_bytes, self._num_empty_bytes = False, 0, 0
        self.transport.write(request)

    def close(self) -> None:
        self.is_open = False
        if self.transport is not None:
            self.transport.abort()

    def connection_made(self, transport: Any) -> None:
        self.transport = transport
        self._parser = httptools.HttpResponseParser(self)
        self.read_ns = time.monotonic_ns()
        self.is_open = True

    def data_received(self, data: bytes) -> None:
        self.read_ns = time.monotonic_ns()
        self.got_bytes = True
        self._num_empty_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            is_long = self._num_head_bytes > MAX_HEAD_BYTES
            self.fail(HEAD_TOO_LARGE if is_long else f"not HTTP: {error}")
        self._flush()
        if self._num_empty_bytes > MAX_HEAD_BYTES:  # an endless line, or ever more interim heads
            self.fail(HEAD_TOO_LARGE)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_open = False
        if self._ends_with_connection and error is None:
            self.read_ns = time.monotonic_ns()
            self.finish(keep_alive=False)
        else:
            self.answer_cut_off(error)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_head_bytes += len(name) + len(value) + ENTRY_BYTES
        if self._num_head_bytes > MAX_HEAD_BYTES:
            raise ValueError(HEAD_TOO_LARGE)
        if not self._has_head:  # a trailer is dropped
            self._headers.append((name.lower(), value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:  # the real one follows
            self._headers = []
        else:
            self._has_head = True
            self._ends_with_connection = LENGTH.isdisjoint(name for name, _ in self._headers)
            self.take_head(status, self._headers)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._flush()
            self._num_empty_bytes = 0
            self.finish(self._parser.should_keep_alive())

    def _flush(self) -> None:
        if self._parts:
            self._num_empty_bytes = 0
            self.take_body(self._parts)
            self._parts.clear()


C = TypeVar("C", bound=HttpConnection)


async def connect(
    make: Callable[[], C], address: tuple[str, int], tls: ssl.SSLContext | None, host: str
) -> C:
    """A new connection; `host` is whom the certificate must name."""
    name = host if tls is not None else None
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(make, *address, ssl=tls, server_hostname=name)
    return connection


class ConnectionPool(Generic[C]):
    """Connections to the server of a URL; of the idle ones the last used is used first."""

    def __init__(
        self, url: str, insecure: bool = False, stale_s: float = 0.0, max_idle: int = MAX_IDLE
    ) -> None:
        parts = urlsplit(url)
        self._host = parts.hostname or ""
        self._tls = tls_of(parts, insecure)
        self.address = (self._host, parts.port or (443 if self._tls else 80))
        self.host_line = b"Host: %b\r\n" % parts.netloc.rpartition("@")[2].encode()
        self._stale_ns, self._max_idle = round(stale_s * 1e9), max_idle
        self._idle: list[C] = []

    async def connect(self, make: Callable[[], C]) -> C:
        return await connect(make, self.address, self._tls, self._host)

    def take(self) -> C | None:
        """An idle connection; when even the last used one is too old, all are."""
        now_ns = time.monotonic_ns()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open and now_ns - connection.read_ns < MAX_IDLE_NS:
                connection.reused_ns = now_ns
                return connection
            connection.close()
        return None

    def give(self, connection: C) -> None:
        if connection.is_open and len(self._idle) < self._max_idle:
            self._idle.append(connection)
        else:
            connection.close()

    def went_stale(self, connection: HttpConnection) -> bool:
        """True if the server closed an idle connection just when it was used again.

        A server that ends one within `stale_s` of an answer has failed.
        """
        idle_ns = connection.reused_ns - connection.read_ns
        return bool(connection.reused_ns) and not connection.got_bytes and idle_ns >= self._stale_ns

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()


def raise_file_limit() -> None:
    """Raise the limit of open files, which bounds connections, to MAX_FILES or what is allowed."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_FILES if hard == resource.RLIM_INFINITY else min(MAX_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def max_open_files() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_FILES if soft == resource.RLIM_INFINITY else soft
