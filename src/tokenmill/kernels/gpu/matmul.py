"""Products y = x W^T: cuBLAS, or kernels for what it does not have.

`skinny_matmul`: a few rows, bound by reading W; norm, gate, scales and residual ride along.
`matmul_by_tiles`: any rows, each with the same bits in every batch, or of shapes that _scaled_mm
refuses. `scale_product`: row and column scales, bias and residual after a product without them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE
from tokenmill.kernels import matmul as products
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper import gated
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.gpu.rows import activate
from tokenmill.kernels.matmul import SKINNY_ROWS, PackedWeight, few_rows, num_rows, unit_scales
from tokenmill.kernels.product_trials import adds_slowly, by_lt, matmul_by_lt, second_is_faster
from tokenmill.kernels.rows import (
    FP8,
    Activation,
    QuantizedRows,
    Rounding,
    act_and_mul,
    rms_norm,
)

MATMUL_TILE = (128, 128)  # the same for every m: a row's sum runs in one order whatever the batch
PARTS_BYTES = 128 * 2**20  # of the sums of parts that wait for each other: few rows at a time
MATMUL_LINE_BYTES = 128  # of k per step: one swizzled line of shared memory
MATMUL_GROUP = 8  # row tiles that share their columns of W in L2
SCALE_BLOCK = 1024
SMALL_ROWS = 64  # up to here cuBLAS with one scale beats the kernel with row and column scales


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0.0)
    return values


@triton.jit
def _scale_and_bias(
    product, row_scales, column_scales, bias, rows, columns,
    SCALED: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """product[rows, columns] in fp32, with what belongs to its rows and columns."""
    if SCALED:
        product = product * tl.load(row_scales + rows)[:, None]
        product = product * tl.load(column_scales + columns)[None, :]
    if BIAS:
        product = product + tl.load(bias + columns).to(tl.float32)[None, :]
    return product


@triton.jit
def _store(product, out, rows, columns, m, n, ADD: tl.constexpr):
    places = out + rows.to(tl.int64)[:, None] * n + columns[None, :]
    inside = (rows[:, None] < m) & (columns[None, :] < n)
    if ADD:
        product += tl.load(places, mask=inside, other=0.0).to(tl.float32)
    tl.store(places, product.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _fold(x, ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """x[ROWS, BN, BK] summed over BK pair by pair: in one order, however threads hold it."""
    tl.static_assert(BK <= 1024)
    for level in tl.static_range(10):
        if BK >> level > 1:
            x = tl.sum(tl.reshape(x, [ROWS, BN, BK >> (level + 1), 2]), axis=3)
    return tl.reshape(x, [ROWS, BN])


@quick
@triton.jit
def _skinny_kernel(
    x, weight, out, norm, row_scales, column_scales, bias, m, n, k, eps,
    ROWS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr,
    EVEN: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    rows, columns = tl.arange(0, ROWS), tl.program_id(0) * BN + tl.arange(0, BN)
    row, column = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1)
    x_line = x + row[:, None, None] * k
    line = weight + column.to(tl.int64)[None, :, None] * k
    up_line = weight + (column + n).to(tl.int64)[None, :, None] * k
    # Sums stay apart per lane of k until the end: one reduction, and no traffic between threads.
    acc = tl.zeros([ROWS, BN, BK], tl.float32)
    up_acc = tl.zeros([ROWS, BN, BK], tl.float32)
    squares = tl.zeros([ROWS, 1, BK], tl.float32)
    steps = tl.arange(0, BK)[None, None, :]
    weights = _load(line + steps, steps < k, EVEN)
    up_weights = weights
    if GATED:
        up_weights = _load(up_line + steps, steps < k, EVEN)
    wait(EARLY)  # the first weights are on their way already
    values = _load(x_line + steps, steps < k, EVEN).to(tl.float32)
    if NORM:
        squares += values * values
        values *= _load(norm + steps, steps < k, EVEN).to(tl.float32)
    acc += values * weights.to(tl.float32)
    if GATED:
        up_acc += values * up_weights.to(tl.float32)
    for start in tl.range(BK, k, BK, num_stages=STAGES):
        steps = start + tl.arange(0, BK)[None, None, :]
        inside = steps < k
        values = _load(x_line + steps, inside, EVEN).to(tl.float32)
        if NORM:
            squares += values * values
            values *= _load(norm + steps, inside, EVEN).to(tl.float32)
        acc += values * _load(line + steps, inside, EVEN).to(tl.float32)
        if GATED:
            up_acc += values * _load(up_line + steps, inside, EVEN).to(tl.float32)
    product, up = _fold(acc, ROWS, BN, BK), _fold(up_acc, ROWS, BN, BK)
    if NORM:
        inverse = tl.rsqrt(_fold(squares, ROWS, 1, BK) / k + eps)
        product, up = product * inverse, up * inverse
    product = _scale_and_bias(product, row_scales, column_scales, bias, row, column, SCALED, BIAS)
    if GATED:
        up = _scale_and_bias(up, row_scales, column_scales, bias, row, column + n, SCALED, BIAS)
        product = activate(product, ACTIVATION) * up
    _store(product, out, rows, columns, m, n, ADD)


@triton.jit
def _tree(parts, place, size, FIRST: tl.constexpr, COUNT: tl.constexpr):
    """Parts FIRST, FIRST + 1, ... of an element, added up pair by pair."""
    if COUNT > 1:
        half: tl.constexpr = COUNT // 2
        total = _tree(parts, place, size, FIRST, half)
        total += _tree(parts, place, size, FIRST + half, half)
    else:
        total = tl.load(parts + FIRST * size + place, mask=place < size, other=0.0)
    return total


@quick
@triton.jit(do_not_specialize=["size"])
def _join_parts_kernel(
    parts, out, size, PARTS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _tree(parts, place, size, 0, PARTS)
    if ADD:
        total += tl.load(out + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@quick
@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    x, weight, out, row_scales, column_scales, bias, m, n, k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr,
    SCALED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    tile, row_tiles, column_tiles = tl.program_id(0), tl.cdiv(m, BM), tl.cdiv(n, BN)
    first = tile // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inner = tile % (GROUP * column_tiles)
    rows = (first + inner % height) * BM + tl.arange(0, BM)
    columns = inner // height * BN + tl.arange(0, BN)
    row, column = tl.minimum(rows, m - 1), tl.minimum(columns, n - 1)
    x_line = x + row.to(tl.int64)[:, None] * k
    line = weight + column.to(tl.int64)[None, :] * k
    steps = tl.arange(0, BK)
    acc = tl.zeros([BM, BN], tl.float32)
    first, end = 0, k
    if PARTS > 1:  # a part of k for each program, and a part of `out`
        first = tl.program_id(1) * (k // PARTS)
        end = first + k // PARTS
        out += tl.program_id(1).to(tl.int64) * m * n
    for start in range(first, end, BK):
        inside = steps < end - start
        values = _load(x_line + start + steps[None, :], inside[None, :], EVEN)
        weights = _load(line + start + steps[:, None], inside[:, None], EVEN)
        acc = tl.dot(values, weights, acc)
    acc = _scale_and_bias(acc, row_scales, column_scales, bias, row, column, SCALED, BIAS)
    _store(acc, out, rows, columns, m, n, ADD)


@quick
@triton.jit
def _scale_kernel(
    raw, out, row_scales, column_scales, bias, n,
    BIAS: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    place = row.to(tl.int64) * n + columns
    product = tl.load(raw + place, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(row_scales + row)
    product *= tl.load(column_scales + columns, mask=inside, other=0.0)
    if BIAS:
        product += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        product += tl.load(out + place, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + place, product.to(out.dtype.element_ty), mask=inside)


def _operands(
    x: torch.Tensor | QuantizedRows, weight: PackedWeight
) -> tuple[torch.Tensor, torch.Tensor | None, torch.dtype]:
    """Values, scales of their rows, and the type of the result."""
    scaled = isinstance(x, QuantizedRows)
    values, scales = x if isinstance(x, QuantizedRows) else (x, None)
    assert values.is_contiguous() and weight.data.is_contiguous()
    assert values.dtype == weight.data.dtype and scaled == (weight.scales is not None)
    return values, scales, torch.bfloat16 if scaled else values.dtype


def skinny_tile(n: int, k: int, gated: bool) -> tuple[int, int, int, int]:
    """Output columns and steps of k per program, warps, stages; measured on an H200.

    The same for every m: a row has the same bits whether its token is alone or has drafts beside.
    Short rows want few steps, long ones few warps to add up.
    """
    if gated:
        return (1, 256, 1, 3) if k < 2048 else (4, 128, 2, 5)
    if n >= 8192:
        return 8, 64, 1, 5
    if k <= 1024:
        return 4, 1024, 4, 3
    return (4, 512, 2, 3) if k < 2048 else (4, 256, 2, 5)


def skinny_matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
    norm: tuple[torch.Tensor, float] | None = None,
    gate: str | None = None,
    tile: tuple[int, int, int, int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x[m, k] @ W.T (+ bias) -> [m, n] for few rows; or added to `add_to` in place.

    `norm` (weight, eps) takes the RMSNorm of x first; `gate` names an activation and gives
    activation(gate) * up, [m, n / 2].
    """
    values, scales, dtype = _operands(x, weight)
    dtype = out_dtype or dtype
    (m, k), n = values.shape, weight.n // 2 if gate else weight.n
    assert m <= SKINNY_ROWS
    bn, bk, warps, stages = tile or skinny_tile(n, k, gate is not None)
    bk = min(bk, next_power_of_2(k))
    out = torch.empty(m, n, dtype=dtype, device=values.device) if add_to is None else add_to
    assert out.is_contiguous() and out.shape == (m, n)
    gain, eps = norm or (None, 0.0)
    _skinny_kernel[(cdiv(n, bn),)](
        values, weight.data, out, gain, scales, weight.scales, bias, m, n, k, eps,
        ROWS=next_power_of_2(m), BN=bn, BK=bk, STAGES=stages, EVEN=k % bk == 0,
        NORM=norm is not None, GATED=gate is not None, ACTIVATION=gate or "",
        SCALED=scales is not None, BIAS=bias is not None, ADD=add_to is not None, num_warps=warps,
        **launch_options(),
    )  # fmt: skip
    return out


def matmul_by_tiles(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """x[m, k] @ W.T (+ bias) -> [m, n], or added to `add_to` in place; bits of a row are its own.

    fp8 sums stay in the tensor cores, as with use_fast_accum.
    """
    values, scales, dtype = _operands(x, weight)
    m, n = values.shape[0], weight.n
    out = torch.empty(m, n, dtype=dtype, device=values.device) if add_to is None else add_to
    assert out.is_contiguous() and out.shape == (m, n)
    _launch(values, scales, weight, bias, out, add_to is not None)
    return out


def matmul_parts(
    x: torch.Tensor, weight: PackedWeight, parts: int, add_to: torch.Tensor | None = None
) -> torch.Tensor:
    """Bits of a row are its own."""
    values, _, _ = _operands(x, weight)
    (m, k), n = values.shape, weight.n
    assert parts in (1, 2, 4, 8) and k % parts == 0
    out = torch.empty(m, n, device=values.device) if add_to is None else add_to
    assert out.is_contiguous() and out.shape == (m, n)
    rows = max(1, PARTS_BYTES // (4 * parts * n))
    for start in range(0, m, rows):
        some, own = values[start : start + rows], out[start : start + rows]
        sums = torch.empty(parts, *own.shape, device=values.device)
        _launch(some, None, weight, None, sums, False, parts)
        size = own.numel()
        _join_parts_kernel[(cdiv(size, SCALE_BLOCK),)](
            sums, own, size, PARTS=parts, ADD=add_to is not None, BLOCK=SCALE_BLOCK, num_warps=4
        )
    return out


def _launch(
    values: torch.Tensor,
    scales: torch.Tensor | None,
    weight: PackedWeight,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    add: bool,
    parts: int = 1,
) -> None:
    (m, k), n = values.shape, weight.n
    bm, bn = MATMUL_TILE
    bk = MATMUL_LINE_BYTES // values.element_size()
    _matmul_kernel[(cdiv(m, bm) * cdiv(n, bn), parts)](
        values, weight.data, out, scales, weight.scales, bias, m, n, k,
        BM=bm, BN=bn, BK=bk, GROUP=MATMUL_GROUP, EVEN=k // parts % bk == 0,
        SCALED=scales is not None, BIAS=bias is not None, ADD=add, PARTS=parts, num_warps=8,
        num_stages=4,
    )  # fmt: skip


def scale_product(
    raw: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """raw[m, n] times its scales (+ bias), in place, or added to `add_to` in place."""
    m, n = raw.shape
    out = raw if add_to is None else add_to
    assert raw.is_contiguous() and out.is_contiguous() and out.shape == raw.shape
    _scale_kernel[(m, cdiv(n, SCALE_BLOCK))](
        raw, out, row_scales, column_scales, bias, n,
        BIAS=bias is not None, ADD=add_to is not None, BLOCK=SCALE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def matmul(
    x: torch.Tensor | QuantizedRows,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    add_to: torch.Tensor | None = None,
) -> torch.Tensor:
    if MODE.batch_invariant:
        return matmul_by_tiles(x, weight, bias, add_to)
    if num_rows(x) <= SKINNY_ROWS:
        return skinny_matmul(x, weight, bias, add_to)
    if not isinstance(x, QuantizedRows):
        return _matmul_cublas(x, weight.data, bias, add_to)
    if not _suits_scaled_mm(weight):
        return matmul_by_tiles(x, weight, bias, add_to)
    if _row_scaled(num_rows(x), weight):
        out = _matmul_row_scaled(x, weight, bias)
        return out if add_to is None else add_to.add_(out)
    assert weight.scales is not None
    raw = _scaled_mm(x.values, weight.data, *unit_scales(weight.data.device))
    return scale_product(raw, x.scales, weight.scales, bias, add_to)


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


def _by_cublas(x: torch.Tensor | QuantizedRows, weight: PackedWeight) -> bool:
    """True where a product is one of torch's, in bf16."""
    return num_rows(x) > SKINNY_ROWS and weight.scales is None and not MODE.batch_invariant


def _row_scaled(m: int, weight: PackedWeight) -> bool:
    """True where the product is one _scaled_mm with a scale per row and per column."""
    return m > SMALL_ROWS and _suits_scaled_mm(weight) and not MODE.batch_invariant


def _suits_scaled_mm(weight: PackedWeight) -> bool:
    return weight.data.dtype == FP8.dtype and weight.n % 16 == 0 and weight.k % 16 == 0


def adds_in_place(
    x: torch.Tensor | QuantizedRows, weight: PackedWeight, bias: torch.Tensor | None = None
) -> bool:
    """cuBLAS adds a bias at a product's end, or the product to a residual, but not both.

    cuBLASLt, which computes some products faster, is reached with a bias alone.
    """
    if not _by_cublas(x, weight):
        return not _row_scaled(num_rows(x), weight)
    assert isinstance(x, torch.Tensor)
    return bias is None and not by_lt(x, weight.data) and not adds_slowly(x, weight.data)


def matmul_gelu(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor) -> torch.Tensor:
    if _by_cublas(x, weight):
        return torch._addmm_activation(bias, x, weight.data.T, use_gelu=True)
    return products.matmul_gelu.reference(x, weight, bias)


def norm_matmul(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    return skinny_matmul(x, weight, bias, norm=(norm, eps))


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
    if few_rows(x, weight, delta):
        if isinstance(activation, str) and rounding is None:
            return skinny_matmul(x, weight, bias, norm=(norm, eps), gate=activation)
        product = norm_matmul(x, norm, eps, weight, bias)
        return act_and_mul(product, rounding, activation)
    rows = rms_norm(x, norm, eps, weight.rounding, delta)
    plain = rounding is None and bias is None and activation == "silu"
    if plain and isinstance(rows, torch.Tensor) and _gates_itself(rows, weight.data):
        return gated.gated_product(rows, weight.data)
    return act_and_mul(products.matmul(rows, weight, bias), rounding, activation)


def _gates_itself(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """True where one kernel for Hopper computes the product and its gate, unless a trial was lost.

    Kernels that no trial was held for run, too: so the warm-up knows all that are to be compiled.
    """
    if "gated_product" in MODE.without or x.shape[0] <= SKINNY_ROWS:
        return False
    if not gated.suits(x.shape[0], weight):
        return False
    return second_is_faster((_product_and_gate, gated.gated_product), x, weight, untried=True)


def _product_and_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor | QuantizedRows:
    n, k = weight.shape
    return act_and_mul(products.matmul(x, PackedWeight(weight, None, n, k, tiled=False)))
