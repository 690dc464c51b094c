"""CUDA graphs of the decode step: one per batch size of a ladder, replayed over static buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.kernels.attention import AttentionBatch, query_tiles

if TYPE_CHECKING:
    from tokenmill.engine.runner import KVCache, Model


def ladder(max_size: int) -> list[int]:
    """Batch sizes that get a graph: dense, since a batch is padded up to the next one."""
    sizes = [1, 2, 4, *range(8, 257, 8), *range(272, max_size + 16, 16)]
    return [size for size in sizes if size <= max_size] or [1]


@dataclass(frozen=True, slots=True)
class _Captured:
    """A graph and the tensors that its kernels hold addresses of."""

    graph: torch.cuda.CUDAGraph
    buffer: torch.Tensor
    batch: AttentionBatch
    logits: torch.Tensor


class DecodeGraphs:
    """Forward passes of one token per sequence, captured once and replayed.

    All inputs lie in one int32 buffer, so that a step is one copy to the GPU and one launch. Rows
    beyond the batch write to `pad_block`, which no sequence owns.
    """

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        block_size: int,
        group: int,
        max_blocks: int,
        max_size: int,
    ) -> None:
        self.model, self.kv_cache = model, kv_cache
        self.block_size, self.group, self.width = block_size, group, max_blocks
        self.pad_block = kv_cache[0][0].shape[0] - 1
        self.sizes = ladder(max_size)
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[int, _Captured] = {}
        for size in reversed(self.sizes):  # the largest first: the others fit in its memory
            self._graphs[size] = self._capture(size)

    def _layout(self, buffer: torch.Tensor, size: int) -> tuple[torch.Tensor, AttentionBatch]:
        """Views of the buffer: token ids, and where they stand."""
        sizes = [size, size, size, size, size + 1, size * self.width]
        ids, positions, slots, contexts, starts, tables = buffer.split(sizes)
        tiles = query_tiles(np.ones(size, np.int64), self.group, buffer.device, split=True)
        tables = tables.view(size, self.width)
        return ids, AttentionBatch(positions, slots, starts, contexts, tables, tiles)

    def _stage(
        self, size: int, token_ids: list[int], contexts: np.ndarray, tables: np.ndarray
    ) -> np.ndarray:
        """The int32 image of a batch, padded to `size`."""
        count = len(token_ids)
        image = np.zeros(5 * size + 1 + size * self.width, np.int32)
        ids, positions, slots, lens = image[: 4 * size].reshape(4, size)
        ids[:count] = token_ids
        positions[:count] = lens[:count] = contexts
        blocks = tables[np.arange(count), contexts // self.block_size]
        slots[:] = self.pad_block * self.block_size
        slots[:count] = blocks * self.block_size + contexts % self.block_size
        image[4 * size : 5 * size + 1] = np.arange(size + 1)
        rows = image[5 * size + 1 :].reshape(size, self.width)
        rows[count:, 0] = self.pad_block
        rows[:count, : tables.shape[1]] = tables
        return image

    def _capture(self, size: int) -> _Captured:
        image = self._stage(size, [], np.zeros(0, np.int64), np.zeros((0, 1), np.int32))
        buffer = torch.from_numpy(image).cuda()
        ids, batch = self._layout(buffer, size)

        def step() -> torch.Tensor:
            return self.model.logits(self.model.forward(ids, self.kv_cache, batch))

        step()  # compiles kernels and picks algorithms, which capture must not do
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = step()
        return _Captured(graph, buffer, batch, logits)

    def run(
        self, token_ids: list[int], contexts: np.ndarray, tables: np.ndarray
    ) -> torch.Tensor | None:
        """Logits [sequences, vocab], valid until the next run; None when no graph fits."""
        count = len(token_ids)
        if count > self.sizes[-1] or tables.shape[1] > self.width:
            return None
        size = next(s for s in self.sizes if s >= count)
        captured = self._graphs[size]
        captured.buffer.copy_(torch.from_numpy(self._stage(size, token_ids, contexts, tables)))
        captured.graph.replay()
        return captured.logits[:count]
