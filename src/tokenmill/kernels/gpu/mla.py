"""Latent attention on a GPU, and the latent's norm, rotation and cache write in front of it.

A program takes up to 64 rows (tokens times heads) of a tile and walks over the latents, which it
reads once as keys and as values. Where few sequences do not fill the chip, the keys of a tile are
split over several programs, and the join of kernels/gpu/attention.py adds up their parts. On Hopper
kernels/gpu/hopper/mla.py takes whole tiles of 64 rows of bfloat16.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, num_splits
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.attention import _join_kernel
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper import mla as hopper_mla
from tokenmill.kernels.gpu.hopper.two_groups import LOG2E
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick

MAX_ROWS = 64  # as many sums of 512 channels as two groups of four warps hold
KEYS = 64  # per turn: with the queries, two turns of 576 channels just fit into shared memory
PROGRAMS = 132  # one fills a multiprocessor; more would only write more partial sums
HEADS = 16  # of q that a program rotates


@quick
@triton.jit
def _cache_kernel(
    q, kv, rope_cache, latent_cache, norm, cos_sin, positions, slots, q_stride, kv_stride, heads,
    head_dim, block_size, eps,
    LATENT: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr, HEADS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    pair = tl.arange(0, HALF)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + pair
    cos, sin = tl.load(table), tl.load(table + HALF)
    low = 2 * pair if INTERLEAVED else pair
    high = low + (1 if INTERLEAVED else HALF)
    if part == 0:
        channels = tl.arange(0, LATENT)
        line = kv + token * kv_stride
        latent = tl.load(line + channels).to(tl.float32)
        inverse = tl.rsqrt(tl.sum(latent * latent, axis=0) / LATENT + eps)
        latent = latent * inverse * tl.load(norm + channels)
        slot = tl.load(slots + token).to(tl.int64)
        tl.store(latent_cache + slot * LATENT + channels, latent.to(latent_cache.dtype.element_ty))
        key_a = tl.load(line + LATENT + low).to(tl.float32)
        key_b = tl.load(line + LATENT + high).to(tl.float32)
        place = rope_cache + slot * (2 * HALF)
        tl.store(place + low, (key_a * cos - key_b * sin).to(rope_cache.dtype.element_ty))
        tl.store(place + high, (key_b * cos + key_a * sin).to(rope_cache.dtype.element_ty))
    else:
        head = (part - 1) * HEADS + tl.arange(0, HEADS)
        inside = (head < heads)[:, None]
        base = q + token * q_stride + (head * head_dim + head_dim - 2 * HALF)[:, None]
        a = tl.load(base + low[None, :], mask=inside, other=0.0).to(tl.float32)
        b = tl.load(base + high[None, :], mask=inside, other=0.0).to(tl.float32)
        turned_a = a * cos[None, :] - b * sin[None, :]
        turned_b = b * cos[None, :] + a * sin[None, :]
        tl.store(base + low[None, :], turned_a.to(q.dtype.element_ty), mask=inside)
        tl.store(base + high[None, :], turned_b.to(q.dtype.element_ty), mask=inside)


@triton.jit
def _attend(
    latent_queries, rope_queries, peak, total, acc, rope_cache, latent_cache, table, begin, end,
    position, scale,
    MASKED: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over the keys [begin, end); masked ones are those a query may not see."""
    for span in tl.range(begin, end, KEYS, num_stages=STAGES):
        key = span + tl.arange(0, KEYS)
        if BLOCK >= KEYS:
            slot = tl.load(table + span // BLOCK).to(tl.int64) * BLOCK + key % BLOCK
        else:
            place = tl.minimum(key, end - 1)
            slot = tl.load(table + place // BLOCK).to(tl.int64) * BLOCK + place % BLOCK
        latents = tl.load(latent_cache + slot[:, None] * LATENT + tl.arange(0, LATENT)[None, :])
        ropes = tl.load(rope_cache + slot[:, None] * ROPE + tl.arange(0, ROPE)[None, :])
        scores = tl.dot(latent_queries, tl.trans(latents))
        scores = tl.dot(rope_queries, tl.trans(ropes), scores) * (scale * LOG2E)
        if MASKED:
            scores = tl.where(key[None, :] <= position[:, None], scores, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, axis=1)
        acc = tl.dot(weights.to(latents.dtype), latents, acc * shrink[:, None])
        peak = top
    return peak, total, acc


@quick
@triton.jit(do_not_specialize=["num_tokens", "table_stride"])
def _latent_kernel(
    q_latent, q, rope_cache, latent_cache, out, partial, stats, tile_seqs, tile_starts,
    query_starts, context_lens, table_rows, tables, table_stride, q_stride, heads, head_dim,
    num_tokens, tile_tokens, scale,
    LATENT: tl.constexpr, ROPE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    BLOCK: tl.constexpr, SPLITS: tl.constexpr, INVARIANT: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    part, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    start = tl.load(query_starts + seq)
    length = tl.load(query_starts + seq + 1) - start
    context = tl.load(context_lens + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    rows = part * ROWS + tl.arange(0, ROWS)
    token, head = first + rows // heads, rows % heads
    valid = (rows < tile_tokens * heads) & (token < length)
    row = (start + token).to(tl.int64)
    line = row * heads + head
    channels, turned = tl.arange(0, LATENT), tl.arange(0, ROPE)
    latent_queries = tl.load(
        q_latent + line[:, None] * LATENT + channels[None, :], mask=valid[:, None], other=0.0
    )
    base = row * q_stride + (head + 1) * head_dim - ROPE
    rope_queries = tl.load(q + base[:, None] + turned[None, :], mask=valid[:, None], other=0.0)
    position = context + token
    earliest = first + part * ROWS // heads
    latest = first + (part * ROWS + ROWS - 1) // heads
    end = context + tl.minimum(tl.minimum(latest + 1, first + tile_tokens), length)
    begin = 0
    if SPLITS > 1:
        share = tl.cdiv(tl.cdiv(end, KEYS), SPLITS) * KEYS
        begin = split * share
        end = tl.minimum(end, begin + share)
    clear = (context + earliest + 1) // KEYS * KEYS  # keys before it are seen by every row
    clear = tl.maximum(begin, tl.minimum(clear, end // KEYS * KEYS))
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, LATENT], tl.float32)
    if INVARIANT:  # the two loops round differently, and where they meet depends on the tile
        clear = begin
    else:
        peak, total, acc = _attend(
            latent_queries, rope_queries, peak, total, acc, rope_cache, latent_cache, table, begin,
            clear, position, scale, False, LATENT, ROPE, KEYS, BLOCK, STAGES,
        )  # fmt: skip
    peak, total, acc = _attend(
        latent_queries, rope_queries, peak, total, acc, rope_cache, latent_cache, table, clear, end,
        position, scale, True, LATENT, ROPE, KEYS, BLOCK, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        piece = split.to(tl.int64) * num_tokens * heads + line
        tl.store(partial + piece[:, None] * LATENT + channels[None, :], acc, mask=valid[:, None])
        tl.store(stats + 2 * piece, peak, mask=valid)
        tl.store(stats + 2 * piece + 1, total, mask=valid)
    else:
        tl.store(
            out + line[:, None] * LATENT + channels[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=valid[:, None],
        )


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
    tokens, heads, head_dim = q.shape
    block_size, latent = latent_cache.shape[2:]
    assert q.stride(2) == 1 and q.stride(1) == head_dim and kv.stride(1) == 1
    assert rope_cache.is_contiguous() and latent_cache.is_contiguous()
    _cache_kernel[(tokens, 1 + cdiv(heads, HEADS))](
        q, kv, rope_cache, latent_cache, norm, cos_sin, batch.positions, batch.slots, q.stride(0),
        kv.stride(0), heads, head_dim, block_size, eps,
        LATENT=latent, HALF=rope_cache.shape[3] // 2, INTERLEAVED=interleaved, HEADS=HEADS,
        num_warps=2, **launch_options(),
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
    for tiles in batch.tiles:
        attend_tiles(q_latent, q, out, rope_cache, latent_cache, tiles, batch, scale)


def attend_tiles(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    tiles: QueryTiles,
    batch: AttentionBatch,
    scale: float,
) -> None:
    """Attention of these tiles' queries into out's rows, [t, heads, kv_rank]."""
    tokens, heads, head_dim = q.shape
    block_size, latent = latent_cache.shape[2:]
    rows = min(MAX_ROWS, max(16, next_power_of_2(tiles.tokens * heads)))
    parts, count = cdiv(tiles.tokens * heads, rows), tiles.seqs.shape[0]
    splits = min(tiles.splits, num_splits(parts * count, PROGRAMS))
    tables = batch.block_tables
    assert q_latent.is_contiguous() and out.is_contiguous() and tables.stride(1) == 1
    assert q.stride(2) == 1 and q.stride(1) == head_dim
    assert block_size % KEYS == 0 or KEYS % block_size == 0
    partial = stats = out
    if splits > 1:
        partial = torch.empty(splits, tokens, heads, latent, device=q.device)
        stats = torch.empty(splits, tokens, heads, 2, device=q.device)
    common = (
        out, partial, stats, tiles.seqs, tiles.starts, batch.query_starts, batch.context_lens,
        batch.table_rows, tables, tables.stride(0), q.stride(0), heads, head_dim, tokens,
        tiles.tokens, scale,
    )  # fmt: skip
    if _suits_hopper(q_latent, q, rope_cache, latent_cache, tiles):
        grid = parts, count, splits
        hopper_mla.launch(grid, q_latent, q, rope_cache, latent_cache, common)
    else:
        _latent_kernel[(parts, count, splits)](
            q_latent, q, rope_cache, latent_cache, *common,
            LATENT=latent, ROPE=rope_cache.shape[3], ROWS=rows, KEYS=KEYS, BLOCK=block_size,
            SPLITS=splits, INVARIANT=MODE.batch_invariant, STAGES=2,
            num_warps=8 if rows == 64 else 4, **launch_options(),
        )  # fmt: skip
    if splits > 1:
        _join_kernel[(len(tiles.rows), heads)](
            partial, stats, out, heads * latent, tokens, heads, tiles.rows.start, DIM=latent,
            SPLITS=splits, num_warps=4, **launch_options(),
        )  # fmt: skip


def _suits_hopper(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    tiles: QueryTiles,
) -> bool:
    """Whole tiles of 64 rows of the shape that kernels/gpu/hopper/mla.py is made for."""
    if not hopper.is_usable():
        return False
    block_size, latent = latent_cache.shape[2:]
    dtypes = {x.dtype for x in (q_latent, q, rope_cache, latent_cache)}
    return (
        dtypes == {torch.bfloat16}
        and (latent, rope_cache.shape[3]) == (512, 64)
        and tiles.tokens * q.shape[1] % MAX_ROWS == 0
        and block_size % KEYS == 0
        and q.stride(0) % 16 == q.shape[2] % 16 == 0  # rows are copied 16 bytes at a time
    )
