"""All dense layers of a decoder in one call: the launches as a table, most of it filled once.

The launches are those that the layers make one by one in Python, with the same kernels and sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.cpu import attention, groups, rows
from tokenmill.kernels.cpu.int_spans import limit_of
from tokenmill.kernels.cpu.products import split
from tokenmill.kernels.cpu.threads import MAX_ARGS, float_bits, launch_all, rows_of_task
from tokenmill.kernels.matmul import PackedWeight

if TYPE_CHECKING:
    from tokenmill.kernels.stack import DenseLayer, Heads

_NORM, _QKV, _ROPE, _ATTEND, _ROUND, _OUT, _MLP_NORM, _GATE_UP, _ACT, _DOWN = range(10)
_KERNELS = (
    rows.NORM,
    groups.KERNEL,
    attention.ROPE,
    attention.ATTEND,
    rows.QUANTIZE,
    groups.KERNEL,
    rows.NORM,
    groups.KERNEL,
    rows.ACT,
    groups.KERNEL,
)


def _code(weight: PackedWeight) -> int:
    """How the row kernels are told what the product wants."""
    assert weight.rounding is not None
    return weight.rounding.code


class Stack:
    """The launches of all layers; only what depends on a step's batch is written before it runs."""

    def __init__(self, layers: list[DenseLayer], heads: Heads, eps: float) -> None:
        self.layers, self.heads, self.eps = layers, heads, eps
        self._table = np.zeros((len(layers), len(_KERNELS), 2 + MAX_ARGS), np.int64)
        self._table[:, :, 0] = [kernel.address for kernel in _KERNELS]
        self._args = self._table[:, :, 2:]
        self._caches: tuple[int, ...] = ()
        for index, layer in enumerate(layers):
            self._fill(self._args[index], layer)

    def _fill(self, args: np.ndarray, layer: DenseLayer) -> None:
        """What stays: weights, shapes and constants."""
        bits, heads = float_bits(self.eps), self.heads
        hidden, inner = layer.qkv.k, layer.down.k
        for step, norm in ((_NORM, layer.norm), (_MLP_NORM, layer.mlp_norm)):
            args[step, [1, 5, 7, 8]] = norm.data_ptr(), hidden, _code(layer.qkv), bits
        products = (
            (_QKV, layer.qkv, layer.qkv_bias, 0),
            (_OUT, layer.out, layer.out_bias, 1),
            (_GATE_UP, layer.gate_up, None, 0),
            (_DOWN, layer.down, None, 1),
        )
        for step, weight, bias, keep in products:
            assert weight.scales is not None
            args[step, 1] = weight.data.data_ptr()
            args[step, [4, 5]] = groups.padded(weight.k), weight.n
            args[step, 7] = weight.scales.data_ptr()
            args[step, 8] = 0 if bias is None else bias.data_ptr()
            args[step, [9, 10]] = 4 * weight.n, keep
        norms = (0, 0) if layer.qk_norms is None else [w.data_ptr() for w in layer.qk_norms]
        shape = heads.num_heads, heads.num_kv_heads, heads.dim, heads.block_size
        args[_ROPE, 6:8], args[_ROPE, 8:12] = norms, shape
        args[_ROPE, [14, 15, 16]] = layer.qkv.n, float_bits(heads.scale), bits
        args[_ATTEND, [9, 14]] = layer.qkv.n, layer.window
        args[_ATTEND, 10:14], args[_ATTEND, 17] = shape, limit_of(heads.dim)
        args[_ROUND, [5, 7, 8]] = layer.out.k, _code(layer.out), layer.out.k
        args[_ACT, [5, 7, 8]] = inner, _code(layer.down), 2 * inner

    def run(
        self,
        x: torch.Tensor,
        kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Add all layers to the stream x[tokens, hidden] in place."""
        args, layer = self._args, self.layers[0]
        m = x.shape[0]
        assert x.is_contiguous() and x.dtype == torch.float32
        self._place_caches(kv_cache)
        wide = max(layer.qkv.k, layer.out.k, layer.down.k)
        values, scales = groups.empty_rows(m, wide)
        qkv, attended = torch.empty(m, layer.qkv.n), torch.empty(m, layer.out.k)
        gate_up = torch.empty(m, layer.gate_up.n)

        self._rows((_NORM, _MLP_NORM), x, values, scales, layer.qkv.k)
        self._rows((_ROUND,), attended, values, scales, layer.out.k)
        self._rows((_ACT,), gate_up, values, scales, layer.down.k)
        outs = ((_QKV, qkv), (_OUT, x), (_GATE_UP, gate_up), (_DOWN, x))
        weights = layer.qkv, layer.out, layer.gate_up, layer.down
        for (step, out), weight in zip(outs, weights, strict=True):
            tasks, span, tiles = split(m, weight.n, groups.padded(weight.k), groups.TILE)
            self._table[:, step, 1] = tasks
            args[:, step, [0, 2, 3, 6]] = (
                values.data_ptr(),
                out.data_ptr(),
                m,
                scales.data_ptr(),
            )
            args[:, step, 11:13] = span, tiles
        self._attend(qkv, attended, cos_sin, batch)
        launch_all(self._table.reshape(-1, self._table.shape[2]))

    def _rows(
        self,
        steps: tuple[int, ...],
        source: torch.Tensor,
        values: torch.Tensor,
        scales: torch.Tensor,
        k: int,
    ) -> None:
        m = source.shape[0]
        chunk = rows_of_task(m, k)
        for step in steps:
            self._table[:, step, 1] = -(-m // chunk)
            pointers = source.data_ptr(), values.data_ptr(), scales.data_ptr()
            self._args[:, step, [0, 2, 3]] = pointers
            self._args[:, step, [4, 6]] = m, chunk

    def _attend(
        self,
        qkv: torch.Tensor,
        attended: torch.Tensor,
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        m, heads = qkv.shape[0], self.heads
        chunk = rows_of_task(m, qkv.shape[1])
        (tiles,) = batch.tiles
        self._table[:, _ROPE, 1] = -(-m // chunk)
        self._args[:, _ROPE, 0] = qkv.data_ptr()
        self._args[:, _ROPE, 3:6] = [t.data_ptr() for t in (cos_sin, batch.positions, batch.slots)]
        self._args[:, _ROPE, 12:14] = m, chunk
        self._table[:, _ATTEND, 1] = tiles.seqs.shape[0] * heads.num_kv_heads
        self._args[:, _ATTEND, 0] = qkv.data_ptr()
        pointers = (
            attended,
            tiles.seqs,
            tiles.starts,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
        )
        self._args[:, _ATTEND, 3:9] = [t.data_ptr() for t in pointers]
        self._args[:, _ATTEND, 15:17] = tiles.tokens, batch.block_tables.shape[1]

    def _place_caches(self, kv_cache: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        places = tuple(part.data_ptr() for both in kv_cache for part in both)
        if places != self._caches:
            self._caches = places
            for step in (_ROPE, _ATTEND):
                self._args[:, step, 1:3] = np.array(places).reshape(-1, 2)
            cache_type = kv_cache[0][0].dtype
            self._table[:, _ATTEND, 0] = attention.attend_kernel(cache_type).address
            self._args[:, _ROPE, 17] = cache_type == torch.float16
