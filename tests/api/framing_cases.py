"""Requests as bytes, and how a server must read them: the calls that it may see, or its refusal.

The server and the router are tested by the same cases. h11 is the second opinion: where it reads a
case in another way, the case says why we do not.
"""

from __future__ import annotations

from dataclasses import dataclass

import h11

PATH = b"/v1/completions"
OTHER = b"/v1/embeddings"
Call = tuple[str, str, bytes]  # method, path and body


@dataclass(frozen=True)
class Case:
    name: str
    data: bytes
    calls: tuple[Call, ...] = ()  # in order; without any the request is refused
    status: int = 400  # of the refusal
    why_not_h11: str = ""  # why h11's reading is not ours

    def __str__(self) -> str:
        return self.name


def head(
    *lines: bytes, first: bytes = b"POST %b HTTP/1.1" % PATH, host: bytes = b"localhost"
) -> bytes:
    """A head with a Host and these lines."""
    return b"\r\n".join(
        [first, b"Host: " + host, b"Content-Type: application/json", *lines, b"", b""]
    )


def plain(first: bytes, *lines: bytes) -> bytes:
    """A head of these lines alone."""
    return b"\r\n".join([first, *lines, b"", b""])


CHUNKED = b"Transfer-Encoding: chunked"
LENGTH = b"Content-Length: 2"
GET = b"GET /health HTTP/1.1"
HI = ("POST", PATH.decode(), b"{}")
NEXT = plain(
    b"POST %b HTTP/1.1" % OTHER, b"Host: localhost", b"Content-Type: application/json", LENGTH
)
SECOND = ("POST", OTHER.decode(), b"[]")
ALIVE = ("GET", "/health", b"")
STRICT = "ambiguous for those that read it in another way: refused"
SMUGGLED = NEXT + b"[]"  # what would be a second call, were the first to end early

CASES = (
    # Taken.
    Case("length", head(LENGTH) + b"{}", (HI,)),
    Case("chunked", head(CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n", (HI,)),
    Case("two chunks", head(CHUNKED) + b"1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", (HI,)),
    Case(
        "chunked in capitals", head(b"TRANSFER-ENCODING: Chunked") + b"2\r\n{}\r\n0\r\n\r\n", (HI,)
    ),
    Case("chunk extension", head(CHUNKED) + b"2;a=b\r\n{}\r\n0\r\n\r\n", (HI,)),
    Case("leading zeros of a chunk", head(CHUNKED) + b"002\r\n{}\r\n0\r\n\r\n", (HI,)),
    Case("trailers", head(CHUNKED) + b"2\r\n{}\r\n0\r\nX-Api-Key: k\r\nHost: b\r\n\r\n", (HI,)),
    Case("pipelined", head(LENGTH) + b"{}" + SMUGGLED, (HI, SECOND)),
    Case(
        "pipelined after chunks", head(CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n" + SMUGGLED, (HI, SECOND)
    ),
    Case(
        "pipelined after trailers",
        head(CHUNKED) + b"2\r\n{}\r\n0\r\nA: b\r\n\r\n" + SMUGGLED,
        (HI, SECOND),
    ),
    Case("HTTP/1.0 without a Host", plain(b"GET /health HTTP/1.0"), (ALIVE,)),
    Case("a Host with a port", head(first=GET, host=b"localhost:8000"), (ALIVE,)),
    Case("an IPv6 Host", head(first=GET, host=b"[::1]:8000"), (ALIVE,)),
    Case("tabs around a value", head(first=GET, host=b"\tlocalhost\t"), (ALIVE,)),
    Case("empty lines first", b"\r\n\r\n" + head(first=GET), (ALIVE,), why_not_h11="RFC 9112, 2.2"),
    Case(
        "calls after Connection: close",
        head(b"Connection: close", first=GET) + SMUGGLED,
        (ALIVE,),
    ),
    Case(
        "a length without a body in a GET",
        head(LENGTH, first=GET) + b"{}",
        (("GET", "/health", b"{}"),),
    ),
    Case(
        "a whole URL",
        plain(b"GET http://localhost/health HTTP/1.1", b"Host: evil"),
        (ALIVE,),
        why_not_h11="a path",
    ),
    Case("two spaces", head(first=b"GET  /health HTTP/1.1"), (ALIVE,), why_not_h11="RFC 9112, 3"),
    # The Host.
    Case("no Host", plain(GET)),
    Case("two Hosts", head(b"Host: localhost", first=GET)),
    Case("two different Hosts", head(b"Host: evil.example", first=GET)),
    Case(
        "HTTP/1.0 with two Hosts",
        head(b"Host: a", first=b"GET /health HTTP/1.0"),
    ),
    Case("a Host with a space", head(first=GET, host=b"a b"), why_not_h11=STRICT),
    Case("a Host with a path", head(first=GET, host=b"localhost/x"), why_not_h11=STRICT),
    Case("a Host with a user", head(first=GET, host=b"localhost@evil"), why_not_h11=STRICT),
    Case("a Host with a word for a port", head(first=GET, host=b"localhost:x"), why_not_h11=STRICT),
    Case("a Host in a list", head(first=GET, host=b"localhost, evil"), why_not_h11=STRICT),
    Case("a Host of bytes", head(first=GET, host=b"\xff"), why_not_h11=STRICT),
    # The first line.
    Case("HTTP/2.0", head(first=b"GET /health HTTP/2.0"), why_not_h11=STRICT),
    Case("a bare HTTP/2.0", plain(b"GET /health HTTP/2.0"), why_not_h11=STRICT),
    Case("the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"),
    Case("HTTP/0.9", head(first=b"GET /health HTTP/0.9"), why_not_h11=STRICT),
    Case("HTTP/0.9 as it was", b"GET /health\r\n\r\n"),
    Case("HTTP/1.2", head(first=b"GET /health HTTP/1.2"), why_not_h11=STRICT),
    Case("HTTP/11", head(first=b"GET /health HTTP/11")),
    Case("a space in the target", head(first=b"GET /a b HTTP/1.1")),
    Case("a control character in the target", head(first=b"GET /\x01 HTTP/1.1")),
    Case("a byte over 127 in the target", head(first=b"GET /\xff HTTP/1.1")),
    Case("a small method", head(first=b"get /health HTTP/1.1"), why_not_h11=STRICT),
    Case("line feeds alone", b"GET /health HTTP/1.1\nHost: localhost\n\n", why_not_h11=STRICT),
    # The headers.
    Case("a space before the colon", head(b"Content-Length : 2") + b"{}"),
    Case("a line feed alone", head(b"a: b\nc: d", first=GET), why_not_h11=STRICT),
    Case("a carriage return alone", head(b"a: b\rc", first=GET)),
    Case("a NUL", head(b"a: b\0c", first=GET)),
    Case("no colon", head(b"abc", first=GET)),
    Case("no name", head(b": b", first=GET)),
    Case("a name in two words", head(b"a b: c", first=GET)),
    Case("a folded line", head(b"a: b\r\n c", first=GET), why_not_h11=STRICT),
    Case(
        "a folded coding",
        head(b"Transfer-Encoding:\r\n chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        why_not_h11=STRICT,
    ),
    Case("a first line that is folded", plain(GET, b" Host: localhost")),
    # The length.
    Case("two lengths", head(LENGTH, b"Content-Length: 3") + b"{} "),
    Case("the same length twice", head(LENGTH, LENGTH) + b"{}", why_not_h11=STRICT),
    Case("a list of lengths", head(b"Content-Length: 2, 2") + b"{}", why_not_h11=STRICT),
    Case("a length with a sign", head(b"Content-Length: +2") + b"{}"),
    Case("a negative length", head(b"Content-Length: -2") + b"{}"),
    Case("a length in hexadecimal", head(b"Content-Length: 0x2") + b"{}"),
    Case("a length with a space", head(b"Content-Length: 1 2") + b"{}"),
    Case("an empty length", head(b"Content-Length:") + b"{}"),
    Case(
        "a length over 64 bits",
        head(b"Content-Length: 99999999999999999999") + b"{}",
        why_not_h11=STRICT,
    ),
    # Codings, and both.
    Case(
        "a coding and a length",
        head(CHUNKED, LENGTH) + b"2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        why_not_h11=STRICT,
    ),
    Case(
        "a length and a coding",
        head(LENGTH, CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n" + SMUGGLED,
        why_not_h11=STRICT,
    ),
    Case(
        "a length in the trailers",
        head(CHUNKED) + b"2\r\n{}\r\n0\r\nContent-Length: 9\r\n\r\n",
        why_not_h11=STRICT,
    ),
    Case(
        "gzip, chunked",
        head(b"Transfer-Encoding: gzip, chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        status=501,
    ),
    Case("chunked, gzip", head(b"Transfer-Encoding: chunked, gzip") + b"2\r\n{}\r\n0\r\n\r\n"),
    Case("identity", head(b"Transfer-Encoding: identity") + b"{}", status=501),
    Case(
        "a coding like chunked",
        head(b"Transfer-Encoding: xchunked") + b"2\r\n{}\r\n0\r\n\r\n",
        status=501,
    ),
    Case("chunked twice", head(CHUNKED, CHUNKED) + b"2\r\n{}\r\n0\r\n\r\n"),
    Case("an empty coding", head(b"Transfer-Encoding:") + b"2\r\n{}\r\n0\r\n\r\n"),
    Case("a coding with a tab", head(b"Transfer-Encoding:\x0bchunked") + b"2\r\n{}\r\n0\r\n\r\n"),
    Case(
        "chunks in HTTP/1.0",
        head(CHUNKED, first=b"POST %b HTTP/1.0" % PATH) + b"2\r\n{}\r\n0\r\n\r\n",
        why_not_h11=STRICT,
    ),
    # Chunks.
    Case("no size", head(CHUNKED) + b"zz\r\n"),
    Case("a size with a sign", head(CHUNKED) + b"+2\r\n{}\r\n0\r\n\r\n"),
    Case("a size with 0x", head(CHUNKED) + b"0x2\r\n{}\r\n0\r\n\r\n"),
    Case(
        "a size over 64 bits",
        head(CHUNKED) + b"fffffffffffffffff2\r\n{}\r\n0\r\n\r\n",
        why_not_h11="no limit",
    ),
    Case("a size with a space", head(CHUNKED) + b"2 \r\n{}\r\n0\r\n\r\n", why_not_h11=STRICT),
    Case("chunks by line feeds", head(CHUNKED) + b"2\n{}\n0\n\n", why_not_h11="it waits for more"),
    Case("an extension with a line feed", head(CHUNKED) + b"2;a\n{}\r\n0\r\n\r\n"),
    Case("a chunk longer than its size", head(CHUNKED) + b"2\r\n{}!!\r\n0\r\n\r\n"),
    Case("a trailer without a colon", head(CHUNKED) + b"2\r\n{}\r\n0\r\nabc\r\n\r\n"),
)


def read_by_h11(data: bytes) -> tuple[list[Call], int]:
    """The calls that h11 reads, and the status with which it refuses what follows, or 0."""
    connection, calls, request = h11.Connection(h11.SERVER), list[Call](), None
    connection.receive_data(data)
    body = b""
    try:
        while (event := connection.next_event()) is not h11.NEED_DATA:
            match event:
                case h11.Request():
                    request, body = event, b""
                case h11.Data():
                    body += bytes(event.data)
                case h11.EndOfMessage():
                    assert request is not None
                    calls.append((request.method.decode(), request.target.decode("latin-1"), body))
                    connection.send(h11.Response(status_code=204, headers=[]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.MUST_CLOSE:
                        break
                case h11.PAUSED:
                    connection.start_next_cycle()
    except h11.RemoteProtocolError as error:
        return calls, error.error_status_hint
    return calls, 0
