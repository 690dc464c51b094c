"""Files of images to RGB pixels: PNG, JPEG, WebP and the first frame of a GIF, by Pillow.

The size is read from the header, and an image that is too large is refused before it is decoded.
What transformers does is done here: rotation by EXIF, and transparency on white.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from tokenmill.core.types import ImageError, LargeImageError

Pixels = npt.NDArray[np.uint8]

Image.MAX_IMAGE_PIXELS = None  # open_image checks the size, by the operator's limit
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# A transparency of its own, or 8 bits a channel: what transformers turns into RGB as it looks.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


def open_image(data: bytes, max_area: int) -> Image.Image:
    """The image with its header read, not decoded; raises ImageError."""
    _check_area(_webp_size(data), max_area)
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError:
        raise ImageError(_unknown_format(data)) from None
    except Exception as error:  # decoders raise what they like on broken files
        raise _broken(error) from None
    _check_area(image.size, max_area)
    if image.mode not in _MODES:
        raise ImageError(f"pixels of mode {image.mode!r} are not supported; send 8 bits a channel")
    return image


def decode(image: Image.Image) -> Image.Image:
    """The first frame, upright, in RGB; raises ImageError where the file is broken."""
    try:
        return _to_rgb(ImageOps.exif_transpose(image))
    except Exception as error:  # decoders raise what they like on broken files
        raise _broken(error) from None


def resize(image: Image.Image, height: int, width: int) -> Pixels:
    """The image in another size, [height, width, 3]."""
    return np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, (255, 255, 255, 255))
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _check_area(size: tuple[int, int] | None, max_area: int) -> None:
    if size is not None and size[0] * size[1] > max_area:
        raise LargeImageError(
            f"it has {size[0]} x {size[1]} pixels, and {max_area} are allowed",
            "start the server with a larger --max-image-area",
        )


def _webp_size(data: bytes) -> tuple[int, int] | None:
    """The canvas of a WebP file, for which Pillow's decoder takes memory as it opens it."""
    if len(data) < 30 or data[:4] != b"RIFF" or data[8:12] != b"WEBP":
        return None
    kind, body = data[12:16], data[20:30]
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L":
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    return (
        int.from_bytes(body[6:8], "little") & 0x3FFF,
        int.from_bytes(body[8:10], "little") & 0x3FFF,
    )


def _unknown_format(data: bytes) -> str:
    if not data:
        return "it is empty"
    return "it is no readable PNG, JPEG, WebP or GIF file"


def _broken(error: Exception) -> ImageError:
    reason = str(error) or type(error).__name__
    return ImageError(f"it cannot be decoded: {reason[:120]}")
