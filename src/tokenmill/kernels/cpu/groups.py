"""Products of int8 weights with int8 activations, which have a scale for every 32 of a row.

The sum of a group is an exact integer below 2**24; fp32 sums run over the groups in order, on AVX2
as on AVX-512. vpdpbusd multiplies unsigned by signed bytes: weights are stored 128 too large, and
what that adds is taken off a group's sum before it starts.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from tokenmill.kernels.cpu import build
from tokenmill.kernels.cpu.build import compiled
from tokenmill.kernels.cpu.pool import get_num_threads, launch, task_kernel
from tokenmill.kernels.cpu.tiles import (
    F32,
    I32,
    I64,
    accumulators,
    load,
    row_addresses,
    splat,
    store,
)

GROUP = 32
COLUMNS = 16  # whose weights lie side by side
_TASK_MACS = 500_000  # at least, where there is enough work to go round
_ROW_BLOCK = 128  # rows of A that stay in L2 while a tile of weights passes over them


class Avx2:
    """int8 weights by pairs [k/2, 16, 2] and int16 activations; a vector is 8 columns."""

    lanes, steps, step_bytes, a_bytes = 8, 16, 32, 2
    unrolled = 2  # more steps in a row, and LLVM spills registers
    rows = (6, 4, 2, 1)
    vectors = 2  # of a full tile
    columns = 16

    @staticmethod
    def sums(b: ir.IRBuilder, row: Any, group: Any, groups: Any) -> Any:
        """What the integer sums of a group start from."""
        return ir.Constant(ir.VectorType(I32, 8), [0] * 8)

    @staticmethod
    def weights(b: ir.IRBuilder, at: Any, step: int, v: int) -> Any:
        narrow = load(b, at, 32 * step + 16 * v, ir.VectorType(ir.IntType(8), 16), 1)
        return b.sext(narrow, ir.VectorType(ir.IntType(16), 16))

    @staticmethod
    def multiply(b: ir.IRBuilder, total: Any, both: Any, weights: Any) -> Any:
        """total + a pair of activations, in every lane, times a pair of weights each."""
        sums, pairs = ir.VectorType(I32, 8), ir.VectorType(ir.IntType(16), 16)
        kind = ir.FunctionType(sums, [pairs, pairs])
        madd = b.module.declare_intrinsic("llvm.x86.avx2.pmadd.wd", (), kind)
        return b.add(total, b.call(madd, [b.bitcast(splat(b, both, sums), pairs), weights]))


class Vnni:
    """uint8 weights by fours [k/4, 16, 4] and int8 activations; a vector is 16 columns."""

    lanes, steps, step_bytes, a_bytes = 16, 8, 64, 1
    unrolled = 8
    rows = (6, 4, 2, 1)
    vectors = 2
    columns = 32

    @staticmethod
    def sums(b: ir.IRBuilder, row: Any, group: Any, groups: Any) -> Any:
        at = b.add(row, b.shl(b.add(group, groups), ir.Constant(I64, 2)))
        return splat(b, load(b, at, 0, I32), ir.VectorType(I32, 16))

    @staticmethod
    def weights(b: ir.IRBuilder, at: Any, step: int, v: int) -> Any:
        return load(b, at, 64 * step, ir.VectorType(I32, 16), 1)

    @staticmethod
    def multiply(b: ir.IRBuilder, total: Any, both: Any, weights: Any) -> Any:
        kind = ir.VectorType(I32, 16)
        dot = b.module.declare_intrinsic(
            "llvm.x86.avx512.vpdpbusd.512", (), ir.FunctionType(kind, [kind] * 3)
        )
        return b.call(dot, [total, weights, splat(b, both, kind)])


def emit_tile(isa: Any, rows: int, vectors: int, b: ir.IRBuilder, args: Any) -> None:
    """C[rows, lanes * vectors] (+)= sum over groups of (A @ W) * scale, times w_scale (+ bias).

    A row's scales lie side by side, after them one int32 for each group: -128 times its sum.
    """
    a, lda, w, ldw, groups, scales, lds, w_scale, bias, c, ldc, keep = args
    floats = ir.VectorType(F32, isa.lanes)
    fma = b.module.declare_intrinsic(
        f"llvm.fma.v{isa.lanes}f32", (), ir.FunctionType(floats, [floats] * 3)
    )
    total = accumulators(b, rows, vectors, ir.Constant(floats, [0.0] * isa.lanes))
    sums = accumulators(
        b, rows, vectors, ir.Constant(ir.VectorType(I32, isa.lanes), [0] * isa.lanes)
    )
    lines, scale_rows = row_addresses(b, a, lda, rows), row_addresses(b, scales, lds, rows)
    columns = row_addresses(b, w, ldw, vectors)
    group_bytes = ir.Constant(I64, isa.steps * isa.step_bytes)
    turn_bytes = ir.Constant(I64, isa.unrolled * isa.step_bytes)
    with cgutils.for_range(b, groups) as loop:
        at = [b.add(column, b.mul(loop.index, group_bytes)) for column in columns]
        step_at = b.mul(loop.index, ir.Constant(I64, GROUP * isa.a_bytes))
        for row, slots in zip(scale_rows, sums, strict=True):
            for slot in slots:
                b.store(isa.sums(b, row, loop.index, groups), slot)
        with cgutils.for_range(b, ir.Constant(I64, isa.steps // isa.unrolled)) as turn:
            here = [b.add(x, b.mul(turn.index, turn_bytes)) for x in at]
            a_at = b.add(step_at, b.mul(turn.index, ir.Constant(I64, 4 * isa.unrolled)))
            for step in range(isa.unrolled):
                weights = [isa.weights(b, here[v], step, v) for v in range(vectors)]
                for r in range(rows):
                    both = load(b, b.add(lines[r], a_at), 4 * step, I32)
                    for v in range(vectors):
                        slot = sums[r][v]
                        b.store(isa.multiply(b, b.load(slot), both, weights[v]), slot)
        for r in range(rows):
            scale_at = b.add(scale_rows[r], b.shl(loop.index, ir.Constant(I64, 2)))
            scale = splat(b, load(b, scale_at, 0, F32), floats)
            for v in range(vectors):
                slot = total[r][v]
                b.store(
                    b.call(fma, [b.sitofp(b.load(sums[r][v]), floats), scale, b.load(slot)]), slot
                )
    for r, out in enumerate(row_addresses(b, c, ldc, rows)):
        for v in range(vectors):
            where = 4 * isa.lanes * v
            slot = cgutils.alloca_once(b, floats)
            b.store(b.fmul(b.load(total[r][v]), load(b, w_scale, where, floats)), slot)
            with b.if_then(b.icmp_signed("!=", bias, ir.Constant(I64, 0))):
                b.store(b.fadd(b.load(slot), load(b, bias, where, floats)), slot)
            with b.if_then(b.icmp_signed("!=", keep, ir.Constant(I64, 0))):
                b.store(b.fadd(b.load(slot), load(b, out, where, floats)), slot)
            store(b, b.load(slot), out, where)


def _make_tile(rows: int, vectors: int) -> Any:
    @intrinsic
    def tile(
        typing_context: Any,
        a: Any,
        lda: Any,
        w: Any,
        ldw: Any,
        groups: Any,
        scales: Any,
        lds: Any,
        w_scale: Any,
        bias: Any,
        c: Any,
        ldc: Any,
        keep: Any,
    ) -> Any:
        def generate(context: Any, b: ir.IRBuilder, signature: Any, args: Any) -> Any:
            emit_tile(ISA, rows, vectors, b, args)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), generate

    return tile


ISA = Vnni if build.VNNI else Avx2
_WIDE = ISA.columns  # of a tile; what is left over has COLUMNS
_LANES_16 = COLUMNS // ISA.lanes
_6, _4, _2, _1 = (_make_tile(rows, ISA.vectors) for rows in ISA.rows)
_6n, _4n, _2n, _1n = (
    (_6, _4, _2, _1) if _WIDE == COLUMNS else (_make_tile(rows, _LANES_16) for rows in ISA.rows)
)


@compiled
def _wide(
    a: Any,
    lda: Any,
    w: Any,
    ldw: Any,
    g: Any,
    s: Any,
    lds: Any,
    ws: Any,
    b: Any,
    c: Any,
    ldc: Any,
    keep: Any,
    m: Any,
) -> None:
    while m >= 6 and m != 8:
        _6(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 6 * lda, c + 6 * ldc, s + 6 * lds, m - 6
    while m >= 4:
        _4(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 4 * lda, c + 4 * ldc, s + 4 * lds, m - 4
    if m >= 2:
        _2(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 2 * lda, c + 2 * ldc, s + 2 * lds, m - 2
    if m == 1:
        _1(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)


@compiled
def _narrow(
    a: Any,
    lda: Any,
    w: Any,
    ldw: Any,
    g: Any,
    s: Any,
    lds: Any,
    ws: Any,
    b: Any,
    c: Any,
    ldc: Any,
    keep: Any,
    m: Any,
) -> None:
    while m >= 6 and m != 8:
        _6n(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 6 * lda, c + 6 * ldc, s + 6 * lds, m - 6
    while m >= 4:
        _4n(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 4 * lda, c + 4 * ldc, s + 4 * lds, m - 4
    if m >= 2:
        _2n(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)
        a, c, s, m = a + 2 * lda, c + 2 * ldc, s + 2 * lds, m - 2
    if m == 1:
        _1n(a, lda, w, ldw, g, s, lds, ws, b, c, ldc, keep)


_TILE_STRIDE = 0 if ISA is Avx2 else COLUMNS  # from a vector's columns to the next one's, times k
_A_BYTES = ISA.a_bytes


@compiled
def _tile(args: Any, tile: int) -> None:
    a, w, c, m, groups, n = args[0], args[1], args[2], args[3], args[4], args[5]
    scales, w_scale, bias, ldc, keep = args[6], args[7], args[8], args[9], args[10]
    k = 32 * groups
    lda, lds, ldw = k * _A_BYTES, 8 * groups, k * _TILE_STRIDE
    columns = (n + _WIDE - 1) // _WIDE
    row, column = (tile // columns) * 128, (tile % columns) * _WIDE
    rows = min(m - row, 128)
    a, c, w = a + row * lda, c + row * ldc + column * 4, w + column * k
    scales, w_scale = scales + row * lds, w_scale + column * 4
    if bias != 0:
        bias += column * 4
    if n - column >= _WIDE:
        _wide(a, lda, w, ldw, groups, scales, lds, w_scale, bias, c, ldc, keep, rows)
    else:
        _narrow(a, lda, w, ldw, groups, scales, lds, w_scale, bias, c, ldc, keep, rows)


def _body(args: Any, task: int) -> None:
    for tile in range(task * args[11], min(args[12], task * args[11] + args[11])):
        _tile(args, tile)


KERNEL = task_kernel(_body)


def split(m: int, n: int, k: int) -> tuple[int, int, int]:
    """(tasks, tiles a task, tiles): a task outweighs the atomic that hands it out."""
    tiles = -(-m // _ROW_BLOCK) * -(-n // _WIDE)
    enough = _TASK_MACS // (min(m, _ROW_BLOCK) * _WIDE * k) + 1
    span = min(enough, -(-tiles // (4 * get_num_threads())))
    return -(-tiles // span), span, tiles


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """int8 W[n, k], both padded, as the tiles read it: [n/16, k/4, 16, 4] or [n/16, k/2, 16, 2]."""
    step = GROUP // ISA.steps
    rows: torch.Tensor = weight.unflatten(1, (-1, step))
    tiles: torch.Tensor = rows.unflatten(0, (-1, COLUMNS)).transpose(1, 2).contiguous()
    return tiles if ISA is Avx2 else (tiles.view(torch.uint8) ^ 128)


def take_rows(data: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int8 rows [len(ids), k] out of what lay_out made."""
    rows = data[ids // COLUMNS, :, ids % COLUMNS].flatten(1)
    return rows if ISA is Avx2 else (rows ^ 128).view(torch.int8)


def matmul_groups(
    values: torch.Tensor,
    scales: torch.Tensor,
    weight: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    keep: bool,
) -> None:
    """out[m, n] (+)= (values * scales by group) @ W.T * weight_scales[n] (+ bias[n])."""
    (m, k), n = values.shape, out.shape[1]
    assert values.is_contiguous() and scales.is_contiguous() and out.stride(1) == 1
    assert n % COLUMNS == 0 and k % GROUP == 0 and weight_scales.shape[0] == n
    tasks, span, tiles = split(m, n, k)
    launch(
        KERNEL,
        tasks,
        values.data_ptr(),
        weight.data_ptr(),
        out.data_ptr(),
        m,
        k // GROUP,
        n,
        scales.data_ptr(),
        weight_scales.data_ptr(),
        0 if bias is None else bias.data_ptr(),
        4 * out.stride(0),
        keep,
        span,
        tiles,
    )
