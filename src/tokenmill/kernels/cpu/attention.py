"""Paged attention for prefill and decode alike, and RoPE with the KV write in front of it.

Work is cut into (tile of query tokens, KV head). A tile's rows are its tokens times the query heads
that share the KV head; keys pass in spans of 64 from position 0, so that a token's sums never
depend on how its prompt was chunked or what it was batched with.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.cpu.build import compiled
from tokenmill.kernels.cpu.pool import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.spans import add_span, prefetch, score_span
from tokenmill.kernels.cpu.tiles import (
    as_float,
    exp32,
    f32_at,
    i32_at,
    i64_at,
    span_exp,
    span_max,
    span_sum,
    square_sum,
)

if TYPE_CHECKING:
    from tokenmill.kernels.attention import AttentionBatch, QueryTiles

_MASKED = np.float32(-1e30)


@compiled
def _fill(at: int, low: int, high: int, value: Any) -> None:
    """Overwrite what lies outside [low, high) of the span at an address."""
    line = carray(f32_at(at), (64,))
    for j in range(low):
        line[j] = value
    for j in range(high, 64):
        line[j] = value


@compiled
def _softmax_span(at: int, acc: Any, peaks: Any, sums: Any, low: int, high: int, r: int) -> None:
    """One online-softmax step of row r: its scores become weights, what was summed shrinks."""
    if low >= high:
        _fill(at, 64, 64, np.float32(0.0))
        return
    partial = low > 0 or high < 64
    if partial:
        _fill(at, low, high, _MASKED)
    before = peaks[r]
    top = max(before, span_max(at))
    span_exp(at, top)
    if partial:
        _fill(at, low, high, np.float32(0.0))
    total = span_sum(at)
    if top == before:
        sums[r] += total
        return
    shrink = exp32(before - top)
    peaks[r] = top
    sums[r] = sums[r] * shrink + total
    dim = len(acc) // len(sums)
    for i in range(r * dim, r * dim + dim):
        acc[i] *= shrink


@compiled
def _attend(
    queries: Any,
    queries_at: int,
    acc: Any,
    acc_at: int,
    keys: int,
    values: int,
    table: Any,
    page: int,
    block_size: int,
    window: int,
    first: int,
    last: int,
    group: int,
) -> None:
    """Attention of rows queries[rows, dim], of positions first..last, into acc[rows, dim]."""
    rows = (last - first + 1) * group
    dim = len(queries) // rows
    scratch = np.empty(rows * 66, np.float32)
    peaks, sums = scratch[rows * 64 : rows * 65], scratch[rows * 65 :]
    scores_at = scratch.ctypes.data
    addresses = np.empty(8, np.int64)
    key_slices, value_slices = addresses[:4], addresses[4:]
    peaks[:] = _MASKED
    sums[:] = np.float32(0.0)
    acc[:] = np.float32(0.0)
    span = 0 if window == 0 else max(0, first - window + 1) // 64 * 64
    while span <= last:
        slices = min(4, (last - span) // 16 + 1)
        for j in range(slices):
            block, offset = divmod(span + 16 * j, block_size)
            key_slices[j] = keys + table[block] * page + offset * 4
            value_slices[j] = values + table[block] * page + offset * dim * 4
            if rows <= 6:
                prefetch(value_slices[j], 64 * dim)
        score_span(queries_at, dim * 4, key_slices, slices, block_size * 4, dim, rows, scores_at)
        for r in range(rows):
            position = first + r // group
            low = 0 if window == 0 else max(0, position - window + 1 - span)
            high = min(64, position - span + 1)
            _softmax_span(scores_at + 256 * r, acc, peaks, sums, low, high, r)
        if rows <= 6:
            for j in range(min(4, (last - span - 64) // 16 + 1)):
                block, offset = divmod(span + 64 + 16 * j, block_size)
                prefetch(keys + table[block] * page + offset * 4, 64 * dim)
        add_span(scores_at, value_slices, slices, dim, rows, acc_at)
        span += 64
    for r in range(rows):
        inverse = np.float32(1.0) / sums[r]
        for i in range(r * dim, r * dim + dim):
            acc[i] *= inverse


def _attention_body(args: Any, task: int) -> None:
    q, out, q_stride, heads, kv_heads = args[0], args[3], args[9], args[10], args[11]
    dim, block_size, window, tile_tokens = args[12], args[13], args[14], args[15]
    tile, head = task // kv_heads, task % kv_heads
    seq = np.int64(carray(i32_at(args[4] + 4 * tile), (1,))[0])
    start = np.int64(carray(i32_at(args[5] + 4 * tile), (1,))[0])
    bounds = carray(i32_at(args[6] + 4 * seq), (2,))
    context = np.int64(carray(i32_at(args[7] + 4 * seq), (1,))[0])
    table = carray(i32_at(args[8] + 4 * seq * args[16]), (args[16],))
    tokens = min(tile_tokens, bounds[1] - bounds[0] - start)
    row, width = bounds[0] + start, heads // kv_heads * dim
    page, offset = kv_heads * dim * block_size * 4, head * dim * block_size * 4
    scratch = np.empty(2 * tokens * width, np.float32)
    queries, acc = scratch[: tokens * width], scratch[tokens * width :]
    for t in range(tokens):
        source = carray(f32_at(q + 4 * ((row + t) * q_stride + head * width)), (width,))
        queries[t * width : t * width + width] = source
    first = context + start
    _attend(
        queries,
        queries.ctypes.data,
        acc,
        acc.ctypes.data,
        args[1] + offset,
        args[2] + offset,
        table,
        page,
        block_size,
        window,
        first,
        first + tokens - 1,
        heads // kv_heads,
    )
    for t in range(tokens):
        target = carray(f32_at(out + 4 * ((row + t) * heads * dim + head * width)), (width,))
        target[:] = acc[t * width : t * width + width]


@compiled
def _rotate(x: Any, cos: Any, sin: Any, half: int, scale: Any) -> None:
    for i in range(half):
        a, b = x[i], x[half + i]
        x[i] = (a * cos[i] - b * sin[i]) * scale
        x[half + i] = (b * cos[i] + a * sin[i]) * scale


@compiled
def _head_norm(at: int, weight: Any, dim: int, eps: Any) -> None:
    x = carray(f32_at(at), (dim,))
    inverse = np.float32(1.0) / np.sqrt(square_sum(at, dim) / np.float32(dim) + np.float32(eps))
    for i in range(dim):
        x[i] = x[i] * inverse * weight[i]


def _rope_body(args: Any, task: int) -> None:
    heads, kv_heads, dim, block_size = args[8], args[9], args[10], args[11]
    num_tokens, rows, stride = args[12], args[13], args[14]
    scale, eps = np.float32(as_float(args[15])), as_float(args[16])
    half = dim // 2
    positions = carray(i64_at(args[4]), (num_tokens,))
    slots = carray(i64_at(args[5]), (num_tokens,))
    for t in range(task * rows, min(num_tokens, task * rows + rows)):
        cos = carray(f32_at(args[3] + 4 * positions[t] * dim), (half,))
        sin = carray(f32_at(args[3] + 4 * (positions[t] * dim + half)), (half,))
        for h in range(heads + kv_heads):
            at = args[0] + 4 * (t * stride + h * dim)
            if args[6] != 0:
                _head_norm(at, carray(f32_at(args[6] if h < heads else args[7]), (dim,)), dim, eps)
            x = carray(f32_at(at), (dim,))
            _rotate(x, cos, sin, half, scale if h < heads else np.float32(1.0))
        block, offset = slots[t] // block_size, slots[t] % block_size
        for h in range(kv_heads):
            k = carray(f32_at(args[0] + 4 * (t * stride + (heads + h) * dim)), (dim,))
            v = carray(f32_at(args[0] + 4 * (t * stride + (heads + kv_heads + h) * dim)), (dim,))
            base = (block * kv_heads + h) * dim * block_size
            keys = carray(f32_at(args[1] + 4 * base), (dim * block_size,))
            values = carray(f32_at(args[2] + 4 * (base + offset * dim)), (dim,))
            for i in range(dim):
                keys[i * block_size + offset] = k[i]
                values[i] = v[i]


ATTEND = task_kernel(_attention_body)
ROPE = task_kernel(_rope_body)


def supports(head_dim: int, block_size: int) -> bool:
    """The tiles read 16 keys and 16 channels at a time."""
    return head_dim % 16 == 0 and block_size % 16 == 0


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
    """Rotate q (times `scale`) and k of qkv[t, .] in place and write k, v into their slots."""
    _, kv_heads, dim, block_size = k_cache.shape
    tokens = qkv.shape[0]
    rows = rows_of_task(tokens, (num_heads + 2 * kv_heads) * dim)
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    launch(
        ROPE,
        -(-tokens // rows),
        qkv.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        cos_sin.data_ptr(),
        positions.data_ptr(),
        slots.data_ptr(),
        0 if norms is None else norms[0].data_ptr(),
        0 if norms is None else norms[1].data_ptr(),
        num_heads,
        kv_heads,
        dim,
        block_size,
        tokens,
        rows,
        qkv.stride(0),
        float_bits(scale),
        float_bits(eps),
    )


def paged_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: QueryTiles,
    batch: AttentionBatch,
    num_heads: int,
    window: int,
) -> None:
    """Attention of pre-scaled q[t, heads * dim] over the cache into out's rows of these tiles.

    Row i of the block tables must be sequence i's.
    """
    _, kv_heads, dim, block_size = k_cache.shape
    tables = batch.block_tables
    assert q.stride(1) == 1 and out.is_contiguous() and tables.is_contiguous()
    launch(
        ATTEND,
        tiles.seqs.shape[0] * kv_heads,
        q.data_ptr(),
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        out.data_ptr(),
        tiles.seqs.data_ptr(),
        tiles.starts.data_ptr(),
        batch.query_starts.data_ptr(),
        batch.context_lens.data_ptr(),
        tables.data_ptr(),
        q.stride(0),
        num_heads,
        kv_heads,
        dim,
        block_size,
        window,
        tiles.tokens,
        tables.shape[1],
    )
