"""Attention of prompts over the paged KV cache on Hopper: two groups of four warps take turns.

The groups and the copying warp are those of two_groups.py. Rows are tokens times query heads that
share a KV head: as many as divide a tile, and SHARE tiles for all of them. The last tile of 128
keys comes first: only tiles that some row does not see whole are masked, which are the first one or
two, or all of a sliding window's.

As many programs as the GPU has multiprocessors stay and take work items, a tile of queries and its
heads each, from lists that begin with the longest; every other round in reverse, so that each gets
about as much. The copying warp runs ahead into a program's next item.
"""

from __future__ import annotations

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.attention import AttentionBatch, QueryTiles, heads_of
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper.two_groups import (
    HALF,
    KEYS,
    LOG2E,
    MASKED,
    ROWS,
    SCORES,
    exp2,
    operand,
    ring_barriers,
    score,
    shrunk,
)
from tokenmill.kernels.gpu.launch import quick

FLOOR = gl.constexpr(-1e20)  # of a peak: masked scores weigh nothing even where all are masked
STAGES = 2

SCORE_ROWS = gl.constexpr(gl.SliceLayout(1, SCORES.value))
SCORE_KEYS = gl.constexpr(gl.SliceLayout(0, SCORES.value))
TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))


@gluon.jit
def _num_turns(last):
    """How many of the items up to the last one this program takes."""
    whole = (last + 1) // gl.num_programs(0)
    return whole + gl.minimum(gl.maximum(last + 1 - _item_of(whole), 0), 1)


@gluon.jit
def _item_of(turn):
    """The item of this program's turn: there and back over the programs."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    odd = turn & 1
    return turn * programs + program + odd * (programs - 1 - 2 * program)


@gluon.jit
def _place_of(lists, tile, seq, TOKENS: gl.constexpr):
    """Row and position of the first query of a tile, and how many it has."""
    _, tile_starts, query_starts, context_lens = lists
    first, start = gl.load(tile_starts + tile), gl.load(query_starts + seq)
    left = gl.minimum(gl.load(query_starts + seq + 1) - start - first, TOKENS)
    return start + first, gl.load(context_lens + seq) + first, left


@gluon.jit
def _span(position, left, window, SLIDING: gl.constexpr):
    """The first and last key that queries see."""
    low = 0
    if SLIDING:
        low = gl.maximum(position - window + 1, 0)
    return low, position + left - 1


@gluon.jit
def _copy_keys(
    cache, table, tile, pages, head, full, target, KV_HEADS: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """A tile's pages; those before or past the ones that queries see may be any others of these."""
    PAGE: gl.constexpr = cache.block_type.shape[0]
    COUNT: gl.constexpr = KEYS // PAGE
    mbarrier.expect(full, COUNT * cache.block_type.nbytes)
    for i in gl.static_range(COUNT):
        key = tile * KEYS + i * PAGE
        block = gl.load(table + gl.minimum(gl.maximum(key // BLOCK, pages[0]), pages[1]))
        row = (block * KV_HEADS + head) * BLOCK + key % BLOCK
        tma.async_copy_global_to_shared(cache, [row, 0], full, target.slice(i * PAGE, PAGE, dim=0))


@gluon.jit
def _copy_tiles(
    q, k_cache, v_cache, memory, barriers, lists, tables, table_rows, table_stride, last,
    window,
    KV_HEADS: gl.constexpr, SHARE: gl.constexpr, GROUP: gl.constexpr, BLOCK: gl.constexpr,
    SLIDING: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """The copying warp: of each item the queries, then keys, and values one tile behind them."""
    queries, keys, values = memory
    full_queries, empty_queries, full_keys, empty_keys, full_values, empty_values, _ = barriers
    TOKENS: gl.constexpr = ROWS // GROUP
    done = 0
    for turn in range(_num_turns(last)):
        item = _item_of(turn)
        head = item % (KV_HEADS * SHARE)
        tile = item // (KV_HEADS * SHARE)
        seq = gl.load(lists[0] + tile)
        row, position, left = _place_of(lists, tile, seq, TOKENS)
        table = tables + gl.load(table_rows + seq).to(gl.int64) * table_stride
        low, high = _span(position, left, window, SLIDING)
        pages, top = (low // BLOCK, high // BLOCK), high // KEYS
        slot = turn & 1
        mbarrier.wait(empty_queries.index(slot), ((turn >> 1) & 1) ^ 1)
        mbarrier.expect(full_queries.index(slot), q.block_type.nbytes)
        tma.async_copy_global_to_shared(
            q, [row, head * GROUP, 0], full_queries.index(slot),
            queries.index(slot)._reinterpret(q.dtype, q.block_type.shape, q.layout),
        )  # fmt: skip
        count = top - low // KEYS + 1
        for j in range(count + 1):
            if j < count:
                stage, phase = (done + j) % STAGES, (((done + j) // STAGES) & 1) ^ 1
                mbarrier.wait(empty_keys.index(stage), phase)
                _copy_keys(
                    k_cache, table, top - j, pages, head // SHARE, full_keys.index(stage),
                    keys.index(stage), KV_HEADS, BLOCK,
                )  # fmt: skip
            if j > 0:
                before = done + j - 1
                stage, phase = before % STAGES, ((before // STAGES) & 1) ^ 1
                mbarrier.wait(empty_values.index(stage), phase)
                _copy_keys(
                    v_cache, table, top - j + 1, pages, head // SHARE, full_values.index(stage),
                    values.index(stage), KV_HEADS, BLOCK,
                )  # fmt: skip
        done += count


@gluon.jit
def _masked(scores, tile, bound, window, SLIDING: gl.constexpr):
    """Scores of a tile without those of keys from `bound` on, or before its window."""
    key = (tile * KEYS + gl.arange(0, KEYS, layout=SCORE_KEYS))[None, :]
    seen = key < bound[:, None]
    if SLIDING:
        seen = seen & (key >= (bound - window)[:, None])
    return gl.where(seen, scores, MASKED)


@gluon.jit
def _softmax(scores, peak, total):
    """Weights of a tile's scores, the new peak, how sums shrink by it, and the total."""
    top = gl.maximum(peak, gl.max(scores, axis=1) * LOG2E)
    each = exp2(scores * LOG2E - top[:, None])
    shrink = exp2(peak - top)
    return each, top, shrink, total * shrink + gl.sum(each, axis=1)


@gluon.jit
def _weigh(
    mine, memory, barriers, state, nothing, begin, end, done, turn, top, bound, window,
    SUMS: gl.constexpr, MASK: gl.constexpr, SLIDING: gl.constexpr, STAGES: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """The item's tiles [begin, end) of scores; of weights and values those one before them."""
    _, keys, values = memory
    _, _, full_keys, empty_keys, full_values, empty_values, turns = barriers
    acc, each, peak, total = state
    for j in range(begin, end):
        stage, phase = (done + j) % STAGES, ((done + j) // STAGES) & 1
        last, last_phase = (done + j - 1) % STAGES, ((done + j - 1) // STAGES) & 1
        mbarrier.wait(full_keys.index(stage), phase)
        mbarrier.wait(turns.index(WHO), (done - turn + j - WHO) & 1)
        scores = score(mine, keys.index(stage), nothing)
        weights = operand(each, SUMS)
        mbarrier.wait(full_values.index(last), last_phase)
        acc = warpgroup_mma(weights, values.index(last), acc, is_async=True)
        mbarrier.arrive(turns.index(1 - WHO), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(empty_keys.index(stage), count=1)
        if MASK:
            scores = _masked(scores, top - j, bound, window, SLIDING)
        each, peak, shrink, total = _softmax(scores, peak, total)
        # Long since full; a branch, which keeps ptxas from moving the wait before the softmax.
        mbarrier.wait(full_values.index(last), last_phase)
        acc, each = warpgroup_mma_wait(0, deps=(acc, each))
        mbarrier.arrive(empty_values.index(last), count=1)
        acc = shrunk(acc, shrink, SUMS)
    return acc, each, peak, total


@gluon.jit
def _group(
    out, out_stride, sinks, memory, barriers, lists, last, window,
    DIM: gl.constexpr, HEADS: gl.constexpr, GROUP: gl.constexpr, SLIDING: gl.constexpr,
    SINKS: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """One group: its rows of all of the program's items, and their results to memory."""
    queries, keys, values = memory
    full_queries, empty_queries, full_keys, empty_keys, full_values, empty_values, _ = barriers
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    TOKENS: gl.constexpr = ROWS // GROUP
    nothing = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    none = gl.zeros([HALF], gl.float32, SCORE_ROWS)
    done = 0
    tile = _item_of(0) // HEADS
    row, position, left = _place_of(lists, tile, gl.load(lists[0] + tile), TOKENS)
    for turn in range(_num_turns(last)):
        # Whose queries the next item has is read long before it begins.
        tile = gl.minimum(_item_of(turn + 1), last) // HEADS
        seq = gl.load(lists[0] + tile)
        head = _item_of(turn) % HEADS
        low, high = _span(position, left, window, SLIDING)
        top, count = high // KEYS, high // KEYS - low // KEYS + 1
        index = WHO * HALF + gl.arange(0, HALF, layout=SCORE_ROWS)
        bound = position + 1 + index // GROUP
        peak, total = gl.full([HALF], FLOOR, gl.float32, SCORE_ROWS), none
        if SINKS:  # a key without a value
            peak = gl.load(sinks + head * GROUP + index % GROUP).to(gl.float32) * LOG2E
            total = gl.full([HALF], 1.0, gl.float32, SCORE_ROWS)
        slot = turn & 1
        mine = queries.index(slot).slice(WHO * HALF, HALF, dim=0)
        mbarrier.wait(full_queries.index(slot), (turn >> 1) & 1)
        stage, phase = done % STAGES, (done // STAGES) & 1
        mbarrier.wait(full_keys.index(stage), phase)
        scores = warpgroup_mma_wait(0, deps=(score(mine, keys.index(stage), nothing),))
        mbarrier.arrive(empty_keys.index(stage), count=1)
        scores = _masked(scores, top, bound, window, SLIDING)
        each, peak, _shrink, total = _softmax(scores, peak, total)

        state = (gl.zeros([HALF, DIM], gl.float32, SUMS), each, peak, total)
        clear = gl.minimum(gl.maximum(top - (position + 1) // KEYS + 1, 1), count)
        if SLIDING:
            clear = count
        state = _weigh(
            mine, memory, barriers, state, nothing, 1, clear, done, turn, top, bound, window,
            SUMS, True, SLIDING, STAGES, WHO,
        )  # fmt: skip
        acc, each, peak, total = _weigh(
            mine, memory, barriers, state, nothing, clear, count, done, turn, top, bound, window,
            SUMS, False, SLIDING, STAGES, WHO,
        )  # fmt: skip
        mbarrier.arrive(empty_queries.index(slot), count=1)
        next_row, next_position, next_left = _place_of(lists, tile, seq, TOKENS)
        done += count
        stage, phase = (done - 1) % STAGES, ((done - 1) // STAGES) & 1
        mbarrier.wait(full_values.index(stage), phase)
        acc = warpgroup_mma(operand(each, SUMS), values.index(stage), acc)
        mbarrier.arrive(empty_values.index(stage), count=1)

        acc = shrunk(acc, 1.0 / total, SUMS)
        index = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, SUMS))
        channels = gl.arange(0, DIM, layout=gl.SliceLayout(0, SUMS))
        line = (row + index // GROUP).to(gl.int64) * out_stride + (
            head * GROUP + index % GROUP
        ) * DIM
        target = out + line[:, None] + channels[None, :]
        gl.store(target, acc.to(gl.bfloat16), mask=(index // GROUP < left)[:, None])
        row, position, left = next_row, next_position, next_left


@quick
@gluon.jit(do_not_specialize=["table_stride", "last"])
def prefill_kernel(
    q, k_cache, v_cache, sinks, out, tile_seqs, tile_starts, query_starts, context_lens,
    table_rows, tables, table_stride, out_stride, last, window,
    DIM: gl.constexpr, KV_HEADS: gl.constexpr, SHARE: gl.constexpr, GROUP: gl.constexpr,
    BLOCK: gl.constexpr, SLIDING: gl.constexpr, SINKS: gl.constexpr, STAGES: gl.constexpr,
    EARLY: gl.constexpr,
):  # fmt: skip
    """All tiles of queries, for all heads, to out[t, heads * DIM]."""
    wait(EARLY)
    HEADS: gl.constexpr = KV_HEADS * SHARE
    queries = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, DIM], TILE)
    keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, DIM], TILE)
    full_queries = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty_queries = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    rings = ring_barriers(STAGES)
    for i in gl.static_range(2):
        mbarrier.init(full_queries.index(i), count=1)
        mbarrier.init(empty_queries.index(i), count=2)
    fence_async_shared()

    memory = (queries, keys, values)
    barriers = (
        full_queries, empty_queries, rings[0], rings[1], rings[2], rings[3], rings[4],
    )  # fmt: skip
    lists = (tile_seqs, tile_starts, query_starts, context_lens)
    gl.warp_specialize(
        [
            (_group, (out, out_stride, sinks, memory, barriers, lists, last, window,
                      DIM, HEADS, GROUP, SLIDING, SINKS, STAGES, 0)),
            (_group, (out, out_stride, sinks, memory, barriers, lists, last, window,
                      DIM, HEADS, GROUP, SLIDING, SINKS, STAGES, 1)),
            (_copy_tiles, (q, k_cache, v_cache, memory, barriers, lists, tables, table_rows,
                           table_stride, last, window, KV_HEADS, SHARE, GROUP, BLOCK,
                           SLIDING, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def launch(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: QueryTiles,
    batch: AttentionBatch,
    num_heads: int,
    window: int,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of the queries of these tiles."""
    _, kv_heads, block_size, dim = v_cache.shape
    group, tables = heads_of(tiles, num_heads // kv_heads), batch.block_tables
    assert tiles.tokens * group == ROWS.value and tiles.splits == 1
    assert q.stride(1) == out.stride(1) == tables.stride(1) == 1
    items = tiles.seqs.shape[0] * (num_heads // group)
    prefill_kernel[(min(items, _num_processors(q.device)),)](
        *descriptors(q, k_cache, v_cache, group), out if sinks is None else sinks, out, tiles.seqs,
        tiles.starts, batch.query_starts, batch.context_lens, batch.table_rows, tables,
        tables.stride(0), out.stride(0), items - 1, window,
        DIM=dim, KV_HEADS=kv_heads, SHARE=num_heads // kv_heads // group, GROUP=group,
        BLOCK=block_size, SLIDING=window > 0, SINKS=sinks is not None, STAGES=STAGES, num_warps=4,
        **launch_options(),
    )  # fmt: skip


def descriptors(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, group: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Queries in tiles [tokens, heads of a group, dim], and the caches' rows in pages."""
    dim, page = v_cache.shape[3], min(v_cache.shape[2], KEYS.value)
    tile = [ROWS.value // group, group, dim]
    heads = gl.NVMMASharedLayout(128, 16, 3)
    queries = TensorDescriptor.from_tensor(q.unflatten(1, (-1, dim)), tile, heads)
    rows = gl.NVMMASharedLayout(128, 16, 2)
    caches = (c.view(-1, dim) for c in (k_cache, v_cache))
    keys, values = (TensorDescriptor.from_tensor(c, [page, dim], rows) for c in caches)
    return queries, keys, values
