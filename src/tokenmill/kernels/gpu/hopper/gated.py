"""silu(gate(x)) * up(x) of up to 192 rows in bfloat16 on Hopper, at the rate of reading W.

A tile is 128 channels of gate and the same of up, by all rows of x. The steps of all tiles stand
in one line, and every program takes an equal share of it: no program is idle in a last round of
tiles. Where a share ends inside a tile, two programs have parts of it; the one that ends last adds
both and stores. A thread holds gate and up of the same channels, so that only results are stored.

One warp copies steps of 64 channels into a ring while two groups of four multiply, each 64 channels
of gate and of up. Weights depend on no other kernel: the ring is filled with them while the kernel
before this one still runs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import next_power_of_2, quick

CHANNELS = gl.constexpr(128)  # of gate, and of up, per tile
PIECE = gl.constexpr(64)  # of them per group
STEP = gl.constexpr(64)  # columns of W per stage of the ring
MAIN_ROWS = 128  # at most, in one product; what is beyond them is a second one
MOST_ROWS = 192
LEAST_ROWS, LEAST_TAIL = 16, 32
LEAST_TILES = 0.75  # for each processor: with fewer tiles too many processors have none
SHARED_BYTES = 226 * 1024  # of the ring and of results

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINES = gl.constexpr(gl.SliceLayout(1, COPY.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY.value))


@triton.jit
def _barrier():
    """For the threads of a group; Gluon's own has one name in Triton 3.6 and another in 3.7."""
    tl.debug_barrier()


@gluon.jit
def _share(total):
    """The steps of this program, [first, end)."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    return total * program // programs, total * (program + 1) // programs


@gluon.jit
def _copy_weights(weight, ring, barrier, stage, at, steps, n):
    row, column = at // steps * CHANNELS, at % steps * STEP
    for i in gl.static_range(2):
        place = ring.index(stage).slice(i * CHANNELS, CHANNELS, dim=0)
        tma.async_copy_global_to_shared(weight, [row + i * (n // 2), column], barrier, place)


@gluon.jit
def _copy_rows(rows, rings, barrier, stage, at, steps, MAIN: gl.constexpr, TAIL: gl.constexpr):
    column = at % steps * STEP
    tma.async_copy_global_to_shared(rows[0], [0, column], barrier, rings[1].index(stage))
    if TAIL:
        tma.async_copy_global_to_shared(rows[1], [MAIN, column], barrier, rings[2].index(stage))


@gluon.jit
def _copy_share(
    rows, weight, rings, barriers, n, k,
    MAIN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp: weights of a whole ring, then, once x is complete, all the rest."""
    full, empty = barriers
    steps = k // STEP
    first, end = _share(n // (2 * CHANNELS) * steps)
    ahead = gl.minimum(end - first, STAGES)
    num_bytes: gl.constexpr = (2 * CHANNELS + MAIN + TAIL) * STEP * 2
    for i in range(ahead):
        mbarrier.expect(full.index(i), num_bytes)
        _copy_weights(weight, rings[0], full.index(i), i, first + i, steps, n)
    wait(EARLY)
    for i in range(ahead):
        _copy_rows(rows, rings, full.index(i), i, first + i, steps, MAIN, TAIL)
    for turn in range(ahead, end - first):
        stage, phase = turn % STAGES, (turn // STAGES & 1) ^ 1
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), num_bytes)
        _copy_weights(weight, rings[0], full.index(stage), stage, first + turn, steps, n)
        _copy_rows(rows, rings, full.index(stage), stage, first + turn, steps, MAIN, TAIL)


@gluon.jit
def _multiply(
    rings, barriers, turn, count,
    MAIN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """This group's channels by all rows: gate and up [PIECE, MAIN], and both [PIECE, TAIL]."""
    full, empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, MAIN, 16])
    gate = gl.zeros([PIECE, MAIN], gl.float32, layout)
    up = gl.zeros([PIECE, MAIN], gl.float32, layout)
    if TAIL:
        tail_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        tail_gate = gl.zeros([PIECE, TAIL], gl.float32, tail_layout)
        tail_up = gl.zeros([PIECE, TAIL], gl.float32, tail_layout)
    for step in range(count):
        stage, phase = turn % STAGES, turn // STAGES & 1
        mbarrier.wait(full.index(stage), phase)
        gates = rings[0].index(stage).slice(WHO * PIECE, PIECE, dim=0)
        ups = rings[0].index(stage).slice(CHANNELS + WHO * PIECE, PIECE, dim=0)
        rows = rings[1].index(stage).permute((1, 0))
        gate = warpgroup_mma(gates, rows, gate, is_async=True)
        up = warpgroup_mma(ups, rows, up, is_async=True)
        if TAIL:
            rows = rings[2].index(stage).permute((1, 0))
            tail_gate = warpgroup_mma(gates, rows, tail_gate, is_async=True)
            tail_up = warpgroup_mma(ups, rows, tail_up, is_async=True)
            both = (gate, up, tail_gate, tail_up)
            gate, up, tail_gate, tail_up = warpgroup_mma_wait(4, deps=both)
        else:
            gate, up = warpgroup_mma_wait(2, deps=(gate, up))
        mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1, pred=step > 0)
        turn += 1
    if TAIL:
        both = (gate, up, tail_gate, tail_up)
        gate, up, tail_gate, tail_up = warpgroup_mma_wait(0, deps=both)
    else:
        gate, up = warpgroup_mma_wait(0, deps=(gate, up))
        tail_gate, tail_up = gate, up
    mbarrier.arrive(empty.index((turn + STAGES - 1) % STAGES), count=1)
    return gate, up, tail_gate, tail_up


@gluon.jit
def _places(sums, ROWS: gl.constexpr):
    """Where gate [PIECE, ROWS] and up [PIECE, ROWS] of a part of a tile lie."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    channel = gl.arange(0, PIECE, layout=gl.SliceLayout(1, layout))
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, layout))
    gates = sums + channel[:, None] * ROWS + row[None, :]
    return gates, gates + PIECE * ROWS


@gluon.jit
def _join(
    products, sums, flag, begun, MAIN: gl.constexpr, TAIL: gl.constexpr, WHO: gl.constexpr
):  # fmt: skip
    """1 and whole products if the other part of the tile was complete before this one, else 0.

    A program begins with the end of a tile and ends with the beginning of another one: mostly the
    end of a tile is there when its beginning is complete, which then need not be written.
    """
    gate, up, tail_gate, tail_up = products
    program, programs = gl.program_id(0), gl.num_programs(0)
    own, other = program, programs + program - 1
    whole = 0
    if begun == 0:
        own, other = programs + program, program + 1
        whole = gl.atomic_add(flag, 0, sem="acquire", scope="gpu")
    size: gl.constexpr = 2 * PIECE * (MAIN + TAIL)
    if whole == 0:
        part = sums + (2 * own + WHO) * size
        gates, ups = _places(part, MAIN)
        gl.store(gates, gate)
        gl.store(ups, up)
        if TAIL:
            gates, ups = _places(part + 2 * PIECE * MAIN, TAIL)
            gl.store(gates, tail_gate)
            gl.store(ups, tail_up)
        _barrier()  # what all threads have written is released by the one that counts
        whole = gl.atomic_add(flag, 1, sem="acq_rel", scope="gpu")
    if whole == 1:
        gl.store(flag, 0)
        part = sums + (2 * other + WHO) * size
        gates, ups = _places(part, MAIN)
        gate += gl.load(gates, cache_modifier=".cg")
        up += gl.load(ups, cache_modifier=".cg")
        if TAIL:
            gates, ups = _places(part + 2 * PIECE * MAIN, TAIL)
            tail_gate += gl.load(gates, cache_modifier=".cg")
            tail_up += gl.load(ups, cache_modifier=".cg")
    return whole, gate, up, tail_gate, tail_up


@gluon.jit
def _store(gate, up, place, out, first_row, num_rows, width, ROWS: gl.constexpr):
    """Store silu(gate) * up [PIECE, ROWS] as rows, by way of shared memory."""
    gated = gate / (1.0 + gl.exp(-gate)) * up
    place.permute((1, 0)).store(gated.to(gl.bfloat16))
    row = first_row + gl.arange(0, ROWS, layout=LINES)
    column = gl.arange(0, PIECE, layout=COLUMNS)
    offsets = (row * width)[:, None] + column[None, :]
    gl.store(out + offsets, place.load(COPY), mask=(row < num_rows)[:, None])


@gluon.jit
def _multiply_share(
    out, sums, flags, num_rows, rings, results, barriers, n, k,
    MAIN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A multiplying group: its channels of every tile that this program has a part of."""
    steps = k // STEP
    first, end = _share(n // (2 * CHANNELS) * steps)
    at = first
    while at < end:
        tile, begun = at // steps, at % steps
        count = gl.minimum(steps - begun, end - at)
        gate, up, tail_gate, tail_up = _multiply(
            rings, barriers, at - first, count, MAIN, TAIL, STAGES, WHO
        )
        whole = 1
        if count < steps:
            whole, gate, up, tail_gate, tail_up = _join(
                (gate, up, tail_gate, tail_up), sums, flags + 2 * tile + WHO, begun, MAIN, TAIL, WHO
            )
        if whole == 1:
            target = out + tile * CHANNELS + WHO * PIECE
            place = results.index(WHO)
            _store(gate, up, place, target, 0, num_rows, n // 2, MAIN)
            if TAIL:
                place = place.slice(0, TAIL, dim=0)
                _store(tail_gate, tail_up, place, target, MAIN, num_rows, n // 2, TAIL)
        at += count


@quick
@gluon.jit
def gated_kernel(
    x, x_tail, weight, out, sums, flags, num_rows, n, k,
    MAIN: gl.constexpr, TAIL: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """x, x_tail: tiles [MAIN, STEP] and [TAIL, STEP] of x; weight: tiles [CHANNELS, STEP]."""
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * CHANNELS, STEP], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, MAIN, STEP], TILE)
    tails = values
    if TAIL:
        tails = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TAIL, STEP], TILE)
    rings = (weights, values, tails)
    results = gl.allocate_shared_memory(gl.bfloat16, [2, MAIN, PIECE], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    barriers, rows = (full, empty), (x, x_tail)
    gl.warp_specialize(
        [
            (
                _multiply_share,
                (out, sums, flags, num_rows, rings, results, barriers, n, k, MAIN, TAIL, STAGES, 0),
            ),
            (
                _multiply_share,
                (out, sums, flags, num_rows, rings, results, barriers, n, k, MAIN, TAIL, STAGES, 1),
            ),
            (_copy_share, (rows, weight, rings, barriers, n, k, MAIN, TAIL, STAGES, EARLY)),
        ],
        [4, 1],
        [232, 24],
    )


def shape(num_rows: int) -> tuple[int, int]:
    """Rows of the first product and of the second one."""
    if num_rows <= MAIN_ROWS:
        return max(LEAST_ROWS, next_power_of_2(num_rows)), 0
    return MAIN_ROWS, max(LEAST_TAIL, next_power_of_2(num_rows - MAIN_ROWS))


def num_stages(main: int, tail: int) -> int:
    """Stages of the ring that fit beside both groups' results."""
    results: int = 2 * main * PIECE.value * 2
    stage: int = (2 * CHANNELS.value + main + tail) * STEP.value * 2
    return (SHARED_BYTES - results) // stage


def suits(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether the kernel runs here, takes so many rows, and W has whole tiles."""
    (n, k), least = weight.shape, LEAST_TILES * _num_processors(weight.device)
    whole = n % (2 * CHANNELS.value) == 0 and k % STEP.value == 0
    return (
        weight.dtype == torch.bfloat16
        and whole
        and num_rows <= MOST_ROWS
        and n // (2 * CHANNELS.value) >= least
        and hopper.is_usable()
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def _memory(device: torch.device, num_tiles: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Of parts of tiles, and a flag for each; flags are zero between launches."""
    parts = 0 if num_tiles <= _num_processors(device) else 2 * _num_processors(device)
    sums = torch.empty(max(1, parts * 2 * CHANNELS.value * MOST_ROWS), device=device)
    return sums, torch.zeros(2 * num_tiles, dtype=torch.int32, device=device)


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ W[:n/2].T) * (x @ W[n/2:].T) of x[m, k] and W[n, k], [m, n / 2]."""
    (num_rows, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and num_rows <= MOST_ROWS
    main, tail = shape(num_rows)
    out = x.new_empty(num_rows, n // 2)
    num_tiles = n // (2 * CHANNELS.value)
    layout, step = gl.NVMMASharedLayout(128, 16, 2), STEP.value
    rows = TensorDescriptor.from_tensor(x, [main, step], layout)
    tails = TensorDescriptor.from_tensor(x, [tail, step], layout) if tail else rows
    weights = TensorDescriptor.from_tensor(weight, [CHANNELS.value, step], layout)
    gated_kernel[(min(_num_processors(x.device), num_tiles),)](
        rows, tails, weights, out, *_memory(x.device, num_tiles), num_rows, n, k,
        MAIN=main, TAIL=tail, STAGES=num_stages(main, tail), num_warps=4, **launch_options(),
    )  # fmt: skip
    return out
