"""Images to patches, equal to transformers' Qwen2VLImageProcessorPil to the last bit.

transformers 5 has two processors for Qwen3-VL: one by torchvision, and this one by Pillow, which is
the reference here. They differ in how they resample.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace
from hashlib import blake2b
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from tokenmill.core.images import ImageInput
from tokenmill.core.installation import install_command
from tokenmill.core.types import ImageError, LargeImageError, ModelLoadError, TokenmillError

MODEL_TYPES = ("qwen3_vl", "qwen3_vl_moe")
MAX_ASPECT = 200
IMAGE_TOKEN_ID = 151_655  # where config.json says nothing, as the next line
_VISION_DEFAULTS = {"patch_size": 16, "temporal_patch_size": 2, "spatial_merge_size": 2}
LOW_DETAIL_PIXELS = 512 * 512  # detail "low"
# What transformers' class assumes for keys that preprocessor_config.json leaves out.
_CLASS_DEFAULTS: dict[str, Any] = {
    "size": {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280},
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "rescale_factor": 1 / 255,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
# What Qwen3-VL publishes, where a folder has no such file.
_QWEN3_VL: dict[str, Any] = {
    "size": {"shortest_edge": 65_536, "longest_edge": 16_777_216},
    "patch_size": 16,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


@dataclass(frozen=True, slots=True)
class PixelLimits:
    """Fewest and most pixels of an image after it is resized."""

    low: int
    high: int


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """The sizes and the normalisation of one model's images."""

    limits: PixelLimits
    patch: int
    temporal: int
    merge: int
    scale: float
    mean: tuple[float, ...]
    std: tuple[float, ...]
    token_id: int  # the placeholder

    @property
    def factor(self) -> int:
        """Both sides of a resized image are multiples of it."""
        return self.patch * self.merge

    def with_limits(self, low: int | None, high: int | None) -> ImageProcessor:
        """The same with an operator's limits; ModelLoadError where there is nothing between them.

        A limit of the operator's beats a limit of the model's that contradicts it.
        """
        most = high if high is not None else max(self.limits.high, low or 0)
        least = low if low is not None else min(self.limits.low, most)
        if least > most or most < self.factor**2:
            raise ModelLoadError(
                f"images cannot have at least {least} and at most {most} "
                f"pixels: they have at least {self.factor**2}"
            )
        return replace(self, limits=PixelLimits(least, most))

    def num_tokens(self, width: int, height: int, limits: PixelLimits) -> int:
        new_height, new_width = smart_resize(height, width, self.factor, limits)
        return new_height * new_width // self.factor**2

    def check_tokens(self, width: int, height: int, limits: PixelLimits, most: int) -> None:
        """ImageError for an image with more than the `most` tokens."""
        num_tokens = self.num_tokens(width, height, limits)
        if num_tokens > most:
            raise LargeImageError(
                f"it has {num_tokens} tokens, and this model's context has {most}",
                "send max_pixels",
            )

    def process(
        self, data: bytes, limits: PixelLimits, max_area: int, max_tokens: int
    ) -> ImageInput:
        """The patches of a file; ImageError also where it has more than `max_tokens`."""
        from tokenmill.vision.image_files import decode, open_image, resize  # needs Pillow

        image = open_image(data, max_area)
        self.check_tokens(*image.size, limits, max_tokens)
        upright = decode(image)
        height, width = smart_resize(upright.height, upright.width, self.factor, limits)
        return self.patches(resize(upright, height, width))

    def patches(self, pixels: npt.NDArray[np.uint8]) -> ImageInput:
        """The patches of an image [height, width, 3] whose sides are multiples of `factor`."""
        height, width = pixels.shape[0] // self.patch, pixels.shape[1] // self.patch
        m, p = self.merge, self.patch
        split = pixels.reshape(height // m, m, p, width // m, m, p, 3)
        ordered = np.ascontiguousarray(split.transpose(0, 3, 1, 4, 6, 2, 5))
        grid = (1, height, width)
        digest = blake2b(repr((grid, self.patch, self.merge)).encode(), digest_size=32)
        digest.update(ordered.data)
        return ImageInput(ordered.tobytes(), grid, digest.digest(), self._levels())

    def _levels(self) -> bytes:
        """What each byte becomes, by channel: transformers' steps, once for all pixels."""
        scaled = (np.arange(256, dtype=np.float64) * self.scale).astype(np.float32)
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return ((scaled - mean) / std).astype("<f4", copy=False).tobytes()


def smart_resize(height: int, width: int, factor: int, limits: PixelLimits) -> tuple[int, int]:
    """The size, in multiples of `factor`, that is nearest to an image's within the limits."""
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise ImageError(
            f"it has {width} x {height} pixels; one side may be {MAX_ASPECT} times the other at "
            "most"
        )
    new_height, new_width = round(height / factor) * factor, round(width / factor) * factor
    if new_height * new_width > limits.high:
        shrink = math.sqrt((height * width) / limits.high)
        new_height = max(factor, math.floor(height / shrink / factor) * factor)
        new_width = max(factor, math.floor(width / shrink / factor) * factor)
    elif new_height * new_width < limits.low:
        grow = math.sqrt(limits.low / (height * width))
        new_height = math.ceil(height * grow / factor) * factor
        new_width = math.ceil(width * grow / factor) * factor
    return new_height, new_width


def load_processor(path: Path) -> ImageProcessor | None:
    """The processor of a model's folder; None for a model that takes no images."""
    config = _read(path / "config.json") if path.is_dir() else None
    if config is None or config.get("model_type") not in MODEL_TYPES:
        return None
    given = _read(path / "preprocessor_config.json")
    values = _CLASS_DEFAULTS | (_QWEN3_VL if given is None else given)
    try:
        processor = _processor(values, int(config.get("image_token_id", IMAGE_TOKEN_ID)))
        vision = _VISION_DEFAULTS | config["vision_config"]
        sizes = tuple(vision[name] for name in _VISION_DEFAULTS)
    except (KeyError, TypeError, ValueError) as error:
        raise ModelLoadError(f"{path}: the settings of images are not usable ({error})") from None
    if sizes != (processor.patch, processor.temporal, processor.merge):
        raise ModelLoadError(
            f"{path}: preprocessor_config.json and config.json have different patch sizes"
        )
    return processor


def check_pillow() -> None:
    """TokenmillError where images cannot be decoded."""
    if find_spec("PIL") is None:
        raise TokenmillError(
            f"the model takes images, which need Pillow: {install_command('vision')}"
        )


def _processor(values: dict[str, Any], token_id: int) -> ImageProcessor:
    size = dict(values["size"])
    low = values.get("min_pixels") or size.get("min_pixels") or size["shortest_edge"]
    high = values.get("max_pixels") or size.get("max_pixels") or size["longest_edge"]
    return ImageProcessor(
        limits=PixelLimits(int(low), int(high)),
        patch=int(values["patch_size"]),
        temporal=int(values["temporal_patch_size"]),
        merge=int(values["merge_size"]),
        scale=float(values["rescale_factor"]),
        mean=tuple(map(float, values["image_mean"])),
        std=tuple(map(float, values["image_std"])),
        token_id=token_id,
    )


def _read(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{path}: not a readable JSON file ({error})") from None
    return values if isinstance(values, dict) else None
