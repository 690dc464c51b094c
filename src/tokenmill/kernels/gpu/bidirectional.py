"""Attention without a mask or a cache: norm over all heads and rotation in one pass, the softmax.

A program of attention takes a tile of one head's queries. It is the plain kernel of any GPU; that
of bidirectional_hopper.py reads the same tensors.

What kernels/rounded_attention.py rounds lies by head: codes of queries and keys
[b, heads, tiles * TILE, DIM], values in fp8 with the keys of a channel side by side,
[b, heads, DIM, tiles * TILE]. Places past the end are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels import bidirectional, triton_kernels
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.attention import LOG2E
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.rows import ELEMENTS_PER_WARP, FP8_LIMIT, MAX_WARPS

if TYPE_CHECKING:
    from tokenmill.kernels.rounded_attention import Rounding

TILE = 128  # of codes
DIM = 128  # of the heads that the Hopper kernel takes
MASKED = tl.constexpr(-1e30)
WEIGHT_SHIFT = tl.constexpr(8.0)  # weights in fp8 are up to 2^8


class AttentionShape(NamedTuple):
    """How a program of attention is laid out."""

    rows: int = 128
    keys: int = 128
    stages: int = 2
    warps: int = 8


class HopperShape(NamedTuple):
    """The same of the Hopper kernel, whose tiles are fixed."""

    stages: int = 2
    turns: bool = True  # the groups begin their products in turns


SHAPE = AttentionShape()
CODES_SHAPE = AttentionShape()  # as codes are packed
HOPPER_SHAPE = HopperShape()


class Packed(NamedTuple):
    """What attention reads: plain [b, n, heads, dim], or codes."""

    q: torch.Tensor
    q_scales: torch.Tensor | None
    k: torch.Tensor
    k_scales: torch.Tensor | None
    v: torch.Tensor
    v_scales: torch.Tensor | None

    def rows(self, part: torch.Tensor, codes: bool) -> torch.Tensor:
        """A part as a matrix: rows of codes, or of all heads' channels."""
        if codes:
            return part.flatten(0, 2)
        assert part.stride(3) == 1 and part.stride(2) == part.shape[3]
        assert part.shape[0] == 1 or part.stride(0) == part.shape[1] * part.stride(1)
        b, n, heads, dim = part.shape
        return part.as_strided((b * n, heads * dim), (part.stride(1), 1))


@triton.jit
def norm_rotate_kernel(
    x, weight, cos, sin, out, tokens, stride, k, eps,
    HALF: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values, axis=0) / k + eps) * gain
    if ROTATE:
        pairs = tl.arange(0, BLOCK // 2)
        first, second = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
        places = (row % tokens) * HALF + pairs % HALF  # the same turns for every head
        c, s = tl.load(cos + places), tl.load(sin + places)
        y = tl.reshape(tl.join(first * c - second * s, first * s + second * c), (BLOCK,))
    tl.store(out + row * k + columns, y.to(out.dtype.element_ty), mask=inside)


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_heads: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """x[b, n, k], a part of wider rows or whole ones, -> [b, n, heads, dim]."""
    branches, tokens, k = x.shape
    assert x.stride(2) == 1 and x.stride(0) == tokens * x.stride(1)
    assert k % (2 * num_heads) == 0 and weight.is_contiguous()
    cos, sin = (weight, weight) if rotation is None else rotation
    assert cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(branches, tokens, num_heads, k // num_heads, device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(k)
    norm_rotate_kernel[(branches * tokens,)](
        x, weight, cos, sin, out, tokens, x.stride(1), k, eps,
        HALF=k // num_heads // 2, ROTATE=rotation is not None, BLOCK=block,
        num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)), **launch_options(),
    )  # fmt: skip
    return out


@triton.jit
def key_order(place):
    """The key that lies at a place among 16: a thread's weights are then four keys in a row."""
    return (place & -15) | ((place & 6) << 1) | ((place & 8) >> 2)


@triton.jit
def _tile(base, row, column, stride, left, ROWS: tl.constexpr, WIDTH: tl.constexpr,
          TMA: tl.constexpr):  # fmt: skip
    """A tile [ROWS, WIDTH]; of its rows `left` are read, the others may be any."""
    if TMA:
        return base.load([row, column])
    else:
        index = tl.arange(0, ROWS)
        lines = (row + index).to(tl.int64)[:, None] * stride + column
        return tl.load(
            base + lines + tl.arange(0, WIDTH)[None, :], mask=(index < left)[:, None], other=0.0
        )


@triton.jit
def _weigh(
    queries, acc, peak, total, k, v, k_scales, factor, places, begin, end, num_keys,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    CODES: tl.constexpr, FP8: tl.constexpr, RAGGED: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Sums, peaks and totals with the keys [begin, end); RAGGED: some are past the last one."""
    k_row, k_column, k_stride, v_row, v_column, v_stride = places
    for first in tl.range(begin, end, KEYS, num_stages=STAGES):
        left = num_keys - first
        keys = _tile(k, k_row + first, k_column, k_stride, KEYS if CODES else left, KEYS, DIM, TMA)
        scores = tl.dot(queries, tl.trans(keys)).to(tl.float32)
        by = factor
        if CODES:
            by = factor * tl.load(k_scales + first // KEYS)
        if RAGGED:
            place = tl.arange(0, KEYS)
            key = key_order(place) if FP8 else place
            scores = tl.where((key < left)[None, :], scores * by[:, None], MASKED)
            by = tl.full([ROWS], 1.0, tl.float32)
        top = tl.maximum(peak, tl.max(scores, axis=1) * by)
        offset = top - WEIGHT_SHIFT if FP8 else top
        weights = tl.exp2(scores * by[:, None] - offset[:, None])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, axis=1)
        peak = top
        acc *= shrink[:, None]
        if FP8:
            split = tl.permute(tl.reshape(weights, (ROWS, KEYS // 16, 2, 4, 2)), (0, 1, 3, 2, 4))
            values = _tile(v, v_row, v_column + first, v_stride, DIM, DIM, KEYS, TMA)
            acc += tl.dot(tl.reshape(split, (ROWS, KEYS)).to(values.dtype), tl.trans(values))
        else:
            values = _tile(v, v_row + first, v_column, v_stride, left, KEYS, DIM, TMA)
            acc = tl.dot(weights.to(values.dtype), values, acc)
    return acc, peak, total


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def attend_kernel(
    q, k, v, out, q_scales, k_scales, v_scales, num_queries, num_keys, heads, q_stride, k_stride,
    v_stride, scale,
    DIM: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, STAGES: tl.constexpr,
    CODES: tl.constexpr, FP8: tl.constexpr, TMA: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of one tile of queries, one head, one sequence, to out[b, n, heads, DIM]."""
    wait(EARLY)
    tile, head, branch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = branch * heads + head
    row = tile * ROWS + tl.arange(0, ROWS)
    channels = tl.arange(0, DIM)
    valid = row < num_queries
    factor = tl.full([ROWS], scale, tl.float32) * LOG2E
    count = tl.cdiv(num_keys, KEYS)
    if CODES:
        q_row, q_column = group.to(tl.int64) * tl.cdiv(num_queries, ROWS) * ROWS, 0
        k_row, k_column = group * count * KEYS, 0
        factor *= tl.load(q_scales + q_row + row)
        k_scales += group * count
    else:
        q_row, q_column = branch.to(tl.int64) * num_queries, head * DIM
        k_row, k_column = branch * num_keys, head * DIM
    if FP8:
        v_row, v_column = group * DIM, 0
    else:
        v_row, v_column = branch * num_keys, head * DIM
    lines = q + (q_row + row)[:, None] * q_stride + q_column
    queries = tl.load(lines + channels[None, :], mask=valid[:, None], other=0.0)
    places = (k_row, k_column, k_stride, v_row, v_column, v_stride)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    peak, total = tl.full([ROWS], MASKED, tl.float32), tl.zeros([ROWS], tl.float32)
    whole = num_keys // KEYS * KEYS
    acc, peak, total = _weigh(
        queries, acc, peak, total, k, v, k_scales, factor, places, 0, whole, num_keys,
        DIM, ROWS, KEYS, STAGES, CODES, FP8, False, TMA,
    )  # fmt: skip
    acc, peak, total = _weigh(
        queries, acc, peak, total, k, v, k_scales, factor, places, whole, num_keys, num_keys,
        DIM, ROWS, KEYS, 1, CODES, FP8, True, TMA,
    )  # fmt: skip
    acc = acc / total[:, None]
    if FP8:
        acc *= tl.load(v_scales + group * DIM + channels)[None, :]
    place = ((branch.to(tl.int64) * num_queries + row) * heads + head)[:, None] * DIM
    tl.store(out + place + channels[None, :], acc.to(out.dtype.element_ty), mask=valid[:, None])


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """q[b, n, heads, dim], k and v[b, m, heads, dim] -> as q."""
    return attend_packed(Packed(_rows(q), None, _rows(k), None, _rows(v), None), q, k.shape[1])


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x[b, n, heads, dim] with the heads of a token side by side, and tokens at even distances."""
    b, n, _, dim = x.shape
    even = b == 1 or x.stride(0) == n * x.stride(1)
    return x if x.stride(3) == 1 and x.stride(2) == dim and even else x.contiguous()


def attend_packed(packed: Packed, like: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Attention over plain or rounded tensors; the result is as `like`[b, n, heads, dim]."""
    out = torch.empty(like.shape, device=like.device, dtype=like.dtype)
    fits = like.shape[3] == DIM and like.dtype == torch.bfloat16
    if bidirectional.KERNEL == "hopper" and hopper.is_usable() and fits:
        triton_kernels("bidirectional_hopper").launch(packed, out, num_keys, HOPPER_SHAPE)
    else:
        _launch(packed, out, num_keys)
    return out


def _launch(packed: Packed, out: torch.Tensor, num_keys: int) -> None:
    branches, num_queries, heads, dim = out.shape
    codes, fp8 = packed.q_scales is not None, packed.v_scales is not None
    q, k = packed.rows(packed.q, codes), packed.rows(packed.k, codes)
    v = packed.rows(packed.v, fp8)
    tma, shape = hopper.is_here(), CODES_SHAPE if codes else SHAPE
    key_tile, value_tile = [shape.keys, dim], [dim, shape.keys] if fp8 else [shape.keys, dim]
    attend_kernel[(triton.cdiv(num_queries, shape.rows), heads, branches)](
        q, TensorDescriptor.from_tensor(k, key_tile) if tma else k,
        TensorDescriptor.from_tensor(v, value_tile) if tma else v, out, packed.q_scales,
        packed.k_scales, packed.v_scales, num_queries, num_keys, heads, q.stride(0), k.stride(0),
        v.stride(0), dim**-0.5, DIM=dim, ROWS=shape.rows, KEYS=shape.keys, STAGES=shape.stages,
        CODES=codes, FP8=fp8, TMA=tma, num_warps=shape.warps, **launch_options(),
    )  # fmt: skip


@triton.jit
def round_rows_kernel(
    x, mean, codes, scales, tokens, branch_stride, row_stride, heads, limit,
    BLOCKS: tl.constexpr, ORDERED: tl.constexpr, CENTRED: tl.constexpr, TILE: tl.constexpr,
    DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of one head's rows; BLOCKS: with one scale, ORDERED: in the order of `key_order`."""
    wait(EARLY)
    tile, head, branch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    place, channel = tl.arange(0, TILE), tl.arange(0, DIM)[None, :]
    token = tile * TILE + (key_order(place) if ORDERED else place)
    inside = (token < tokens)[:, None]
    lines = x + branch * branch_stride + token.to(tl.int64)[:, None] * row_stride + head * DIM
    values = tl.load(lines + channel, mask=inside, other=0.0).to(tl.float32)
    group = branch * heads + head
    if CENTRED:
        values = tl.where(inside, values - tl.load(mean + group * DIM + channel), 0.0)
    peaks = tl.max(tl.abs(values), axis=1)
    row = (group * tl.num_programs(0) + tile) * TILE + place
    if BLOCKS:
        peak = tl.maximum(tl.max(peaks, axis=0), 1e-30)
        tl.store(scales + group * tl.num_programs(0) + tile, peak / limit)
        rounded = values * (limit / peak)
    else:
        peaks = tl.maximum(peaks, 1e-30)
        tl.store(scales + row, peaks / limit)
        rounded = values * (limit / peaks)[:, None]
    if codes.dtype.element_ty == tl.int8:
        rounded = tl.floor(rounded + 0.5)
    tl.store(codes + row[:, None] * DIM + channel, rounded.to(codes.dtype.element_ty))


@triton.jit
def round_values_kernel(
    v, scales, codes, tokens, branch_stride, row_stride, heads,
    TILE: tl.constexpr, DIM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of one head's values, each channel by its scale, to where a channel's keys lie."""
    wait(EARLY)
    tile, head, branch = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    token, channel = tile * TILE + tl.arange(0, TILE), tl.arange(0, DIM)
    inside = (token < tokens)[:, None]
    lines = v + branch * branch_stride + token.to(tl.int64)[:, None] * row_stride + head * DIM
    values = tl.load(lines + channel[None, :], mask=inside, other=0.0).to(tl.float32)
    group = branch * heads + head
    scale = tl.load(scales + group * DIM + channel)
    rounded = tl.trans(values / scale[None, :])
    row = (group * DIM + channel) * tl.num_programs(0) * TILE
    tl.store(codes + row[:, None] + token[None, :], rounded.to(codes.dtype.element_ty))


def round_rows(
    x: torch.Tensor, rounding: Rounding, mean: torch.Tensor | None, blocks: bool, ordered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """x[b, n, heads, dim] -> codes, and scales of tiles [b, heads, tiles] or of all rows."""
    branches, tokens, heads, dim = x.shape
    assert x.stride(3) == 1 and x.stride(2) == dim
    tiles = triton.cdiv(tokens, TILE)
    codes = torch.empty(
        branches, heads, tiles * TILE, dim, device=x.device, dtype=rounding.codes
    )  # fmt: skip
    shape = (branches, heads, tiles if blocks else tiles * TILE)
    scales = torch.empty(shape, device=x.device, dtype=torch.float32)
    round_rows_kernel[(tiles, heads, branches)](
        x, scales if mean is None else mean, codes, scales, tokens, x.stride(0), x.stride(1),
        heads, rounding.limit, BLOCKS=blocks, ORDERED=ordered, CENTRED=mean is not None,
        TILE=TILE, DIM=dim, num_warps=8, **launch_options(),
    )  # fmt: skip
    return codes, scales


def round_values(v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """v[b, n, heads, dim] -> fp8 codes [b, heads, dim, tiles * TILE] and scales [b, heads, dim]."""
    branches, tokens, heads, dim = v.shape
    assert v.stride(3) == 1 and v.stride(2) == dim
    tiles = triton.cdiv(tokens, TILE)
    low, high = torch.aminmax(v, dim=1)
    scales = torch.maximum(-low, high).float().clamp_(min=1e-30) / FP8_LIMIT.value
    codes = torch.empty(
        branches, heads, dim, tiles * TILE, device=v.device, dtype=torch.float8_e4m3fn
    )  # fmt: skip
    round_values_kernel[(tiles, heads, branches)](
        v, scales, codes, tokens, v.stride(0), v.stride(1), heads,
        TILE=TILE, DIM=dim, num_warps=8, **launch_options(),
    )  # fmt: skip
    return codes, scales


def pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: Rounding) -> Packed:
    """All that attention reads."""
    fp8 = rounding.fp8_values
    mean = k.mean(1, dtype=torch.float32).contiguous()
    queries = round_rows(q, rounding, None, blocks=False, ordered=False)
    keys = round_rows(k, rounding, mean, blocks=True, ordered=fp8)
    values = round_values(v) if fp8 else (v, None)
    return Packed(*queries, *keys, *values)


def attend_rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """q[b, n, heads, dim], k and v[b, m, heads, dim] -> as q."""
    return attend_packed(pack(_rows(q), _rows(k), _rows(v), rounding), q, k.shape[1])
