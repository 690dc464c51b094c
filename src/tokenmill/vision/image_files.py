"""Files of images to RGB pixels: PNG, JPEG, WebP and the first frame of a GIF, by Pillow.

A server opens files of its callers in the processes of an ImageMaker alone. What transformers does
is done here: rotation by EXIF, and transparency on white.
"""

from __future__ import annotations

from io import BytesIO

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from tokenmill.core.types import ImageError
from tokenmill.vision.image_headers import checked_size

Pixels = npt.NDArray[np.uint8]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
# A transparency of its own, or 8 bits a channel: what transformers turns into RGB as it looks.
_MODES = ("1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr")


def open_image(data: bytes, max_area: int) -> Image.Image:
    """The image with its header read, not decoded; raises ImageError."""
    stated = checked_size(data, max_area)
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS or 0, max_area)  # Pillow's holds below it
    try:
        image = Image.open(BytesIO(data), formats=FORMATS)
    except Exception as error:  # decoders raise what they like on broken files
        raise _broken(error) from None
    if image.size != stated:
        raise ImageError(f"its header states {stated}, and its decoder finds {image.size}")
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


def _broken(error: Exception) -> ImageError:
    if isinstance(error, MemoryError):
        raise error
    reason = str(error) or type(error).__name__
    return ImageError(f"it cannot be decoded: {reason[:120]}")
