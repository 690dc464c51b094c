"""Products of int8 weights with rows that have an integer range of 16 bits, but 8 bits a group.

A group's values are int8 shifted left by a number of bits of its own, so that the sum over a whole
row is an exact int32, on AVX2 as on AVX-512. AVX2 multiplies the shifted values as int16 rows
(products.py). With AVX-512 vpdpbusd multiplies the bytes, four at a time, and a group's sum is
shifted; it takes unsigned weights, so these are stored 128 too large, and what that adds is taken
off a row's sum before it starts.

Group g of 64 channels is channels g, g + 4, g + 8 ...: a register of channels holds all groups.
"""

from __future__ import annotations

from typing import Any

import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tokenmill.kernels.cpu.compiler import VNNI, compiled, emitted
from tokenmill.kernels.cpu.products import COLUMNS, INT_KERNEL
from tokenmill.kernels.cpu.threads import task_kernel
from tokenmill.kernels.cpu.tiles import (
    I32,
    I64,
    accumulators,
    finish_integers,
    load,
    row_addresses,
    splat,
)

BLOCK = 64  # channels that k is padded to
GROUP = 16
_INTS = ir.VectorType(I32, 16)
_HEAD = 2  # words of a row in front of its shifts: its scale, and -128 times its sum


def emit_tile(rows: int, vectors: int, b: ir.IRBuilder, args: Any) -> None:
    """C[rows, 16 * vectors] (+)= sum over groups of (A @ W) << shift, times the scales (+ bias).

    `a` is int8, weights of 16 columns are uint8 [k/4, 16, 4], `ldw` apart.
    """
    a, lda, w, ldw, groups, scales, lds, w_scale, bias, c, ldc, keep = args
    dot, shift_left = (
        b.module.declare_intrinsic(
            f"llvm.x86.avx512.{name}.512", (), ir.FunctionType(_INTS, [_INTS] * count)
        )
        for name, count in (("vpdpbusd", 3), ("psllv.d", 2))
    )
    zero = ir.Constant(_INTS, [0] * 16)
    total = accumulators(b, rows, vectors, zero)
    lines, heads = row_addresses(b, a, lda, rows), row_addresses(b, scales, lds, rows)
    columns = row_addresses(b, w, ldw, vectors)
    for head, slots in zip(heads, total, strict=True):
        for slot in slots:
            b.store(splat(b, load(b, head, 4, I32), _INTS), slot)
    with cgutils.for_range(b, groups) as loop:
        w_at = [b.add(at, b.mul(loop.index, ir.Constant(I64, 16 * GROUP))) for at in columns]
        a_at = b.mul(loop.index, ir.Constant(I64, GROUP))
        sums = [[zero] * vectors for _ in range(rows)]
        for step in range(GROUP // 4):
            weights = [load(b, at, 64 * step, _INTS, 1) for at in w_at]
            for r in range(rows):
                four = splat(b, load(b, b.add(lines[r], a_at), 4 * step, I32), _INTS)
                sums[r] = [b.call(dot, [x, y, four]) for x, y in zip(sums[r], weights, strict=True)]
        shift_at = b.shl(loop.index, ir.Constant(I64, 2))
        for r in range(rows):
            shift = splat(b, load(b, b.add(heads[r], shift_at), 4 * _HEAD, I32), _INTS)
            for slot, x in zip(total[r], sums[r], strict=True):
                b.store(b.add(b.load(slot), b.call(shift_left, [x, shift])), slot)
    row_scales = [b.inttoptr(head, ir.FloatType().as_pointer()) for head in heads]
    finish_integers(b, total, [b.load(at) for at in row_scales], w_scale, bias, c, ldc, keep)


def _make_tile(rows: int, vectors: int) -> Any:
    @emitted(types.void(types.UniTuple(types.int64, 12)))
    def tile(b: ir.IRBuilder, args: Any) -> None:
        emit_tile(rows, vectors, b, cgutils.unpack_tuple(b, args))

    return tile


_6x2, _4x2, _2x2, _1x2 = (_make_tile(rows, 2) for rows in (6, 4, 2, 1))
_6x1, _1x1 = _make_tile(6, 1), _make_tile(1, 1)


@compiled
def _tile(args: Any, tile: int) -> None:
    a, w, c, m, k, n = args[0], args[1], args[2], args[3], args[4], args[5]
    s, ws, bias, ldc, keep = args[6], args[7], args[8], args[9], args[10]
    g = k // 16
    lda, lds, ldw = k, 8 + 4 * g, k * 16
    columns = (n + 31) // 32
    row, column = (tile // columns) * 128, (tile % columns) * 32
    m = min(m - row, 128)
    a, c, w = a + row * lda, c + row * ldc + column * 4, w + column * k
    s, ws = s + row * lds, ws + column * 4
    if bias != 0:
        bias += column * 4
    if n - column < 32:
        while m >= 6:
            _6x1((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))
            a, c, s, m = a + 6 * lda, c + 6 * ldc, s + 6 * lds, m - 6
        while m >= 1:
            _1x1((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))
            a, c, s, m = a + lda, c + ldc, s + lds, m - 1
    while m >= 6 and m != 8:
        _6x2((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))
        a, c, s, m = a + 6 * lda, c + 6 * ldc, s + 6 * lds, m - 6
    while m >= 4:
        _4x2((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))
        a, c, s, m = a + 4 * lda, c + 4 * ldc, s + 4 * lds, m - 4
    if m >= 2:
        _2x2((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))
        a, c, s, m = a + 2 * lda, c + 2 * ldc, s + 2 * lds, m - 2
    if m == 1:
        _1x2((a, lda, w, ldw, g, s, lds, ws, bias, c, ldc, keep))


def _body(args: Any, task: int) -> None:
    for tile in range(task * args[11], min(args[12], task * args[11] + args[11])):
        _tile(args, tile)


KERNEL = task_kernel(_body) if VNNI else INT_KERNEL
TILE = 32 if VNNI else COLUMNS  # columns of a task


def padded(k: int) -> int:
    return -(-k // BLOCK) * BLOCK


def empty_rows(m: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Memory for rounded rows: values, and their scales, with AVX-512 before a row's shifts."""
    if VNNI:
        return torch.empty(m, padded(k), dtype=torch.int8), torch.empty(
            m, _HEAD + padded(k) // GROUP
        )
    return torch.empty(m, padded(k), dtype=torch.int16), torch.empty(m)


def shifted_rows(
    values: torch.Tensor, scales: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded rows as plain ones: int16 [m, k] and scales [m]."""
    if VNNI:
        shifts = scales[:, _HEAD:].contiguous().view(torch.int32)
        wide = values.short().unflatten(1, (-1, GROUP)) << shifts[:, :, None]
        values, scales = _natural(wide.flatten(1)), scales[:, 0]
    return values[:, :k], scales


def _by_group(rows: torch.Tensor) -> torch.Tensor:
    """[n, k] with the channels of a group side by side."""
    groups: torch.Tensor = rows.unflatten(1, (-1, GROUP, BLOCK // GROUP))
    return groups.transpose(2, 3).flatten(1)


def _natural(rows: torch.Tensor) -> torch.Tensor:
    groups: torch.Tensor = rows.unflatten(1, (-1, BLOCK // GROUP, GROUP))
    return groups.transpose(2, 3).flatten(1)


def lay_out(weight: torch.Tensor) -> torch.Tensor:
    """int8 W[n, k], both padded, as the tiles read it: [n/16, k/4, 16, 4] or [n/16, k/2, 16, 2]."""
    step = 4 if VNNI else 2
    ordered = _by_group(weight) if VNNI else weight
    steps: torch.Tensor = ordered.unflatten(1, (-1, step)).unflatten(0, (-1, COLUMNS))
    tiles = steps.transpose(1, 2).contiguous()
    return tiles.view(torch.uint8) ^ 128 if VNNI else tiles


def take_rows(data: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """int8 rows [len(ids), k] out of what lay_out made."""
    rows = data[ids // COLUMNS, :, ids % COLUMNS].flatten(1)
    return _natural((rows ^ 128).view(torch.int8)) if VNNI else rows
