"""Files of pictures for tests."""

from __future__ import annotations

import base64
import random
import struct
import zlib
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    """Smooth colours with noise on them."""
    noise = np.random.default_rng(seed).normal(0, 12, (height, width, 3))
    y, x = np.mgrid[:height, :width]
    waves = [np.sin(x / 17 + c + seed) * 60 + np.cos(y / 23 - c) * 60 + 128 for c in range(3)]
    return Image.fromarray((np.stack(waves, -1) + noise).clip(0, 255).astype(np.uint8))


def file_of(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chunk(kind: bytes, body: bytes) -> bytes:
    checksum = zlib.crc32(kind + body)
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", checksum)


def empty_png(width: int, height: int) -> bytes:
    """A PNG of this size without its pixels."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    data = chunk(b"IDAT", zlib.compress(b"\0" * 1000))
    return b"\x89PNG\r\n\x1a\n" + head + data + chunk(b"IEND", b"")


def gif(
    width: int, height: int, frame: tuple[int, int, int, int] = (0, 0, 1, 1), before: bytes = b""
) -> bytes:
    """A GIF with this screen and one frame at this place, of this size."""
    table = bytes([0, 0, 0, 255, 255, 255])
    end = b"\x02\x02\x44\x01\x00;"  # a pixel of LZW
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + table
    return head + before + b"," + struct.pack("<HHHHB", *frame, 0) + end


def seeds() -> list[bytes]:
    """Small files of every kind, to be broken."""
    frames = [photo(40, 33, seed) for seed in range(2)]
    exif = Image.Exif()
    exif[0x0112] = 6
    animated = {"save_all": True, "append_images": frames[1:]}
    return [
        file_of(frames[0], "PNG"),
        file_of(frames[0].convert("P"), "PNG", transparency=2),
        file_of(frames[0].convert("RGBA"), "PNG"),
        file_of(frames[0], "JPEG", exif=exif),
        file_of(frames[0], "JPEG", progressive=True),
        file_of(frames[0].convert("CMYK"), "JPEG"),
        file_of(frames[0], "WEBP"),
        file_of(frames[0], "WEBP", lossless=True, **animated),
        file_of(frames[0], "GIF", **animated),
        empty_png(3000, 3000),
    ]


def mutated(data: bytes, source: random.Random) -> bytes:
    """A file with some bytes changed, cut, repeated or put in."""
    broken = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8, 64))):
        place = source.randrange(max(len(broken), 1))
        match source.randrange(6):
            case 0 | 1:
                broken[place : place + 1] = bytes([source.randrange(256)])
            case 2:
                del broken[place:]
            case 3:
                broken[place:place] = broken[place : place + source.randrange(64)]
            case 4:  # lengths, sizes and counts are often 4 bytes
                broken[place : place + 4] = source.choice((b"\xff" * 4, bytes(4), b"\x7f\xff" * 2))
            case _:
                place = source.randrange(min(40, len(broken)) or 1)  # the header
                broken[place : place + 1] = bytes([source.randrange(256)])
    return bytes(broken)
