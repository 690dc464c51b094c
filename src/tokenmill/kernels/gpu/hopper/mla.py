"""Latent attention of 64 rows on Hopper: two groups of four warps that take turns.

Each group keeps the sums of half of the latent channels. Group 0 scores the even tiles of 64 keys
and group 1 the odd ones; what a group scored it weighs with its own half of the latents and hands
to the other through shared memory. While one group is in its softmax the other multiplies. A ninth
warp copies tiles: each in three pieces, two halves of the latents and the rotated part, so that a
piece is filled again as soon as its last reader is through.

Tile j lies in buffer j % 2, the group that scores it owns the buffer. A group's half of a tile is
read last by that group, in both buffers: one arrival empties it. The rotated part is read by the
owner alone. There is one place for handed weights: a group writes it only after it has multiplied
what lay there. Peaks are handed over before the weights, so that the other group's sums are ready
for these when they come; they are written again only after the other group emptied its half of the
tile they belong to.
"""

from __future__ import annotations

from typing import Any

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper.two_groups import LOG2E, MASKED
from tokenmill.kernels.gpu.launch import quick

ROWS = gl.constexpr(64)
KEYS = gl.constexpr(64)
HALF = gl.constexpr(256)  # of the latent channels
ROPE = gl.constexpr(64)
FLOOR = gl.constexpr(-1e20)  # of a peak: masked scores weigh nothing even where all are masked

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16]))
WEIGHTS = gl.constexpr(gl.DotOperandLayout(0, SUMS.value, 2))
SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES.value))
SUM_ROWS = gl.constexpr(gl.SliceLayout(1, SUMS.value))
SUM_CHANNELS = gl.constexpr(gl.SliceLayout(0, SUMS.value))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
LINE = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))


@gluon.jit
def _copy_queries(base, lines, valid, place, CHANNELS: gl.constexpr):
    """Rows of queries, 64 channels at a time, into a tile [ROWS, CHANNELS]."""
    channels = gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))
    for i in gl.static_range(CHANNELS // 64):
        async_copy.async_copy_global_to_shared(
            place.slice(i * 64, 64, dim=1),
            base + lines[:, None] + (i * 64 + channels)[None, :],
            mask=valid[:, None],
        )


@gluon.jit
def _copy_tiles(latents, ropes, memory, barriers, span, table, BLOCK: gl.constexpr):
    """The copying warp: every tile's pieces in the order in which they get empty."""
    tiles, turned = memory[0], memory[1]
    full_tiles, full_turned, empty_tiles, empty_turned, _, _, _ = barriers
    begin, count = span[0], span[1]
    for j in range(count):
        owner, phase = j & 1, ((j >> 1) & 1) ^ 1
        key = begin + j * KEYS
        row = gl.load(table + key // BLOCK) * BLOCK + key % BLOCK
        mbarrier.wait(empty_turned.index(owner), phase)
        mbarrier.expect(full_turned.index(owner), ropes.block_type.nbytes)
        tma.async_copy_global_to_shared(
            ropes, [row, 0], full_turned.index(owner), turned.index(owner)
        )
        for k in gl.static_range(2):
            half = owner ^ k
            piece = 2 * owner + half
            mbarrier.wait(empty_tiles.index(piece), phase)
            mbarrier.expect(full_tiles.index(piece), latents.block_type.nbytes)
            tma.async_copy_global_to_shared(
                latents, [row, half * HALF], full_tiles.index(piece), tiles.index(piece)
            )


@gluon.jit
def _masked(scores, first, clear, bound):
    """Scores of the tile from key `first` on, without those of keys from bound on."""
    if first + KEYS > clear:
        key = first + gl.arange(0, KEYS, layout=SCORE_KEYS)
        scores = gl.where(key[None, :] < bound[:, None], scores, MASKED)
    return scores


@gluon.jit
def _unknown_zero():
    """Added to what a turn indexes: addresses known before the loop would fill the registers."""
    return gl.inline_asm_elementwise(
        "mov.u32 $0, 0;", "=r", [], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _score(queries, keys, scores, use_acc=True):
    """Begin to add the products of queries and keys to the scores."""
    return warpgroup_mma(queries, keys.permute((1, 0)), scores, use_acc=use_acc, is_async=True)


@gluon.jit
def _shrunk(acc, old, new):
    """Sums as they are with a new peak."""
    return acc * gl.convert_layout(gl.exp2(old - new), SUM_ROWS, assert_trivial=True)[:, None]


@gluon.jit
def _hand_over(rounded, weights, ready):
    weights.store(rounded)
    fence_async_shared()
    mbarrier.arrive(ready, count=1)


@gluon.jit
def _attend(memory, barriers, span, bound, scale, WHO: gl.constexpr):
    """One group's walk over all tiles -> its sums [ROWS, HALF], the peak, its own tiles' total."""
    OTHER: gl.constexpr = 1 - WHO
    NEAR: gl.constexpr = 3 * WHO  # the own half of the own buffer
    FAR: gl.constexpr = 2 * WHO + OTHER  # the other half of it
    HANDED: gl.constexpr = 2 * OTHER + WHO  # the own half of the other buffer
    tiles, turned, queries, turned_queries, weights, peaks, _ = memory
    full_tiles, full_turned, empty_tiles, empty_turned, ready, _, known = barriers
    begin, count, clear, _ = span
    none = gl.zeros([ROWS, KEYS], gl.float32, SCORES)
    acc = gl.zeros([ROWS, HALF], gl.float32, SUMS)
    peak = gl.full([ROWS], FLOOR, gl.float32, SCORE_ROWS)
    total = gl.zeros([ROWS], gl.float32, SCORE_ROWS)
    if WHO == 0:  # the first tile of all: nothing comes before it
        mbarrier.wait(full_turned.index(0), 0)
        scores = _score(turned_queries, turned.index(0), none, False)
        mbarrier.wait(full_tiles.index(0), 0)
        scores = _score(queries.index(0), tiles.index(0), scores)
        mbarrier.wait(full_tiles.index(1), 0)
        scores = _score(queries.index(1), tiles.index(1), scores)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty_turned.index(0), count=1)
        scores = _masked(scores, begin, clear, bound)
        peak = gl.maximum(peak, gl.max(scores, axis=1) * scale)
        peaks.index(0).store(peak)
        mbarrier.arrive(known.index(0), count=1)
        each = gl.exp2(scores * scale - peak[:, None])
        total = gl.sum(each, axis=1)
        rounded = each.to(gl.bfloat16)
        own = gl.convert_layout(rounded, WEIGHTS, assert_trivial=True)
        acc = warpgroup_mma(own, tiles.index(0), acc, use_acc=False, is_async=True)
        _hand_over(rounded, weights, ready.index(0))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_tiles.index(0), count=1)
    for turn in range(1 - WHO, (count + OTHER) // 2):
        phase, earlier = turn & 1, (turn - OTHER) & 1
        nil = _unknown_zero()
        near = tiles.index(NEAR + nil)
        mbarrier.wait(full_turned.index(WHO), phase)
        scores = _score(turned_queries, turned.index(WHO + nil), none, False)
        mbarrier.wait(full_tiles.index(NEAR), phase)
        scores = _score(queries.index(WHO + nil), near, scores)

        mbarrier.wait(full_tiles.index(HANDED), earlier)
        mbarrier.wait(known.index(OTHER), earlier)
        before = peaks.index(OTHER).load(SCORE_ROWS)
        acc = warpgroup_mma_wait(2, deps=(acc,))  # is complete; unsaid, the scores would be awaited
        acc = _shrunk(acc, peak, before)
        mbarrier.wait(ready.index(OTHER), earlier)
        acc = warpgroup_mma(weights, tiles.index(HANDED + nil), acc, is_async=True)

        mbarrier.wait(full_tiles.index(FAR), phase)
        scores = _score(queries.index(OTHER + nil), tiles.index(FAR + nil), scores)
        acc = warpgroup_mma_wait(1, deps=(acc,))
        mbarrier.arrive(empty_tiles.index(HANDED), count=1)
        scores = warpgroup_mma_wait(0, deps=(scores,))
        mbarrier.arrive(empty_turned.index(WHO), count=1)

        scores = _masked(scores, begin + (2 * turn + WHO) * KEYS, clear, bound)
        top = gl.maximum(before, gl.max(scores, axis=1) * scale)
        peaks.index(WHO).store(top)
        mbarrier.arrive(known.index(WHO), count=1)
        each = gl.exp2(scores * scale - top[:, None])
        total = total * gl.exp2(peak - top) + gl.sum(each, axis=1)
        rounded = each.to(gl.bfloat16)
        own = gl.convert_layout(rounded, WEIGHTS, assert_trivial=True)
        acc = warpgroup_mma(own, near, _shrunk(acc, before, top), is_async=True)
        _hand_over(rounded, weights, ready.index(WHO))
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_tiles.index(NEAR), count=1)
        peak = top
    if (count & 1) == WHO:  # the last tile is the other group's
        earlier = ((count - 1) >> 1) & 1
        mbarrier.wait(full_tiles.index(HANDED), earlier)
        mbarrier.wait(ready.index(OTHER), earlier)
        before = peaks.index(OTHER).load(SCORE_ROWS)
        total *= gl.exp2(peak - before)
        acc = warpgroup_mma(weights, tiles.index(HANDED), _shrunk(acc, peak, before))
        peak = before
    return acc, peak, total


@gluon.jit
def _group(
    memory, barriers, span, place, out, partial, stats, scale,
    SPLITS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """All that one group does, from the first score to the rows of its channels in memory."""
    start, first, length, context, part, split, heads, num_tokens, tile_tokens = place
    totals, summed, limit = memory[6], barriers[5], span[3]
    rows = part * ROWS + gl.arange(0, ROWS, layout=SCORE_ROWS)
    bound = gl.minimum(context + first + rows // heads + 1, limit)
    acc, peak, total = _attend(memory, barriers, span, bound, scale, WHO)
    totals.index(WHO).store(total)
    mbarrier.arrive(summed.index(WHO), count=1)
    mbarrier.wait(summed.index(1 - WHO), 0)
    total += totals.index(1 - WHO).load(SCORE_ROWS)

    rows = part * ROWS + gl.arange(0, ROWS, layout=SUM_ROWS)
    token = first + rows // heads
    valid = (rows < tile_tokens * heads) & (token < length)
    line = (start + token).to(gl.int64) * heads + rows % heads
    channels = WHO * HALF + gl.arange(0, HALF, layout=SUM_CHANNELS)
    if SPLITS > 1:
        piece = split.to(gl.int64) * num_tokens * heads + line
        target = partial + piece[:, None] * (2 * HALF) + channels[None, :]
        gl.store(target, acc, mask=valid[:, None])
        if WHO == 0:
            top = gl.convert_layout(peak, SUM_ROWS, assert_trivial=True)
            whole = gl.convert_layout(total, SUM_ROWS, assert_trivial=True)
            gl.store(stats + 2 * piece, top, mask=valid)
            gl.store(stats + 2 * piece + 1, whole, mask=valid)
    else:
        share = gl.convert_layout(1.0 / total, SUM_ROWS, assert_trivial=True)
        target = out + line[:, None] * (2 * HALF) + channels[None, :]
        gl.store(target, (acc * share[:, None]).to(out.dtype.element_ty), mask=valid[:, None])


@quick
@gluon.jit(do_not_specialize=["num_tokens", "table_stride"])
def latent_kernel(
    q_latent, q, ropes, latents, out, partial, stats, tile_seqs, tile_starts, query_starts,
    context_lens, table_rows, tables, table_stride, q_stride, heads, head_dim, num_tokens,
    tile_tokens, scale,
    BLOCK: gl.constexpr, SPLITS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """As _latent_kernel of kernels/gpu/mla.py, with descriptors of the caches' rows."""
    wait(EARLY)
    part, tile, split = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    seq = gl.load(tile_seqs + tile)
    first = gl.load(tile_starts + tile)
    start = gl.load(query_starts + seq)
    length = gl.load(query_starts + seq + 1) - start
    context = gl.load(context_lens + seq)
    table = tables + gl.load(table_rows + seq).to(gl.int64) * table_stride

    queries = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, HALF], TILE)
    turned_queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, ROPE], TILE)
    rows = part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, COPY))
    token = first + rows // heads
    valid = (rows < tile_tokens * heads) & (token < length)
    row = (start + token).to(gl.int64)
    line = (row * heads + rows % heads) * (2 * HALF)
    _copy_queries(q_latent, line, valid, queries.index(0), HALF)
    _copy_queries(q_latent + HALF, line, valid, queries.index(1), HALF)
    line = row * q_stride + (rows % heads + 1) * head_dim - ROPE
    _copy_queries(q, line, valid, turned_queries, ROPE)
    async_copy.commit_group()

    tiles = gl.allocate_shared_memory(gl.bfloat16, [4, KEYS, HALF], TILE)
    turned = gl.allocate_shared_memory(gl.bfloat16, [2, KEYS, ROPE], TILE)
    weights = gl.allocate_shared_memory(gl.bfloat16, [ROWS, KEYS], TILE)
    peaks = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    totals = gl.allocate_shared_memory(gl.float32, [2, ROWS], LINE)
    full_tiles = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    empty_tiles = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    full_turned = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_turned = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    summed = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    known = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(full_tiles.index(i), count=1)
        mbarrier.init(empty_tiles.index(i), count=1)
    for i in gl.static_range(2):
        mbarrier.init(full_turned.index(i), count=1)
        mbarrier.init(empty_turned.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(summed.index(i), count=1)
        mbarrier.init(known.index(i), count=1)

    earliest = first + part * ROWS // heads
    latest = first + (part * ROWS + ROWS - 1) // heads
    end = context + gl.minimum(gl.minimum(latest + 1, first + tile_tokens), length)
    last = gl.maximum(end - 1, 0) // KEYS * KEYS
    begin = 0
    if SPLITS > 1:
        share = gl.cdiv(gl.cdiv(end, KEYS), SPLITS) * KEYS
        begin = split * share
        end = gl.minimum(end, begin + share)
    count = gl.maximum(gl.cdiv(end - begin, KEYS), 1)
    limit = gl.where(begin < end, end, 0)  # a program without keys masks one tile
    begin = gl.minimum(begin, last)
    clear = gl.minimum(context + earliest + 1, limit)

    async_copy.wait_group(0)
    fence_async_shared()
    memory = (tiles, turned, queries, turned_queries, weights, peaks, totals)
    barriers = (full_tiles, full_turned, empty_tiles, empty_turned, ready, summed, known)
    span = (begin, count, clear, limit)
    place = (start, first, length, context, part, split, heads, num_tokens, tile_tokens)
    factor = scale * LOG2E
    gl.warp_specialize(
        [
            (_group, (memory, barriers, span, place, out, partial, stats, factor, SPLITS, 0)),
            (_group, (memory, barriers, span, place, out, partial, stats, factor, SPLITS, 1)),
            (_copy_tiles, (latents, ropes, memory, barriers, span, table, BLOCK)),
        ],
        [4, 1],
        [232, 40],
    )


def launch(
    grid: tuple[int, int, int],
    q_latent: torch.Tensor,
    q: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    rest: tuple[Any, ...],
) -> None:
    """Attention of 64 rows each of parts, tiles and splits; `rest` are the kernel's arguments."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    ropes = TensorDescriptor.from_tensor(rope_cache.view(-1, 64), [64, 64], layout)
    latents = TensorDescriptor.from_tensor(latent_cache.view(-1, 512), [64, 256], layout)
    latent_kernel[grid](
        q_latent, q, ropes, latents, *rest,
        BLOCK=latent_cache.shape[2], SPLITS=grid[2], num_warps=4, **launch_options(),
    )  # fmt: skip
