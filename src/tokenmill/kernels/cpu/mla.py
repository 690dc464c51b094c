"""Latent attention: the write of latents and rotated keys, and attention over them.

Work is cut into (tile of query tokens, 16 heads). Keys pass in spans of 64 from position 0, as in
attention.py. A span's latents are copied once and serve as keys and as values: scores are taken
with the queries in the place of weights, so that latents need no transposition.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.cpu.attention import finish_rows, reset_rows, softmax_span
from tokenmill.kernels.cpu.compiler import compiled
from tokenmill.kernels.cpu.grouped import multiply_heads
from tokenmill.kernels.cpu.threads import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.tiles import as_float, f32_at, f32_rows, i32_at, i64_at, square_sum
from tokenmill.kernels.moe import PackedExperts

_HEADS = 16  # of a task: as many rows as a register tile has columns


@compiled
def _turn(x: Any, cos: Any, sin: Any, half: int, interleaved: int) -> None:
    """Rotate channels 2i and 2i + 1, or i and half + i."""
    step, apart = (2, 1) if interleaved != 0 else (1, half)
    for i in range(half):
        a, b = x[step * i], x[step * i + apart]
        x[step * i] = a * cos[i] - b * sin[i]
        x[step * i + apart] = b * cos[i] + a * sin[i]


def _cache_body(args: Any, task: int) -> None:
    heads, q_dim, kv_rank, rope, block_size = args[8], args[9], args[12], args[13], args[14]
    tokens, rows, eps, half = args[15], args[16], as_float(args[17]), args[13] // 2
    positions = carray(i64_at(args[6]), (tokens,))
    slots = carray(i64_at(args[7]), (tokens,))
    norm = carray(f32_at(args[4]), (kv_rank,))
    key = np.empty(rope, np.float32)
    for t in range(task * rows, min(tokens, task * rows + rows)):
        cos = carray(f32_at(args[5] + 4 * positions[t] * rope), (half,))
        sin = carray(f32_at(args[5] + 4 * (positions[t] * rope + half)), (half,))
        for h in range(heads):
            at = args[0] + 4 * (t * args[10] + h * q_dim + q_dim - rope)
            _turn(carray(f32_at(at), (rope,)), cos, sin, half, args[18])
        at = args[1] + 4 * t * args[11]
        block, offset = slots[t] // block_size, slots[t] % block_size
        source = carray(f32_at(at), (kv_rank,))
        target = carray(f32_at(args[3] + 4 * slots[t] * kv_rank), (kv_rank,))
        mean = square_sum(at, kv_rank) / np.float32(kv_rank)
        inverse = np.float32(1.0) / np.sqrt(mean + np.float32(eps))
        for i in range(kv_rank):
            target[i] = source[i] * inverse * norm[i]
        key[:] = carray(f32_at(at + 4 * kv_rank), (rope,))
        _turn(key, cos, sin, half, args[18])
        keys = carray(f32_at(args[2] + 4 * block * rope * block_size), (rope * block_size,))
        for i in range(rope):
            keys[i * block_size + offset] = key[i]


@compiled
def _attend(
    turned: int,
    ropes: int,
    acc: Any,
    rope_cache: int,
    latent_cache: int,
    table: Any,
    rows: int,
    heads: int,
    kv_rank: int,
    rope: int,
    block_size: int,
    first: int,
    last: int,
) -> None:
    """Attention of `rows` queries, `heads` for each position first..last, into acc[rows, kv_rank].

    Their latent parts lie at `turned` as [kv_rank, width], the others at `ropes` as [rows, rope].
    """
    width, line = (rows + 15) // 16 * 16, kv_rank + 16  # a power of two would share cache sets
    scratch = np.empty(rows * 66 + 64 * (width + line), np.float32)
    scores, states = scratch[: rows * 64], scratch[rows * 64 : rows * 66]
    across, latents = scratch[rows * 66 :], scratch[rows * 66 + 64 * width :]
    scores_at, across_at, latents_at = scores.ctypes.data, across.ctypes.data, latents.ctypes.data
    acc_at, states_at = acc.ctypes.data, states.ctypes.data
    reset_rows(acc[: rows * kv_rank], states)
    for span in range(0, last + 1, 64):
        slices = min(4, (last - span) // 16 + 1)
        for j in range(slices):
            block, offset = divmod(span + 16 * j, block_size)
            page = table[block] * block_size
            at = rope_cache + 4 * (page * rope + offset)
            f32_rows(ropes, rope * 4, at, block_size * 4, rope, rows, scores_at + 64 * j, 256, 0)
            at = latent_cache + 4 * (page + offset) * kv_rank
            for i in range(16):
                source = carray(f32_at(at + 4 * i * kv_rank), (kv_rank,))
                latents[(16 * j + i) * line : (16 * j + i) * line + kv_rank] = source
        keys = 16 * slices
        for column in range(0, width, 16):
            for start in range(0, kv_rank, 256):  # partial sums of 256 keep fp32 rounding down
                f32_rows(
                    latents_at + 4 * start, line * 4, turned + 4 * (start * width + column),
                    width * 4, min(256, kv_rank - start), keys, across_at + 4 * column, width * 4,
                    start,
                )  # fmt: skip
        for r in range(rows):
            for j in range(keys):
                scores[r * 64 + j] += across[j * width + r]
            high = min(64, first + r // heads - span + 1)
            acc_row = acc_at + 4 * r * kv_rank
            softmax_span(scores_at + 256 * r, states_at + 8 * r, acc_row, kv_rank, 0, high)
        for d in range(0, kv_rank * 4, 64):
            f32_rows(
                scores_at, 256, latents_at + d, line * 4, keys, rows, acc_at + d, kv_rank * 4, 1
            )
    finish_rows(acc[: rows * kv_rank], states)


def _attention_body(args: Any, task: int) -> None:
    heads, q_stride, q_dim, kv_rank, rope = args[12], args[13], args[14], args[15], args[16]
    scale = np.float32(as_float(args[19]))
    chunks = (heads + 15) // 16
    tile, head = task // chunks, task % chunks * 16
    own = min(16, heads - head)
    seq = np.int64(carray(i32_at(args[5] + 4 * tile), (1,))[0])
    start = np.int64(carray(i32_at(args[6] + 4 * tile), (1,))[0])
    bounds = carray(i32_at(args[7] + 4 * seq), (2,))
    context = np.int64(carray(i32_at(args[8] + 4 * seq), (1,))[0])
    row = np.int64(carray(i32_at(args[10] + 4 * seq), (1,))[0])
    table = carray(i32_at(args[9] + 4 * row * args[11]), (args[11],))
    tokens = min(args[18], bounds[1] - bounds[0] - start)
    rows = tokens * own
    width = (rows + 15) // 16 * 16
    scratch = np.zeros(width * kv_rank + rows * (rope + kv_rank), np.float32)
    turned, ropes = scratch[: width * kv_rank], scratch[width * kv_rank :]
    acc = scratch[width * kv_rank + rows * rope :]
    for r in range(rows):
        t, h = bounds[0] + start + r // own, head + r % own
        source = carray(f32_at(args[0] + 4 * (t * heads + h) * kv_rank), (kv_rank,))
        for i in range(kv_rank):
            turned[i * width + r] = source[i] * scale
        source = carray(f32_at(args[1] + 4 * (t * q_stride + h * q_dim + q_dim - rope)), (rope,))
        for i in range(rope):
            ropes[r * rope + i] = source[i] * scale
    first = context + start
    _attend(
        turned.ctypes.data, ropes.ctypes.data, acc, args[2], args[3], table, rows, own, kv_rank,
        rope, args[17], first, first + tokens - 1,
    )  # fmt: skip
    for r in range(rows):
        t, h = bounds[0] + start + r // own, head + r % own
        target = carray(f32_at(args[4] + 4 * (t * heads + h) * kv_rank), (kv_rank,))
        target[:] = acc[r * kv_rank : r * kv_rank + kv_rank]


_cache_kernel = task_kernel(_cache_body)
_attention_kernel = task_kernel(_attention_body)


def per_head(x: torch.Tensor, weight: PackedExperts) -> torch.Tensor:
    assert weight.data is not None
    padded = x.new_empty(*x.shape[:2], weight.n + -weight.n % 8)
    multiply_heads(x, weight.data, padded)
    return padded[..., : weight.n].contiguous()


def latent_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    interleaved: bool,
) -> None:
    tokens, heads, q_dim = q.shape
    _, _, block_size, kv_rank = latent_cache.shape
    assert q.stride(2) == kv.stride(1) == 1 and q.stride(1) == q_dim
    assert rope_cache.is_contiguous() and latent_cache.is_contiguous() and norm.is_contiguous()
    rows = rows_of_task(tokens, heads * rope_cache.shape[2] + kv.shape[1])
    launch(
        _cache_kernel, -(-tokens // rows), q.data_ptr(), kv.data_ptr(), rope_cache.data_ptr(),
        latent_cache.data_ptr(), norm.data_ptr(), cos_sin.data_ptr(), batch.positions.data_ptr(),
        batch.slots.data_ptr(), heads, q_dim, q.stride(0), kv.stride(0), kv_rank,
        rope_cache.shape[2], block_size, tokens, rows, float_bits(eps), interleaved,
    )  # fmt: skip


def attend_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    scale: float,
) -> None:
    _, heads, q_dim = q.shape
    _, _, rope, block_size = rope_cache.shape
    tables = batch.block_tables
    assert q_latent.is_contiguous() and out.is_contiguous() and tables.is_contiguous()
    assert q.stride(2) == 1 and q.stride(1) == q_dim
    for tiles in batch.tiles:
        launch(
            _attention_kernel, tiles.seqs.shape[0] * -(-heads // _HEADS),
            q_latent.data_ptr(), q.data_ptr(), rope_cache.data_ptr(), latent_cache.data_ptr(),
            out.data_ptr(), tiles.seqs.data_ptr(), tiles.starts.data_ptr(),
            batch.query_starts.data_ptr(), batch.context_lens.data_ptr(), tables.data_ptr(),
            batch.table_rows.data_ptr(), tables.shape[1], heads, q.stride(0), q_dim,
            q_latent.shape[2], rope, block_size, tiles.tokens, float_bits(scale),
        )  # fmt: skip
