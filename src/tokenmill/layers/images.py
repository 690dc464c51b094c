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

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        """Where all of the step's tokens stand in time, height and width, [3, tokens]."""
        places = positions.long().repeat(3, 1)
        places[:, self.rows] = self.positions
        return places

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        """Embedded tokens, where those of images are the encoder's; x may be changed."""
        x[self.rows] = self.features[0]
        return x

    def add(self, x: torch.Tensor, layer: int) -> None:
        """Add what the stream gets before this layer, in place."""
        x[self.rows] += self.features[layer]


@dataclass(frozen=True, slots=True)
class ImageBuffers:
    """The same in a fixed shape, as CUDA graphs read it: a row for each token of a step.

    Text has zeros, so that steps without images are computed alike.
    """

    is_image: torch.Tensor  # bool [tokens, 1]
    shifts: torch.Tensor  # int64 [3, tokens]: what is added to the positions of text
    features: torch.Tensor  # [1 + layers, tokens, hidden]

    @classmethod
    def zeros(cls, num_tokens: int, num_features: int, like: torch.Tensor) -> ImageBuffers:
        """Those of a text of so many tokens; a row is of the size and type of `like`."""
        return cls(
            like.new_zeros((num_tokens, 1), dtype=torch.bool),
            like.new_zeros((3, num_tokens), dtype=torch.int64),
            like.new_zeros((num_features, num_tokens, *like.shape)),
        )

    def first(self, num_tokens: int) -> ImageBuffers:
        """The part that a step of so many tokens reads."""
        shifts, features = self.shifts[:, :num_tokens], self.features[:, :num_tokens]
        return ImageBuffers(self.is_image[:num_tokens], shifts, features)

    def fill(self, images: ImageRows | None, positions: torch.Tensor) -> None:
        """Hold a step's images and nothing else; `positions` as batches have them, [tokens]."""
        for own in (self.is_image, self.shifts, self.features):
            own.zero_()
        if images is not None:
            self.is_image.index_fill_(0, images.rows, True)
            self.shifts[:, images.rows] = images.positions - positions.long()[images.rows]
            self.features[:, images.rows] = images.features

    def place(self, positions: torch.Tensor) -> torch.Tensor:
        return positions + self.shifts

    def embed(self, x: torch.Tensor) -> torch.Tensor:
        return torch.where(self.is_image, self.features[0], x)

    def add(self, x: torch.Tensor, layer: int) -> None:
        x += self.features[layer]


StepRows = ImageRows | ImageBuffers  # the images of a step, as a model takes them


@dataclass(frozen=True, slots=True)
class Places:
    """Where the patches of images stand, on the device."""

    indices: torch.Tensor  # [patches, 4]: the learned positions around each
    weights: torch.Tensor  # [patches, 4, 1]: of these, in the encoder's type
    cos_sin: torch.Tensor  # fp32 [patches, head_dim]: cosines by row and by column, then sines
    segments: Segments  # the patches of a frame

    @property
    def of_patches(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.indices, self.weights, self.cos_sin

    def change(self, change: Callable[[torch.Tensor], torch.Tensor], segments: Segments) -> Places:
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

    def go_on(self, begun: BegunPatches, end: int) -> None:
        """Run the layers before `end` that have not run."""

    def finish(self, begun: BegunPatches) -> list[torch.Tensor]:
        """Run what is left; what encode() returns."""
