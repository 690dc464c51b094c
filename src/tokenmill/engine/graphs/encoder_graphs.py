"""CUDA graphs of the vision encoder: one for what comes before its layers, for each, and after.

An image that is encoded over several steps stops between two of them. What it is then lies in its
own memory, so that others are encoded in between.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from tokenmill.core.images import Grid
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.engine.graphs.capture import CaptureJob, capturing, jobs_for
from tokenmill.engine.graphs.graph_sizes import graph_sizes
from tokenmill.kernels.segments import TILE_ROWS, Segments
from tokenmill.layers.images import BegunPatches, ImageEncoder, Places

MOST_PATCHES = 8192  # an image of 1,536 x 1,280: beside texts the host has no time to launch more
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
        self._encoder, self._vision, self.sizes = encoder, vision, list(sizes)
        self._merged = vision.merge_size**2
        places, most = encoder.place([(1, vision.merge_size, vision.merge_size)]), self.sizes[-1]
        tiles = places.segments.tiles.new_zeros((_num_tiles(most), 3))
        self._places = places.change(
            lambda each: each.new_zeros((most, *each.shape[1:])), Segments((most,), tiles)
        )
        zeros = places.weights.new_zeros
        self._pixels = zeros((most, vision.patch_dim))
        self._x, self._delta = (zeros((most, vision.hidden_size)) for _ in range(2))
        self._features = zeros((vision.num_features, most // self._merged, vision.out_size))
        self._graphs: dict[int, list[torch.cuda.CUDAGraph]] = {}
        self.num_replayed = self.num_parts_replayed = 0

    def jobs(self, pool: Any) -> list[CaptureJob]:
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def _capture(self, size: int, pool: Any) -> None:
        stages, graphs = self._stages(size, (size,)), []
        for stage in stages:  # compiles kernels and picks algorithms, which capture must not
            stage()
        torch.cuda.synchronize()
        for stage in stages:
            graph = torch.cuda.CUDAGraph()
            with capturing(torch.cuda.graph(graph, pool=pool)):
                stage()
            graphs.append(graph)
        self._graphs[size] = graphs

    def start(self) -> None:
        """Use what was captured, and nothing else."""
        self.sizes = sorted(self._graphs)

    def __call__(self, pixels: torch.Tensor, grids: Sequence[Grid]) -> list[torch.Tensor]:
        """As ImageEncoder: by the smallest size that holds the images, else as they are."""
        placed = self._encoder.place(grids)
        size = self._size_for(placed)
        if size is None:
            return self._encoder(pixels, grids)
        self._pixels[: len(pixels)] = pixels
        self._fill(size, placed)
        self._run(size, placed, range(self._vision.depth + 2))
        self.num_replayed += size in self._graphs
        counts = [prod(grid) // self._merged for grid in grids]
        found = self._features[:, : sum(counts)].split(counts, dim=1)
        return [each.clone() for each in found]  # before the next call writes there

    def go_on(self, begun: BegunPatches, end: int) -> None:
        """Run the layers of a begun image up to `end`, in its own memory again after it."""
        first, count = begun.layer, len(begun.x)
        size = self._size_for(begun.places)
        if size is None or first >= end:
            self._encoder.go_on(begun, end)
            return
        self._fill(size, begun.places)
        self._x[:count] = begun.x
        if begun.delta is not None:
            self._delta[:count] = begun.delta
        self._run(size, begun.places, range(first + 1, end + 1))
        self.num_parts_replayed += size in self._graphs
        begun.x.copy_(self._x[:count])
        begun.delta = self._delta[:count].clone() if self._has_delta(end) else None
        for index, layer in enumerate(self._vision.deepstack_layers):
            if first <= layer < end:
                begun.deep.append(self._features[1 + index, : count // self._merged].clone())
        begun.layer = end

    def _size_for(self, placed: Places) -> int | None:
        """The smallest size that holds images; None where none does, or they are many and small."""
        place = bisect_left(self.sizes, len(placed.cos_sin))
        if place == len(self.sizes):
            return None
        size = self.sizes[place]
        return None if len(placed.segments.tiles) > _num_tiles(size) else size

    def _fill(self, size: int, placed: Places) -> None:
        """Put places where the graphs read them; what is behind them is any number."""
        count = len(placed.cos_sin)
        for own, given in zip(self._places.of_patches, placed.of_patches, strict=True):
            own[:count] = given
        own, given = self._places.segments.tiles, placed.segments.tiles
        own[: len(given)] = given
        own[len(given) : _num_tiles(size)] = 0

    def _run(self, size: int, placed: Places, indices: range) -> None:
        """Run some of the stages: by their graphs, or operation by operation."""
        if size in self._graphs:
            for index in indices:
                self._graphs[size][index].replay()
        else:
            lens = *placed.segments.lens, size - len(placed.cos_sin)
            stages = self._stages(size, lens)
            for index in indices:
                stages[index]()

    def _stages(self, size: int, lens: tuple[int, ...]) -> list[Callable[[], None]]:
        """What runs over the first rows: the start, the layers, and the end.

        `lens` counts where no kernel reads the tiles.
        """
        tiles = self._places.segments.tiles[: _num_tiles(size)]
        placed = self._places.change(lambda each: each[:size], Segments(lens, tiles))
        x, delta = self._x[:size], self._delta[:size]
        features = self._features[:, : size // self._merged]

        def begin() -> None:
            x.copy_(self._encoder.begin(self._pixels[:size], placed).x)

        def at(layer: int) -> BegunPatches:
            return BegunPatches(placed, x, delta if self._has_delta(layer) else None, [], layer)

        def go_on(layer: int) -> None:
            begun = at(layer)
            self._encoder.go_on(begun, layer + 1)
            if begun.delta is not None:
                delta.copy_(begun.delta)
            for deep in begun.deep:
                features[1 + self._vision.deepstack_layers.index(layer)].copy_(deep)

        def finish() -> None:
            features[0].copy_(self._encoder.finish(at(self._vision.depth))[0])

        layers = [lambda layer=layer: go_on(layer) for layer in range(self._vision.depth)]
        return [begin, *layers, finish]

    def _has_delta(self, layer: int) -> bool:
        """Whether something is still to be added to x before a layer."""
        return layer > 0 and layer - 1 not in self._vision.deepstack_layers


def _num_tiles(size: int) -> int:
    """Tiles of queries that a call of a size has: images end with one that is not whole."""
    return 2 * (size // TILE_ROWS)
