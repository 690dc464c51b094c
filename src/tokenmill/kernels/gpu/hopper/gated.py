"""silu(gate(x)) * up(x) of up to 128 rows in bfloat16 on Hopper, at the rate of reading W.

A program has a tile, 128 channels of gate and the same of up, by all rows of x. A thread holds gate
and up of the same channels, so that only results are stored. One warp copies steps of 64 channels
into a ring while two groups of four multiply, each 64 channels of gate and of up. Weights depend on
no other kernel: the ring is filled with them while the kernel before this one still runs.
"""

from __future__ import annotations

import functools

import torch
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
LEAST_ROWS, MOST_ROWS = 16, 128
LEAST_TILES = 0.75  # for each processor: with fewer tiles too many processors have none
SHARED_BYTES = 226 * 1024  # of the ring and of results

TILE = gl.constexpr(gl.NVMMASharedLayout(128, 16, 2))
COPY = gl.constexpr(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
LINES = gl.constexpr(gl.SliceLayout(1, COPY.value))
COLUMNS = gl.constexpr(gl.SliceLayout(0, COPY.value))


@gluon.jit
def _copy_weights(weight, ring, barrier, stage, step, n):
    row = gl.program_id(0) * CHANNELS
    for i in gl.static_range(2):
        place = ring.index(stage).slice(i * CHANNELS, CHANNELS, dim=0)
        tma.async_copy_global_to_shared(weight, [row + i * (n // 2), step * STEP], barrier, place)


@gluon.jit
def _copy_tile(
    x, weight, rings, barriers, n, k,
    ROWS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """The copying warp: weights of a whole ring, then, once x is complete, all the rest."""
    full, empty = barriers
    steps = k // STEP
    ahead = gl.minimum(steps, STAGES)
    num_bytes: gl.constexpr = (2 * CHANNELS + ROWS) * STEP * 2
    for step in range(ahead):
        mbarrier.expect(full.index(step), num_bytes)
        _copy_weights(weight, rings[0], full.index(step), step, step, n)
    wait(EARLY)
    for step in range(ahead):
        tma.async_copy_global_to_shared(x, [0, step * STEP], full.index(step), rings[1].index(step))
    for step in range(ahead, steps):
        stage, phase = step % STAGES, (step // STAGES & 1) ^ 1
        mbarrier.wait(empty.index(stage), phase)
        mbarrier.expect(full.index(stage), num_bytes)
        _copy_weights(weight, rings[0], full.index(stage), stage, step, n)
        tma.async_copy_global_to_shared(
            x, [0, step * STEP], full.index(stage), rings[1].index(stage)
        )


@gluon.jit
def _multiply_tile(
    out, num_rows, rings, results, barriers, n, k,
    ROWS: gl.constexpr, STAGES: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """A multiplying group: its channels by all rows, gate and up [PIECE, ROWS] each."""
    full, empty = barriers
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, ROWS, 16])
    gate = gl.zeros([PIECE, ROWS], gl.float32, layout)
    up = gl.zeros([PIECE, ROWS], gl.float32, layout)
    for step in range(k // STEP):
        stage, phase = step % STAGES, step // STAGES & 1
        mbarrier.wait(full.index(stage), phase)
        gates = rings[0].index(stage).slice(WHO * PIECE, PIECE, dim=0)
        ups = rings[0].index(stage).slice(CHANNELS + WHO * PIECE, PIECE, dim=0)
        rows = rings[1].index(stage).permute((1, 0))
        gate = warpgroup_mma(gates, rows, gate, is_async=True)
        up = warpgroup_mma(ups, rows, up, is_async=True)
        gate, up = warpgroup_mma_wait(2, deps=(gate, up))
        mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=step > 0)
    gate, up = warpgroup_mma_wait(0, deps=(gate, up))
    gated = gate / (1.0 + gl.exp(-gate)) * up
    place = results.index(WHO)  # by way of shared memory rows are stored, not columns
    place.permute((1, 0)).store(gated.to(gl.bfloat16))
    row, column = gl.arange(0, ROWS, layout=LINES), gl.arange(0, PIECE, layout=COLUMNS)
    target = out + gl.program_id(0) * CHANNELS + WHO * PIECE
    offsets = (row * (n // 2))[:, None] + column[None, :]
    gl.store(target + offsets, place.load(COPY), mask=(row < num_rows)[:, None])


@quick
@gluon.jit
def gated_kernel(
    x, weight, out, num_rows, n, k,
    ROWS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """x: tiles [ROWS, STEP]; weight: tiles [CHANNELS, STEP] of [n, k]; out[num_rows, n / 2]."""
    weights = gl.allocate_shared_memory(gl.bfloat16, [STAGES, 2 * CHANNELS, STEP], TILE)
    values = gl.allocate_shared_memory(gl.bfloat16, [STAGES, ROWS, STEP], TILE)
    results = gl.allocate_shared_memory(gl.bfloat16, [2, ROWS, PIECE], TILE)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    rings, barriers = (weights, values), (full, empty)
    gl.warp_specialize(
        [
            (_multiply_tile, (out, num_rows, rings, results, barriers, n, k, ROWS, STAGES, 0)),
            (_multiply_tile, (out, num_rows, rings, results, barriers, n, k, ROWS, STAGES, 1)),
            (_copy_tile, (x, weight, rings, barriers, n, k, ROWS, STAGES, EARLY)),
        ],
        [4, 1],
        [232, 24],
    )


def padded_rows(num_rows: int) -> int:
    """What rows are padded to: a product has a power of two of them."""
    return max(LEAST_ROWS, next_power_of_2(num_rows))


def num_stages(rows: int) -> int:
    """Stages of the ring that fit beside both groups' results."""
    results: int = 2 * rows * PIECE.value * 2
    stage: int = (2 * CHANNELS.value + rows) * STEP.value * 2
    return (SHARED_BYTES - results) // stage


def suits(num_rows: int, weight: torch.Tensor) -> bool:
    """Whether the kernel runs here, takes so many rows, and W has a tile for most processors."""
    (n, k), processors = weight.shape, _num_processors(weight.device)
    return (
        weight.dtype == torch.bfloat16
        and n % (2 * CHANNELS.value) == 0
        and k % STEP.value == 0
        and num_rows <= MOST_ROWS
        and LEAST_TILES * processors <= n // (2 * CHANNELS.value) <= processors
        and hopper.is_usable()
    )


@functools.cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def gated_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """silu(x @ W[:n/2].T) * (x @ W[n/2:].T) of x[m, k] and W[n, k], [m, n / 2]."""
    (num_rows, k), n = x.shape, weight.shape[0]
    assert x.is_contiguous() and weight.is_contiguous() and num_rows <= MOST_ROWS
    rows, out = padded_rows(num_rows), x.new_empty(num_rows, n // 2)
    layout, step = gl.NVMMASharedLayout(128, 16, 2), STEP.value
    gated_kernel[(n // (2 * CHANNELS.value),)](
        TensorDescriptor.from_tensor(x, [rows, step], layout),
        TensorDescriptor.from_tensor(weight, [CHANNELS.value, step], layout), out, num_rows, n, k,
        ROWS=rows, STAGES=num_stages(rows), num_warps=4, **launch_options(),
    )  # fmt: skip
    return out
