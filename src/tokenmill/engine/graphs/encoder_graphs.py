"""CUDA graphs of the vision encoder, for calls whose launches would take longer than their work."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from math import prod
from typing import Any

import torch

from tokenmill.core.images import Grid
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.engine.graphs.capture import Job, capturing, jobs_for
from tokenmill.engine.graphs.graph_sizes import graph_sizes
from tokenmill.kernels.segments import TILE_ROWS, Segments
from tokenmill.layers.images import ImageEncoder, Places

MOST_PATCHES = 4096  # an image of 1,024 x 1,024: more keep a GPU busy while they are launched
SIZES = tuple(TILE_ROWS * size for size in graph_sizes(MOST_PATCHES // TILE_ROWS))


class EncoderGraphs:
    """Images in calls of a few sizes; without capture() they run operation by operation.

    All sizes read one set of inputs and write one output, so that graphs own no memory but what
    they share. Rows beyond the images are computed like others, except that attention has no tile
    for them: nothing of theirs reaches another row.
    """

    def __init__(
        self, encoder: ImageEncoder, vision: VisionSpec, sizes: Sequence[int] = SIZES
    ) -> None:
        self._encoder, self._merged, self.sizes = encoder, vision.merge_size**2, list(sizes)
        places, most = encoder.place([(1, vision.merge_size, vision.merge_size)]), self.sizes[-1]
        tiles = places.segments.tiles.new_zeros((_num_tiles(most), 3))
        self._places = places.change(
            lambda each: each.new_zeros((most, *each.shape[1:])), Segments((most,), tiles)
        )
        self._pixels = places.weights.new_zeros((most, vision.patch_dim))
        shape = vision.num_features, most // self._merged, vision.out_size
        self._features = places.weights.new_zeros(shape)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.num_replayed = 0

    def jobs(self, pool: Any) -> list[Job]:
        """What captures the sizes."""
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def _capture(self, size: int, pool: Any) -> None:
        self._run(size, (size,))  # compiles kernels and picks algorithms, which capture must not
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with capturing(torch.cuda.graph(graph, pool=pool)):
            self._run(size, (size,))
        self._graphs[size] = graph

    def start(self) -> None:
        """Use what was captured, and nothing else."""
        self.sizes = sorted(self._graphs)

    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """As ImageEncoder: by the smallest size that holds the images, else as they are."""
        place = bisect_left(self.sizes, len(pixels))
        if place == len(self.sizes):
            return self._encoder(pixels, grids)
        size, placed = self.sizes[place], self._encoder.place(grids)
        if len(placed.segments.tiles) > _num_tiles(size):  # many small images
            return self._encoder(pixels, grids)
        self._fill(size, pixels, placed)
        if size in self._graphs:
            self._graphs[size].replay()
            self.num_replayed += 1
        else:
            self._run(size, (*placed.segments.lens, size - len(pixels)))
        counts = [prod(grid) // self._merged for grid in grids]
        found = self._features[:, : sum(counts)].split(counts, dim=1)
        return [each.clone() for each in found]  # before the next call writes there

    def _fill(self, size: int, pixels: torch.Tensor, placed: Places) -> None:
        """Put images where the graphs read them; what is behind them is any number."""
        count = len(pixels)
        self._pixels[:count] = pixels
        for own, given in zip(self._places.of_patches, placed.of_patches, strict=True):
            own[:count] = given
        own, given = self._places.segments.tiles, placed.segments.tiles
        own[: len(given)] = given
        own[len(given) : _num_tiles(size)] = 0

    def _run(self, size: int, lens: tuple[int, ...]) -> None:
        """Encode the first rows of the inputs; `lens` counts where no kernel reads the tiles."""
        tiles = self._places.segments.tiles[: _num_tiles(size)]
        placed = self._places.change(lambda each: each[:size], Segments(lens, tiles))
        encoded = self._encoder.encode(self._pixels[:size], placed)
        for own, given in zip(self._features[:, : size // self._merged], encoded, strict=True):
            own.copy_(given)


def _num_tiles(size: int) -> int:
    """Tiles of queries that a call of a size has: images end with one that is not whole."""
    return 2 * (size // TILE_ROWS)
