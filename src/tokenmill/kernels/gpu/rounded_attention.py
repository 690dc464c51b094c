"""Rounding of queries, keys and values for attention, and attention over what was rounded.

Codes lie by head: queries and keys [b, heads, tiles * TILE, DIM], values in fp8 with the keys of a
channel side by side, [b, heads, DIM, tiles * TILE]. Places past the end are zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu import bidirectional
from tokenmill.kernels.gpu.bidirectional import Packed, key_order
from tokenmill.kernels.gpu.dependent import launch_options, wait

if TYPE_CHECKING:
    from tokenmill.kernels.rounded_attention import Rounding

TILE = 128
FP8_LIMIT = 448.0


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
    scales = torch.maximum(-low, high).float().clamp_(min=1e-30) / FP8_LIMIT
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
    return bidirectional.attend_packed(pack(q, k, v, rounding), q, k.shape[1])
