"""Paged attention for prefill and decode alike, and RoPE with the KV write in front of it.

A program takes one tile of a sequence's query tokens and one KV head; its rows are the tokens times
the query heads that share the KV head, so that every key is read once for all of them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _head_norm(a, b, weight, HALF: tl.constexpr, eps):
    channels = tl.arange(0, HALF)
    total = tl.sum(a * a, axis=0) + tl.sum(b * b, axis=0)
    inverse = tl.rsqrt(total / (2 * HALF) + eps)
    a = a * inverse * tl.load(weight + channels).to(tl.float32)
    b = b * inverse * tl.load(weight + HALF + channels).to(tl.float32)
    return a, b


@triton.jit
def _rope_kernel(
    qkv,
    k_cache,
    v_cache,
    cos_sin,
    positions,
    slots,
    q_norm,
    k_norm,
    stride,
    heads,
    kv_heads,
    block_size,
    scale,
    eps,
    HAS_NORM: tl.constexpr,
    HALF: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    channels = tl.arange(0, HALF)
    base = qkv + token * stride + head * (2 * HALF)
    a = tl.load(base + channels).to(tl.float32)
    b = tl.load(base + HALF + channels).to(tl.float32)
    slot = tl.load(slots + token).to(tl.int64)
    block, offset = slot // block_size, slot % block_size
    if head >= heads + kv_heads:
        page = (block * kv_heads + head - heads - kv_heads) * block_size + offset
        tl.store(v_cache + page * (2 * HALF) + channels, a)
        tl.store(v_cache + page * (2 * HALF) + HALF + channels, b)
    else:
        if HAS_NORM:
            if head < heads:
                a, b = _head_norm(a, b, q_norm, HALF, eps)
            else:
                a, b = _head_norm(a, b, k_norm, HALF, eps)
        table = cos_sin + tl.load(positions + token) * (2 * HALF)
        cos, sin = tl.load(table + channels), tl.load(table + HALF + channels)
        low, high = a * cos - b * sin, b * cos + a * sin
        if head < heads:
            tl.store(base + channels, low * scale)
            tl.store(base + HALF + channels, high * scale)
        else:
            page = (block * kv_heads + head - heads) * block_size + offset
            tl.store(k_cache + page * (2 * HALF) + channels, low)
            tl.store(k_cache + page * (2 * HALF) + HALF + channels, high)


@triton.jit
def _attention_kernel(
    q,
    k_cache,
    v_cache,
    out,
    tile_seqs,
    tile_starts,
    query_starts,
    context_lens,
    tables,
    table_stride,
    q_stride,
    out_stride,
    kv_heads,
    block_size,
    window,
    tile_tokens,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    tile, head = tl.program_id(0), tl.program_id(1)
    seq = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    start = tl.load(query_starts + seq)
    length = tl.load(query_starts + seq + 1) - start
    context = tl.load(context_lens + seq)
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = first + rows // GROUP
    valid = (rows < tile_tokens * GROUP) & (token < length)
    columns = (head * GROUP + rows % GROUP) * DIM
    row = (start + token).to(tl.int64)
    queries = tl.load(
        q + row[:, None] * q_stride + columns[:, None] + channels[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    position = context + token
    end = context + tl.minimum(first + tile_tokens, length)
    begin = 0
    if window > 0:
        begin = tl.maximum(0, context + first - window + 1) // KEYS * KEYS
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    for span in range(begin, end, KEYS):
        key = span + tl.arange(0, KEYS)
        inside = key < end
        block = tl.load(tables + seq * table_stride + key // block_size, mask=inside, other=0)
        page = (block.to(tl.int64) * kv_heads + head) * (DIM * block_size)
        offset = key % block_size
        line = page[:, None] + offset[:, None] * DIM + channels[None, :]
        keys = tl.load(k_cache + line, mask=inside[:, None], other=0.0)
        scores = tl.dot(queries, tl.trans(keys))
        seen = key[None, :] <= position[:, None]
        if window > 0:
            seen = seen & (key[None, :] > position[:, None] - window)
        scores = tl.where(seen & inside[None, :], scores, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp(scores - top[:, None])
        shrink = tl.exp(peak - top)
        total = total * shrink + tl.sum(weights, axis=1)
        values = tl.load(v_cache + line, mask=inside[:, None], other=0.0)
        acc = acc * shrink[:, None] + tl.dot(weights.to(values.dtype), values)
        peak = top
    tl.store(
        out + row[:, None] * out_stride + columns[:, None] + channels[None, :],
        acc / total[:, None],
        mask=valid[:, None],
    )


def rope_and_cache(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Rotate q (times `scale`) of qkv[t, .] in place; rotate k and write k, v into their slots."""
    _, kv_heads, block_size, dim = v_cache.shape
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    q_norm, k_norm = norms if norms is not None else (cos_sin, cos_sin)
    _rope_kernel[(qkv.shape[0], num_heads + 2 * kv_heads)](
        qkv,
        k_cache,
        v_cache,
        cos_sin,
        positions,
        slots,
        q_norm,
        k_norm,
        qkv.stride(0),
        num_heads,
        kv_heads,
        block_size,
        scale,
        eps,
        HAS_NORM=norms is not None,
        HALF=dim // 2,
    )


def paged_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tile_seqs: torch.Tensor,
    tile_starts: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    block_tables: torch.Tensor,
    num_heads: int,
    tile_tokens: int,
    window: int,
) -> None:
    """Attention of pre-scaled q[t, heads * dim] over the cache into out's rows of these tiles."""
    _, kv_heads, block_size, dim = v_cache.shape
    group = num_heads // kv_heads
    rows = max(16, triton.next_power_of_2(tile_tokens * group))
    assert q.stride(1) == 1 and block_tables.is_contiguous() and dim & (dim - 1) == 0
    _attention_kernel[(tile_seqs.shape[0], kv_heads)](
        q,
        k_cache,
        v_cache,
        out,
        tile_seqs,
        tile_starts,
        query_starts,
        context_lens,
        block_tables,
        block_tables.stride(0),
        q.stride(0),
        out.stride(0),
        kv_heads,
        block_size,
        window,
        tile_tokens,
        GROUP=group,
        DIM=dim,
        ROWS=rows,
        KEYS=32,
        num_warps=1 if rows == 16 else 4,
        num_stages=2,
    )
