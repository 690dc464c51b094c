"""Images in a step: where their tokens stand, and their features, encoded once and kept."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.engine.graphs.encoder_graphs import EncoderGraphs
from tokenmill.engine.staging import Staging, send
from tokenmill.engine.warm_up import blank_image
from tokenmill.layers.images import BegunPatches, ImageEncoder, ImageRows
from tokenmill.sched.sequence import Batch, BegunImage, Item, Sequence

if TYPE_CHECKING:
    from tokenmill.engine.model import Model

GROUP_PATCHES = 2**14  # encoded in one call: enough to fill a GPU


class GroupEncoder:
    """Encodes images: on a GPU several in a call, by graphs where a call is small.

    On CPU each is encoded by itself, so that its features do not depend on others.
    """

    def __init__(self, encoder: ImageEncoder, vision: VisionSpec, device: torch.device) -> None:
        self._encoder, self._vision, self._device = encoder, vision, device
        self._most = GROUP_PATCHES if device.type == "cuda" else 0
        self.graphs: EncoderGraphs | None = None

    def add_graphs(self) -> EncoderGraphs:
        """Encode small groups in shapes of their own, which graphs can be captured of."""
        self.graphs = EncoderGraphs(self._encoder, self._vision)
        return self.graphs

    def __call__(self, images: list[ImageInput]) -> Iterator[tuple[ImageInput, torch.Tensor]]:
        """Each image with its features, [1 + layers, tokens, hidden]."""
        for group in grouped(images, self._most):
            grids = [image.grid for image in group]
            encode = self._encoder if self.graphs is None else self.graphs
            yield from zip(group, encode(self._sent(group), grids), strict=True)

    def _sent(self, images: list[ImageInput]) -> torch.Tensor:
        """Patches of images one after the other on the device, [patches, patch_dim]."""
        parts = [normalised(image, self._vision, self._device) for image in images]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def begin(self, image: ImageInput) -> BegunPatches:
        return self._encoder.begin(self._sent([image]), self._encoder.place([image.grid]))

    def go_on(self, begun: BegunPatches, share: float) -> None:
        """Run layers until so large a share of them is done."""
        encode = self._encoder if self.graphs is None else self.graphs
        encode.go_on(begun, int(share * self._vision.depth))

    def finish(self, begun: BegunPatches) -> torch.Tensor:
        """The features, [1 + layers, tokens, hidden]."""
        self.go_on(begun, 1.0)
        return torch.stack(self._encoder.finish(begun))

    def warm_up(self) -> None:
        """Encode blank images: one alone, several together, and large ones in parts."""
        side = 8 * self._vision.merge_size
        small = blank_image((1, side, side), self._vision)
        large = blank_image((1, 5 * side, 6 * side), self._vision)
        for images in ([small], [small] * 4):
            list(self(images))
        for _ in range(2):  # the host's memory for patches is there for two under way
            begun = self.begin(large)
            self.go_on(begun, 0.5)
            self.finish(begun)


class TokenPositions:
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


class ImageSource(Protocol):
    """Where a step gets its image tokens from."""

    def rows(self, batch: Batch) -> ImageRows | None: ...


class SharedImages:
    """The image tokens of ranks that compute the same ones: rank 0 encodes for all."""

    def __init__(self, own: StepImages | None, model: Model) -> None:
        self._own, self._model = own, model

    def rows(self, batch: Batch) -> ImageRows | None:
        """What StepImages has on rank 0."""
        if not any(seq.num_computed_tokens < seq.image_end for seq, _ in batch.items):
            return None
        norm, vision, ranks = self._model.norm, self._model.spec.vision, self._model.layout.ranks
        found = None if self._own is None else self._own.rows(batch)
        count = norm.new_zeros(1, dtype=torch.int64)
        if found is not None:
            count += len(found.rows)
        num_rows = int(ranks.broadcast(count).item())
        if not num_rows:
            return None
        assert vision is not None
        if found is None:
            places = norm.new_empty((4, num_rows), dtype=torch.int64)
            features = norm.new_empty(vision.num_features, num_rows, vision.out_size)
        else:
            places, features = torch.cat([found.rows[None], found.positions]), found.features
        places = ranks.broadcast(places)
        return ImageRows(places[0], places[1:], ranks.broadcast(features.contiguous()))


class StepImages:
    """Makes the rows of a step that are parts of images; owns the features of encoded ones."""

    def __init__(self, encoder: ImageEncoder, vision: VisionSpec, staging: Staging) -> None:
        self.vision, self._staging = vision, staging
        self.encode = GroupEncoder(encoder, vision, staging.device)
        self._features: dict[bytes, torch.Tensor] = {}  # by content, [1 + layers, tokens, hidden]
        self._begun: dict[bytes, BegunPatches] = {}  # by content; of the last step

    def __len__(self) -> int:
        return len(self._features)

    def placement(self, seq: Sequence) -> TokenPositions:
        return TokenPositions(seq.request.task.images, self.vision.merge_size)

    def forget(self, contents: list[bytes]) -> None:
        for content in contents:
            self._features.pop(content, None)

    def go_on(self, begun: list[BegunImage]) -> None:
        """Encode parts of images. What is not known here is begun anew."""
        for each in begun:
            work = self._begun.get(each.image.content_hash)
            work = work or self.encode.begin(each.image)
            self._begun[each.image.content_hash] = work
            self.encode.go_on(work, each.share)

    def keep(self, begun: list[BegunImage]) -> None:
        """Forget what was begun and is not among these: nobody waits for it."""
        if self._begun:
            wanted = {each.image.content_hash for each in begun}
            self._begun = {key: work for key, work in self._begun.items() if key in wanted}

    def rows(self, batch: Batch) -> ImageRows | None:
        """The step's image tokens; images that it reaches first are encoded here."""
        parts: list[_Part] = []
        begin = 0
        for item in batch.items:
            if item[0].num_computed_tokens < item[0].image_end:
                parts += self._parts(item, begin)
            begin += item[1]
        if not parts:
            return None
        self._know([part.image for part in parts])
        found = [part.positions for part in parts]
        rows, *positions = self._staging.send(
            [np.concatenate([part.rows for part in parts]), *np.concatenate(found, axis=1)]
        )
        features = [self._features[p.image.content_hash][:, p.first : p.end] for p in parts]
        return ImageRows(rows.long(), torch.stack(positions).long(), torch.cat(features, dim=1))

    def _parts(self, item: Item, begin: int) -> list[_Part]:
        seq, num_new = item
        context, placement = seq.num_computed_tokens, self.placement(seq)
        parts = []
        for index, span in enumerate(seq.request.task.images):
            low, high = max(span.offset, context), min(span.end, context + num_new)
            if low < high:
                rows = np.arange(low, high) + begin - context
                first, end = low - span.offset, high - span.offset
                positions = placement.inside(index, first, end)
                parts.append(_Part(span.image, first, end, rows, positions))
        return parts

    def _know(self, images: list[ImageInput]) -> None:
        """Encode those whose features are not known, each once."""
        known = self._features
        new = {i.content_hash: i for i in images if i.content_hash not in known}
        if new:
            for content in self._begun.keys() & new.keys():
                known[content] = self.encode.finish(self._begun.pop(content))
                del new[content]
            for image, features in self.encode(list(new.values())):
                known[image.content_hash] = features


class _Part(NamedTuple):
    """Tokens [first, end) of an image in a step."""

    image: ImageInput
    first: int
    end: int
    rows: np.ndarray  # of the step
    positions: np.ndarray  # [3, n]: in time, height and width


def grouped(images: list[ImageInput], most: int) -> Iterator[list[ImageInput]]:
    group: list[ImageInput] = []
    total = 0
    for image in images:
        total += image.num_patches
        if group and total > most:
            yield group
            group, total = [], image.num_patches
        group.append(image)
    if group:
        yield group


def normalised(image: ImageInput, vision: VisionSpec, device: torch.device) -> torch.Tensor:
    """The pixels of an image as the model's processor makes them, float32 [patches, patch_dim]."""
    count, channels = image.num_patches, vision.in_channels
    if not image.levels:
        return send(np.frombuffer(image.data, "<f4").reshape(count, -1), device)
    codes = np.frombuffer(image.data, np.uint8).reshape(count, channels, -1, vision.patch_size**2)
    levels = send(np.frombuffer(image.levels, "<f4").reshape(channels, 256), device)
    each = torch.arange(channels, device=device)[:, None, None]
    values = levels[each, send(codes, device).long()]
    return values.expand(-1, -1, vision.temporal_patch_size, -1).reshape(count, -1)
