"""Paged attention for prefill and decode alike, and RoPE with the KV write in front of it.

Work is cut into (tile of query tokens, KV head). A tile's rows are its tokens times the query heads
that share the KV head; keys pass in spans of 64 from position 0, so that a token's sums never
depend on how its prompt was chunked or what it was batched with.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.cpu.compiler import compiled
from tokenmill.kernels.cpu.int_spans import (
    MASKED,
    WEIGHT_LIMIT,
    half_bits,
    limit_of,
    round_by,
    round_keys,
    round_values,
    row_inverse,
    weigh_span,
)
from tokenmill.kernels.cpu.int_spans import add_span as add_rounded
from tokenmill.kernels.cpu.int_spans import score_span as score_rounded
from tokenmill.kernels.cpu.spans import add_span, prefetch, score_span
from tokenmill.kernels.cpu.threads import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.tiles import (
    as_float,
    exp32,
    f32_at,
    i16_at,
    i32_at,
    i64_at,
    span_exp,
    span_max,
    span_sum,
    square_sum,
)

_PASS_ROWS = 24  # of a tile, whose scores lie in L1: four register tiles


@compiled
def _fill(at: int, low: int, high: int, value: Any) -> None:
    """Overwrite what lies outside [low, high) of the span at an address."""
    line = carray(f32_at(at), (64,))
    for j in range(low):
        line[j] = value
    for j in range(high, 64):
        line[j] = value


@compiled
def softmax_span(at: int, state: int, acc_at: int, dim: int, low: int, high: int) -> None:
    """One online-softmax step of a row: its scores become weights, what was summed shrinks.

    `state` has the row's peak and sum. Addresses, since arrays would be counted in every call.
    """
    if low >= high:
        _fill(at, 64, 64, np.float32(0.0))
        return
    partial = low > 0 or high < 64
    if partial:
        _fill(at, low, high, MASKED)
    row = carray(f32_at(state), (2,))
    before = row[0]
    top = max(before, span_max(at))
    span_exp(at, top)
    if partial:
        _fill(at, low, high, np.float32(0.0))
    total = span_sum(at)
    if top == before:
        row[1] += total
        return
    shrink = exp32(before - top)
    row[0] = top
    row[1] = row[1] * shrink + total
    acc = carray(f32_at(acc_at), (dim,))
    for i in range(dim):
        acc[i] *= shrink


@compiled
def _raise_peak(
    at: int, state: int, weight: int, acc_at: int, dim: int, low: int, high: int
) -> Any:
    """Mask a row's scores; returns their peak, and stores at `weight` what the span counts.

    A higher peak than before shrinks what was summed.
    """
    counts = carray(f32_at(weight), (1,))
    if low >= high:
        _fill(at, 64, 64, MASKED)
        counts[0] = np.float32(0.0)
        return np.float32(0.0)
    if low > 0 or high < 64:
        _fill(at, low, high, MASKED)
    row = carray(f32_at(state), (2,))
    before, peak = row[0], span_max(at)
    smaller = exp32(-abs(peak - before))
    if peak <= before:
        counts[0] = smaller
        return peak
    counts[0] = np.float32(1.0)
    row[0], row[1] = peak, row[1] * smaller
    acc = carray(f32_at(acc_at), (dim,))
    for i in range(dim):
        acc[i] *= smaller
    return peak


@compiled
def reset_rows(acc: Any, states: Any) -> None:
    """Nothing has been summed yet; states are [rows, 2]."""
    acc[:] = np.float32(0.0)
    for r in range(len(states) // 2):
        states[2 * r], states[2 * r + 1] = MASKED, np.float32(0.0)


@compiled
def _add_sinks(states: Any, sinks: int, group: int) -> None:
    """Begin each row with its head's sink, a key without a value, at an address; 0: no sinks."""
    if sinks == 0:
        return
    scores = carray(f32_at(sinks), (group,))
    for r in range(len(states) // 2):
        states[2 * r], states[2 * r + 1] = scores[r % group], np.float32(1.0)


@compiled
def finish_rows(acc: Any, states: Any) -> None:
    rows = len(states) // 2
    dim = len(acc) // rows
    for r in range(rows):
        inverse = np.float32(1.0) / states[2 * r + 1]
        for i in range(r * dim, r * dim + dim):
            acc[i] *= inverse


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
    sinks: int,
) -> None:
    """Attention of rows queries[rows, dim], of positions first..last, into acc[rows, dim]."""
    rows = (last - first + 1) * group
    dim = len(queries) // rows
    scratch = np.empty(rows * 66, np.float32)
    states, scores_at = scratch[rows * 64 :], scratch.ctypes.data
    states_at = states.ctypes.data
    addresses = np.empty(8, np.int64)
    key_slices, value_slices = addresses[:4], addresses[4:]
    reset_rows(acc, states)
    _add_sinks(states, sinks, group)
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
            acc_row = acc_at + 4 * r * dim
            softmax_span(scores_at + 256 * r, states_at + 8 * r, acc_row, dim, low, high)
        if rows <= 6:
            for j in range(min(4, (last - span - 64) // 16 + 1)):
                block, offset = divmod(span + 64 + 16 * j, block_size)
                prefetch(keys + table[block] * page + offset * 4, 64 * dim)
        add_span(scores_at, value_slices, slices, dim, rows, acc_at)
        span += 64
    finish_rows(acc, states)


@compiled
def _place(args: Any, task: int) -> Any:
    """(head, sequence, first row, tokens, first position) of a task."""
    tile, head = task // args[11], task % args[11]
    seq = np.int64(carray(i32_at(args[4] + 4 * tile), (1,))[0])
    start = np.int64(carray(i32_at(args[5] + 4 * tile), (1,))[0])
    bounds = carray(i32_at(args[6] + 4 * seq), (2,))
    context = np.int64(carray(i32_at(args[7] + 4 * seq), (1,))[0])
    tokens = min(args[15], bounds[1] - bounds[0] - start)
    return head, seq, bounds[0] + start, tokens, context + start


def _attention_body(args: Any, task: int) -> None:
    q, out, q_stride, heads, kv_heads = args[0], args[3], args[9], args[10], args[11]
    dim, block_size, window = args[12], args[13], args[14]
    head, seq, row, left, first = _place(args, task)
    table = carray(i32_at(args[8] + 4 * seq * args[16]), (args[16],))
    group = heads // kv_heads
    width = group * dim
    page, offset = kv_heads * dim * block_size * 4, head * dim * block_size * 4
    most = max(1, _PASS_ROWS // group)
    sinks = args[18] + 4 * head * group if args[18] != 0 else 0
    scratch = np.empty(2 * most * width, np.float32)
    while left > 0:
        tokens = min(left, most)
        queries, acc = scratch[: tokens * width], scratch[most * width :][: tokens * width]
        for t in range(tokens):
            source = carray(f32_at(q + 4 * ((row + t) * q_stride + head * width)), (width,))
            queries[t * width : t * width + width] = source
        _attend(
            queries, queries.ctypes.data, acc, acc.ctypes.data, args[1] + offset, args[2] + offset,
            table, page, block_size, window, first, first + tokens - 1, group, sinks,
        )  # fmt: skip
        for t in range(tokens):
            target = carray(f32_at(out + 4 * ((row + t) * heads * dim + head * width)), (width,))
            target[:] = acc[t * width : t * width + width]
        row, first, left = row + tokens, first + tokens, left - tokens


@compiled
def _prefetch_span(
    keys: int, values: int, table: Any, page: int, block_size: int, dim: int, span: int, last: int
) -> None:
    """Ask for a span of an fp16 cache ahead of its use: few rows wait for memory."""
    for j in range(span, min(span + 64, last + 1), 16):
        block, offset = divmod(j, block_size)
        here = table[block] * page
        prefetch(values + here + offset * dim * 2, 32 * dim)
        prefetch(keys + here + offset * 2, 32 * dim)


@compiled
def _attend_rounded(
    queries: int,
    query_scales: int,
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
    limit: Any,
    sinks: int,
) -> None:
    """As _attend, of int16 queries[rows, dim] over an fp16 cache, all products in integers."""
    rows = (last - first + 1) * group
    dim = len(acc) // rows
    scratch = np.empty(_PASS_ROWS * 97 + 192 + 64 * dim + 2 * rows, np.float32)
    scratch[97 * _PASS_ROWS : 97 * _PASS_ROWS + 192] = np.float32(0.0)  # of keys that are not there
    scores = scratch.ctypes.data
    weights = scores + 256 * _PASS_ROWS
    counts = weights + 128 * _PASS_ROWS
    columns = counts + 4 * _PASS_ROWS  # key scales, logarithms of value scales, their inverses
    keys_at = columns + 768
    values_at = keys_at + 128 * dim
    states = scratch[-2 * rows :]
    states_at = states.ctypes.data
    span_counts = scratch[96 * _PASS_ROWS : 97 * _PASS_ROWS]
    peaks = np.empty(_PASS_ROWS, np.float32)
    reset_rows(acc, states)
    _add_sinks(states, sinks, group)
    span = 0 if window == 0 else max(0, first - window + 1) // 64 * 64
    if rows <= 6:
        _prefetch_span(keys, values, table, page, block_size, dim, span, last)
    while span <= last:
        slices = min(4, (last - span) // 16 + 1)
        if rows <= 6:
            _prefetch_span(keys, values, table, page, block_size, dim, span + 64, last)
        for j in range(slices):
            block, offset = divmod(span + 16 * j, block_size)
            here = keys + table[block] * page + offset * 2
            round_keys(here, 2 * block_size, dim, keys_at + 64 * j, columns + 64 * j, limit)
            here = values + table[block] * page + offset * dim * 2
            logs = columns + 256 + 64 * j
            round_values(here, dim, values_at + 32 * j * dim, logs, logs + 256)
        for low in range(0, rows, _PASS_ROWS):
            count = min(_PASS_ROWS, rows - low)
            q, q_scales = queries + 2 * low * dim, query_scales + 4 * low
            score_rounded(q, q_scales, dim, keys_at, columns, slices, count, scores)
            for r in range(count):
                position = first + (low + r) // group
                start = 0 if window == 0 else max(0, position - window + 1 - span)
                end = min(64, position - span + 1)
                peaks[r] = _raise_peak(
                    scores + 256 * r, states_at + 8 * (low + r), counts + 4 * r,
                    acc_at + 4 * (low + r) * dim, dim, start, end,
                )  # fmt: skip
            for r in range(count):
                total = weigh_span(scores + 256 * r, peaks[r], columns + 512, weights + 128 * r)
                states[2 * (low + r) + 1] += total * span_counts[r]
                span_counts[r] *= np.float32(1 / WEIGHT_LIMIT)
            add_rounded(weights, counts, values_at, slices, dim, count, acc_at + 4 * low * dim)
        span += 64
    finish_rows(acc, states)


def _rounded_body(args: Any, task: int) -> None:
    q, out, q_stride, heads, kv_heads = args[0], args[3], args[9], args[10], args[11]
    dim, block_size = args[12], args[13]
    head, seq, row, tokens, first = _place(args, task)
    table = carray(i32_at(args[8] + 4 * seq * args[16]), (args[16],))
    group = heads // kv_heads
    width = group * dim
    page, offset = kv_heads * dim * block_size * 2, head * dim * block_size * 2
    scratch = np.empty(2 * tokens * width + tokens * group, np.float32)
    acc = scratch[: tokens * width]  # in use to the end: it keeps the memory of the others
    queries_at = scratch.ctypes.data + 4 * tokens * width
    scales_at = queries_at + 4 * tokens * width
    limit = np.float32(args[17])
    for r in range(tokens * group):
        source = q + 4 * ((row + r // group) * q_stride + head * width + r % group * dim)
        inverse = row_inverse(source, dim, scales_at + 4 * r, limit)
        round_by(source, dim, queries_at + 2 * r * dim, inverse)
    _attend_rounded(
        queries_at, scales_at, acc, acc.ctypes.data, args[1] + offset, args[2] + offset, table,
        page, block_size, args[14], first, first + tokens - 1, group, limit,
        args[18] + 4 * head * group if args[18] != 0 else 0,
    )  # fmt: skip
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
            if args[17] != 0:
                short_keys = carray(i16_at(args[1] + 2 * base), (dim * block_size,))
                short_values = carray(i16_at(args[2] + 2 * (base + offset * dim)), (dim,))
                for i in range(dim):
                    short_keys[i * block_size + offset] = half_bits(k[i])
                    short_values[i] = half_bits(v[i])
                continue
            keys = carray(f32_at(args[1] + 4 * base), (dim * block_size,))
            values = carray(f32_at(args[2] + 4 * (base + offset * dim)), (dim,))
            for i in range(dim):
                keys[i * block_size + offset] = k[i]
                values[i] = v[i]


ATTEND = task_kernel(_attention_body)
ATTEND_ROUNDED = task_kernel(_rounded_body)
ROPE = task_kernel(_rope_body)


def attend_kernel(cache_type: torch.dtype) -> Any:
    return ATTEND_ROUNDED if cache_type == torch.float16 else ATTEND


def rope_and_cache(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """In place; what is returned is a view of qkv."""
    _, kv_heads, dim, block_size = k_cache.shape
    tokens = qkv.shape[0]
    rows = rows_of_task(tokens, (num_heads + 2 * kv_heads) * dim)
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    q_norm, k_norm = (0, 0) if norms is None else (norm.data_ptr() for norm in norms)
    launch(
        ROPE, -(-tokens // rows),
        qkv.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), cos_sin.data_ptr(),
        batch.positions.data_ptr(), batch.slots.data_ptr(), q_norm, k_norm, num_heads, kv_heads,
        dim, block_size, tokens, rows, qkv.stride(0), float_bits(scale), float_bits(eps),
        k_cache.dtype == torch.float16,
    )  # fmt: skip
    return qkv[:, : num_heads * dim]


def attend_paged(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """Row i of the block tables must be sequence i's."""
    _, kv_heads, dim, block_size = k_cache.shape
    tables = batch.block_tables
    assert q.stride(1) == 1 and out.is_contiguous() and tables.is_contiguous()
    assert sinks is None or (sinks.dtype == torch.float32 and sinks.is_contiguous())
    for tiles in batch.tiles:
        launch(
            attend_kernel(k_cache.dtype), tiles.seqs.shape[0] * kv_heads,
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), out.data_ptr(),
            tiles.seqs.data_ptr(), tiles.starts.data_ptr(), batch.query_starts.data_ptr(),
            batch.context_lens.data_ptr(), tables.data_ptr(), q.stride(0), num_heads, kv_heads, dim,
            block_size, window, tiles.tokens, tables.shape[1], limit_of(dim),
            0 if sinks is None else sinks.data_ptr(),
        )  # fmt: skip
