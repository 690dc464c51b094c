"""HTTP to one backend, whose answers are passed on byte by byte.

If the backend closes an idle connection just when it is used again, the call is sent once more on a
new one; the caller decides about all other failures.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from urllib.parse import urlsplit

from tokenmill.http_connection import ConnectionPool, Headers, HttpConnection

MAX_BUFFERED = 1 << 20  # bytes that nobody has read yet; beyond them the backend has to wait
MAX_STATUS = 599
STALE_S = 1.0  # one that was used a moment ago did not go stale: the backend has failed
# Between neighbours only; the length is written anew, and which pages may call is decided here.
HOP_BY_HOP = frozenset(
    b"connection content-length expect host keep-alive origin proxy-authenticate "
    b"proxy-authorization proxy-connection sec-fetch-site te trailer transfer-encoding "
    b"upgrade".split()
)


def end_to_end(headers: Headers) -> Headers:
    """The headers without those between neighbours, of which Connection may name others."""
    options = b",".join([value for name, value in headers if name == b"connection"])
    dropped = HOP_BY_HOP.union(option.strip().lower() for option in options.split(b","))
    return [pair for pair in headers if pair[0] not in dropped]


def with_entry(headers: Headers, name: bytes, entry: bytes) -> Headers:
    entries = [value for known, value in headers if known == name]
    return [pair for pair in headers if pair[0] != name] + [(name, b", ".join([*entries, entry]))]


def via(version: str, headers: Headers) -> Headers:
    """The headers with this router in Via; the version is that of the message that came."""
    return with_entry(headers, b"via", b"%b tokenmill" % version.encode())


def header(headers: Iterable[tuple[bytes, bytes]], name: bytes) -> bytes:
    return next((value for known, value in headers if known == name), b"")


class UpstreamError(Exception):
    """The backend cannot be reached, or was lost before its answer was whole."""


class ConnectError(UpstreamError):
    """The backend takes no connections."""


class AnswerError(UpstreamError):
    """The backend's answer is no HTTP, or has more of something than is taken."""


class UpstreamAnswer:
    """One answer on its way: the head, then the body in the pieces that come."""

    __slots__ = (
        "_connection",
        "_error",
        "_has_head",
        "_parts",
        "_size",
        "_waiter",
        "ended",
        "headers",
        "is_closed",
        "status",
    )

    def __init__(self) -> None:
        self.status = 0
        self.headers: Headers = []
        self.ended = False  # the last byte is here, be it not read yet, or none will come
        self.is_closed = False  # by its reader
        self._has_head = False
        self._parts: list[bytes] = []
        self._size = 0
        self._error: UpstreamError | None = None
        self._connection: _Connection | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_whole(self) -> bool:
        """True when all has come and all was read."""
        return self.ended and self._error is None and not self._parts

    def header(self, name: bytes) -> bytes:
        return header(self.headers, name)

    async def read(self) -> bytes:
        """All that has come since the last call; b"" at the end."""
        while not self._parts and not self.ended:
            await self._wait()
        if self._parts:
            data = b"".join(self._parts)
            self._parts.clear()
            self._size = 0
            if self._connection is not None:
                self._connection.resume()
            return data
        if self._error is not None:
            raise self._error
        return b""

    async def read_up_to(self, limit: int) -> bytes:
        """The rest of the body, or `limit` bytes and more where it is longer."""
        parts = [await self.read()]
        size = len(parts[0])
        while size < limit and not self.is_whole:
            parts.append(await self.read())
            size += len(parts[-1])
        return b"".join(parts)

    async def read_whole(self, limit: int) -> bytes:
        """The whole body; AnswerError where it has more bytes."""
        data = await self.read_up_to(limit)
        if len(data) > limit or not self.is_whole:
            raise AnswerError(f"the body of its answer {self.status} has more than {limit} bytes")
        return data

    def close(self, reason: str = "closed") -> None:
        """Read no more; the backend sees the connection close unless the answer is whole."""
        connection, self.is_closed = self._connection, True
        if connection is not None:
            connection.answer = None
            connection.close()
        self.end(UpstreamError(reason))

    # For the connection.

    async def head(self, connection: _Connection) -> None:
        self._connection = connection
        while not self._has_head and not self.ended:
            await self._wait()
        if self._error is not None:
            raise self._error

    def take_head(self, status: int, headers: Headers) -> None:
        self.status, self.headers, self._has_head = status, headers, True
        self._wake()

    def take(self, parts: list[bytes]) -> bool:
        """Parts of the body; True: hold the rest back for now."""
        self._parts += parts
        self._size += sum([len(part) for part in parts])
        self._wake()
        return self._size > MAX_BUFFERED

    def end(self, error: UpstreamError | None = None) -> None:
        if not self.ended:
            self.ended, self._error, self._connection = True, error, None
            self._wake()

    def begin_again(self) -> None:
        """Forget the first connection, on which nothing came; another one brings the answer."""
        self.ended, self._error = False, None

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class _Connection(HttpConnection):
    """A connection to the backend, which waits while its answer is not read."""

    def __init__(self, pool: ConnectionPool[_Connection]) -> None:
        super().__init__()
        self.answer: UpstreamAnswer | None = None
        self._pool = pool
        self._is_paused = False

    def send(self, request: bytes, answer: UpstreamAnswer) -> None:
        self.answer = answer
        self.write(request)

    def resume(self) -> None:
        if self._is_paused:
            self._is_paused = False
            self.transport.resume_reading()

    def on_message_begin(self) -> None:
        """An answer that nobody asked for must not become that of the next call."""
        if self.answer is None:
            self.close()

    def take_head(self, status: int, headers: Headers) -> None:
        codings = [value.lower() for name, value in headers if name == b"transfer-encoding"]
        if status > MAX_STATUS:
            self.fail(f"not HTTP: its status is {status}")
        elif codings not in ([], [b"chunked"]):
            self.fail("not HTTP: its Transfer-Encoding is not 'chunked'")
        elif self.answer is not None:
            passed = [pair for pair in end_to_end(headers) if pair[0] != b"date"]  # ours is added
            self.answer.take_head(status, via(self._parser.get_http_version(), passed))

    def take_body(self, parts: list[bytes]) -> None:
        if self.answer is not None and self.answer.take(parts):
            self._is_paused = True
            self.transport.pause_reading()

    def finish(self, keep_alive: bool) -> None:
        answer, self.answer = self.answer, None
        if answer is None:
            return
        self.resume()
        if keep_alive:
            self._pool.give(self)
        else:
            self.close()
        answer.end()

    def fail(self, reason: str) -> None:
        self._end(AnswerError(f"its answer is {reason}"))

    def answer_cut_off(self, error: Exception | None) -> None:
        self._end(UpstreamError("the connection was lost" + (f": {error}" if error else "")))

    def _end(self, error: UpstreamError) -> None:
        answer, self.answer = self.answer, None
        self.close()
        if answer is not None:
            answer.end(error)


class Upstream:
    """Requests to one base URL, such as http://host:8000, over a pool of connections."""

    def __init__(self, url: str, connect_timeout_s: float) -> None:
        self._prefix = urlsplit(url).path.rstrip("/").encode()
        self._connect_timeout_s = connect_timeout_s
        self._pool: ConnectionPool[_Connection] = ConnectionPool(url, stale_s=STALE_S)

    async def send(
        self,
        answer: UpstreamAnswer,
        method: str,
        path: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes = b"",
        once: bool = False,
    ) -> None:
        """Send a request and wait for the head of its answer; raises UpstreamError.

        One that is sent `once` gets a new connection, which cannot have gone stale.
        """
        request = self._request(method, path, headers, body)
        connection = None if once else self._pool.take()
        if connection is not None:
            try:
                connection.send(request, answer)
                return await answer.head(connection)
            except UpstreamError:
                if answer.is_closed or not self._pool.went_stale(connection):
                    raise
            answer.begin_again()  # the pooled connection had gone stale
        connection = await self._connect()
        if answer.is_closed:
            connection.close()
            raise UpstreamError("closed")
        connection.send(request, answer)
        await answer.head(connection)

    def close(self) -> None:
        self._pool.close()

    def _request(
        self, method: str, path: bytes, headers: Iterable[tuple[bytes, bytes]], body: bytes
    ) -> bytes:
        lines = [b"%s %s%s HTTP/1.1\r\n" % (method.encode(), self._prefix, path)]
        lines += [self._pool.host_line, *(b"%s: %s\r\n" % pair for pair in headers)]
        lines.append(b"content-length: %d\r\n\r\n" % len(body))
        return b"".join(lines) + body

    async def _connect(self) -> _Connection:
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                return await self._pool.connect(lambda: _Connection(self._pool))
        except TimeoutError:
            limit = self._connect_timeout_s
            raise ConnectError(f"no connection within {limit:g} s") from None
        except OSError as error:
            raise ConnectError(error.strerror or str(error)) from None
