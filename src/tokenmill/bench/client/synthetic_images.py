"""Images to send: squares of random colours as PNG files, the same for the same seed and number."""

from __future__ import annotations

import base64
import mimetypes
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from tokenmill.bench.workload import BenchError

SQUARE = 16  # pixels of a side, as the patches of Qwen3-VL


def synthetic_image(key: str, number: int, size: tuple[int, int]) -> str:
    """The data: URL of an image of `size` (width, height) that differs for every (key, number)."""
    return _data_url("image/png", _png(random.Random(f"{key}/{number}"), *size))


def _png(source: random.Random, width: int, height: int) -> bytes:
    rows = b"".join(_rows(source, width, min(SQUARE, height - y)) for y in range(0, height, SQUARE))
    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunks = ((b"IHDR", head), (b"IDAT", zlib.compress(rows, 1)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join([_chunk(kind, body) for kind, body in chunks])


def _rows(source: random.Random, width: int, count: int) -> bytes:
    """`count` equal rows: the first as it is, the others as no difference from the one above."""
    colours = [source.randbytes(3) * SQUARE for _ in range(-(-width // SQUARE))]
    first = b"\0" + b"".join(colours)[: 3 * width]
    return first + (b"\2" + bytes(3 * width)) * (count - 1)


def _chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def given_images(found: Any, folder: Path, where: str) -> tuple[str, ...]:
    """The images of a line of a file: URLs as they are, files (relative to it) as data: URLs."""
    given = [found] if isinstance(found, str) else found or []
    if not isinstance(given, list) or not all(isinstance(item, str) for item in given):
        raise BenchError(f'{where}: "images" must be a list of files or URLs, got {found!r}')
    return tuple(_given(item, folder, where) for item in given)


def _given(item: str, folder: Path, where: str) -> str:
    if item.startswith(("data:", "http://", "https://", "file:")):
        return item
    data = read_image(item, folder, where)
    return _data_url(mimetypes.guess_type(item)[0] or "image/png", data)


def read_image(item: str, folder: Path, where: str) -> bytes:
    """The file behind a data: URL or a name relative to `folder`."""
    if item.startswith("data:"):
        return base64.b64decode(item.partition(",")[2])
    try:
        return (folder / Path(item).expanduser()).read_bytes()
    except OSError as error:
        raise BenchError(f"{where}: image {item}: {error.strerror}") from None


def _data_url(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
