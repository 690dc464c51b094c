"""Products y = x W^T that cuBLAS has no kernel for.

`skinny_matmul`: a few rows, bound by reading W; norm, gate, scales and residual ride along.
`matmul`: any rows, each with the same bits in every batch, or of shapes that _scaled_mm refuses.
`scale_product`: row and column scales, bias and residual after a product without them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.gpu.rows import activate
from tokenmill.kernels.matmul import SKINNY_ROWS, PackedWeight, QuantizedRows

MATMUL_TILE = (128, 128)  # the same for every m: a row's sum runs in one order whatever the batch
PARTS_BYTES = 128 * 2**20  # of the sums of parts that wait for each other: few rows at a time
MATMUL_LINE_BYTES = 128  # of k per step: one swizzled line of shared memory
MATMUL_GROUP = 8  # row tiles that share their columns of W in L2
SCALE_BLOCK = 1024


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    if EVEN:
        values = tl.load(pointers)
    else:
        values = tl.load(pointers, mask=inside, other=0.0)
    return values


@triton.jit
def _scale_and_bias(
    product,
    row_scales,
    column_scales,
    bias,
    rows,
    columns,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
):
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
    x,
    weight,
    out,
    norm,
    row_scales,
    column_scales,
    bias,
    m,
    n,
    k,
    eps,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EVEN: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    EARLY: tl.constexpr,
):
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
):
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = _tree(parts, place, size, 0, PARTS)
    if ADD:
        total += tl.load(out + place, mask=place < size, other=0.0).to(tl.float32)
    tl.store(out + place, total.to(out.dtype.element_ty), mask=place < size)


@quick
@triton.jit(do_not_specialize=["m"])
def _matmul_kernel(
    x,
    weight,
    out,
    row_scales,
    column_scales,
    bias,
    m,
    n,
    k,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    GROUP: tl.constexpr,
    EVEN: tl.constexpr,
    SCALED: tl.constexpr,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    PARTS: tl.constexpr,
):
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
    raw,
    out,
    row_scales,
    column_scales,
    bias,
    n,
    BIAS: tl.constexpr,
    ADD: tl.constexpr,
    BLOCK: tl.constexpr,
):
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
    gated: str | None = None,
    tile: tuple[int, int, int, int] | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x[m, k] @ W.T (+ bias) -> [m, n] for few rows; or added to `add_to` in place.

    `norm` (weight, eps) takes the RMSNorm of x first; `gated` names an activation and gives
    activation(gate) * up, [m, n / 2].
    """
    values, scales, dtype = _operands(x, weight)
    dtype = out_dtype or dtype
    (m, k), n = values.shape, weight.n // 2 if gated else weight.n
    assert m <= SKINNY_ROWS
    bn, bk, warps, stages = tile or skinny_tile(n, k, gated is not None)
    bk = min(bk, next_power_of_2(k))
    out = torch.empty(m, n, dtype=dtype, device=values.device) if add_to is None else add_to
    assert out.is_contiguous() and out.shape == (m, n)
    gain, eps = norm or (None, 0.0)
    _skinny_kernel[(cdiv(n, bn),)](
        values,
        weight.data,
        out,
        gain,
        scales,
        weight.scales,
        bias,
        m,
        n,
        k,
        eps,
        ROWS=next_power_of_2(m),
        BN=bn,
        BK=bk,
        STAGES=stages,
        EVEN=k % bk == 0,
        NORM=norm is not None,
        GATED=gated is not None,
        ACTIVATION=gated or "",
        SCALED=scales is not None,
        BIAS=bias is not None,
        ADD=add_to is not None,
        num_warps=warps,
        **launch_options(),
    )
    return out


def matmul(
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
    """x[m, k] @ W.T -> fp32 [m, n], or added to `add_to` in place; bits of a row are its own.

    Each of the equal parts of k is summed by itself, and the sums of parts pair by pair.
    """
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
        values,
        weight.data,
        out,
        scales,
        weight.scales,
        bias,
        m,
        n,
        k,
        BM=bm,
        BN=bn,
        BK=bk,
        GROUP=MATMUL_GROUP,
        EVEN=k // parts % bk == 0,
        SCALED=scales is not None,
        BIAS=bias is not None,
        ADD=add,
        PARTS=parts,
        num_warps=8,
        num_stages=4,
    )


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
        raw,
        out,
        row_scales,
        column_scales,
        bias,
        n,
        BIAS=bias is not None,
        ADD=add_to is not None,
        BLOCK=SCALE_BLOCK,
        num_warps=4,
    )
    return out
