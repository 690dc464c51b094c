"""Linear products y = x W^T over weights packed once at load: fp32, and int8 x int16.

int8: weights are rounded per output channel to [-127, 127], activations per row to as many
integers as keep the int32 sum exact whatever the values. Integer sums do not depend on the order
of addition, so a row's result is bitwise the same in any batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.kernels import compiled, cpu_kernels

INT32_MAX = 2**31 - 1
TILE_COLUMNS = 16  # outputs whose weights lie side by side; the last tile may be narrower


class QuantizedRows(NamedTuple):
    """x[m, k] ~ values[m, k] * scales[m, None]."""

    values: torch.Tensor  # int16
    scales: torch.Tensor  # fp32


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """W[n, k] as the kernels read it. `scales` is None for fp32."""

    data: torch.Tensor  # flat when tiled, else [n, k]
    scales: torch.Tensor | None
    n: int
    k: int
    tiled: bool

    @property
    def num_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.data.nbytes + scales

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """W[ids] in fp32, [len(ids), k]: the embedding lookup of a tied head."""
        if self.tiled:
            data = _gather_tiled(self, ids)
        else:
            data = self.data[ids]
        return data if self.scales is None else data.float() * self.scales[ids, None]


def activation_limit(k: int) -> int:
    """Largest |activation| whose dot product with k weights of at most 127 fits an int32."""
    return min(32767, INT32_MAX // (127 * k))


def quantize_rows(x: torch.Tensor, limit: int) -> QuantizedRows:
    """Round each row of x[m, k] to int16 in [-limit, limit]."""
    if cpu_kernels():
        return QuantizedRows(*compiled("rows").quantize_rows(x, limit))
    return quantize_rows_reference(x, limit)


def quantize_rows_reference(x: torch.Tensor, limit: int) -> QuantizedRows:
    scales = x.abs().amax(1).clamp(min=1e-30) / limit
    return QuantizedRows((x / scales[:, None]).round().to(torch.int16), scales)


def pack(weight: torch.Tensor, dtype: str, device: torch.device | str = "cpu") -> PackedWeight:
    """Pack W[n, k] for "fp32", "int8" or "bf16"; CPU tiles pad n to a multiple of 8."""
    n, k = weight.shape
    if dtype == "bf16":
        return PackedWeight(weight.to(device, torch.bfloat16), None, n, k, tiled=False)
    weight = weight.float()
    scales = None
    if dtype == "int8":
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        weight = (weight / scales[:, None]).round().to(torch.int8)
    if not cpu_kernels():
        return PackedWeight(weight.contiguous(), scales, n, k, tiled=False)
    if n % 8:
        pad = (0, 0, 0, -n % 8)
        weight = torch.nn.functional.pad(weight, pad)
        scales = None if scales is None else torch.nn.functional.pad(scales, pad[2:])
    return PackedWeight(_tile(weight), scales, n, k, tiled=True)


def matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[m, k] @ W.T (+ bias) -> [m, n]; with `add_to`, added to it in place."""
    if not weight.tiled:
        return matmul_reference(x, weight, bias, add_to)
    kernels = compiled("matmul")
    rows = x.values.shape[0] if isinstance(x, QuantizedRows) else x.shape[0]
    padded = weight.n + -weight.n % 8
    if add_to is not None and padded != weight.n:
        return add_to.add_(matmul(x, weight, bias))
    out = torch.empty(rows, padded) if add_to is None else add_to
    keep = add_to is not None
    if isinstance(x, QuantizedRows):
        assert weight.scales is not None
        if bias is not None and padded != weight.n:
            bias = torch.nn.functional.pad(bias, (0, padded - weight.n))
        kernels.matmul_int8(x.values, x.scales, weight.data, weight.scales, bias, out, keep)
    else:
        kernels.matmul_f32(x, weight.data, out, keep)
        if bias is not None:
            out[:, : weight.n] += bias
    return out if padded == weight.n else out[:, : weight.n]


def matmul_reference(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same product in torch; int8 sums are exact in float64."""
    dense = unpack(weight)
    if isinstance(x, QuantizedRows):
        assert weight.scales is not None
        exact = x.values.double() @ dense.double().T
        out = (exact * x.scales[:, None]).float() * weight.scales[: weight.n]
    elif add_to is not None and bias is None:
        return add_to.addmm_(x, dense.T)
    else:
        out = x @ dense.T
    if bias is not None:
        out = out + bias
    return out if add_to is None else add_to.add_(out)


def _tile(weight: torch.Tensor) -> torch.Tensor:
    """[n, k] -> tiles [k, columns], int8 as [k/2, columns, 2]; the last tile may be narrower."""
    n, k = weight.shape
    full = n - n % TILE_COLUMNS
    parts = [weight[:full].view(-1, TILE_COLUMNS, k)]
    if full < n:
        parts.append(weight[full:].unsqueeze(0))
    if weight.dtype == torch.int8:
        tiled = [p.unflatten(2, (k // 2, 2)).permute(0, 2, 1, 3) for p in parts]
    else:
        tiled = [p.transpose(1, 2) for p in parts]
    return torch.cat([p.reshape(-1) for p in tiled])


def unpack(weight: PackedWeight) -> torch.Tensor:
    """The dense [n, k] matrix behind a PackedWeight, without its scales."""
    if not weight.tiled:
        return weight.data
    return _gather_tiled(weight, torch.arange(weight.n))


def _gather_tiled(weight: PackedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows of W out of its tiles: the offset of (row, k) is linear in both inside a tile."""
    k, padded = weight.k, weight.n + -weight.n % 8
    start = ids // TILE_COLUMNS * TILE_COLUMNS
    width = torch.clamp(padded - start, max=TILE_COLUMNS)
    lane = ids - start
    steps = torch.arange(k)
    if weight.scales is None:
        offsets = steps * width[:, None] + lane[:, None]
    else:
        offsets = (steps // 2) * (2 * width[:, None]) + 2 * lane[:, None] + steps % 2
    return weight.data[(start * k)[:, None] + offsets]
