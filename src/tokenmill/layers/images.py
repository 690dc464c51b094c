"""Images as an engine and a model hand them to each other: patches, and the tokens of a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tokenmill.core.images import Grid
from tokenmill.kernels.segments import Segments


@dataclass(frozen=True, slots=True)
class ImageRows:
    """The tokens of a step that are parts of images."""

    rows: torch.Tensor  # int64 [n]: of the step, each once
    positions: torch.Tensor  # int64 [3, n]: in time, height and width
    features: torch.Tensor  # [1 + layers, n, hidden]: embeddings, and what first layers add


@dataclass(frozen=True, slots=True)
class Places:
    """Where the patches of images stand, on the device."""

    indices: torch.Tensor  # [patches, 4]: the learned positions around each
    weights: torch.Tensor  # [patches, 4, 1]: of these, in the encoder's type
    cos_sin: torch.Tensor  # fp32 [patches, head_dim]: cosines by row and by column, then sines
    segments: Segments  # the patches of a frame

    @property
    def of_patches(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What has a row for each patch."""
        return self.indices, self.weights, self.cos_sin

    def change(self, change: Callable[[torch.Tensor], torch.Tensor], segments: Segments) -> Places:
        """The same with other rows."""
        indices, weights, cos_sin = map(change, self.of_patches)
        return Places(indices, weights, cos_sin, segments)


@dataclass(slots=True, eq=False)
class BegunPatches:
    """Patches between two layers of an encoder."""

    places: Places
    x: torch.Tensor  # [patches, hidden]
    delta: torch.Tensor | None = None  # what is still to be added to x
    deep: list[torch.Tensor] = field(default_factory=list)  # what the text model's layers add
    layer: int = 0  # the next one


class ImageEncoder(Protocol):
    """Turns the patches of images into the features of each one's tokens."""

    @property
    def num_bytes(self) -> int: ...
    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """Patches of one image after the other -> [1 + layers, tokens, hidden] of each."""

    def place(self, grids: Sequence[Grid]) -> Places:
        """Where their patches stand."""

    def encode(self, pixels: torch.Tensor, places: Places) -> list[torch.Tensor]:
        """Of all tokens the embeddings, and what each of the layers adds, [tokens, hidden]."""

    def begin(self, pixels: torch.Tensor, places: Places) -> BegunPatches:
        """The same in parts: what goes before the first layer."""

    def go_on(self, begun: BegunPatches, share: float) -> None:
        """Run layers until so large a share of them is done."""

    def finish(self, begun: BegunPatches) -> list[torch.Tensor]:
        """Run what is left; what encode() returns."""
