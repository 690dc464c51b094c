"""Register tiles of attention: spans of 64 keys, in slices of 16 at addresses of their own.

A lane is an element of the result and sums in one order, so registers of 8 and 16 lanes agree.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils

from tokenmill.kernels.cpu.compiler import VNNI, compiled, emitted
from tokenmill.kernels.cpu.tiles import (
    F32,
    I64,
    LANES,
    accumulators,
    f32_rows,
    load,
    row_addresses,
    splat,
    store,
)

_FLOATS = ir.VectorType(F32, LANES)


def _fma(b: ir.IRBuilder) -> Any:
    kind = ir.FunctionType(_FLOATS, [_FLOATS] * 3)
    return b.module.declare_intrinsic(f"llvm.fma.v{LANES}f32", (), kind)


def _advance(b: ir.IRBuilder, total: Any, rows: list[Any], at: Any, others: list[Any]) -> None:
    """Add to total[r][v] the float at rows[r] + at times others[v]."""
    for line, slots in zip(rows, total, strict=True):
        x = splat(b, load(b, b.add(line, at), 0, F32), _FLOATS)
        for slot, other in zip(slots, others, strict=True):
            b.store(b.call(_fma(b), [x, other, b.load(slot)]), slot)


def _make_scores(rows: int) -> Any:
    """S[rows, 64] = Q[rows, k] @ K[k, 64], the keys of slice j at the address bases[j]."""

    @emitted(types.void(*[types.int64] * 7))
    def tile(
        b: ir.IRBuilder, q: Any, ldq: Any, bases: Any, ldk: Any, k: Any, s: Any, lds: Any
    ) -> None:
        total = accumulators(b, rows, 4, ir.Constant(_FLOATS, [0.0] * LANES))
        lines = row_addresses(b, q, ldq, rows)
        slices = [load(b, bases, 8 * j, I64) for j in range(4)]
        with cgutils.for_range(b, k) as loop:
            offset = b.mul(loop.index, ldk)
            keys = [load(b, b.add(at, offset), 0, _FLOATS) for at in slices]
            _advance(b, total, lines, b.shl(loop.index, ir.Constant(I64, 2)), keys)
        for out, slots in zip(row_addresses(b, s, lds, rows), total, strict=True):
            for j, slot in enumerate(slots):
                store(b, b.load(slot), out, 64 * j)

    return tile


def _make_values(rows: int, vectors: int) -> Any:
    """C[rows, LANES * vectors] += P[rows, 16 * slices] @ V, the values of slice j at bases[j]."""

    @emitted(types.void(*[types.int64] * 8))
    def tile(
        b: ir.IRBuilder,
        p: Any,
        ldp: Any,
        bases: Any,
        offset: Any,
        ldv: Any,
        slices: Any,
        c: Any,
        ldc: Any,
    ) -> None:
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        total, part = (accumulators(b, rows, vectors, zero) for _ in range(2))
        pairs = [pair for both in zip(total, part, strict=True) for pair in zip(*both, strict=True)]
        lines, outs = row_addresses(b, p, ldp, rows), row_addresses(b, c, ldc, rows)
        places = [(out, 4 * LANES * v) for out in outs for v in range(vectors)]
        for (slot, _), place in zip(pairs, places, strict=True):
            b.store(load(b, *place, _FLOATS), slot)
        with cgutils.for_range(b, slices) as outer:
            base = load(b, b.add(bases, b.shl(outer.index, ir.Constant(I64, 3))), 0, I64)
            base, first = b.add(base, offset), b.shl(outer.index, ir.Constant(I64, 6))
            for _, slot in pairs:
                b.store(zero, slot)
            with cgutils.for_range(b, ir.Constant(I64, 16)) as loop:
                line = b.add(base, b.mul(loop.index, ldv))
                values = [load(b, line, 4 * LANES * v, _FLOATS) for v in range(vectors)]
                at = b.add(first, b.shl(loop.index, ir.Constant(I64, 2)))
                _advance(b, part, lines, at, values)
            for slot, summed in pairs:  # partial sums of 16 keep fp32 rounding down
                b.store(b.fadd(b.load(summed), b.load(slot)), slot)
        for (slot, _), place in zip(pairs, places, strict=True):
            store(b, b.load(slot), *place)

    return tile


@emitted(types.void(types.int64))
def _prefetch(b: ir.IRBuilder, address: Any) -> None:
    pointer, i32 = ir.IntType(8).as_pointer(), ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [pointer, i32, i32, i32])
    fetch = b.module.declare_intrinsic("llvm.prefetch", [pointer], kind)
    hints = [ir.Constant(i32, value) for value in (0, 3, 1)]
    b.call(fetch, [b.inttoptr(address, pointer), *hints])


@compiled
def prefetch(at: int, num_bytes: int) -> None:
    """Ask for the cache lines of a stretch: a slice is a page, where the hardware stops asking."""
    for line in range(at, at + num_bytes, 64):
        _prefetch(line)


_s6, _s3, _s1 = _make_scores(6), _make_scores(3), _make_scores(1)
_v6x2, _v3x2, _v1x2 = _make_values(6, 2), _make_values(3, 2), _make_values(1, 2)
_v6x1, _v3x1, _v1x1 = _make_values(6, 1), _make_values(3, 1), _make_values(1, 1)


@compiled
def _wide_scores(q: int, ldq: int, bases: int, ldk: int, k: int, m: int, s: int) -> None:
    while m >= 6:
        _s6(q, ldq, bases, ldk, k, s, 256)
        q, s, m = q + 6 * ldq, s + 1536, m - 6
    while m >= 3:
        _s3(q, ldq, bases, ldk, k, s, 256)
        q, s, m = q + 3 * ldq, s + 768, m - 3
    while m >= 1:
        _s1(q, ldq, bases, ldk, k, s, 256)
        q, s, m = q + ldq, s + 256, m - 1


@compiled
def score_span(q: int, ldq: int, bases: Any, slices: int, ldk: int, k: int, m: int, s: int) -> None:
    """S[m, 64] = Q[m, k] @ keys of a span; past its slices S is left as it was."""
    if VNNI and slices == 4:
        _wide_scores(q, ldq, bases.ctypes.data, ldk, k, m, s)
        return
    for j in range(slices):
        f32_rows(q, ldq, bases[j], ldk, k, m, s + 64 * j, 256, 0)


@compiled
def _add_wide(p: int, bases: int, at: int, ldv: int, slices: int, m: int, c: int, ldc: int) -> None:
    while m >= 6:
        _v6x2(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 1536, c + 6 * ldc, m - 6
    while m >= 3:
        _v3x2(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 768, c + 3 * ldc, m - 3
    while m >= 1:
        _v1x2(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 256, c + ldc, m - 1


@compiled
def _add_narrow(
    p: int, bases: int, at: int, ldv: int, slices: int, m: int, c: int, ldc: int
) -> None:
    while m >= 6:
        _v6x1(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 1536, c + 6 * ldc, m - 6
    while m >= 3:
        _v3x1(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 768, c + 3 * ldc, m - 3
    while m >= 1:
        _v1x1(p, 256, bases, at, ldv, slices, c, ldc)
        p, c, m = p + 256, c + ldc, m - 1


@compiled
def add_span(p: int, bases: Any, slices: int, dim: int, m: int, c: int) -> None:
    """C[m, dim] += P[m, 64] @ values of a span, [keys, dim]."""
    width = 8 * LANES  # bytes of two registers
    for d in range(0, dim * 4, width):
        if dim * 4 - d >= width:
            _add_wide(p, bases.ctypes.data, d, dim * 4, slices, m, c + d, dim * 4)
        else:
            _add_narrow(p, bases.ctypes.data, d, dim * 4, slices, m, c + d, dim * 4)
