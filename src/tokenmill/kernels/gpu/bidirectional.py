"""What attention without a mask reads: norm over all heads and rotation in one pass, rounding.

The attention itself is in hopper/bidirectional.py.

What is rounded lies by head: codes of queries and keys
[b, heads, tiles * TILE, DIM], values in fp8 with the keys of a channel side by side,
[b, heads, DIM, tiles * TILE]. Places past the end are zeros.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.kernels.bidirectional import AttentionRounding, Rotation
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper import bidirectional as hopper
from tokenmill.kernels.gpu.launch import cdiv, quick
from tokenmill.kernels.gpu.modulation import load_row, row_parts, store_row
from tokenmill.kernels.gpu.rows import FP8_LIMIT

TILE = 128  # of codes


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
def _rotated(y, cos, sin, FIRST: tl.constexpr, SIZE: tl.constexpr, HALF: tl.constexpr):
    """Channels of a token from FIRST on, with its cos and sin, which are the same in each head."""
    first, second = tl.split(tl.reshape(y, (SIZE // 2, 2)))
    turn = (FIRST // 2 + tl.arange(0, SIZE // 2)) % HALF
    c, s = tl.load(cos + turn), tl.load(sin + turn)
    return tl.reshape(tl.join(first * c - second * s, first * s + second * c), (SIZE,))


@quick
@triton.jit
def norm_rotate_kernel(
    x, weight, cos, sin, out, tokens, stride, k, eps,
    HALF: tl.constexpr, ROTATE: tl.constexpr,
    HEAD: tl.constexpr, TAIL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    wait(EARLY)
    head, tail = load_row(x + row * stride, k, HEAD, TAIL)
    squares = tl.sum(head * head, axis=0) + tl.sum(tail * tail, axis=0)
    inverse = tl.rsqrt(squares / k + eps)
    gain, last = load_row(weight, k, HEAD, TAIL)
    head, tail = head * inverse * gain, tail * inverse * last
    if ROTATE:
        place = (row % tokens) * HALF
        head = _rotated(head, cos + place, sin + place, 0, HEAD, HALF)
        tail = _rotated(tail, cos + place, sin + place, HEAD, TAIL, HALF)
    store_row(out + row * k, head, tail, k, HEAD, TAIL)


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_heads: int, rotation: Rotation | None
) -> torch.Tensor:
    """x may be a part of wider rows."""
    branches, tokens, k = x.shape
    assert x.stride(2) == 1 and x.stride(0) == tokens * x.stride(1)
    assert k % (2 * num_heads) == 0 and weight.is_contiguous()
    cos, sin = (weight, weight) if rotation is None else rotation
    assert cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(branches, tokens, num_heads, k // num_heads, device=x.device, dtype=x.dtype)
    norm_rotate_kernel[(branches * tokens,)](
        x, weight, cos, sin, out, tokens, x.stride(1), k, eps,
        HALF=k // num_heads // 2, ROTATE=rotation is not None, **row_parts(k),
    )  # fmt: skip
    return out


@triton.jit
def key_order(place):
    """The key that lies at a place among 16: a thread's weights are then four keys in a row."""
    return (place & -15) | ((place & 6) << 1) | ((place & 8) >> 2)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attend_packed(plain(q, k, v), q, k.shape[1])


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Packed:
    """All that attention reads, as it comes."""
    return Packed(_rows(q), None, _rows(k), None, _rows(v), None)


def _rows(x: torch.Tensor) -> torch.Tensor:
    """x[b, n, heads, dim] with the heads of a token side by side, and tokens at even distances."""
    b, n, _, dim = x.shape
    even = b == 1 or x.stride(0) == n * x.stride(1)
    return x if x.stride(3) == 1 and x.stride(2) == dim and even else x.contiguous()


def attend_packed(packed: Packed, like: torch.Tensor, num_keys: int) -> torch.Tensor:
    """Attention over plain or rounded tensors; the result is as `like`[b, n, heads, dim]."""
    out = torch.empty(like.shape, device=like.device, dtype=like.dtype)
    hopper.launch(packed, out, num_keys)
    return out


@quick
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


@quick
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
    x: torch.Tensor,
    rounding: AttentionRounding,
    mean: torch.Tensor | None,
    blocks: bool,
    ordered: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """x[b, n, heads, dim] -> codes, and scales of tiles [b, heads, tiles] or of all rows."""
    branches, tokens, heads, dim = x.shape
    assert x.stride(3) == 1 and x.stride(2) == dim
    tiles = cdiv(tokens, TILE)
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
    tiles = cdiv(tokens, TILE)
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


def pack(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: AttentionRounding) -> Packed:
    fp8 = rounding.fp8_values
    mean = k.mean(1, dtype=torch.float32).contiguous()
    queries = round_rows(q, rounding, None, blocks=False, ordered=False)
    keys = round_rows(k, rounding, mean, blocks=True, ordered=fp8)
    values = round_values(v) if fp8 else (v, None)
    return Packed(*queries, *keys, *values)


def attend_rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: AttentionRounding
) -> torch.Tensor:
    return attend_packed(pack(_rows(q), _rows(k), _rows(v), rounding), q, k.shape[1])
