"""Makes images of files in processes of their own, which a file can end but not make grow.

The size is read here, and what it allows is all that a process may take. A decoder that needs more,
takes too long or crashes ends its process, and the error is that of its file.
"""

from __future__ import annotations

import struct

from tokenmill.core.images import ImageInput
from tokenmill.core.types import ImageError
from tokenmill.vision.image_headers import checked_size
from tokenmill.vision.processor import ImageProcessor, PixelLimits
from tokenmill.vision.work_process import Allowance, WorkEndedError, WorkProcesses

DECODE_S = 60.0  # 64 million pixels of WebP take 3 s
BASE_BYTES = 2**28  # Pillow and numpy, the file, and the patches of a small image
PIXEL_BYTES = 32  # WebP with transparency takes 28 in all
_GRID = struct.Struct("<3I")


class ImageMaker:
    """Makes the images of one model; any number of threads may do so at once."""

    def __init__(self, processor: ImageProcessor, max_area: int) -> None:
        self._processor = processor
        self._max_area = max_area
        self._processes = WorkProcesses()

    def make(self, data: bytes, limits: PixelLimits, max_tokens: int) -> ImageInput:
        """The patches of a file; ImageError also where it has more than `max_tokens`."""
        width, height = checked_size(data, self._max_area)
        self._processor.check_tokens(width, height, limits, max_tokens)
        allowed = Allowance(DECODE_S, BASE_BYTES + PIXEL_BYTES * width * height)
        settings = self._processor, limits, self._max_area, max_tokens
        try:
            parts = self._processes.run(allowed, _make, data, *settings)
        except WorkEndedError as ended:
            why = f"took more than {DECODE_S:g} s" if ended.is_late else "crashed"
            raise ImageError(f"it cannot be decoded: its decoder {why}") from None
        if len(parts) == 1:
            raise ImageError(parts[0].decode())
        pixels, grid, content_hash, levels = parts
        return ImageInput(pixels, _GRID.unpack(grid), content_hash, levels)

    def close(self) -> None:
        self._processes.close()


# In the other process.


def _make(
    data: bytes, processor: ImageProcessor, limits: PixelLimits, max_area: int, max_tokens: int
) -> list[bytes]:
    try:
        image = processor.process(data, limits, max_area, max_tokens)
    except ImageError as error:
        return [str(error).encode()]
    except MemoryError:
        return [b"it cannot be decoded: it takes more memory than images of its size do"]
    return [image.data, _GRID.pack(*image.grid), image.content_hash, image.levels]
