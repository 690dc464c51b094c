"""Attention inside segments on Hopper, for heads of 65 to 80 channels: 64 and 16 of them.

Two groups of four warps and a copying warp, as two_groups.py has them. A product over a head's
channels is one over its first 64 and one over the next 16, of which those that are not the head's
have queries of zero. The last tile of keys ends with the segment and comes first: keys that an
earlier tile has are masked once. So no key behind a segment is read, whatever it holds.
"""

from __future__ import annotations

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

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.hopper.bidirectional import softmax
from tokenmill.kernels.gpu.hopper.two_groups import (
    HALF,
    KEYS,
    LOG2E,
    MASKED,
    ROWS,
    SCORES,
    ProgramShape,
    operand,
    ring_barriers,
    shrunk,
)
from tokenmill.kernels.gpu.launch import quick
from tokenmill.kernels.segments import TILE_ROWS, Segments

LOW = gl.constexpr(64)  # channels
HIGH = gl.constexpr(16)

LOW_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
HIGH_SUMS = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16]))
SHAPE = ProgramShape(stages=3, turns=True)


@gluon.jit
def _copy(low, high, row, column, barrier, low_memory, high_memory):
    """A tile of one head into shared memory."""
    mbarrier.expect(barrier, low.block_type.nbytes + high.block_type.nbytes)
    tma.async_copy_global_to_shared(low, [row, column], barrier, low_memory)
    tma.async_copy_global_to_shared(high, [row, column + LOW], barrier, high_memory)


@gluon.jit
def _copy_tiles(low, high, memory, barriers, places, count, STAGES: gl.constexpr):
    """The copying warp: of each tile of keys the values come a turn later."""
    queries, low_keys, high_keys, low_values, high_values = memory
    ready, full_keys, empty_keys, full_values, empty_values, _ = barriers
    row, begin, end, column, size = places
    mbarrier.expect(ready, low.block_type.nbytes)
    tma.async_copy_global_to_shared(low, [row, column], ready, queries)
    for j in range(count + 1):
        if j < count:
            stage, phase = j % STAGES, ((j // STAGES) & 1) ^ 1
            first = end - KEYS if j == 0 else begin + (count - 1 - j) * KEYS
            mbarrier.wait(empty_keys.index(stage), phase)
            _copy(
                low, high, first, column + size, full_keys.index(stage),
                low_keys.index(stage), high_keys.index(stage),
            )  # fmt: skip
        if j > 0:
            stage, phase = (j - 1) % STAGES, (((j - 1) // STAGES) & 1) ^ 1
            first = end - KEYS if j == 1 else begin + (count - j) * KEYS
            mbarrier.wait(empty_values.index(stage), phase)
            _copy(
                low, high, first, column + 2 * size, full_values.index(stage),
                low_values.index(stage), high_values.index(stage),
            )  # fmt: skip


@gluon.jit
def _score(low_mine, high_mine, low_keys, high_keys, nothing):
    scores = warpgroup_mma(
        low_mine, low_keys.permute((1, 0)), nothing, use_acc=False, is_async=True
    )
    return warpgroup_mma(high_mine, high_keys.permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weigh(each, low_values, high_values, low_acc, high_acc):
    """Values by their weights, added to both parts of the sums."""
    low_acc = warpgroup_mma(operand(each, LOW_SUMS), low_values, low_acc, is_async=True)
    high_acc = warpgroup_mma(operand(each, HIGH_SUMS), high_values, high_acc, is_async=True)
    return low_acc, high_acc


@gluon.jit
def _high_queries(qkv, place, WHO: gl.constexpr, DIM: gl.constexpr):
    """A group's queries in the channels from LOW on; zeros behind the head and the segment."""
    row, end, column, stride, _ = place
    layout: gl.constexpr = gl.DotOperandLayout(0, SCORES, 2)
    rows = row + WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    channels = LOW + gl.arange(0, HIGH, layout=gl.SliceLayout(0, layout))
    source = qkv + column + rows.to(gl.int64)[:, None] * stride + channels[None, :]
    return gl.load(source, mask=(rows < end)[:, None] & (channels < DIM)[None, :], other=0.0)


@gluon.jit
def _group(
    memory, barriers, count, left, place, qkv, out,
    STAGES: gl.constexpr, TURNS: gl.constexpr, DIM: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """One group: its rows of queries by all keys, and their results to memory."""
    queries, low_keys, high_keys, low_values, high_values = memory
    ready, full_keys, empty_keys, full_values, empty_values, turns = barriers
    rows: gl.constexpr = gl.SliceLayout(1, SCORES)
    by = gl.full([HALF], LOG2E, gl.float32, rows)
    nothing = gl.zeros([HALF, KEYS], gl.float32, SCORES)
    high_mine = _high_queries(qkv, place, WHO, DIM)
    mbarrier.wait(ready, 0)
    low_mine = queries.slice(WHO * HALF, HALF, dim=0)
    mbarrier.wait(full_keys.index(0), 0)
    scores = _score(low_mine, high_mine, low_keys.index(0), high_keys.index(0), nothing)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    mbarrier.arrive(empty_keys.index(0), count=1)
    key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, SCORES))
    scores = gl.where((key >= KEYS - left)[None, :], scores, MASKED)
    peak, total = gl.full([HALF], MASKED, gl.float32, rows), gl.zeros([HALF], gl.float32, rows)
    each, peak, _, total = softmax(scores, peak, total, by, 0.0)
    low_acc = gl.zeros([HALF, LOW], gl.float32, LOW_SUMS)
    high_acc = gl.zeros([HALF, HIGH], gl.float32, HIGH_SUMS)
    for j in range(1, count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        last, last_phase = (j - 1) % STAGES, ((j - 1) // STAGES) & 1
        mbarrier.wait(full_keys.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(WHO), (j - WHO) & 1)
        scores = _score(low_mine, high_mine, low_keys.index(stage), high_keys.index(stage), nothing)
        mbarrier.wait(full_values.index(last), last_phase)
        low_acc, high_acc = _weigh(
            each, low_values.index(last), high_values.index(last), low_acc, high_acc
        )
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO), count=1)
        scores = warpgroup_mma_wait(2, deps=(scores,))
        mbarrier.arrive(empty_keys.index(stage), count=1)
        each, peak, shrink, total = softmax(scores, peak, total, by, 0.0)
        # Long since full; a branch, which keeps ptxas from moving the wait before the softmax.
        mbarrier.wait(full_values.index(last), last_phase)
        low_acc, high_acc, each = warpgroup_mma_wait(0, deps=(low_acc, high_acc, each))
        mbarrier.arrive(empty_values.index(last), count=1)
        low_acc = shrunk(low_acc, shrink, LOW_SUMS)
        high_acc = shrunk(high_acc, shrink, HIGH_SUMS)
    last, last_phase = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
    mbarrier.wait(full_values.index(last), last_phase)
    low_acc, high_acc = _weigh(
        each, low_values.index(last), high_values.index(last), low_acc, high_acc
    )
    low_acc, high_acc = warpgroup_mma_wait(0, deps=(low_acc, high_acc))
    _store(shrunk(low_acc, 1.0 / total, LOW_SUMS), out, place, 0, WHO, DIM, LOW_SUMS)
    _store(shrunk(high_acc, 1.0 / total, HIGH_SUMS), out, place, LOW, WHO, DIM, HIGH_SUMS)


@gluon.jit
def _store(
    sums, out, place,
    FIRST: gl.constexpr, WHO: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Channels [FIRST, ...) of a group's rows, as far as they are the head's and the segment's."""
    row, end, column, _, out_stride = place
    rows = row + WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, layout))
    channels = FIRST + gl.arange(0, sums.shape[1], layout=gl.SliceLayout(0, layout))
    target = out + column + rows.to(gl.int64)[:, None] * out_stride + channels[None, :]
    seen = (rows < end)[:, None] & (channels < DIM)[None, :]
    gl.store(target, sums.to(gl.bfloat16), mask=seen)


@quick
@gluon.jit
def segment_kernel(
    low, high, qkv, out, tiles, stride, out_stride, size,
    DIM: gl.constexpr, STAGES: gl.constexpr, TURNS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Rows of one tile of queries of a segment and one head, to out[t, heads * DIM]."""
    wait(EARLY)
    column, tile = gl.program_id(0) * DIM, tiles + 3 * gl.program_id(1)
    row, begin, end = gl.load(tile), gl.load(tile + 1), gl.load(tile + 2)
    # A tile without rows, which fills a graph's shape, has a turn too: groups wait for barriers.
    count = gl.maximum(gl.cdiv(end - begin, KEYS), 1)

    queries = gl.allocate_shared_memory(gl.bfloat16, [ROWS, LOW], low.layout)
    low_keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, LOW], low.layout)
    high_keys = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HIGH], high.layout)
    low_values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, LOW], low.layout)
    high_values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, KEYS, HIGH], high.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    rings = ring_barriers(STAGES)
    fence_async_shared()

    memory = (queries, low_keys, high_keys, low_values, high_values)
    barriers = (ready, rings[0], rings[1], rings[2], rings[3], rings[4])
    left = end - begin - (count - 1) * KEYS
    place = (row, end, column, stride, out_stride)
    gl.warp_specialize(
        [
            (_group, (memory, barriers, count, left, place, qkv, out, STAGES, TURNS, DIM, 0)),
            (_group, (memory, barriers, count, left, place, qkv, out, STAGES, TURNS, DIM, 1)),
            (_copy_tiles, (low, high, memory, barriers, (row, begin, end, column, size), count,
                           STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def takes(dim: int) -> bool:
    """Whether heads have so many channels as this kernel is made for."""
    return bool(LOW.value < dim <= LOW.value + HIGH.value)


def attend(
    qkv: torch.Tensor, segments: Segments, num_heads: int, shape: ProgramShape = SHAPE
) -> torch.Tensor:
    """Attention of pre-scaled q over k and v of its segment, [t, 3 * heads * dim] -> [t, .]."""
    size = qkv.shape[1] // 3
    assert qkv.is_contiguous() and qkv.dtype == torch.bfloat16 and ROWS.value == TILE_ROWS
    assert takes(size // num_heads) and qkv.stride(0) % 8 == 0
    out = torch.empty(qkv.shape[0], size, dtype=qkv.dtype, device=qkv.device)
    low, high = (
        TensorDescriptor.from_tensor(
            qkv, [KEYS.value, width], gl.NVMMASharedLayout(2 * width, 16, 2)
        )
        for width in (LOW.value, HIGH.value)
    )
    segment_kernel[(num_heads, segments.tiles.shape[0])](
        low, high, qkv, out, segments.tiles, qkv.stride(0), size, size,
        DIM=size // num_heads, STAGES=shape.stages, TURNS=shape.turns, num_warps=4,
        **launch_options(),
    )  # fmt: skip
    return out
