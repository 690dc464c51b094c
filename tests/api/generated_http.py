"""Requests and answers as bytes, made from good ones by small changes, the same ones each time.

The body of a request holds another request, so that whoever loses count of bytes takes it for one.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator

BYTES = (b"\0", b"\t", b"\r", b"\n", b"\r\n", b" ", b":", b",", b";", b"\x0b", b"\x7f", b"\x80")
BYTES += (b"\xff", b"+", b"-", b"0", b"1", b"a", b"x", b'"', b"\\", b"%0d%0a", b"\r\n\r\n", b"0x")
LENGTHS = (
    b"0",
    b"1",
    b"00",
    b"+0",
    b"-1",
    b"0x1",
    b"1 1",
    b"1,1",
    b"",
    b"1" * 25,
    b"1\x0b",
    b"\xb2",
)
CODINGS = (b"chunked", b"Chunked", b"gzip, chunked", b"chunked, chunked", b"identity", b"xchunked")
CODINGS += (b"chunked;q=1", b"\x0bchunked", b'"chunked"', b"chunked,", b",chunked", b"", b"chunke")
SIZES = (
    b"%x",
    b"0%x",
    b"+%x",
    b"-%x",
    b"0x%x",
    b"%x ",
    b" %x",
    b"%x;a=b",
    b'%x;a="b',
    b"%x;\n",
    b"%xg",
)
SIZES += (b"%x\t", b"%x;" + b"e" * 99, b"fffffffffffffffff%x", b"%x\n", b"%x\r\r")
ENDS = (b"\r\n", b"\n", b"\r", b"", b"\r\n\r\n")
LINES = (b"Connection: close", b"Connection: keep-alive, x-hop", b"X-Hop: 1", b"TE: trailers")
LINES += (
    b"Expect: 100-continue",
    b"Upgrade: h2c",
    b"a:b",
    b"a : b",
    b" a: b",
    b"a b: c",
    b"a",
    b": b",
)
LINES += (b"Host: evil.example", b"Host:", b"Content-Length : 5", b"Transfer-Encoding : chunked")
LINES += (b"Transfer_Encoding: chunked", b"Content-Length: 5\r\n Content-Length: 6", b"Trailer: a")
LINES += (b"Proxy-Connection: keep-alive", b"Keep-Alive: timeout=9", b"X-Nul: \0", b"X-Obs: \xe9")
FIRSTS = (
    b"HTTP/1.1",
    b"HTTP/1.0",
    b"HTTP/1.2",
    b"HTTP/2.0",
    b"HTTP/0.9",
    b"http/1.1",
    b"HTTP/1.10",
)
FIRSTS += (b"HTTP/1.1 ", b"", b"HTTP/1.1\x0b", b"HTTP 1.1", b"HTTP/11")

# Empty lines before a request, and more spaces in its first line: RFC 9112, 2.2 and 3, let a server
# take them; h11 does not. They are among the cases that are written by hand.
_LENIENT = re.compile(rb"^[\r\n]|}[\r\n]+POST|\n\r\n[\r\n]+POST|POST\s\s|\s\sHTTP/")


def requests(count: int, seed: int, path: bytes, other: bytes) -> Iterator[bytes]:
    """Bytes for one connection each; a query names the case."""
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        place = b"?case=%d" % number
        data, is_last = b"", dice.random() < 0.5
        if not is_last:
            data = _request(dice, path + place, b"first", other + place, [])
        lines = [b"Connection: close"]
        data += _request(dice, other + place, b"last", path + place, lines, is_last)
        data = _with_changed_bytes(dice, data, dice.choice((0, 0, 0, 1, 2)))
        if _LENIENT.search(data) is None:
            yield data


def _request(
    dice: random.Random,
    target: bytes,
    name: bytes,
    hidden: bytes,
    lines: list[bytes],
    may_be_odd: bool = True,
) -> bytes:
    inner = b"POST %b&smuggled HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}" % hidden
    body = b'{"%b": "' % name + inner + b'"}'
    odds = dice.choice((0.0, 0.1, 0.35)) if may_be_odd else 0.0
    version = dice.choice(FIRSTS) if dice.random() < odds / 3 else b"HTTP/1.1"
    lines = [*lines, b"Host: localhost", b"Content-Type: application/json"]
    for _ in range(2):
        if dice.random() < odds:
            lines.append(dice.choice(LINES))
    framing, body = _framed(dice, body, odds)
    lines += framing
    dice.shuffle(lines)
    end = dice.choice(ENDS) if dice.random() < odds / 8 else b"\r\n"
    head = end.join([b"POST %b %b" % (target, version), *lines])
    return head + b"\r\n\r\n" + body


def _framed(dice: random.Random, body: bytes, odds: float) -> tuple[list[bytes], bytes]:
    """Headers that say where a body ends, and the body; with some odds they disagree."""
    lines = []
    is_chunked = dice.random() < 0.5
    if is_chunked:
        coding = dice.choice(CODINGS) if dice.random() < odds else CODINGS[0]
        lines.append(b"Transfer-Encoding: " + coding)
    if not is_chunked or dice.random() < odds / 2:
        length = b"%d" % (len(body) + (dice.choice((-5, 5)) if dice.random() < odds / 4 else 0))
        lines.append(b"Content-Length: " + length)
    if dice.random() < odds / 2:
        lines.append(b"Content-Length: " + dice.choice((*LENGTHS, b"%d" % len(body))))
    return lines, _chunks(dice, body, odds) if is_chunked else body


def _chunks(dice: random.Random, body: bytes, odds: float) -> bytes:
    parts, at = list[bytes](), 0
    while at < len(body):
        part = body[at : at + dice.randrange(1, 80)]
        size = dice.choice(SIZES) if dice.random() < odds / 2 else SIZES[0]
        ends = [dice.choice(ENDS) if dice.random() < odds / 8 else b"\r\n" for _ in range(2)]
        parts.append(size % len(part) + ends[0] + part + ends[1])
        at += len(part)
    trailers = [b"X-Trailer: 1", b"Content-Length: 3", b"Host: evil", b"a b: c", b"X-Api-Key: k"]
    chosen = [line + b"\r\n" for line in trailers if dice.random() < odds / 4]
    return b"".join([*parts, b"0\r\n", *chosen, b"\r\n"])


def answers(count: int, seed: int) -> Iterator[bytes]:
    """What a backend may send for one request; some have bytes of another answer behind them."""
    for number in range(count):
        dice = random.Random(f"{seed} answer {number}")
        body = b'{"case": %d, "of": "HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nevil"}' % number
        odds = dice.choice((0.0, 0.1, 0.3))
        first = b"HTTP/1.1 200 OK"
        if dice.random() < odds:
            first = dice.choice(_STATUS_LINES)
        lines = [b"Content-Type: application/json"]
        if dice.random() < odds:
            lines.append(dice.choice(LINES))
        framing, framed = _framed(dice, body, odds)
        lines += [] if dice.random() < odds / 3 else framing
        dice.shuffle(lines)
        interim = b"HTTP/1.1 100 Continue\r\n\r\n" * dice.choice((0, 0, 0, 1, 3))
        data = interim + b"\r\n".join([first, *lines]) + b"\r\n\r\n" + framed
        yield _with_changed_bytes(dice, data, dice.choice((0, 0, 0, 1, 2)))


_STATUS_LINES = (b"HTTP/1.0 200 OK", b"HTTP/1.1 200", b"HTTP/1.1 204 None", b"HTTP/1.1 304 Same")
_STATUS_LINES += (
    b"HTTP/1.1 20 OK",
    b"HTTP/1.1 2000 OK",
    b"HTTP/2 200 OK",
    b"ICY 200 OK",
    b"200 OK",
)
_STATUS_LINES += (
    b"HTTP/1.1  200 OK",
    b"HTTP/1.1 200\tOK",
    b"HTTP/1.1 101 Switching",
    b"HTTP/1.1 99 x",
)


def _with_changed_bytes(dice: random.Random, data: bytes, count: int) -> bytes:
    for _ in range(count):
        at = dice.randrange(len(data))
        taken = dice.choice((0, 0, 1, 2))
        data = data[:at] + dice.choice(BYTES) * dice.choice((0, 1, 1, 1)) + data[at + taken :]
    return data


def in_parts(data: bytes, number: int) -> list[bytes]:
    """The same bytes as a network may bring them."""
    dice, parts = random.Random(number), []
    while data:
        size = dice.choice((1, 2, 7, 30, 400))
        parts.append(data[:size])
        data = data[size:]
    return parts
