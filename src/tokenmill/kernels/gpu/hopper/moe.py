"""Experts in bfloat16 on Hopper: programs that stay, a ring of stages, rows stored as tiles lie.

A tile is 256 rows of an expert's W by up to 128 rows of tokens. Four warps copy steps of 64
channels into a ring while two groups of four multiply, each its quarters of either half of W's rows
by all rows of tokens: however few these are, the tensor cores get blocks of 64. A stage is full
when the bytes of W and each copying thread's rows have come, and empty when both groups have read
it. The copying warps run ahead into the next tile while a group stores the last one.

The first product takes rows of gate and up of the same channels as the halves of W's tile: a thread
holds both and stores silu(gate) * up alone. It stores rows in the order of tiles; so the second
one's rows lie side by side, and its results go where the tokens' choices are.
"""

from __future__ import annotations

import functools

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
from tokenmill.kernels.gpu.expert_tiles import ExpertTiles
from tokenmill.kernels.gpu.launch import next_power_of_2, quick
from tokenmill.kernels.moe import PackedExperts

HALF = gl.constexpr(128)  # of the rows of W per tile
PIECE = gl.constexpr(64)  # of them per group
STEP = gl.constexpr(64)  # channels per stage of the ring
MOST_ROWS = 128  # of tokens per tile
COPIERS = gl.constexpr(128)  # threads
SHARED_BYTES = 226 * 1024  # of the ring and of results
GROUP = 8  # tiles that share their columns of W in L2

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINES = gl.constexpr(gl.SliceLayout(1, COPY.value))
CHANNELS = gl.constexpr(gl.SliceLayout(0, COPY.value))


@gluon.jit
def _find(visit, count, column_tiles, GROUP: gl.constexpr):
    """The tile of rows and of columns that a program visits; the last ones for all beyond."""
    visit = gl.minimum(visit, count * column_tiles - 1)
    first = visit // (GROUP * column_tiles) * GROUP
    height = gl.minimum(count - first, GROUP)
    inner = visit % (GROUP * column_tiles)
    return first + inner % height, inner // height


@gluon.jit
def _sources(tiles, tile, SHARE: gl.constexpr, ROWS: gl.constexpr):
    """Rows of x that a tile has, and which of them are used."""
    sorted_rows, _, sizes, _ = tiles
    member = gl.arange(0, ROWS, layout=LINES)
    valid = member < gl.load(sizes + tile)
    return gl.load(sorted_rows + tile * ROWS + member, mask=valid, other=0) // SHARE, valid


@gluon.jit
def _copy_tiles(
    x, weight, tiles, memory, barriers, n, k,
    SHARE: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """The copying warps: every step of every tile of this program, each looked up one ahead."""
    _, experts, _, count = tiles
    weights, values, _ = memory
    full, empty = barriers
    programs, column_tiles = gl.num_programs(0), n // (2 * HALF)
    tile, column = _find(gl.program_id(0), count, column_tiles, GROUP)
    expert = gl.load(experts + tile)
    if UP:
        source, valid = _sources(tiles, tile, SHARE, ROWS)
    turn = 0
    for visit in range(gl.program_id(0), count * column_tiles, programs):
        next_tile, next_column = _find(visit + programs, count, column_tiles, GROUP)
        next_expert = gl.load(experts + next_tile)
        if UP:
            first = expert * n + column * HALF
            second = first + n // 2
            lines = x + (source.to(gl.int64) * k)[:, None]
            lines = lines + gl.arange(0, STEP, layout=CHANNELS)[None, :]
            next_source, next_valid = _sources(tiles, next_tile, SHARE, ROWS)
        else:
            first = expert * n + 2 * column * HALF
            second = first + HALF
        for start in range(0, k, STEP):
            stage, phase = turn % STAGES, (turn // STAGES & 1) ^ 1
            ready = full.index(stage)
            mbarrier.wait(empty.index(stage), phase)
            if UP:
                mbarrier.expect(ready, 2 * weight.block_type.nbytes)
            else:
                mbarrier.expect(ready, 2 * weight.block_type.nbytes + x.block_type.nbytes)
            for i in gl.static_range(2):
                place = weights.index(stage).slice(i * HALF, HALF, dim=0)
                row = second if i else first
                tma.async_copy_global_to_shared(weight, [row, start], ready, place)
            if UP:
                async_copy.async_copy_global_to_shared(
                    values.index(stage), lines + start, mask=valid[:, None]
                )
                async_copy.mbarrier_arrive(ready, increment_count=False)
            else:
                tma.async_copy_global_to_shared(x, [tile * ROWS, start], ready, values.index(stage))
            turn += 1
        tile, column, expert = next_tile, next_column, next_expert
        if UP:
            source, valid = next_source, next_valid


@gluon.jit
def _multiply(
    memory, barriers, turn, steps,
    UP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """This group's rows of either half of W's tile by all rows of tokens: two [PIECE, ROWS]."""
    weights, values, _ = memory
    full, empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    first = gl.zeros([PIECE, ROWS], gl.float32, layout)
    second = gl.zeros([PIECE, ROWS], gl.float32, layout)
    for step in range(steps):
        stage, phase = turn % STAGES, turn // STAGES & 1
        mbarrier.wait(full.index(stage), phase)
        if UP:
            fence_async_shared()  # rows came by plain copies
        rows, columns = values.index(stage).permute((1, 0)), weights.index(stage)
        quarter = columns.slice(WHO * PIECE, PIECE, dim=0)
        first = warpgroup_mma(quarter, rows, first, is_async=True)
        quarter = columns.slice(HALF + WHO * PIECE, PIECE, dim=0)
        second = warpgroup_mma(quarter, rows, second, is_async=True)
        first, second = warpgroup_mma_wait(2, deps=(first, second))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    first, second = warpgroup_mma_wait(0, deps=(first, second))
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return first, second


@gluon.jit
def _store(result, place, target, lines, valid, width):
    """Store the columns of a product as rows, by way of shared memory."""
    place.permute((1, 0)).store(result.to(gl.bfloat16))
    channels = gl.arange(0, place.shape[1], layout=CHANNELS)
    offsets = (lines.to(gl.int64) * width)[:, None] + channels[None, :]
    gl.store(target + offsets, place.load(COPY), mask=valid[:, None])


@gluon.jit
def _visit(
    memory, barriers, turn, steps, out, sorted_rows, tile, column, size, n,
    UP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A group's part of one tile."""
    member = gl.arange(0, ROWS, layout=LINES)
    valid = member < size
    lines = tile * ROWS + member
    if not UP:
        lines = gl.load(sorted_rows + lines, mask=valid, other=0)
    first, second = _multiply(memory, barriers, turn, steps, UP, ROWS, STAGES, WHO)
    place = memory[2].index(WHO)
    out += WHO * PIECE
    if UP:
        gated = first / (1.0 + gl.exp(-first)) * second
        _store(gated, place, out + column * HALF, lines, valid, n // 2)
    else:
        out += 2 * column * HALF
        _store(first, place, out, lines, valid, n)
        _store(second, place, out + HALF, lines, valid, n)


@gluon.jit
def _multiply_tiles(
    out, tiles, memory, barriers, n, k,
    UP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    WHO: gl.constexpr,
):  # fmt: skip
    """A multiplying group: its part of every tile of this program."""
    sorted_rows, _, sizes, count = tiles
    programs, column_tiles, steps = gl.num_programs(0), n // (2 * HALF), k // STEP
    tile, column = _find(gl.program_id(0), count, column_tiles, GROUP)
    size = gl.load(sizes + tile)
    turn = 0
    for visit in range(gl.program_id(0), count * column_tiles, programs):
        next_tile, next_column = _find(visit + programs, count, column_tiles, GROUP)
        next_size = gl.load(sizes + next_tile)
        _visit(
            memory, barriers, turn, steps, out, sorted_rows, tile, column, size, n,
            UP, ROWS, STAGES, WHO,
        )  # fmt: skip
        turn += steps
        tile, column, size = next_tile, next_column, next_size


@quick
@gluon.jit
def grouped_kernel(
    x, weight, out, sorted_rows, tile_experts, tile_sizes, num_tiles, n, k,
    SHARE: gl.constexpr, UP: gl.constexpr, ROWS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """UP: x's rows times gate and up; else x, a descriptor of rows as tiles have them, by W."""
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * HALF, STEP], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, STEP], TILE)
    places = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, PIECE], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1 + COPIERS if UP else 1)
        mbarrier.init(empty.index(i), count=2)
    wait(EARLY)
    tiles = (sorted_rows, tile_experts, tile_sizes, gl.load(num_tiles))
    memory, barriers = (weights, values, places), (full, empty)
    gl.warp_specialize(
        [
            (_multiply_tiles, (out, tiles, memory, barriers, n, k, UP, ROWS, STAGES, GROUP, 0)),
            (_multiply_tiles, (out, tiles, memory, barriers, n, k, UP, ROWS, STAGES, GROUP, 1)),
            (
                _copy_tiles,
                (x, weight, tiles, memory, barriers, n, k, SHARE, UP, ROWS, STAGES, GROUP),
            ),
        ],
        [4, 4],
        [208, 88],
    )


@functools.cache
def _num_programs(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows per tile: as many as most experts get, for one tile more reads all of W again."""
    usual: int = next_power_of_2(-(-3 * num_rows // (2 * num_experts)))
    return min(MOST_ROWS, max(16, usual))


def num_stages(rows: int) -> int:
    """Stages of the ring that fit beside both groups' results."""
    results: int = 2 * rows * PIECE.value * 2
    stage: int = (2 * HALF.value + rows) * STEP.value * 2
    return (SHARED_BYTES - results) // stage


def suits(weight: PackedExperts) -> bool:
    """Whether W has whole tiles."""
    whole: bool = weight.n % (2 * HALF.value) == 0 and weight.k % STEP.value == 0
    return whole


def _launch(
    x: torch.Tensor,
    weight: PackedExperts,
    out: torch.Tensor,
    tiles: ExpertTiles,
    up: bool,
    share: int,
) -> None:
    data, n, k = weight.data, weight.n, weight.k
    assert data is not None and all(y.is_contiguous() for y in (x, data, out)) and x.shape[1] == k
    layout, step = gl.NVMMASharedLayout(128, 16, 2), STEP.value
    halves = TensorDescriptor.from_tensor(data.view(-1, k), [HALF.value, step], layout)
    rows = x if up else TensorDescriptor.from_tensor(x, [tiles.rows, step], layout)
    grid = (min(_num_programs(x.device), tiles.most * n // (2 * HALF.value)),)
    grouped_kernel[grid](
        rows, halves, out, tiles.sorted_rows, tiles.experts, tiles.sizes, tiles.num_used, n, k,
        SHARE=share, UP=up, ROWS=tiles.rows, STAGES=num_stages(tiles.rows), GROUP=GROUP,
        num_warps=4, **launch_options(),
    )  # fmt: skip


def gate_up_product(
    x: torch.Tensor, weight: PackedExperts, tiles: ExpertTiles, share: int
) -> torch.Tensor:
    """silu(gate(x)) * up(x) of x[r // share], rows r in the order of tiles."""
    gated = x.new_empty(tiles.most * tiles.rows, weight.n // 2)
    _launch(x, weight, gated, tiles, True, share)
    return gated


def down_product(
    gated: torch.Tensor, weight: PackedExperts, tiles: ExpertTiles, num_rows: int
) -> torch.Tensor:
    """Rows in the order of tiles times W.T -> [num_rows, n] in the order of choices."""
    out = gated.new_empty(num_rows, weight.n)
    _launch(gated, weight, out, tiles, False, 1)
    return out
