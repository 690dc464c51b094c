"""Attention without a mask on Hopper, by the groups and the copying warp of two_groups.py.

The queries are copied once. A group's turn begins the products of its queries with the next keys,
then those of the last tile's weights with its values; the softmax of the new scores runs beside the
latter.

The last tile of keys comes first: keys past the end are masked once, outside of the loop.

Queries and keys may be 8-bit codes, and values fp8: see kernels/bidirectional.py. The tensor
cores add fp8 products with few bits, so each tile's sums are their own, added up in fp32. A thread
holds the weights of two neighbouring keys in each of eight columns, and fp8 operands are four: so
rounded keys lie in the order that `key_order` gives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

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
from tokenmill.kernels.gpu.hopper.two_groups import (
    HALF,
    KEYS,
    LOG2E,
    MASKED,
    ROWS,
    SCORES,
    ProgramShape,
    exp2,
    operand,
    ring_barriers,
    score,
    shrunk,
)
from tokenmill.kernels.gpu.launch import cdiv, quick

if TYPE_CHECKING:
    from tokenmill.kernels.gpu.bidirectional import Packed

DIM = gl.constexpr(128)
MAGIC = gl.constexpr(0x4B400000)  # the bits of 1.5 * 2^23: a sum with them is a float's bits
MAGIC_VALUE = gl.constexpr(12582912.0)
FP8_SHIFT = gl.constexpr(8.0)  # weights in fp8 are up to 2^8

SCORES_8 = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32]))

PLAIN = ProgramShape(3, True)
ROUNDED = ProgramShape(2, False)


@gluon.jit
def _copy_tiles(
    q, k, v, memory, barriers, places, count,
    STAGES: gl.constexpr, ACROSS: gl.constexpr,
):  # fmt: skip
    """The copying warp; ACROSS: values lie with a channel's keys side by side."""
    queries, keys, values = memory
    ready, full_keys, empty_keys, full_values, empty_values, _ = barriers
    q_row, k_row, v_row, q_column, k_column, v_column = places
    mbarrier.expect(ready, q.block_type.nbytes)
    tma.async_copy_global_to_shared(q, [q_row, q_column], ready, queries)
    for j in range(count + 1):
        if j < count:
            stage, phase = j % STAGES, ((j // STAGES) & 1) ^ 1
            mbarrier.wait(empty_keys.index(stage), phase)
            mbarrier.expect(full_keys.index(stage), k.block_type.nbytes)
            tma.async_copy_global_to_shared(
                k, [k_row + (count - 1 - j) * KEYS, k_column], full_keys.index(stage),
                keys.index(stage),
            )  # fmt: skip
        if j > 0:
            stage, phase = (j - 1) % STAGES, (((j - 1) // STAGES) & 1) ^ 1
            offset = (count - j) * KEYS
            if ACROSS:
                row, column = v_row, v_column + offset
            else:
                row, column = v_row + offset, v_column
            mbarrier.wait(empty_values.index(stage), phase)
            mbarrier.expect(full_values.index(stage), v.block_type.nbytes)
            tma.async_copy_global_to_shared(
                v, [row, column], full_values.index(stage), values.index(stage)
            )


@gluon.jit
def softmax(scores, peak, total, by, SHIFT: gl.constexpr):
    """Weights of a tile's scores times `by`, the new peak, how sums shrink by it, and the total."""
    values, base = scores, gl.zeros_like(by)
    if scores.dtype == gl.int32:
        values, base = (scores + MAGIC).to(gl.float32, bitcast=True), by * MAGIC_VALUE
    top = gl.maximum(peak, gl.max(values, axis=1) * by - base)
    each = exp2(values * by[:, None] - (top + base - SHIFT)[:, None])
    shrink = exp2(peak - top)
    return each, top, shrink, total * shrink + gl.sum(each, axis=1)


@gluon.jit
def _masked(scores, left, FP8: gl.constexpr, layout: gl.constexpr):
    """Scores without those of keys past the end."""
    if left < KEYS:
        key = gl.arange(0, KEYS, layout=gl.SliceLayout(0, layout))
        if FP8:  # the place of a key among those in order
            key = (key & 0x71) | ((key & 6) << 1) | ((key & 8) >> 2)
        scores = gl.where((key < left)[None, :], scores, MASKED)
    return scores


@gluon.jit
def _operand(each, layout: gl.constexpr, dtype: gl.constexpr):
    """Weights as the tensor cores take them, without a move between threads."""
    if dtype == gl.bfloat16:
        return operand(each, layout)
    else:
        wide: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
        split = each.reshape([HALF, KEYS // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4))
        own = gl.convert_layout(split.reshape([HALF, KEYS]), wide, assert_trivial=True)
        return gl.inline_asm_elementwise(
            """
            {
            .reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};
            }
            """,
            "=r,f,f,f,f", [own], dtype=gl.float8e4nv, is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def _scale_of(factor, k_scales, tile, CODES: gl.constexpr):
    """What scores of a tile of keys are multiplied by."""
    if CODES:
        return factor * gl.load(k_scales + tile)
    else:
        return factor


@gluon.jit
def _weigh(
    mine, memory, barriers, count, state, nothing, factor, k_scales,
    STAGES: gl.constexpr, TURNS: gl.constexpr, CODES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """All tiles but the first, values in bf16 -> sums [HALF, DIM], total."""
    _, keys, values = memory
    _, full_keys, empty_keys, full_values, empty_values, turns = barriers
    each, peak, total = state
    acc = gl.zeros([HALF, DIM], gl.float32, SCORES)
    for j in range(1, count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        last, last_phase = (j - 1) % STAGES, ((j - 1) // STAGES) & 1
        by = _scale_of(factor, k_scales, count - 1 - j, CODES)
        mbarrier.wait(full_keys.index(stage), phase)
        if TURNS:
            mbarrier.wait(turns.index(WHO), (j - WHO) & 1)
        scores = score(mine, keys.index(stage), nothing)
        weights = _operand(each, SCORES, values.dtype)
        mbarrier.wait(full_values.index(last), last_phase)
        acc = warpgroup_mma(weights, values.index(last), acc, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO), count=1)
        scores = warpgroup_mma_wait(1, deps=(scores,))
        mbarrier.arrive(empty_keys.index(stage), count=1)
        each, peak, shrink, total = softmax(scores, peak, total, by, 0.0)
        # Long since full; a branch, which keeps ptxas from moving the wait before the softmax.
        mbarrier.wait(full_values.index(last), last_phase)
        acc, each = warpgroup_mma_wait(0, deps=(acc, each))
        mbarrier.arrive(empty_values.index(last), count=1)
        acc = shrunk(acc, shrink, SCORES)
    last, last_phase = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
    weights = _operand(each, SCORES, values.dtype)
    mbarrier.wait(full_values.index(last), last_phase)
    return warpgroup_mma(weights, values.index(last), acc), total


@gluon.jit
def _weigh_fp8(
    mine, memory, barriers, count, state, nothing, factor, k_scales,
    STAGES: gl.constexpr, TURNS: gl.constexpr, CODES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """The same with values in fp8; for want of registers a tile's sums end before the softmax."""
    _, keys, values = memory
    _, full_keys, empty_keys, full_values, empty_values, turns = barriers
    each, peak, total = state
    none = gl.zeros([HALF, DIM], gl.float32, SCORES_8)
    acc = none
    shrink = gl.zeros_like(peak)
    for j in range(1, count):
        stage, phase = j % STAGES, (j // STAGES) & 1
        last, last_phase = (j - 1) % STAGES, ((j - 1) // STAGES) & 1
        by = _scale_of(factor, k_scales, count - 1 - j, CODES)
        weights = _operand(each, SCORES_8, values.dtype)
        mbarrier.wait(full_values.index(last), last_phase)
        if TURNS:
            mbarrier.wait(turns.index(WHO), (j - WHO) & 1)
        part = score(weights, values.index(last), none)
        mbarrier.wait(full_keys.index(stage), phase)
        scores = score(mine, keys.index(stage), nothing)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO), count=1)
        part = warpgroup_mma_wait(1, deps=(part,))
        mbarrier.arrive(empty_values.index(last), count=1)
        acc = shrunk(acc, shrink, SCORES_8) + part
        # Long since full; a branch, which keeps ptxas from taking these sums into the softmax.
        mbarrier.wait(full_keys.index(stage), phase)
        scores, acc = warpgroup_mma_wait(0, deps=(scores, acc))
        mbarrier.arrive(empty_keys.index(stage), count=1)
        each, peak, shrink, total = softmax(scores, peak, total, by, FP8_SHIFT)
    last, last_phase = (count - 1) % STAGES, ((count - 1) // STAGES) & 1
    weights = _operand(each, SCORES_8, values.dtype)
    mbarrier.wait(full_values.index(last), last_phase)
    part = warpgroup_mma_wait(0, deps=(score(weights, values.index(last), none),))
    return shrunk(acc, shrink, SCORES_8) + part, total


@gluon.jit
def _group(
    memory, barriers, count, left, factors, place, out, v_scales,
    STAGES: gl.constexpr, TURNS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """One group: its rows of queries by all keys, and their results to memory."""
    queries, keys, values = memory
    ready, full_keys, empty_keys, _, _, _ = barriers
    scale, q_scales, k_scales = factors
    row, rows_left, line, out_stride = place
    CODES: gl.constexpr = keys.dtype != gl.bfloat16
    FP8: gl.constexpr = values.dtype != gl.bfloat16
    layout: gl.constexpr = SCORES_8 if CODES else SCORES
    sums: gl.constexpr = SCORES_8 if FP8 else SCORES
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    kind: gl.constexpr = gl.int32 if keys.dtype == gl.int8 else gl.float32

    factor = gl.full([HALF], scale, gl.float32, rows)
    if CODES:
        factor *= gl.load(q_scales + row + WHO * HALF + gl.arange(0, HALF, layout=rows))
    nothing = gl.zeros([HALF, KEYS], kind, layout)
    mbarrier.wait(ready, 0)
    mine = queries.slice(WHO * HALF, HALF, dim=0)
    mbarrier.wait(full_keys.index(0), 0)
    scores = warpgroup_mma_wait(0, deps=(score(mine, keys.index(0), nothing),))
    mbarrier.arrive(empty_keys.index(0), count=1)
    scores = scores.to(gl.float32) * _scale_of(factor, k_scales, count - 1, CODES)[:, None]
    scores = _masked(scores, left, FP8, layout)
    peak, total = gl.full([HALF], MASKED, gl.float32, rows), gl.zeros([HALF], gl.float32, rows)
    one = gl.full([HALF], 1.0, gl.float32, rows)
    each, peak, _, total = softmax(scores, peak, total, one, FP8_SHIFT if FP8 else 0.0)
    state = (each, peak, total)
    if FP8:
        acc, total = _weigh_fp8(
            mine, memory, barriers, count, state, nothing, factor, k_scales,
            STAGES, TURNS, CODES, WHO,
        )  # fmt: skip
    else:
        acc, total = _weigh(
            mine, memory, barriers, count, state, nothing, factor, k_scales,
            STAGES, TURNS, CODES, WHO,
        )  # fmt: skip

    channels = gl.arange(0, DIM, layout=gl.SliceLayout(0, sums))
    acc = shrunk(acc, 1.0 / total, sums)
    if FP8:
        acc *= gl.load(v_scales + channels)[None, :]
    index = WHO * HALF + gl.arange(0, HALF, layout=gl.SliceLayout(1, sums))
    target = out + line + index.to(gl.int64)[:, None] * out_stride + channels[None, :]
    gl.store(target, acc.to(gl.bfloat16), mask=(index < rows_left)[:, None])


@quick
@gluon.jit(do_not_specialize=["num_queries", "num_keys"])
def attend_kernel(
    q, k, v, out, q_scales, k_scales, v_scales, num_queries, num_keys, heads, scale,
    STAGES: gl.constexpr, TURNS: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Rows of one tile of queries, one head, one sequence, to out[b, n, heads, DIM]."""
    wait(EARLY)
    tile, head, branch = gl.program_id(0), gl.program_id(1), gl.program_id(2)
    CODES: gl.constexpr = k.dtype != gl.bfloat16
    FP8: gl.constexpr = v.dtype != gl.bfloat16
    group = branch * heads + head
    tiles, count = gl.cdiv(num_queries, ROWS), gl.cdiv(num_keys, KEYS)
    row = tile * ROWS
    if CODES:
        q_row, q_column = group * tiles * ROWS + row, 0
        k_row, k_column = group * count * KEYS, 0
        q_scales += group.to(gl.int64) * tiles * ROWS
        k_scales += group * count
    else:
        q_row, q_column = branch * num_queries + row, head * DIM
        k_row, k_column = branch * num_keys, head * DIM
    if FP8:
        v_row, v_column = group * DIM, 0
        v_scales += group * DIM
    else:
        v_row, v_column = branch * num_keys, head * DIM

    queries = gl.allocate_shared_memory(q.dtype, [ROWS, DIM], q.layout)
    keys = gl.allocate_shared_memory(k.dtype, [STAGES, KEYS, DIM], k.layout)
    values = gl.allocate_shared_memory(v.dtype, [STAGES, KEYS, DIM], v.layout)
    ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(ready, count=1)
    rings = ring_barriers(STAGES)
    fence_async_shared()

    memory = (queries, keys, values)
    barriers = (ready, rings[0], rings[1], rings[2], rings[3], rings[4])
    places = (q_row, k_row, v_row, q_column, k_column, v_column)
    left = num_keys - (count - 1) * KEYS
    factors = (scale * LOG2E, q_scales, k_scales)
    line = ((branch * num_queries + row).to(gl.int64) * heads + head) * DIM
    place = (row, num_queries - row, line, heads * DIM)
    gl.warp_specialize(
        [
            (_group, (memory, barriers, count, left, factors, place, out, v_scales,
                      STAGES, TURNS, 0)),
            (_group, (memory, barriers, count, left, factors, place, out, v_scales,
                      STAGES, TURNS, 1)),
            (_copy_tiles, (q, k, v, memory, barriers, places, count, STAGES, FP8)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def launch(
    packed: Packed, out: torch.Tensor, num_keys: int, shape: ProgramShape | None = None
) -> None:
    """Attention to out[b, n, heads, DIM]."""
    branches, num_queries, heads, _ = out.shape
    codes, fp8 = packed.q_scales is not None, packed.v_scales is not None
    q, k, v = (
        _tiles(packed.rows(part, rounded), rounded)
        for part, rounded in ((packed.q, codes), (packed.k, codes), (packed.v, fp8))
    )
    shape = shape or (ROUNDED if codes else PLAIN)
    given = (packed.q_scales, packed.k_scales, packed.v_scales)
    scales = (out if part is None else part for part in given)
    attend_kernel[(cdiv(num_queries, ROWS.value), heads, branches)](
        q, k, v, out, *scales, num_queries, num_keys, heads, DIM.value**-0.5,
        STAGES=shape.stages, TURNS=shape.turns, num_warps=4, **launch_options(),
    )  # fmt: skip


def _tiles(matrix: torch.Tensor, rounded: bool) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout(128, 8 if rounded else 16, 2)
    return TensorDescriptor.from_tensor(matrix, [KEYS.value, DIM.value], layout)
