"""Images in a step: where their tokens stand, and their features, encoded once and kept."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.layers.images import ImageRows
from tokenmill.sched.sequence import Batch, Item, Sequence


class Encoder(Protocol):
    """A model that encodes images."""

    def encode(self, pixels: torch.Tensor, grid: tuple[int, int, int]) -> torch.Tensor: ...


class Placement:
    """M-RoPE: the positions of a sequence's tokens. Text after an image goes on at its side."""

    def __init__(self, images: tuple[ImageSpan, ...], merge: int) -> None:
        self._images, self._merge = images, merge
        self._shifts = [0]  # what is added to the index of a token, before and after each image
        for span in images:
            _, height, width = span.image.grid
            longer = max(height, width) // merge
            self._shifts.append(self._shifts[-1] + longer - span.num_tokens)

    @property
    def last_shift(self) -> int:
        """That of all tokens after the last image."""
        return self._shifts[-1]

    def shift(self, positions: np.ndarray) -> None:
        """Turn indices of tokens into positions, in place; those of an image's tokens are any."""
        ends = [span.end for span in self._images]
        positions += np.array(self._shifts)[np.searchsorted(ends, positions, side="right")]

    def inside(self, index: int, first: int, end: int) -> np.ndarray:
        """The positions in time, height and width of tokens [first, end) of an image, [3, n]."""
        _, height, width = self._images[index].image.grid
        rows, columns = height // self._merge, width // self._merge
        tokens = np.arange(first, end)
        parts = tokens // (rows * columns), tokens // columns % rows, tokens % columns
        return np.stack(parts) + self._images[index].offset + self._shifts[index]


class StepImages:
    """Makes the rows of a step that are parts of images; owns the features of encoded ones."""

    def __init__(self, model: Encoder, vision: VisionSpec, device: torch.device) -> None:
        self._model, self._vision, self._device = model, vision, device
        self._features: dict[bytes, torch.Tensor] = {}  # by content, [1 + layers, tokens, hidden]

    def __len__(self) -> int:
        return len(self._features)

    def placement(self, seq: Sequence) -> Placement:
        """The positions of a sequence with images."""
        return Placement(seq.request.images, self._vision.merge_size)

    def forget(self, contents: list[bytes]) -> None:
        """Drop the features of images."""
        for content in contents:
            self._features.pop(content, None)

    def rows(self, batch: Batch) -> ImageRows | None:
        """The step's image tokens; images that it reaches first are encoded here."""
        parts: list[tuple[np.ndarray, np.ndarray, torch.Tensor]] = []
        begin = 0
        for item in batch.items:
            if item[0].num_computed_tokens < item[0].image_end:
                parts += self._parts(item, begin)
            begin += item[1]
        if not parts:
            return None
        rows, positions, features = zip(*parts, strict=True)
        return ImageRows(
            torch.from_numpy(np.concatenate(rows)).to(self._device),
            torch.from_numpy(np.concatenate(positions, axis=1)).to(self._device),
            torch.cat(features, dim=1),
        )

    def _parts(self, item: Item, begin: int) -> list[tuple[np.ndarray, np.ndarray, torch.Tensor]]:
        """Rows, positions and features of each image that an item's tokens touch."""
        seq, num_new = item
        context, placement = seq.num_computed_tokens, self.placement(seq)
        parts = []
        for index, span in enumerate(seq.request.images):
            low, high = max(span.offset, context), min(span.end, context + num_new)
            if low < high:
                rows = np.arange(low, high) + begin - context
                first, end = low - span.offset, high - span.offset
                features = self._encoded(span.image)[:, first:end]
                parts.append((rows, placement.inside(index, first, end), features))
        return parts

    def _encoded(self, image: ImageInput) -> torch.Tensor:
        known = self._features.get(image.content_hash)
        if known is None:
            pixels = normalised(image, self._vision, self._device)
            known = self._features[image.content_hash] = self._model.encode(pixels, image.grid)
        return known


def normalised(image: ImageInput, vision: VisionSpec, device: torch.device) -> torch.Tensor:
    """The pixels of an image as the model's processor makes them, float32 [patches, patch_dim]."""
    count, channels = image.num_patches, vision.in_channels
    if not image.levels:
        pixels = np.frombuffer(image.data, "<f4").reshape(count, -1)
        return torch.tensor(pixels, device=device)
    codes = np.frombuffer(image.data, np.uint8).reshape(count, channels, -1, vision.patch_size**2)
    levels = np.frombuffer(image.levels, "<f4").reshape(channels, 256)
    each = torch.arange(channels, device=device)[:, None, None]
    values = torch.tensor(levels, device=device)[each, torch.tensor(codes, device=device).long()]
    return values.expand(-1, -1, vision.temporal_patch_size, -1).reshape(count, -1)
