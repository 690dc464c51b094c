"""RoPE and the KV write into an fp8 cache: q and k are rotated and spread over channels.

A program is one warp, with queries, keys or values of one token. The table's row, the signs and the
addresses serve all heads that it has. A thread keeps eight neighbouring channels from load to
store, also when they are spread. A cache that is not fp8 is written by gpu/attention.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.attention import AttentionBatch, spread_width
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, quick

CHANNELS = 1024  # of the heads that a program rotates at a time: 16 rows of a tensor core
PROGRAMS = 8192  # that fill a large GPU more than twice; beyond, each takes more heads


@quick
@triton.jit(do_not_specialize=["q_parts", "kv_parts"])
def _spread_kernel(
    qkv, k_cache, v_cache, cos_sin, positions, slots, q_norm, k_norm, stride, heads, kv_heads,
    q_parts, kv_parts, scale, eps,
    HAS_NORM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`q_parts` programs share the queries of a token, `kv_parts` the keys, as many the values."""
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * DIM
    line = (slot // BLOCK).to(tl.int64) * kv_heads * (BLOCK * DIM) + slot % BLOCK * DIM
    q = qkv + token * stride
    k, v = q + heads * DIM, q + (heads + kv_heads) * DIM
    if part < q_parts:
        _rotate_heads(
            q, q, DIM, part, q_parts, heads, table, q_norm, scale, eps,
            HAS_NORM, DIM // 2, HEADS, WIDTH, EARLY,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _rotate_heads(
            k, k_cache + line, BLOCK * DIM, part - q_parts, kv_parts, kv_heads, table, k_norm, 1.0,
            eps, HAS_NORM, DIM // 2, HEADS, WIDTH, EARLY,
        )  # fmt: skip
    else:
        _copy_heads(
            v, v_cache + line, BLOCK * DIM, part - q_parts - kv_parts, kv_parts, kv_heads,
            DIM // 2, HEADS, EARLY,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    x, out, out_stride, part, parts, heads, table, norm, scale, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Norm, rotation and spread of every `parts`-th HEADS heads of x[heads, 2 * HALF] into out."""
    channels = _channels(HALF)
    cos, sin = tl.load(table + channels), tl.load(table + HALF + channels)
    if HAS_NORM:
        a_gain, b_gain = tl.load(norm + channels), tl.load(norm + HALF + channels)
    wait(EARLY)
    # Heads are on their way while what all of them share is computed, and then while the heads
    # before them are rotated.
    next_a, next_b = _load_heads(x, part * HEADS, heads, HALF, HEADS)
    scale *= (2 * WIDTH) ** -0.5
    signs = _hadamard(WIDTH)
    cos, sin = cos * scale, sin * scale
    a_cos, a_sin, b_cos, b_sin = cos, sin, cos, sin
    if HAS_NORM:
        a_gain, b_gain = a_gain.to(tl.float32), b_gain.to(tl.float32)
        a_cos, a_sin, b_cos, b_sin = cos * a_gain, sin * a_gain, cos * b_gain, sin * b_gain
    # The two channels of a rotation become their sum and difference.
    a_cos, a_sin, b_cos, b_sin = a_cos + a_sin, a_cos - a_sin, b_cos + b_sin, b_cos - b_sin
    # More stages would take the heads through shared memory.
    for first in tl.range(part * HEADS, heads, parts * HEADS, num_stages=1):
        a, b = next_a.to(tl.float32), next_b.to(tl.float32)
        next_a, next_b = _load_heads(x, first + parts * HEADS, heads, HALF, HEADS)
        if HAS_NORM:
            total = tl.sum(tl.sum(a * a + b * b, axis=2), axis=1)
            inverse = tl.rsqrt(total / (2 * HALF) + eps)[:, None, None]
            a, b = a * inverse, b * inverse
        low = _spread(a * a_cos + b * b_sin, signs, HEADS, HALF, WIDTH)
        high = _spread(a * a_sin - b * b_cos, signs, HEADS, HALF, WIDTH)
        _store_heads(out, out_stride, first, heads, low, high, HALF, HEADS)


@triton.jit
def _copy_heads(
    x, out, out_stride, part, parts, heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th HEADS heads of x[heads, 2 * HALF] as they are."""
    wait(EARLY)
    for first in range(part * HEADS, heads, parts * HEADS):
        a, b = _load_heads(x, first, heads, HALF, HEADS)
        _store_heads(out, out_stride, first, heads, a.to(tl.float32), b.to(tl.float32), HALF, HEADS)


@triton.jit
def _channels(HALF: tl.constexpr):
    """Channels [1, HALF / 8, 8] of half a head.

    The last dimension gives a thread eight neighbours, also where more would fit into a store.
    """
    return (tl.arange(0, HALF // 8)[:, None] * 8 + tl.arange(0, 8)[None, :])[None]


@triton.jit
def _load_heads(x, first, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Both halves of x[first : first + HEADS], [HEADS, HALF / 8, 8] each; zeros from `heads` on."""
    head = tl.arange(0, HEADS)[:, None, None]
    inside = head < heads - first
    places = x + first * (2 * HALF) + head * (2 * HALF) + _channels(HALF)
    return tl.load(places, mask=inside, other=0.0), tl.load(places + HALF, mask=inside, other=0.0)


@triton.jit
def _store_heads(out, stride, first, heads, low, high, HALF: tl.constexpr, HEADS: tl.constexpr):
    head = tl.arange(0, HEADS)[:, None, None]
    inside = head < heads - first
    places = out + first * stride + head * stride + _channels(HALF)
    tl.store(places, low.to(out.dtype.element_ty), mask=inside)
    tl.store(places + HALF, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _hadamard(WIDTH: tl.constexpr):
    """fp16 [WIDTH, WIDTH], up to 32: negative where row and column share an odd number of bits."""
    shared = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    ODD: tl.constexpr = -0x6996966A  # of its bits those whose number has an odd number of ones
    return tl.where((ODD >> shared) & 1 == 1, -1.0, 1.0).to(tl.float16)


@triton.jit
def _spread(x, signs, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Each WIDTH channels of x[HEADS, HALF / 8, 8] times the signs.

    In a row of a tensor core a thread has two of every eight elements, and here eight neighbours.
    So the elements of a row change places: the bits of their numbers do, and a Hadamard matrix
    whose rows and columns change places alike is the same. Thus no value leaves its thread.
    """
    ROWS: tl.constexpr = HEADS * HALF // WIDTH
    rows = tl.reshape(x.to(tl.float16), [ROWS, 4, WIDTH // 8, 2])
    rows = tl.reshape(tl.permute(rows, [0, 2, 1, 3]), [ROWS, WIDTH])
    rows = tl.reshape(tl.dot(rows, signs), [ROWS, WIDTH // 8, 4, 2])
    return tl.reshape(tl.permute(rows, [0, 2, 1, 3]), [HEADS, HALF // 8, 8])


def rotate_and_spread(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """As rope_and_cache of gpu/attention.py, which calls it where the cache is fp8."""
    _, kv_heads, block_size, dim = v_cache.shape
    q_norm, k_norm = norms if norms is not None else (cos_sin, cos_sin)
    heads = max(1, CHANNELS // dim)
    q_tiles, kv_tiles = cdiv(num_heads, heads), cdiv(kv_heads, heads)
    turns = max(1, qkv.shape[0] * (q_tiles + 2 * kv_tiles) // PROGRAMS)
    q_parts, kv_parts = cdiv(q_tiles, turns), cdiv(kv_tiles, turns)
    _spread_kernel[(qkv.shape[0], q_parts + 2 * kv_parts)](
        qkv, k_cache, v_cache, cos_sin, batch.positions, batch.slots, q_norm, k_norm,
        qkv.stride(0), num_heads, kv_heads, q_parts, kv_parts, scale, eps,
        HAS_NORM=norms is not None, DIM=dim, BLOCK=block_size, HEADS=heads, WIDTH=spread_width(dim),
        num_warps=1, **launch_options(),
    )  # fmt: skip
