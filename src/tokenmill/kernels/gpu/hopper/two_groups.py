"""What the attention kernels of two groups of warps share: tiles, barriers, parts of a softmax.

A program has 128 rows of queries. Two groups of four warps take 64 of them each, and a ninth warp
copies tiles of 128 keys and of their values into rings of stages. The groups may begin their
products in turns, so that one is in its softmax while the other's products run.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma

ROWS = gl.constexpr(128)  # of queries per program
HALF = gl.constexpr(64)  # of them per group
KEYS = gl.constexpr(128)
MASKED = gl.constexpr(-1e30)
LOG2E = gl.constexpr(1.4426950408889634)

SCORES = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))


class ProgramShape(NamedTuple):
    """How a program is laid out; the bits do not depend on it."""

    stages: int
    turns: bool  # the groups begin their products in turns


@gluon.jit
def ring_barriers(STAGES: gl.constexpr):
    """Of keys and of values, each full and then empty, and of the groups' turns."""
    full_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_keys = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_values = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_keys.index(i), count=1)
        mbarrier.init(full_values.index(i), count=1)
        mbarrier.init(empty_keys.index(i), count=2)
        mbarrier.init(empty_values.index(i), count=2)
    for i in gl.static_range(2):
        mbarrier.init(turns.index(i), count=1)
    return full_keys, empty_keys, full_values, empty_values, turns


@gluon.jit
def exp2(x):
    """2^x in one instruction; numbers below the normal ones are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def score(queries, tile, nothing):
    """Begins the products of queries with the rows of a tile."""
    return warpgroup_mma(queries, tile.permute((1, 0)), nothing, use_acc=False, is_async=True)


@gluon.jit
def operand(each, sums: gl.constexpr):
    """Weights as the tensor cores take them, without a move between threads."""
    layout: gl.constexpr = gl.DotOperandLayout(0, sums, 2)
    return gl.convert_layout(each.to(gl.bfloat16), layout, assert_trivial=True)


@gluon.jit
def shrunk(acc, shrink, sums: gl.constexpr):
    """Each row of sums by its factor."""
    return acc * gl.convert_layout(shrink, gl.SliceLayout(1, sums), assert_trivial=True)[:, None]
