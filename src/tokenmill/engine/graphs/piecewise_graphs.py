"""CUDA graphs of the pieces between attentions, for steps that mix prompts and decoding.

All that a layer does to each token by itself has one shape for a number of tokens, so it can be
captured. Attention depends on whose tokens they are: it is launched between two pieces, with what
this step knows. A step is then a graph and a launch or two for each layer, not ten launches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.engine.graphs.capture import CaptureJob, jobs_for, unowned
from tokenmill.engine.graphs.graph_sizes import capture_rank, graph_for, graph_sizes
from tokenmill.engine.graphs.pieces import Pieces, Recorder, skip
from tokenmill.engine.model import KVCache, Model
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.layers.images import ImageBuffers, ImageRows

LEAST_TOKENS, MOST_TOKENS = 8, 2048
# Weights are read for a few tokens as fast as for many: there padding by half costs nothing.
FINE_TOKENS = 256
# What a large GPU computes, with room to spare, while the host launches one layer's kernels: steps
# with more work than that are bound by the device however they are launched.
LAYER_FLOPS = 5e11


def piecewise_sizes(most: int, least: int = LEAST_TOKENS) -> list[int]:
    """Ascending numbers of tokens: an eighth apart, and half where weights bound the time."""

    def suits(size: int) -> bool:
        return size >= min(most, FINE_TOKENS) or (size >= least and capture_rank(size) <= 1)

    return [size for size in graph_sizes(most) if suits(size)]


def most_tokens(spec: ModelSpec, budget: int) -> int:
    """Tokens of the largest step that is worth a graph, of those that have at most `budget`."""
    enough = int(spec.num_layers * LAYER_FLOPS / spec.flops_per_token(0))
    step = FINE_TOKENS // 2
    return min(budget, MOST_TOKENS, max(FINE_TOKENS, enough // step * step))


class PiecewiseGraphs:
    """Steps of any sequences, padded to a few numbers of tokens.

    All sizes read one set of ids, positions, cache slots and images. What pads a step is a sequence
    of the block tables' last row, which nobody owns. Without a capture steps are padded and run
    operation by operation.
    """

    def __init__(
        self,
        model: Model,
        layers: KVCache,
        sizes: Sequence[int],
        num_sliding: int,
        max_len: int,
    ) -> None:
        """The cache's last block is padding; num_sliding: groups of sliding layers."""
        self.model, self.layers, self.sizes = model, layers, list(sizes)
        self._max_len = max_len
        most = max(self.sizes, default=0)
        most += -most % 4  # rows begin where kernels expect them
        values = layers[0][1]  # [blocks, heads, block size, dim]
        kind = torch.int64 if values.device.type == "cpu" else torch.int32
        rows = torch.zeros(3 + num_sliding, most, dtype=kind, device=values.device)
        self._ids, self._positions, *self._slots = rows
        for slots in self._slots:
            slots.fill_((values.shape[0] - 1) * values.shape[2])
        self._images: ImageBuffers | None = None
        if model.spec.vision is not None:
            num_features = model.spec.vision.num_features
            self._images = ImageBuffers.zeros(most, num_features, model.norm)
        self._has_images = False  # the buffers hold those of an earlier step
        self._pieces: dict[int, tuple[Pieces, torch.Tensor]] = {}  # and their hidden states
        self.num_replayed = self.num_with_images = 0

    def jobs(self, pool: Any) -> list[CaptureJob]:
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def start(self) -> int:
        """Use what was captured, and nothing else; returns the largest size."""
        self.sizes = sorted(self._pieces)
        return max(self.sizes, default=0)

    def _capture(self, size: int, pool: Any) -> None:
        # The first run compiles kernels and picks algorithms, which capture must not.
        self._forward(size, skip)
        torch.cuda.synchronize()
        recorder = Recorder(pool)
        pieces, hidden = recorder.record(lambda: self._forward(size, recorder.cut))
        self._pieces[size] = pieces, unowned(hidden)

    def _forward(self, size: int, between: Callable[..., object]) -> torch.Tensor:
        """A step over views of the input buffers; attention and ranks are left to `between`."""
        nobody = self._ids[:0]
        full, *sliding = (
            AttentionBatch(
                positions=self._positions[:size],
                slots=slots[:size],
                query_starts=nobody,
                context_lens=nobody,
                block_tables=nobody,
                table_rows=nobody,
                tiles=(),
                between=partial(between, group),
            )
            for group, slots in enumerate(self._slots)
        )
        batch = replace(full, sliding=tuple(sliding))
        images = None if self._images is None else self._images.first(size)
        with self.model.layout.ranks.in_pieces(partial(between, None)):
            return self.model.forward(self._ids[:size], self.layers, batch, images)

    def size_for(self, num_tokens: int) -> int | None:
        """What a step of so many tokens is padded to; None where no graph suits it."""
        size = graph_for(self.sizes, num_tokens)
        # No position may lie beyond the longest sequence, of the one that pads neither.
        return None if size is None or size - num_tokens > self._max_len else size

    def run(
        self, token_ids: torch.Tensor, batch: AttentionBatch, images: ImageRows | None = None
    ) -> torch.Tensor:
        """The hidden states of a step, valid until the next replay of any graph.

        A step of another size than those that were captured runs operation by operation.
        """
        size = token_ids.shape[0]
        found = self._pieces.get(size)
        if found is None:
            return self.model.forward(token_ids, self.layers, batch, images)
        pieces, hidden = found
        groups = batch, *batch.sliding
        self._ids[:size].copy_(token_ids)
        self._positions[:size].copy_(batch.positions)
        for own, group in zip(self._slots, groups, strict=True):
            own[:size].copy_(group.slots)
        if self._images is not None and (images is not None or self._has_images):
            self._images.fill(images, batch.positions)
            self._has_images = images is not None
        self.num_replayed += 1
        self.num_with_images += images is not None
        pieces.replay(groups)
        return hidden
