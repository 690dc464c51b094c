"""Linear products y = x W^T over weights packed once at load: fp32, int8, bf16, fp8.

int8: weights are rounded per output channel to [-127, 127], activations per row to as many integers
as keep the int32 sum exact whatever the values; except for experts, only the 8 highest bits of each
group of GROUP channels are kept. A row's result is bitwise the same in any batch.

fp8 (e4m3): weights are rounded per output channel, activations per row; results are bf16.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch

from tokenmill.kernels import MODE, compiled, cpu_kernels, triton_kernels, use_triton
from tokenmill.kernels.product_trials import adds_slowly, by_lt, matmul_by_lt

INT32_MAX = 2**31 - 1
GROUP = 16  # channels of a row that are shifted alike: every fourth of BLOCK
BLOCK = 64
TILE_COLUMNS = 16  # outputs whose weights lie side by side; the last tile may be narrower
SKINNY_ROWS = 4  # up to here a product only reads its weights, and norms and gates ride along
SUM_PARTS = 8  # of a product that ranks may divide: 2, 4 or 8 of them give the bits of one
SMALL_ROWS = 64  # up to here cuBLAS with one scale beats the kernel with row and column scales


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rows are rounded to: `dtype`, each row scaled so that its peak becomes `limit`.

    `channels` are rounded twice: what the first rounding lost follows the row, and then their first
    roundings again, for the products with what the weights lost.
    """

    dtype: torch.dtype
    limit: int
    channels: torch.Tensor | None = field(default=None, compare=False)  # int32 [c], fp8 alone
    group: int = 0  # channels whose highest 8 bits count, if not all bits do

    @property
    def code(self) -> int:
        """How the compiled row kernels are told."""
        return -self.limit if self.group else self.limit


FP8 = Rounding(torch.float8_e4m3fn, 448)


class QuantizedRows(NamedTuple):
    """x[m, k] ~ values[m, k] * scales[m, None].

    Rows that the compiled kernels round by groups have a form of their own, see cpu/groups.py.
    """

    values: torch.Tensor  # int16 or fp8
    scales: torch.Tensor  # fp32 [m]


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """W[n, k] as the kernels read it. `scales` is None for fp32 and bf16."""

    data: torch.Tensor  # flat when tiled, else [n, k]
    scales: torch.Tensor | None
    n: int
    k: int
    tiled: bool
    channels: torch.Tensor | None = None  # whose columns follow the others twice: rounded, and lost
    grouped: bool = False  # int8 for activations rounded by groups

    @property
    def padded(self) -> int:
        """Columns of the tiles."""
        return self.n + -self.n % (TILE_COLUMNS if self.grouped else 8)

    @property
    def num_bytes(self) -> int:
        scales = 0 if self.scales is None else self.scales.nbytes
        return self.data.nbytes + scales

    @property
    def rounding(self) -> Rounding | None:
        """What the product wants its input rounded to."""
        if self.scales is None:
            return None
        if self.data.dtype != FP8.dtype:
            return by_groups(self.k) if self.grouped else activation_limit(self.k)
        return FP8 if self.channels is None else replace(FP8, channels=self.channels)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """W[ids] in fp32, [len(ids), k]: the embedding lookup of a tied head."""
        if self.tiled:
            data = _gather_tiled(self, ids)
        else:
            data = self.data[ids]
        return data if self.scales is None else data.float() * self.scales[ids, None]


def activation_limit(k: int) -> Rounding:
    """The widest int16 rounding whose dot products with k weights of at most 127 fit an int32."""
    return Rounding(torch.int16, min(32767, INT32_MAX // (127 * k)))


def by_groups(k: int) -> Rounding:
    """The same range, or the next smaller power of two, with 8 bits for each group."""
    steps = activation_limit(k).limit // 127
    return Rounding(torch.int16, 127 << max(0, steps.bit_length() - 1), group=GROUP)


def compiled_rows(x: torch.Tensor, rounding: Rounding | None) -> bool:
    """True where the compiled CPU kernels round x so."""
    return x.dtype == torch.float32 and not x.is_cuda and rounding != FP8 and cpu_kernels()


def quantize_rows(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    """Round each row of x[m, k]."""
    if use_triton(x, "quantize_rows"):
        return QuantizedRows(*triton_kernels("rows").quantize_rows(x, rounding.channels))
    if compiled_rows(x, rounding):
        return QuantizedRows(*compiled("rows").quantize_rows(x, rounding.code))
    return quantize_rows_reference(x, rounding)


def quantize_rows_reference(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    if rounding == FP8:
        scaled, scales = _scaled(x)
        codes = scaled.to(FP8.dtype)
        if rounding.channels is not None:
            rounded, lost = _split(scaled, codes, rounding.channels)
            codes = _side_by_side(codes, lost, rounded)
        return QuantizedRows(codes, scales)
    if rounding.group:
        return _quantize_groups(x.float(), rounding)
    scales = x.float().abs().amax(1).clamp(min=1e-30) / rounding.limit
    return QuantizedRows((x.float() / scales[:, None]).round().to(rounding.dtype), scales)


def _quantize_groups(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    k = x.shape[1]
    peaks = x.abs().amax(1).clamp(min=1e-30)
    steps = torch.nn.functional.pad(x * (rounding.limit / peaks)[:, None], (0, -k % BLOCK))
    groups = steps.unflatten(1, (-1, rounding.group, BLOCK // rounding.group))
    most = (rounding.limit // 127).bit_length() - 1
    fractions, bits = torch.frexp(groups.abs().amax(2, keepdim=True) / 127)
    shifts = (bits - (fractions == 0.5).int()).clamp(0, most)
    values = torch.ldexp(torch.ldexp(groups, -shifts).round(), shifts).to(rounding.dtype)
    return QuantizedRows(values.flatten(1)[:, :k], peaks / rounding.limit)


def _scaled(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x as fp32 within fp8's range, and their scales."""
    x = x.float()
    peaks = x.abs().amax(1).clamp(min=1e-30)
    return (x * (FP8.limit / peaks)[:, None]).clamp(-FP8.limit, FP8.limit), peaks / FP8.limit


def _split(
    scaled: torch.Tensor, codes: torch.Tensor, channels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The codes of some channels, and in fp8 what they lost by rounding."""
    rounded = codes.view(torch.uint8)[:, channels].view(FP8.dtype)
    return rounded, (scaled[:, channels] - rounded.float()).to(FP8.dtype)


def _side_by_side(*parts: torch.Tensor) -> torch.Tensor:
    return torch.cat([part.view(torch.uint8) for part in parts], dim=1).view(FP8.dtype)


def pack(
    weight: torch.Tensor,
    dtype: str,
    device: torch.device | str = "cpu",
    channels: torch.Tensor | None = None,
    grouped: bool = False,
) -> PackedWeight:
    """Pack W[n, k] for "fp32", "int8", "bf16" or "fp8"; CPU tiles pad n to a multiple of 8 or 16.

    `channels` of an fp8 weight are rounded twice: x W^T ~ x8 W8^T + (x - x8) W8^T + x8 (W - W8)^T.
    """
    n, k = weight.shape
    if dtype == "bf16":
        return PackedWeight(weight.to(device, torch.bfloat16), None, n, k, tiled=False)
    if dtype == "fp8":
        scaled, scales = _scaled(weight.to(device))
        data = scaled.to(FP8.dtype)
        if channels is not None:
            data = _side_by_side(data, *_split(scaled, data, channels))
        _unit_scales(data.device)
        return PackedWeight(data, scales, n, data.shape[1], tiled=False, channels=channels)
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
        data = compiled("groups").lay_out(data)
        return PackedWeight(data, scales, n, k, tiled=True, grouped=True)
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
    if weight.tiled:
        return _matmul_tiled(x, weight, bias, add_to)
    if not use_triton(weight.data):
        return matmul_reference(x, weight, bias, add_to)
    return _matmul_gpu(x, weight, bias, add_to)


def matmul_gelu(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor) -> torch.Tensor:
    """GELU, by its tanh formula, of x[m, k] @ W.T + bias -> [m, n]."""
    if use_triton(weight.data, "matmul_gelu") and _by_cublas(x, weight):
        return torch._addmm_activation(bias, x, weight.data.T, use_gelu=True)
    return torch.nn.functional.gelu(matmul(x, weight, bias), approximate="tanh")


def sum_parts(weight: PackedWeight, bias: torch.Tensor | None, num_ranks: int = 1) -> int:
    """In how many parts a rank adds up its share of a product over k; 0: in no certain order.

    Where a result may not depend on the batch, it does not depend on the number of ranks either.
    What is rounded to 8 bits is rounded on each rank by itself, so there it does.
    """
    if not MODE.batch_invariant or not use_triton(weight.data):
        return 0
    if weight.rounding is not None or bias is not None:
        return 0
    parts = SUM_PARTS // num_ranks
    return parts if parts * num_ranks == SUM_PARTS and weight.k % parts == 0 else 0


def matmul_parts(
    x: torch.Tensor, weight: PackedWeight, parts: int, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """x[m, k] @ W.T in fp32, k in equal parts; or added to `add_to` in place, in its type."""
    out: torch.Tensor = triton_kernels("matmul").matmul_parts(x, weight, parts, add_to)
    return out


def num_rows(x: torch.Tensor | QuantizedRows) -> int:
    return x.values.shape[0] if isinstance(x, QuantizedRows) else x.shape[0]


def adds_in_place(
    x: torch.Tensor | QuantizedRows, weight: PackedWeight, bias: torch.Tensor | None = None
) -> bool:
    """False where `add_to` costs an extra pass, which the norm after it can do for less.

    cuBLAS adds a bias at a product's end, or the product to a residual, but not both. cuBLASLt,
    which computes some products faster, is reached with a bias alone.
    """
    if not use_triton(weight.data):
        return True
    if not _by_cublas(x, weight):
        return not _row_scaled(num_rows(x), weight)
    assert isinstance(x, torch.Tensor)
    return bias is None and not by_lt(x, weight.data) and not adds_slowly(x, weight.data)


def _by_cublas(x: torch.Tensor | QuantizedRows, weight: PackedWeight) -> bool:
    """True where a product is one of torch's, in bf16."""
    return num_rows(x) > SKINNY_ROWS and weight.rounding is None and not MODE.batch_invariant


def _row_scaled(m: int, weight: PackedWeight) -> bool:
    """True where the product is one _scaled_mm with a scale per row and per column."""
    return m > SMALL_ROWS and _suits_scaled_mm(weight) and not MODE.batch_invariant


def _suits_scaled_mm(weight: PackedWeight) -> bool:
    return weight.rounding == FP8 and weight.n % 16 == 0 and weight.k % 16 == 0


def _matmul_gpu(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    add_to: torch.Tensor | None,
) -> torch.Tensor:
    out: torch.Tensor
    kernels = triton_kernels("matmul")
    if MODE.batch_invariant:
        out = kernels.matmul(x, weight, bias, add_to)
    elif num_rows(x) <= SKINNY_ROWS:
        out = kernels.skinny_matmul(x, weight, bias, add_to)
    elif not isinstance(x, QuantizedRows):
        out = _matmul_cublas(x, weight.data, bias, add_to)
    elif not _suits_scaled_mm(weight):
        out = kernels.matmul(x, weight, bias, add_to)
    elif _row_scaled(num_rows(x), weight):
        out = _matmul_row_scaled(x, weight, bias)
        out = out if add_to is None else add_to.add_(out)
    else:
        raw = _scaled_mm(x.values, weight.data, *_unit_scales(weight.data.device))
        out = kernels.scale_product(raw, x.scales, weight.scales, bias, add_to)
    return out


def _matmul_cublas(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    add_to: torch.Tensor | None,
) -> torch.Tensor:
    if add_to is None:
        if bias is None and by_lt(x, weight):
            return matmul_by_lt(x, weight)
        return torch.nn.functional.linear(x, weight, bias)
    out = add_to.addmm_(x, weight.T)
    return out if bias is None else out.add_(bias)


def _matmul_row_scaled(
    x: QuantizedRows, weight: PackedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    assert weight.scales is not None
    return _scaled_mm(x.values, weight.data, x.scales[:, None], weight.scales[None, :], bias)


def _scaled_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    x_scales: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """fp8 x[m, k] @ weight[n, k].T -> bf16 [m, n]."""
    return torch._scaled_mm(
        x, weight.T, x_scales, weight_scales, bias, out_dtype=torch.bfloat16, use_fast_accum=True
    )


@functools.cache
def _unit_scales(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of one. pack() makes them: inside a graph's capture they would be its memory."""
    one = torch.ones((), device=device)
    return one, one


def _matmul_tiled(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    add_to: torch.Tensor | None,
) -> torch.Tensor:
    kernels = compiled("matmul")
    padded = weight.padded
    if add_to is not None and padded != weight.n:
        return add_to.add_(matmul(x, weight, bias))
    out = torch.empty(num_rows(x), padded) if add_to is None else add_to
    keep = add_to is not None
    if isinstance(x, QuantizedRows):
        assert weight.scales is not None
        if bias is not None and padded != weight.n:
            bias = torch.nn.functional.pad(bias, (0, padded - weight.n))
        product = compiled("groups").matmul_groups if weight.grouped else kernels.matmul_int8
        product(x.values, x.scales, weight.data, weight.scales, bias, out, keep)
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
        wide = torch.float32 if weight.rounding == FP8 else torch.float64
        if weight.grouped and weight.tiled:
            x = QuantizedRows(*compiled("groups").shifted_rows(*x, weight.k))
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
        rows: torch.Tensor = compiled("groups").take_rows(weight.data, ids)
        return rows[:, : weight.k]
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
