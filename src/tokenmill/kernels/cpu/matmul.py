"""Products with packed weights: one launch of the tiles in products.py or groups.py."""

from __future__ import annotations

import torch

from tokenmill.kernels.cpu import groups
from tokenmill.kernels.cpu.products import COLUMNS, F32_KERNEL, INT_KERNEL, split
from tokenmill.kernels.cpu.threads import launch
from tokenmill.kernels.matmul import PackedWeight, num_rows
from tokenmill.kernels.rows import QuantizedRows


def matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    padded = weight.padded
    if add_to is not None and padded != weight.n:
        return add_to.add_(matmul(x, weight, bias))
    out = torch.empty(num_rows(x), padded) if add_to is None else add_to
    assert out.stride(1) == 1
    if isinstance(x, QuantizedRows):
        _multiply_int(x, weight, bias, out, add_to is not None)
    else:
        _multiply_f32(x, weight, out, add_to is not None)
        if bias is not None:
            out[:, : weight.n] += bias
    return out if padded == weight.n else out[:, : weight.n]


def _multiply_f32(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor, keep: bool) -> None:
    """out[m, n] (+)= x[m, k] @ W.T with W packed in tiles of COLUMNS columns."""
    (m, k), n = x.shape, out.shape[1]
    assert x.stride(1) == 1 and n % 8 == 0
    tasks, span, tiles = split(m, n, k)
    launch(
        F32_KERNEL, tasks, x.data_ptr(), weight.data.data_ptr(), out.data_ptr(), m, k, n,
        4 * x.stride(0), 4 * out.stride(0), keep, span, tiles,
    )  # fmt: skip


def _multiply_int(
    x: QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    keep: bool,
) -> None:
    """out[m, n] (+)= rounded rows @ W.T * the scales of W (+ bias[n])."""
    (m, k), n = x.values.shape, out.shape[1]
    assert x.values.is_contiguous() and x.scales.is_contiguous() and weight.scales is not None
    if bias is not None and n != weight.n:
        bias = torch.nn.functional.pad(bias, (0, n - weight.n))
    if weight.grouped:
        kernel, columns = groups.KERNEL, groups.TILE
        assert n % COLUMNS == 0 and k % groups.BLOCK == 0 and weight.scales.shape[0] == n
    else:
        kernel, columns = INT_KERNEL, COLUMNS
        assert n % 8 == 0 and k % 4 == 0
    tasks, span, tiles = split(m, n, k, columns)
    launch(
        kernel, tasks, x.values.data_ptr(), weight.data.data_ptr(), out.data_ptr(), m, k, n,
        x.scales.data_ptr(), weight.scales.data_ptr(), 0 if bias is None else bias.data_ptr(),
        4 * out.stride(0), keep, span, tiles,
    )  # fmt: skip
