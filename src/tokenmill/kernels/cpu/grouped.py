"""Products of groups of rows, each group with a matrix of its own, in one launch.

The register tiles are those of products.py: a row's sums run in the same order in any group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray
from numpy.typing import NDArray

from tokenmill.kernels.cpu.products import COLUMNS, _f32_tile, _int_tile
from tokenmill.kernels.cpu.threads import get_num_threads, launch, task_kernel
from tokenmill.kernels.cpu.tiles import i64_at

MAX_ROWS = 128  # of a group: the rows of A that stay in L2 while a tile of weights passes over them
_TASK_MACS = 500_000
_FIELDS = 6  # of a group: addresses of A, W and C, rows, addresses of the scales of A and W

Groups = NDArray[np.int64]  # [groups, _FIELDS]


def _f32_body(args: Any, task: int) -> None:
    k, n, lda, ldc, span, tiles = args[1], args[2], args[3], args[4], args[5], args[6]
    columns = (n + 15) // 16
    product = np.zeros(9, np.int64)
    for tile in range(task * span, min(tiles, task * span + span)):
        group = carray(i64_at(args[0] + 48 * (tile // columns)), (6,))
        product[0], product[1], product[2], product[3] = group[0], group[1], group[2], group[3]
        product[4], product[5], product[6], product[7] = k, n, lda, ldc
        product[8] = 0
        _f32_tile(product, tile % columns)


def _int_body(args: Any, task: int) -> None:
    k, n, ldc, span, tiles = args[1], args[2], args[4], args[5], args[6]
    columns = (n + 15) // 16
    product = np.zeros(11, np.int64)
    for tile in range(task * span, min(tiles, task * span + span)):
        group = carray(i64_at(args[0] + 48 * (tile // columns)), (6,))
        product[0], product[1], product[2], product[3] = group[0], group[1], group[2], group[3]
        product[4], product[5], product[6], product[7] = k, n, group[4], group[5]
        product[9] = ldc
        _int_tile(product, tile % columns)


_f32_kernel = task_kernel(_f32_body)
_int_kernel = task_kernel(_int_body)


def _launch(kernel: Any, groups: Groups, k: int, n: int, lda: int, ldc: int) -> None:
    assert groups.flags.c_contiguous and groups.shape[1] == _FIELDS and n % 8 == 0
    tiles = len(groups) * -(-n // COLUMNS)
    rows = max(1, int(groups[:, 3].sum()) // len(groups))
    enough = _TASK_MACS // (rows * COLUMNS * k) + 1
    span = min(enough, -(-tiles // (4 * get_num_threads())))
    launch(kernel, -(-tiles // span), groups.ctypes.data, k, n, lda, ldc, span, tiles)


def multiply_segments(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    weight: torch.Tensor,
    weight_scales: torch.Tensor | None,
    segments: NDArray[np.int64],
    out: torch.Tensor,
) -> None:
    """out[m, n] = x[m, k] @ W[i].T, where segments[s] = (i, first row, rows) cut the rows.

    weight[i] is W[i] packed, weight_scales[i] its scales; x is int16 with `scales` for int8.
    """
    assert x.is_contiguous() and out.is_contiguous() and weight.is_contiguous()
    owner, first, rows = segments.T
    groups = np.zeros((len(segments), _FIELDS), np.int64)
    lda, ldc = x.stride(0) * x.itemsize, out.stride(0) * 4
    groups[:, 0] = x.data_ptr() + first * lda
    groups[:, 1] = weight.data_ptr() + owner * (weight.stride(0) * weight.itemsize)
    groups[:, 2] = out.data_ptr() + first * ldc
    groups[:, 3] = rows
    if scales is None or weight_scales is None:
        _launch(_f32_kernel, groups, x.shape[1], out.shape[1], lda, ldc)
        return
    assert x.shape[1] % 4 == 0 and weight_scales.is_contiguous()
    groups[:, 4] = scales.data_ptr() + first * 4
    groups[:, 5] = weight_scales.data_ptr() + owner * (weight_scales.stride(0) * 4)
    _launch(_int_kernel, groups, x.shape[1], out.shape[1], lda, ldc)


def multiply_heads(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> None:
    """out[t, h] = x[t, h] @ W[h].T in fp32, x[t, heads, k], out[t, heads, n], weight[h] packed."""
    tokens, heads, k = x.shape
    assert x.stride(2) == 1 and out.is_contiguous() and weight.is_contiguous()
    firsts = np.arange(0, tokens, MAX_ROWS)
    groups = np.zeros((heads, len(firsts), _FIELDS), np.int64)
    head = np.arange(heads)[:, None]
    lda, ldc = 4 * x.stride(0), 4 * out.stride(0)
    groups[..., 0] = x.data_ptr() + head * (4 * x.stride(1)) + firsts * lda
    groups[..., 1] = weight.data_ptr() + head * (4 * weight.stride(0))
    groups[..., 2] = out.data_ptr() + head * (4 * out.stride(1)) + firsts * ldc
    groups[..., 3] = np.minimum(tokens - firsts, MAX_ROWS)
    _launch(_f32_kernel, groups.reshape(-1, _FIELDS), k, out.shape[2], lda, ldc)
