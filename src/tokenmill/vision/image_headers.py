"""The size of an image by its file's header, before anything is decoded or takes memory for it."""

from __future__ import annotations

from tokenmill.core.types import ImageError, LargeImageError

Size = tuple[int, int]  # width and height
MAX_STEPS = 16_384  # through a file's parts; photographs have some tens
_FRAMES = frozenset((*range(0xC0, 0xD0),)) - {0xC4, 0xC8, 0xCC}  # of JPEG: headers with a size
_LONE = frozenset((0x01, *range(0xD0, 0xDA)))  # markers of JPEG without a length


def checked_size(data: bytes, max_area: int) -> Size:
    """The size of a PNG, JPEG, WebP or GIF file; ImageError for others and for larger ones."""
    size = size_of(data)
    if size is None:
        kind = "it is no readable PNG, JPEG, WebP or GIF file"
        raise ImageError(kind if data else "it is empty")
    width, height = size
    if not width or not height:
        raise ImageError("it has no pixels")
    if width * height > max_area:
        raise LargeImageError(f"it has {width} x {height} pixels, and {max_area} are allowed")
    return size


def size_of(data: bytes) -> Size | None:
    """The size that a file or its beginning states; None where it states none."""
    if data[:8] == b"\x89PNG\r\n\x1a\n" and data[12:16] == b"IHDR":
        return (_big(data[16:20]), _big(data[20:24])) if len(data) >= 24 else None
    if data[:3] == b"\xff\xd8\xff":
        return _jpeg_size(data)
    if data[:6] in (b"GIF87a", b"GIF89a"):
        return _gif_size(data)
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return _webp_size(data)
    return None


def _big(data: bytes) -> int:
    return int.from_bytes(data, "big")


def _little(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _jpeg_size(data: bytes) -> Size | None:
    place = 2
    for _ in range(MAX_STEPS):
        place = data.find(b"\xff", place)
        if place < 0 or place + 9 > len(data):
            break
        marker = data[place + 1]
        if marker in _FRAMES:
            return _big(data[place + 7 : place + 9]), _big(data[place + 5 : place + 7])
        if marker == 0xFF:  # fill
            place += 1
        elif marker in _LONE or marker == 0:
            place += 2
        else:
            place += 2 + _big(data[place + 2 : place + 4])
    return None


def _gif_size(data: bytes) -> Size | None:
    """The screen, or what reaches beyond it of the first frame."""
    if len(data) < 13:
        return None
    width, height, flags = _little(data[6:8]), _little(data[8:10]), data[10]
    place, blocks = 13 + (3 << (flags & 7) + 1 if flags & 0x80 else 0), False
    for _ in range(MAX_STEPS):
        if place >= len(data):
            break
        if blocks:  # those of an extension end with an empty one
            blocks = data[place] > 0
            place += 1 + data[place]
        elif data[place] == 0x21:
            blocks = True
            place += 2
        elif data[place] == 0x2C:
            left, top, wide, high = (
                _little(data[place + i : place + i + 2]) for i in range(1, 9, 2)
            )
            return max(width, left + wide), max(height, top + high)
        else:
            place += 1
    return width, height


def _webp_size(data: bytes) -> Size | None:
    if len(data) < 30:
        return None
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + _little(body[4:7]), 1 + _little(body[7:10])
    if kind == b"VP8L":
        bits = _little(body[1:5])
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 ":
        return _little(body[6:8]) & 0x3FFF, _little(body[8:10]) & 0x3FFF
    return None
