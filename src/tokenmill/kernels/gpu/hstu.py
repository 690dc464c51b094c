"""HSTU on a GPU: a batch's rows in one pass, SiLU attention, products with LayerNorm folded in.

A program of attention takes a tile of query rows and a head. There is no softmax, hence no running
maximum, no sum, and no rescaling: a weight costs one tanh, and the division by N comes at the end.
A candidate's own key is one product by row, outside the loop, so that no tile of candidates' keys
is read for its diagonal alone.

LayerNorm(x) W is (x W' - mean * sum(W')) / deviation with W' = diag(w) W: the product runs on x as
it is, and its last step needs two numbers of each row. The gate's norm cannot be folded, since u
multiplies it: its rows are made in registers on their way to the tensor cores. Rows in fp8 need
their peak first: gate_rows writes them, and a product with scales by row and column reads them.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.gpu.rows import ELEMENTS_PER_WARP, FP8_LIMIT, MAX_WARPS
from tokenmill.kernels.hstu import (
    COLUMNS,
    EPS,
    STEP,
    TILE_ROWS,
    AffineNorm,
    Jagged,
    NormProduct,
    RowIds,
    RowTables,
)
from tokenmill.kernels.rows import FP8, QuantizedRows

ELEMENTS_OF_ROWS = 1024  # of a program that takes whole rows by one warp: its sums need no barrier


class AttentionShape(NamedTuple):
    """How a program of attention is laid out."""

    keys: int = 64  # of a turn
    stages: int = 3
    warps: int = 8
    ahead: bool = False  # multiply the next turn's keys before this turn's values


class ProductShape(NamedTuple):
    """Tile and pipeline of a product."""

    rows: int = 128
    columns: int = COLUMNS
    step: int = STEP
    stages: int = 3
    warps: int = 8


ATTENTION = AttentionShape()
UVQK = ProductShape(stages=4)
OUTPUT = ProductShape(stages=2)
SMALL = ProductShape(rows=16, columns=16, step=16, stages=1, warps=4)  # of the interpreter


@functools.cache
def on_hopper() -> bool:
    """Tiles come by the copy engine and tanh is one instruction; the interpreter has neither."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


@triton.jit
def _silu(x, FAST: tl.constexpr):
    """x * sigmoid(x) = h + h * tanh(h) with h = x / 2."""
    if FAST:
        half = 0.5 * x
        turn = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [half], dtype=tl.float32, is_pure=True, pack=1
        )
        return half + half * turn
    else:
        return x * tl.sigmoid(x)


@triton.jit
def _tile(base, row, rows_left, column, stride, ROWS: tl.constexpr, WIDTH: tl.constexpr,
          TMA: tl.constexpr):  # fmt: skip
    """A tile [ROWS, WIDTH] from `row` on; rows past `rows_left` may be any others, or zero."""
    if TMA:
        return base.load([row, column])
    else:
        index = tl.arange(0, ROWS)
        place = (row + index).to(tl.int64)[:, None] * stride + column
        seen = (index < rows_left)[:, None]
        return tl.load(base + place + tl.arange(0, WIDTH)[None, :], mask=seen, other=0.0)


@triton.jit
def _weigh(
    queries, acc, k, v, first_key, head, k_stride, v_stride, begin, end, position, scale,
    MASKED: tl.constexpr, DIM: tl.constexpr, VDIM: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """acc + silu(q k) v over the keys [begin, end); MASKED: some rows do not see some of them."""
    for span in tl.range(begin, end, KEYS, num_stages=STAGES):
        row = first_key + span
        keys = _tile(k, row, end - span, head * DIM, k_stride, KEYS, DIM, TMA)
        weights = _silu(tl.dot(queries, tl.trans(keys)) * scale, FAST)
        if MASKED:
            key = span + tl.arange(0, KEYS)
            weights = tl.where(key[None, :] <= position[:, None], weights, 0.0)
        values = _tile(v, row, end - span, head * VDIM, v_stride, KEYS, VDIM, TMA)
        acc = tl.dot(weights.to(values.dtype), values, acc)
    return acc


@triton.jit
def _weigh_ahead(
    queries, acc, k, v, first_key, head, k_stride, v_stride, begin, end, scale,
    DIM: tl.constexpr, VDIM: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """The same over whole turns that every row sees; tensor cores run while weights are made."""
    if begin < end:
        keys = _tile(k, first_key + begin, KEYS, head * DIM, k_stride, KEYS, DIM, TMA)
        scores = tl.dot(queries, tl.trans(keys))
        for span in tl.range(begin + KEYS, end, KEYS, num_stages=STAGES):
            row = first_key + span
            keys = _tile(k, row, KEYS, head * DIM, k_stride, KEYS, DIM, TMA)
            coming = tl.dot(queries, tl.trans(keys))
            values = _tile(v, row - KEYS, KEYS, head * VDIM, v_stride, KEYS, VDIM, TMA)
            acc = tl.dot(_silu(scores * scale, FAST).to(values.dtype), values, acc)
            scores = coming
        values = _tile(v, first_key + end - KEYS, KEYS, head * VDIM, v_stride, KEYS, VDIM, TMA)
        acc = tl.dot(_silu(scores * scale, FAST).to(values.dtype), values, acc)
    return acc


# What changes from batch to batch is not specialised: each new kind would be compiled.
@quick
@triton.jit(do_not_specialize=["first_target", "inverse"])
def attention_kernel(
    q, k, v, own_k, own_v, out, tiles, q_stride, k_stride, v_stride, own_k_stride, own_v_stride,
    out_stride, first_target, scale, inverse,
    DIM: tl.constexpr, VDIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    STAGES: tl.constexpr, AHEAD: tl.constexpr, FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    head, tile = tl.program_id(0), tiles + 5 * tl.program_id(1)
    first, count = tl.load(tile), tl.load(tile + 1)
    first_key, num_keys, target = tl.load(tile + 2), tl.load(tile + 3), tl.load(tile + 4)
    rows, channels, columns = tl.arange(0, ROWS), tl.arange(0, DIM), tl.arange(0, VDIM)
    valid = (rows < count)[:, None]
    line = (first + target * first_target + rows).to(tl.int64)[:, None]
    queries = tl.load(q + line * q_stride + head * DIM + channels[None, :], mask=valid, other=0.0)
    # A candidate sees all keys; a history's rows are its last ones up to the tile's last key.
    position = tl.where(target == 1, num_keys - 1, num_keys - count + rows)
    clear = tl.where(target == 1, num_keys, num_keys - count + 1) // KEYS * KEYS
    acc = tl.zeros([ROWS, VDIM], tl.float32)
    if AHEAD:
        acc = _weigh_ahead(
            queries, acc, k, v, first_key, head, k_stride, v_stride, 0, clear, scale,
            DIM, VDIM, KEYS, STAGES, FAST, TMA,
        )  # fmt: skip
    else:
        acc = _weigh(
            queries, acc, k, v, first_key, head, k_stride, v_stride, 0, clear, position, scale,
            False, DIM, VDIM, KEYS, STAGES, FAST, TMA,
        )  # fmt: skip
    acc = _weigh(
        queries, acc, k, v, first_key, head, k_stride, v_stride, clear, num_keys, position, scale,
        True, DIM, VDIM, KEYS, STAGES, FAST, TMA,
    )  # fmt: skip
    if target == 1:
        own = (first + rows).to(tl.int64)[:, None]
        keys = own_k + own * own_k_stride + head * DIM + channels[None, :]
        products = queries.to(tl.float32) * tl.load(keys, mask=valid, other=0.0).to(tl.float32)
        weight = _silu(tl.sum(products, axis=1) * scale, FAST)[:, None]
        values = own_v + own * own_v_stride + head * VDIM + columns[None, :]
        acc += weight * tl.load(values, mask=valid, other=0.0).to(tl.float32)
    place = out + line * out_stride + head * VDIM + columns[None, :]
    tl.store(place, (acc * inverse).to(out.dtype.element_ty), mask=valid)


@triton.jit
def _row_norm(values, inside, weight, bias, column, width, eps):
    """LayerNorm of whole rows in fp32; values outside are 0."""
    mean = tl.sum(values, axis=1) / width
    off = tl.where(inside, values - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(off * off, axis=1) / width + eps)
    gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    shift = tl.load(bias + column, mask=column < width, other=0.0).to(tl.float32)
    return off * inverse[:, None] * gain + shift


@triton.jit
def _gathered(table, index, column, width, mask):
    """Rows table[index] of [n, width] in fp32."""
    return tl.load(table + index[:, None] * width + column, mask=mask, other=0.0).to(tl.float32)


@quick
@triton.jit(do_not_specialize=["num_rows", "num_users", "num_items"])
def input_rows_kernel(
    items, norm_weight, norm_bias, context, categories, actions, positions, times, order,
    category_ids, action_ids, position_ids, time_ids, out, num_rows, num_users, num_items,
    last_action, width, scale, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column, valid = tl.arange(0, WIDTH)[None, :], row < num_rows
    inside = valid[:, None] & (column < width)
    place = tl.load(order + row, mask=valid, other=0)
    is_item, item = valid & (place >= num_users), place - num_users
    wanted = inside & is_item[:, None]
    x = _row_norm(
        _gathered(items, item, column, width, wanted),
        wanted, norm_weight, norm_bias, column, width, eps,
    )  # fmt: skip
    x += _gathered(
        categories, tl.load(category_ids + item, mask=is_item, other=0), column, width, wanted
    )
    known = is_item & (item < num_items)
    action = tl.load(action_ids + item, mask=known, other=0)
    x += _gathered(actions, tl.where(known, action, last_action), column, width, wanted)
    token = _gathered(context, place, column, width, inside & (place < num_users)[:, None])
    x = tl.where(is_item[:, None], x, token) * scale
    position = tl.load(position_ids + row, mask=valid, other=0)
    time = tl.load(time_ids + row, mask=valid, other=0)
    x += _gathered(positions, position, column, width, inside)
    x += _gathered(times, time, column, width, inside)
    line = out + row.to(tl.int64)[:, None] * width + column
    tl.store(line, x.to(out.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def swish_norm_kernel(
    x, norm_weight, norm_bias, out, num_rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    values = _gathered(x, row.to(tl.int64), column, width, inside)
    normed = _row_norm(values, inside, norm_weight, norm_bias, column, width, eps)
    line = out + row.to(tl.int64)[:, None] * width + column
    tl.store(line, (values * tl.sigmoid(normed)).to(out.dtype.element_ty), mask=inside)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def _stats_kernel(x, stats, stride, num_rows, width, eps, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)[None, :]
    inside = (row < num_rows)[:, None] & (column < width)
    values = tl.load(x + row.to(tl.int64)[:, None] * stride + column, mask=inside, other=0.0)
    values = values.to(tl.float32)
    mean = tl.sum(values, axis=1) / width
    off = tl.where(inside, values - mean[:, None], 0.0)
    inverse = tl.rsqrt(tl.sum(off * off, axis=1) / width + eps)
    tl.store(stats + 2 * row, mean, mask=row < num_rows)
    tl.store(stats + 2 * row + 1, inverse, mask=row < num_rows)


@triton.jit
def _columns(base, row, column, width, stride, STEP: tl.constexpr, COLUMNS: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    """A tile [STEP, COLUMNS] of a weight."""
    if TMA:
        return base.load([row, column])
    else:
        line = (row + tl.arange(0, STEP)).to(tl.int64)[:, None] * stride
        index = column + tl.arange(0, COLUMNS)[None, :]
        return tl.load(base + line + index, mask=index < width, other=0.0)


@quick
@triton.jit(do_not_specialize=["num_rows"])
def uvqk_kernel(
    x, weight, stats, sums, bias, out, x_stride, w_stride, out_stride, num_rows, k, n, gated,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    FAST: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    for step in tl.range(0, k, STEP, num_stages=STAGES):
        left = _tile(x, row, num_rows - row, step, x_stride, ROWS, STEP, TMA)
        acc = tl.dot(left, _columns(weight, step, column, n, w_stride, STEP, COLUMNS, TMA), acc)
    index, columns = row + tl.arange(0, ROWS), column + tl.arange(0, COLUMNS)
    valid, inside = index < num_rows, columns < n
    mean = tl.load(stats + 2 * index, mask=valid, other=0.0)[:, None]
    inverse = tl.load(stats + 2 * index + 1, mask=valid, other=0.0)[:, None]
    shift = tl.load(sums + columns, mask=inside, other=0.0)[None, :]
    acc = (acc - mean * shift) * inverse + tl.load(bias + columns, mask=inside, other=0.0)[None, :]
    if column < gated:  # u ends where a tile does
        acc = _silu(acc, FAST)
    place = out + index.to(tl.int64)[:, None] * out_stride + columns[None, :]
    tl.store(place, acc.to(out.dtype.element_ty), mask=valid[:, None] & inside[None, :])


@quick
@triton.jit(do_not_specialize=["num_rows"])
def output_kernel(
    x, u, o, weight, stats, norm_weight, norm_bias, out, x_stride, u_stride, o_stride, w_stride,
    out_stride, num_rows, width, n,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    column, row = tl.program_id(0) * COLUMNS, tl.program_id(1) * ROWS
    left, index = num_rows - row, row + tl.arange(0, ROWS)
    valid = index < num_rows
    mean = tl.load(stats + 2 * index, mask=valid, other=0.0)[:, None]
    inverse = tl.load(stats + 2 * index + 1, mask=valid, other=0.0)[:, None]
    acc = tl.zeros([ROWS, COLUMNS], tl.float32)
    # One loop: Triton 3.6 overwrites the registers of a turn's only product while it still runs.
    for step in tl.range(0, width, STEP, num_stages=STAGES):
        gate = _tile(u, row, left, step, u_stride, ROWS, STEP, TMA)
        seen = _tile(o, row, left, step, o_stride, ROWS, STEP, TMA)
        channels = step + tl.arange(0, STEP)
        scale = tl.load(norm_weight + channels).to(tl.float32)[None, :]
        shift = tl.load(norm_bias + channels).to(tl.float32)[None, :]
        normed = (seen.to(tl.float32) - mean) * inverse * scale + shift
        gated = (gate.to(tl.float32) * normed).to(gate.dtype)
        first = _columns(weight, step, column, n, w_stride, STEP, COLUMNS, TMA)
        second = _columns(weight, width + step, column, n, w_stride, STEP, COLUMNS, TMA)
        third = _columns(weight, 2 * width + step, column, n, w_stride, STEP, COLUMNS, TMA)
        acc = tl.dot(gate, first, acc)
        acc = tl.dot(seen, second, acc)
        acc = tl.dot(gated, third, acc)
    columns = column + tl.arange(0, COLUMNS)[None, :]
    inside = valid[:, None] & (columns < n)
    line = index.to(tl.int64)[:, None]
    acc += tl.load(x + line * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + line * out_stride + columns, acc.to(out.dtype.element_ty), mask=inside)


@quick
@triton.jit
def gate_rows_kernel(
    u, o, norm_weight, norm_bias, out, scales, u_stride, o_stride, width, eps,
    BLOCK: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(u + row * u_stride + columns, mask=inside, other=0.0).to(tl.float32)
    seen = tl.load(o + row * o_stride + columns, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(norm_bias + columns, mask=inside, other=0.0).to(tl.float32)
    gate = _silu(gate, FAST)
    off = tl.where(inside, seen - tl.sum(seen, axis=0) / width, 0.0)
    inverse = tl.rsqrt(tl.sum(off * off, axis=0) / width + eps)
    gated = gate * (off * inverse * scale + shift)
    peaks = tl.maximum(tl.maximum(tl.abs(gate), tl.abs(seen)), tl.abs(gated))
    peak = tl.maximum(tl.max(peaks, axis=0), 1e-30)
    tl.store(scales + row, peak / FP8_LIMIT)
    factor, line = FP8_LIMIT / peak, out + row * 3 * width + columns
    tl.store(line, (gate * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(line + width, (seen * factor).to(out.dtype.element_ty), mask=inside)
    tl.store(line + 2 * width, (gated * factor).to(out.dtype.element_ty), mask=inside)


def input_rows(
    items: torch.Tensor, norm: AffineNorm, eps: float, tables: RowTables, ids: RowIds, scale: float
) -> torch.Tensor:
    (num_rows,), width = ids.order.shape, items.shape[1]
    assert all(part.is_contiguous() for part in (items, *norm, *tables, *ids))
    out = torch.empty(num_rows, width, dtype=items.dtype, device=items.device)
    rows, block = whole_rows(width)
    input_rows_kernel[(cdiv(num_rows, rows),)](
        items, *norm, *tables, *ids, out, num_rows, tables.context.shape[0], ids.actions.shape[0],
        tables.actions.shape[0] - 1, width, scale, eps, ROWS=rows, WIDTH=block, num_warps=1,
    )  # fmt: skip
    return out


def whole_rows(width: int) -> tuple[int, int]:
    """Rows of a program and their width in registers."""
    block = next_power_of_2(width)
    return max(1, ELEMENTS_OF_ROWS // block), block


def swish_norm(x: torch.Tensor, norm: AffineNorm, eps: float) -> torch.Tensor:
    (num_rows, width), out = x.shape, torch.empty_like(x)
    rows, block = whole_rows(width)
    assert x.is_contiguous()
    swish_norm_kernel[(cdiv(num_rows, rows),)](
        x, *norm, out, num_rows, width, eps, ROWS=rows, WIDTH=block, num_warps=1
    )
    return out


def silu_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    own_k: torch.Tensor,
    own_v: torch.Tensor,
    rows: Jagged,
    normaliser: int,
) -> torch.Tensor:
    """q, k and v may be columns of one matrix."""
    _, heads, dim = q.shape
    v_dim, tma, shape = v.shape[2], on_hopper(), ATTENTION
    tiles = rows.tiles
    first_target = q.shape[0] - rows.num_candidates
    if first_target == 0:
        tiles = tiles[: rows.num_target_tiles]
    out = torch.empty(q.shape[0], heads * v_dim, dtype=q.dtype, device=q.device)
    for part, width in ((q, dim), (k, dim), (v, v_dim), (own_k, dim), (own_v, v_dim)):
        assert part.stride(2) == 1 and part.stride(1) == width and width & (width - 1) == 0
    # A copy engine cannot be told of no rows: the kernel then has no key to read.
    tma = tma and k.shape[0] > 0
    keys = [_descriptor(part, shape.keys) if tma else part for part in (k, v)]
    attention_kernel[(heads, tiles.shape[0])](
        q, *keys, own_k, own_v, out, tiles, q.stride(0), k.stride(0), v.stride(0), own_k.stride(0),
        own_v.stride(0), out.stride(0), first_target, dim**-0.5, 1.0 / normaliser,
        DIM=dim, VDIM=v_dim, ROWS=TILE_ROWS, KEYS=shape.keys, STAGES=shape.stages,
        AHEAD=shape.ahead, FAST=tma, TMA=tma, num_warps=shape.warps,
    )  # fmt: skip
    return out


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """x[rows, heads, dim], columns of a wider matrix, in tiles of one head."""
    flat = x.flatten(1)
    return TensorDescriptor(flat, list(flat.shape), list(flat.stride()), [rows, x.shape[2]])


def norm_uvqk(x: torch.Tensor, product: NormProduct, gated: int) -> torch.Tensor:
    weight, sums, bias = product.folded
    (m, k), n = x.shape, weight.shape[1]
    shape = UVQK if on_hopper() else SMALL
    tma = on_hopper()
    assert k % shape.step == 0 and gated % shape.columns == 0 and x.stride(1) == 1
    stats, out = row_stats(x), torch.empty(m, n, dtype=x.dtype, device=x.device)
    left, right = _operands(x, weight, shape) if tma else (x, weight)
    uvqk_kernel[(cdiv(n, shape.columns), cdiv(m, shape.rows))](
        left, right, stats, sums, bias, out, x.stride(0), weight.stride(0), out.stride(0), m, k, n,
        gated, ROWS=shape.rows, COLUMNS=shape.columns, STEP=shape.step, STAGES=shape.stages,
        FAST=tma, TMA=tma, num_warps=shape.warps,
    )  # fmt: skip
    return out


def _operands(
    x: torch.Tensor, weight: torch.Tensor, shape: ProductShape
) -> tuple[TensorDescriptor, TensorDescriptor]:
    left = TensorDescriptor.from_tensor(x, [shape.rows, shape.step])
    return left, TensorDescriptor.from_tensor(weight, [shape.step, shape.columns])


def row_stats(x: torch.Tensor) -> torch.Tensor:
    """Mean and one over the deviation of each row of x[m, k], float32[m, 2]."""
    m, k = x.shape
    stats = torch.empty(m, 2, dtype=torch.float32, device=x.device)
    rows = 4
    _stats_kernel[(cdiv(m, rows),)](
        x, stats, x.stride(0), m, k, EPS, ROWS=rows, WIDTH=next_power_of_2(k), num_warps=4
    )
    return stats


def gate_output(
    x: torch.Tensor, u: torch.Tensor, o: torch.Tensor, norm: AffineNorm, weight: torch.Tensor
) -> torch.Tensor:
    """u may be columns of a wider matrix."""
    (m, width), n = o.shape, weight.shape[1]
    shape, tma = (OUTPUT, True) if on_hopper() else (SMALL, False)
    assert width % shape.step == 0 and x.stride(1) == u.stride(1) == o.stride(1) == 1
    stats, out = row_stats(o), torch.empty(m, n, dtype=x.dtype, device=x.device)
    left, right, gate = o, weight, u
    if tma:
        left, right = _operands(o, weight, shape)  # type: ignore[assignment]
        gate = TensorDescriptor.from_tensor(u, [shape.rows, shape.step])  # type: ignore[assignment]
    output_kernel[(cdiv(n, shape.columns), cdiv(m, shape.rows))](
        x, gate, left, right, stats, norm.weight, norm.bias, out, x.stride(0), u.stride(0),
        o.stride(0), weight.stride(0), out.stride(0), m, width, n,
        ROWS=shape.rows, COLUMNS=shape.columns, STEP=shape.step, STAGES=shape.stages, TMA=tma,
        num_warps=shape.warps,
    )  # fmt: skip
    return out


def gate_rows(u: torch.Tensor, o: torch.Tensor, norm: AffineNorm) -> QuantizedRows:
    """u may be columns of a wider matrix."""
    m, width = o.shape
    assert u.stride(1) == o.stride(1) == 1
    out = torch.empty(m, 3 * width, dtype=FP8.dtype, device=o.device)
    scales = torch.empty(m, dtype=torch.float32, device=o.device)
    block = next_power_of_2(width)
    gate_rows_kernel[(m,)](
        u, o, norm.weight, norm.bias, out, scales, u.stride(0), o.stride(0), width, EPS,
        BLOCK=block, FAST=on_hopper(), num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)),
    )  # fmt: skip
    return QuantizedRows(out, scales)
