"""Images of a call as a router counts them: as many tokens as they have, named by their content.

Nothing is fetched or decoded. Of a file in a data: URL the header says how large it is; an image
behind another URL is known by its URL, and counts as one of a usual size.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from tokenmill.api.protocol.images import WantedImage, mark_images, wanted_parts
from tokenmill.api.protocol.requests import Message, PixelBounds
from tokenmill.core.images import Grid, ImageInput, content_ids
from tokenmill.core.types import ImageError
from tokenmill.vision.image_headers import checked_size
from tokenmill.vision.placing import place_images
from tokenmill.vision.processor import ImageProcessor, smart_resize

HEAD_CHARS = 1 << 16  # of a file in base64, which have its size
MOST_PIXELS = 10**9  # of an image that is not decoded here
USUAL_SIZE = 1024, 1024  # pixels of an image that is not there to look at


class CallImages:
    """The images of one call: marked in its messages, and put into its tokens."""

    def __init__(
        self, messages: Sequence[Message], bounds: PixelBounds | None, processor: ImageProcessor
    ) -> None:
        self._processor = processor
        self._wanted = wanted_parts(messages, bounds, processor)

    def mark(self, conversation: list[dict[str, Any]]) -> None:
        """Turn image parts into what chat templates know."""
        for message in conversation:
            mark_images(message)

    def place(self, token_ids: Sequence[int]) -> Sequence[int]:
        """The tokens of a prompt, in which each image has one placeholder."""
        images = list(map(self._sketch, self._wanted))
        expanded, spans = place_images(list(token_ids), images, self._processor)
        return content_ids(expanded, spans)

    def _sketch(self, wanted: WantedImage) -> ImageInput:
        """An image without pixels: its grid, and a hash of the file or the URL."""
        limits = repr(wanted.limits).encode()
        digest = blake2b(wanted.url.encode(), digest_size=32, key=limits[:64]).digest()
        return ImageInput(b"", self._grid(wanted), digest)

    def _grid(self, wanted: WantedImage) -> Grid:
        width, height = size_of(wanted.url) or USUAL_SIZE
        processor = self._processor
        height, width = smart_resize(height, width, processor.factor, wanted.limits)
        return 1, height // processor.patch, width // processor.patch


def size_of(url: str) -> tuple[int, int] | None:
    """Width and height by the header of a file in a data: URL; None where they cannot be told."""
    head, comma, data = url[: HEAD_CHARS + 128].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        return None
    try:
        return checked_size(base64.b64decode(data[: len(data) // 4 * 4]), MOST_PIXELS)
    except (ValueError, ImageError):  # the backend says what is wrong with it
        return None
