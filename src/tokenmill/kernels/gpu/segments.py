"""Attention inside segments, and the rotation before it, for heads of any size.

A program takes a tile of one segment's queries and one head. The tensor cores take 16, 32, 64, ...
channels at once: a head of 72 is one part of 64 channels and one of 16, half of which count.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.dependent import enabled, launch_options, wait
from tokenmill.kernels.gpu.hopper import segments as hopper_segments
from tokenmill.kernels.gpu.hopper.two_groups import LOG2E
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.segments import TILE_ROWS, Segments

NARROWEST = 16  # channels of a product


class SegmentTile(NamedTuple):
    """How a program goes through its keys."""

    keys: int = 64  # per turn
    warps: int = 4
    stages: int = 3


TILE = SegmentTile()


@quick
@triton.jit
def _rotate_kernel(
    qkv, cos_sin, stride, heads, scale,
    HALF: tl.constexpr, CHANNELS: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channels = tl.arange(0, CHANNELS)
    inside = (head < 2 * heads)[:, None] & (channels < HALF)[None, :]
    base = qkv + token * stride + head[:, None] * (2 * HALF) + channels[None, :]
    wait(EARLY)
    table = cos_sin + token * (2 * HALF) + channels
    cos = tl.load(table, mask=channels < HALF, other=0.0)[None, :]
    sin = tl.load(table + HALF, mask=channels < HALF, other=0.0)[None, :]
    a = tl.load(base, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(base + HALF, mask=inside, other=0.0).to(tl.float32)
    factor = tl.where(head < heads, scale, 1.0)[:, None]
    low, high = (a * cos - b * sin) * factor, (b * cos + a * sin) * factor
    tl.store(base, low.to(qkv.dtype.element_ty), mask=inside)
    tl.store(base + HALF, high.to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _part(
    rows, tensor, stride, span, end, column,
    FIRST: tl.constexpr, WIDTH: tl.constexpr, DIM: tl.constexpr, COUNT: tl.constexpr,
    TMA: tl.constexpr,
):  # fmt: skip
    """Rows [span, span + COUNT) of channels [FIRST, FIRST + WIDTH) of the head at `column`.

    Channels from DIM on are zero, or those of what lies behind the head; rows from `end` on any.
    """
    if TMA:
        return rows.load([span, column + FIRST])
    else:
        row = tl.minimum(span + tl.arange(0, COUNT), end - 1).to(tl.int64)
        channel = FIRST + tl.arange(0, WIDTH)
        place = tensor + row[:, None] * stride + column + channel[None, :]
        return tl.load(place, mask=(channel < DIM)[None, :], other=0.0)


@triton.jit
def _attend(
    low_q, high_q, peak, total, low_sum, high_sum, low_rows, high_rows, qkv, stride, column, size,
    begin, stop, end,
    MASKED: tl.constexpr, DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over keys [begin, stop), KEYS at a time; MASKED: some are behind `end`."""
    for span in tl.range(begin, stop, KEYS, num_stages=STAGES):
        low_k = _part(low_rows, qkv, stride, span, end, column + size, 0, LOW, DIM, KEYS, TMA)
        scores = tl.dot(low_q, tl.trans(low_k))
        if HIGH > 0:
            high_k = _part(
                high_rows, qkv, stride, span, end, column + size, LOW, HIGH, DIM, KEYS, TMA
            )
            scores = tl.dot(high_q, tl.trans(high_k), scores)
        if MASKED:
            key = span + tl.arange(0, KEYS)
            scores = tl.where((key < end)[None, :], scores, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1) * LOG2E)
        weights = tl.exp2(scores * LOG2E - top[:, None])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, axis=1)
        low_v = _part(low_rows, qkv, stride, span, end, column + 2 * size, 0, LOW, DIM, KEYS, TMA)
        weights = weights.to(low_v.dtype)
        low_sum = tl.dot(weights, low_v, low_sum * shrink[:, None])
        if HIGH > 0:
            high_v = _part(
                high_rows, qkv, stride, span, end, column + 2 * size, LOW, HIGH, DIM, KEYS, TMA
            )
            high_sum = tl.dot(weights, high_v, high_sum * shrink[:, None])
        peak = top
    return peak, total, low_sum, high_sum


@quick
@triton.jit
def segment_kernel(
    qkv, low_rows, high_rows, out, tiles, stride, out_stride, size,
    DIM: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    column, tile = tl.program_id(0) * DIM, tiles + 3 * tl.program_id(1)
    first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = first + tl.arange(0, ROWS)
    valid = (row < end)[:, None]
    low, high = tl.arange(0, LOW), LOW + tl.arange(0, HIGH if HIGH > 0 else LOW)
    line = qkv + row.to(tl.int64)[:, None] * stride + column
    # Channels that are not the head's have queries of zero.
    low_q = tl.load(line + low[None, :], mask=valid & (low < DIM)[None, :], other=0.0)
    high_q = low_q
    if HIGH > 0:
        high_q = tl.load(line + high[None, :], mask=valid & (high < DIM)[None, :], other=0.0)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    low_sum = tl.zeros([ROWS, LOW], tl.float32)
    high_sum = tl.zeros([ROWS, HIGH if HIGH > 0 else LOW], tl.float32)
    whole = begin + (end - begin) // KEYS * KEYS
    peak, total, low_sum, high_sum = _attend(
        low_q, high_q, peak, total, low_sum, high_sum, low_rows, high_rows, qkv, stride, column,
        size, begin, whole, end, False, DIM, LOW, HIGH, KEYS, TMA, STAGES,
    )  # fmt: skip
    peak, total, low_sum, high_sum = _attend(
        low_q, high_q, peak, total, low_sum, high_sum, low_rows, high_rows, qkv, stride, column,
        size, whole, end, end, True, DIM, LOW, HIGH, KEYS, TMA, STAGES,
    )  # fmt: skip
    written = out + row.to(tl.int64)[:, None] * out_stride + column
    inverse = (1.0 / total)[:, None]
    kind = out.dtype.element_ty
    tl.store(
        written + low[None, :], (low_sum * inverse).to(kind), mask=valid & (low < DIM)[None, :]
    )
    if HIGH > 0:
        tl.store(
            written + high[None, :],
            (high_sum * inverse).to(kind),
            mask=valid & (high < DIM)[None, :],
        )


def rotate_heads(qkv: torch.Tensor, cos_sin: torch.Tensor, num_heads: int, scale: float) -> None:
    half = cos_sin.shape[1] // 2
    assert qkv.stride(1) == 1 and cos_sin.is_contiguous() and cos_sin.dtype == torch.float32
    assert qkv.shape == (cos_sin.shape[0], 6 * num_heads * half)
    heads = min(16, next_power_of_2(2 * num_heads))
    _rotate_kernel[(qkv.shape[0], cdiv(2 * num_heads, heads))](
        qkv, cos_sin, qkv.stride(0), num_heads, scale,
        HALF=half, CHANNELS=next_power_of_2(half), HEADS=heads, num_warps=4,
        **launch_options(),
    )  # fmt: skip


def split_channels(dim: int) -> tuple[int, int]:
    """The widths of a head's two parts; the second is 0 where one takes all channels."""
    low = 1 << (dim.bit_length() - 1)
    if low == dim or low < NARROWEST:
        return max(NARROWEST, next_power_of_2(dim)), 0
    high = max(NARROWEST, next_power_of_2(dim - low))
    return (2 * low, 0) if high == low else (low, high)


def segment_attention(qkv: torch.Tensor, segments: Segments, num_heads: int) -> torch.Tensor:
    aligned = qkv.stride(0) * qkv.element_size() % 16 == 0
    suits = hopper_segments.takes(qkv.shape[1] // 3 // num_heads)
    if aligned and suits and hopper.is_usable() and qkv.dtype == torch.bfloat16:
        return hopper_segments.attend(qkv, segments, num_heads)
    return attend(qkv, segments, num_heads, TILE, aligned and enabled())


def attend(
    qkv: torch.Tensor, segments: Segments, num_heads: int, shape: SegmentTile, tma: bool
) -> torch.Tensor:
    """segment_attention() by tiles of a shape; `tma`: the copy engine reads keys and values."""
    size = qkv.shape[1] // 3
    low, high = split_channels(size // num_heads)
    out = torch.empty(qkv.shape[0], size, dtype=qkv.dtype, device=qkv.device)
    assert qkv.is_contiguous() and size % num_heads == 0
    rows = [
        TensorDescriptor.from_tensor(qkv, [shape.keys, width]) if tma and width else qkv
        for width in (low, high)
    ]
    segment_kernel[(num_heads, segments.tiles.shape[0])](
        qkv, *rows, out, segments.tiles, qkv.stride(0), size, size,
        DIM=size // num_heads, LOW=low, HIGH=high, ROWS=TILE_ROWS, KEYS=shape.keys, TMA=tma,
        STAGES=shape.stages, num_warps=shape.warps, **launch_options(),
    )  # fmt: skip
    return out
