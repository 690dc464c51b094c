"""Which heads of requests are taken: where two servers could read one differently, it is refused.

The parser knows lengths, chunks and names. Here are the version, the Host and the codings of a
body, of which a server behind another one must never have an opinion of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from urllib.parse import urlsplit

from tokenmill.api.errors import ApiError

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~!$&'()*+,;=%-]*)(?::[0-9]{0,5})?")

Headers = list[tuple[bytes, bytes]]


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


def host_of_target(url: bytes, headers: Headers) -> None:
    """Have the Host be that of the target, where the target is a whole URL: it takes precedence."""
    if url.startswith((b"/", b"*")):
        return
    host = urlsplit(url.decode("latin-1")).netloc.encode("latin-1")
    if _HOST.fullmatch(host) is None:
        raise _invalid("the host of its target is neither a name nor an address")
    headers[:] = [pair for pair in headers if pair[0] != b"host"] + [(b"host", host)]


def _invalid(why: str) -> ApiError:
    return ApiError(400, f"the request is not valid HTTP: {why}", code="invalid_http")
