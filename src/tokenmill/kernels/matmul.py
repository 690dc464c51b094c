"""Linear products y = x W^T over weights packed once at load: fp32, int8, bf16, fp8.

int8: weights are rounded per output channel to [-127, 127], rows as kernels/rows.py says. A row's
result is bitwise the same in any batch. fp8 (e4m3): weights are rounded per output channel; results
are bf16. Around a product are its norm and its gate.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from tokenmill.kernels import MODE, always, cpu_kernels, kernel, use_triton
from tokenmill.kernels.rows import (
    BLOCK,
    FP8,
    Activation,
    QuantizedRows,
    Rounding,
    act_and_mul,
    activation_limit,
    by_groups,
    rms_norm,
    scaled_fp8,
)

TILE_COLUMNS = 16  # outputs whose weights lie side by side; the last tile may be narrower
SKINNY_ROWS = 4  # up to here a product only reads its weights, and norms and gates ride along
SUM_PARTS = 8  # of a product that ranks may divide: 2, 4 or 8 of them give the bits of one


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """W[n, k] as the kernels read it. `scales` is None for fp32 and bf16."""

    data: torch.Tensor  # flat when tiled, else [n, k]
    scales: torch.Tensor | None
    n: int
    k: int
    tiled: bool
    grouped: bool = False  # int8 for activations rounded by groups

    @property
    def padded(self) -> int:
        return self.n + -self.n % (TILE_COLUMNS if self.grouped else 8)

    @property
    def num_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.data.nbytes + scales

    @property
    def rounding(self) -> Rounding | None:
        if self.scales is None:
            return None
        if self.data.dtype != FP8.dtype:
            return by_groups(self.k) if self.grouped else activation_limit(self.k)
        return FP8

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """W[ids] in fp32, [len(ids), k]: the embedding lookup of a tied head."""
        if self.tiled:
            data = _gather_tiled(self, ids)
        else:
            data = self.data[ids]
        return data if self.scales is None else data.float() * self.scales[ids, None]


def pack(
    weight: torch.Tensor,
    dtype: str,
    device: torch.device | str = "cpu",
    grouped: bool = False,
) -> PackedWeight:
    """Pack W[n, k] for fp32, int8, bf16 or fp8; CPU tiles pad n to a multiple of 8 or 16."""
    n, k = weight.shape
    if dtype == "bf16":
        return PackedWeight(weight.to(device, torch.bfloat16), None, n, k, tiled=False)
    if dtype == "fp8":
        scaled, scales = scaled_fp8(weight.to(device))
        unit_scales(scaled.device)
        return PackedWeight(scaled.to(FP8.dtype), scales, n, k, tiled=False)
    return _pack_cpu(weight.float(), dtype, grouped and dtype == "int8")


def _pack_cpu(weight: torch.Tensor, dtype: str, grouped: bool) -> PackedWeight:
    n, k = weight.shape
    scales = None
    if dtype == "int8":
        scales = weight.abs().amax(1).clamp(min=1e-30) / 127
        weight = (weight / scales[:, None]).round().to(torch.int8)
    if not cpu_kernels():
        return PackedWeight(weight.contiguous(), scales, n, k, tiled=False, grouped=grouped)
    if grouped:
        assert scales is not None
        data = torch.nn.functional.pad(weight, (0, -k % BLOCK, 0, -n % TILE_COLUMNS))
        scales = torch.nn.functional.pad(scales, (0, -n % TILE_COLUMNS))
        from tokenmill.kernels.cpu import groups

        data = groups.lay_out(data)
        return PackedWeight(data, scales, n, k, tiled=True, grouped=True)
    if n % 8:
        pad = (0, 0, 0, -n % 8)
        weight = torch.nn.functional.pad(weight, pad)
        scales = None if scales is None else torch.nn.functional.pad(scales, pad[2:])
    return PackedWeight(_tile(weight), scales, n, k, tiled=True)


@kernel(gpu=always, cpu=lambda weight: weight.tiled, device_of=lambda weight: weight.data)
def matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[m, k] @ W.T (+ bias) -> [m, n]; with `add_to`, added to it in place.

    int8 sums are exact in float64.
    """
    dense = unpack(weight)
    if isinstance(x, QuantizedRows):
        assert weight.scales is not None
        wide = torch.float32 if weight.rounding == FP8 else torch.float64
        if weight.grouped and weight.tiled:
            from tokenmill.kernels.cpu import groups

            x = QuantizedRows(*groups.shifted_rows(*x, weight.k))
        sums = x.values.to(wide) @ dense.to(wide).T
        out = (sums * x.scales[:, None]).float() * weight.scales[: weight.n]
    elif add_to is not None and bias is None:
        return add_to.addmm_(x, dense.T)
    else:
        out = x @ dense.T
    if bias is not None:
        out = out + bias
    if add_to is not None:
        return add_to.add_(out)
    return out.bfloat16() if weight.rounding == FP8 else out


@kernel(gpu=always, device_of=lambda weight: weight.data)
def matmul_gelu(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor) -> torch.Tensor:
    """GELU, by its tanh formula, of x[m, k] @ W.T + bias -> [m, n]."""
    return torch.nn.functional.gelu(matmul(x, weight, bias), approximate="tanh")


def sum_parts(weight: PackedWeight, bias: torch.Tensor | None, num_ranks: int = 1) -> int:
    """In how many parts a rank adds up its share of a product over k; 0: in no certain order.

    Where a result may not depend on the batch, it does not depend on the number of ranks either.
    What is rounded to 8 bits is rounded on each rank by itself, so there it does.
    """
    if not MODE.batch_invariant or not use_triton(weight.data):
        return 0
    if weight.scales is not None or bias is not None:
        return 0
    parts = SUM_PARTS // num_ranks
    return parts if parts * num_ranks == SUM_PARTS and weight.k % parts == 0 else 0


@kernel(gpu=always)
def matmul_parts(
    x: torch.Tensor, weight: PackedWeight, parts: int, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """x[m, k] @ W.T in fp32; or added to `add_to` in place, in its type.

    Each of the equal parts of k is summed by itself, and the sums of parts pair by pair.
    """
    both = zip(x.float().chunk(parts, 1), weight.data.float().chunk(parts, 1), strict=True)
    sums = [part @ own.T for part, own in both]
    while len(sums) > 1:
        sums = [left + right for left, right in zip(sums[::2], sums[1::2], strict=True)]
    return sums[0] if add_to is None else add_to.add_(sums[0])


def num_rows(x: torch.Tensor | QuantizedRows) -> int:
    return x.values.shape[0] if isinstance(x, QuantizedRows) else x.shape[0]


@kernel(gpu=always, device_of=lambda weight: weight.data)
def adds_in_place(
    x: torch.Tensor | QuantizedRows, weight: PackedWeight, bias: torch.Tensor | None = None
) -> bool:
    """False where `add_to` costs an extra pass, which the norm after it can do for less."""
    return True


def few_rows(x: torch.Tensor, weight: PackedWeight, delta: torch.Tensor | None) -> bool:
    """True where the norm can be part of the product: a few rows, which need no rounding."""
    few = x.shape[0] <= SKINNY_ROWS and not MODE.batch_invariant
    return few and delta is None and weight.scales is None


@kernel(gpu=few_rows)
def norm_matmul(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with W of x's RMSNorm, [m, k] -> [m, n]; `delta` as in rms_norm."""
    return matmul(rms_norm(x, norm, eps, weight.rounding, delta), weight, bias)


@kernel(gpu=always)
def norm_matmul_gated(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    rounding: Rounding | None = None,
    activation: Activation = "silu",
) -> torch.Tensor | QuantizedRows:
    """act_and_mul of the same product with gate and up stacked in W, [m, k] -> [m, n / 2]."""
    return act_and_mul(norm_matmul(x, norm, eps, weight, bias, delta), rounding, activation)


@functools.cache
def unit_scales(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of one. pack() makes them: inside a graph's capture they would be its memory."""
    one = torch.ones((), device=device)
    return one, one


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
    if weight.grouped:
        from tokenmill.kernels.cpu import groups

        return groups.take_rows(weight.data, ids)[:, : weight.k]
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
