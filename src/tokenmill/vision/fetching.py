"""Fetches an image over HTTP within limits of size and time.

A name is resolved once, its addresses are checked, and the connection goes to the address that was
checked: a name that changes its address in between leads nowhere else. Every redirect passes the
same checks.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable
from functools import cache
from typing import Protocol
from urllib.parse import urljoin

from tokenmill.core.types import ImageError, LargeImageError, TokenmillError
from tokenmill.http_connection import Headers, HttpConnection, connect
from tokenmill.vision.addresses import AllowedHosts, FetchTarget, check_address

MAX_REDIRECTS = 3
Grow = Callable[[int], Awaitable[None]]
_REDIRECTS = (301, 302, 303, 307, 308)


class FetchRoom(Protocol):
    async def grow(self, num_bytes: int) -> None: ...


class Boundless:
    async def grow(self, num_bytes: int) -> None:
        pass


async def fetch(
    url: str, allowed: AllowedHosts, max_bytes: int, timeout_s: float, room: FetchRoom
) -> bytes:
    """The body behind a URL, which is read once there is room for it; ImageError: there is none."""
    try:
        async with asyncio.timeout(timeout_s) as patience:

            async def wait_for_room(num_bytes: int) -> None:
                patience.reschedule(None)
                await room.grow(num_bytes)
                patience.reschedule(asyncio.get_running_loop().time() + timeout_s)

            return await _follow(url, allowed, max_bytes, wait_for_room)
    except TimeoutError:
        message = f"it did not come within {timeout_s:g} s"
        raise ImageError(message) from None
    except OSError as error:
        raise ImageError(f"it cannot be fetched: {error.strerror or error}") from None


async def _follow(url: str, allowed: AllowedHosts, max_bytes: int, grow: Grow) -> bytes:
    for _ in range(MAX_REDIRECTS + 1):
        answer = await _get(allowed.check(url), max_bytes, grow)
        if answer.location is None:
            return answer.body()
        url = urljoin(url, answer.location)
    raise ImageError(f"its URL leads to more than {MAX_REDIRECTS} redirects")


async def _get(target: FetchTarget, max_bytes: int, grow: Grow) -> _Download:
    address, tls = await _resolve(target), _tls() if target.is_tls else None
    download = await connect(lambda: _Download(max_bytes), address, tls, target.host)
    try:
        head = f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\n"
        head += "Accept: image/*\r\nUser-Agent: tokenmill\r\nConnection: close\r\n\r\n"
        download.write(head.encode("ascii"))
        await asyncio.wait((download.done, download.has_head), return_when=FIRST_COMPLETED)
        if download.has_head.done():
            await grow(download.num_expected)
            download.go_on()
        await download.done
        return download
    finally:
        download.close()


@cache
def _tls() -> ssl.SSLContext:
    return ssl.create_default_context()


async def _resolve(target: FetchTarget) -> tuple[str, int]:
    """The first address of a host; all of them must be allowed."""
    loop = asyncio.get_running_loop()
    try:
        found = await loop.getaddrinfo(target.host, target.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        raise ImageError(f"the host {target.host[:80]!r} is not known") from None
    addresses = [str(entry[4][0]) for entry in found]
    for address in addresses:
        check_address(target, address)
    return addresses[0], target.port


class _Download(HttpConnection):
    """One answer; `done` is set when it is whole, a redirect, or refused.

    Once its head is there, it waits to `go_on`.
    """

    def __init__(self, max_bytes: int) -> None:
        super().__init__()
        self._max_bytes = max_bytes
        self._received: list[bytes] = []
        self._size = 0
        self.location: str | None = None
        self.num_expected = max_bytes
        self.has_head: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def go_on(self) -> None:
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()

    def body(self) -> bytes:
        return b"".join(self._received)

    def take_head(self, status: int, headers: Headers) -> None:
        fields = dict(headers)
        if status in _REDIRECTS and b"location" in fields:
            self.location = fields[b"location"].decode("latin-1")
            self._end()
        elif status != 200:
            self.fail(f"its server answers with status {status}")
        else:
            self._await_room(fields.get(b"content-length", b""))

    def _await_room(self, length: bytes) -> None:
        if length.isdigit():
            self.num_expected = int(length)
        if self.num_expected > self._max_bytes:
            self._refuse(too_large(self._max_bytes))
        elif self.transport is not None:
            self.transport.pause_reading()
            self.has_head.set_result(None)

    def take_body(self, parts: list[bytes]) -> None:
        self._size += sum(map(len, parts))
        if self._size > self._max_bytes:
            self._refuse(too_large(self._max_bytes))
        elif not self.done.done():
            self._received += parts

    def finish(self, keep_alive: bool) -> None:
        self._end()

    def fail(self, reason: str) -> None:
        self._refuse(ImageError(reason))

    def _refuse(self, error: ImageError) -> None:
        self._end(error)
        self._received.clear()
        if self.transport is not None:
            self.transport.abort()

    def answer_cut_off(self, error: Exception | None) -> None:
        self._end(ImageError("its server ends the connection too early"))

    def _end(self, error: TokenmillError | None = None) -> None:
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


def too_large(max_bytes: int) -> LargeImageError:
    return LargeImageError(f"it is larger than {max_bytes} bytes")
