"""Integer tiles of attention over an fp16 cache: spans of 64 keys as int16 pairs.

A key, a value, a query and a span's weights are each rounded with a scale of their own, to as many
integers as keep int32 sums exact: the sums are the same on AVX2 and AVX-512, and a key's rounding
depends on nothing but the key. The scale of a value is a power of two, 2^e: with e ln 2 added to
its key's score the weight has the scale in it, and a span's largest score gives its largest weight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tokenmill.kernels.cpu.compiler import VNNI, compiled, emitted
from tokenmill.kernels.cpu.tiles import (
    F32,
    I32,
    I64,
    LANES,
    accumulators,
    emit_exp,
    fold,
    larger,
    load,
    row_addresses,
    splat,
    store,
)

MASKED = np.float32(-1e30)  # a score that has no weight
SPAN = 64
INT32_MAX = 2**31 - 1
WEIGHT_LIMIT = math.isqrt(INT32_MAX // SPAN)  # of a span's weights and of values
_TILE_ROWS = (6, 3, 1)
_V8F32, _V8I32 = ir.VectorType(F32, 8), ir.VectorType(I32, 8)
_V16I16, _V16F32 = ir.VectorType(ir.IntType(16), 16), ir.VectorType(F32, 16)


def limit_of(dim: int) -> int:
    """The widest range of queries and keys whose products over `dim` channels fit an int32."""
    return min(32767, math.isqrt(INT32_MAX // dim))


# ---------------------------------------------------------------------------- rounding


def _number(kind: ir.Type, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count if isinstance(kind, ir.VectorType) else value)


def _times(b: ir.IRBuilder, index: Any, factor: int) -> Any:
    return b.mul(index, ir.Constant(I64, factor))


def _round(b: ir.IRBuilder, x: Any) -> Any:
    """Eight floats to the nearest int32."""
    kind = ir.FunctionType(_V8I32, [_V8F32])
    return b.call(b.module.declare_intrinsic("llvm.x86.avx.cvt.ps2dq.256", (), kind), [x])


def _round_sixteen(b: ir.IRBuilder, x: Any) -> Any:
    ints, i16 = ir.VectorType(I32, 16), ir.IntType(16)
    if VNNI:
        kind = ir.FunctionType(ints, [_V16F32, ints, i16, I32])
        convert = b.module.declare_intrinsic("llvm.x86.avx512.mask.cvtps2dq.512", (), kind)
        unused, all_lanes, as_set = ir.Constant(ints, [0] * 16), i16(-1), I32(4)
        return b.call(convert, [x, unused, all_lanes, as_set])
    low, high = (_round(b, part) for part in _eighths(b, x))
    return b.shuffle_vector(low, high, ir.Constant(ints, list(range(16))))


def _halves(b: ir.IRBuilder, address: Any, offset: int) -> Any:
    """Eight fp16 as floats."""
    found = load(b, address, offset, ir.VectorType(ir.HalfType(), 8), 2)
    return b.fpext(found, _V8F32)


def _pairs(b: ir.IRBuilder, low: Any, high: Any) -> Any:
    """Two vectors of int32 as the int16 halves of one."""
    mask, shift = ir.Constant(_V8I32, [0xFFFF] * 8), ir.Constant(_V8I32, [16] * 8)
    return b.or_(b.and_(low, mask), b.shl(high, shift))


def _magnitudes(b: ir.IRBuilder, address: Any) -> Any:
    """Sixteen fp16 without their signs, as integers, which are ordered alike."""
    return b.and_(load(b, address, 0, _V16I16, 2), ir.Constant(_V16I16, [0x7FFF] * 16))


def _umax(b: ir.IRBuilder, x: Any, y: Any) -> Any:
    return b.select(b.icmp_unsigned(">", x, y), x, y)


def _at_least(b: ir.IRBuilder, peak: Any) -> Any:
    return larger(b)(peak, _number(peak.type, 1.0000000031710769e-30))


@emitted(types.void(*[types.int64] * 5, types.float32))
def round_keys(
    b: ir.IRBuilder, keys: Any, stride: Any, dim: Any, target: Any, scales: Any, limit: Any
) -> None:
    """Round 16 keys, fp16 [dim, 16] with rows `stride` apart, each with a scale.

    They become pairs of channels, 16 columns of [dim/2, 64, 2].
    """
    ((slot,),) = accumulators(b, 1, 1, ir.Constant(_V16I16, [0] * 16))
    with cgutils.for_range(b, dim) as loop:
        found = _magnitudes(b, b.add(keys, b.mul(loop.index, stride)))
        b.store(_umax(b, found, b.load(slot)), slot)
    halves = b.bitcast(b.load(slot), ir.VectorType(ir.HalfType(), 16))
    peaks = _at_least(b, b.fpext(halves, _V16F32))
    limits = splat(b, limit, _V16F32)
    store(b, b.fdiv(peaks, limits), scales, 0)
    parts = _eighths(b, b.fdiv(limits, peaks))
    with cgutils.for_range(b, b.ashr(dim, ir.Constant(I64, 1))) as loop:
        even = b.add(keys, b.mul(_times(b, loop.index, 2), stride))
        odd, out = b.add(even, stride), b.add(target, _times(b, loop.index, 4 * SPAN))
        for i, inverse in enumerate(parts):
            low, high = (_round(b, b.fmul(_halves(b, at, 16 * i), inverse)) for at in (even, odd))
            store(b, _pairs(b, low, high), out, 32 * i)


def _row_peak(b: ir.IRBuilder, row: Any, dim: Any) -> Any:
    """The largest magnitude of a row of fp16, as integers."""
    ((slot,),) = accumulators(b, 1, 1, ir.Constant(_V16I16, [0] * 16))
    with cgutils.for_range(b, b.ashr(dim, ir.Constant(I64, 4))) as loop:
        found = _magnitudes(b, b.add(row, _times(b, loop.index, 32)))
        b.store(_umax(b, found, b.load(slot)), slot)
    kind = ir.FunctionType(ir.IntType(16), [_V16I16])
    reduce = b.module.declare_intrinsic("llvm.vector.reduce.umax.v16i16", (), kind)
    return b.call(reduce, [b.load(slot)])


@emitted(types.void(*[types.int64] * 5))
def round_values(
    b: ir.IRBuilder, values: Any, dim: Any, target: Any, logs: Any, inverses: Any
) -> None:
    """Round 16 values, fp16 [16, dim], into pairs of keys [8, dim, 2]; each value has a scale.

    The scales' logarithms go to `logs`, and what is left of them to `inverses`.
    """
    row_bytes = b.shl(dim, ir.Constant(I64, 1))
    rows = row_addresses(b, values, row_bytes, 16)
    peaks: Any = ir.Constant(_V16I16, [0] * 16)
    for i, row in enumerate(rows):
        peaks = b.insert_element(peaks, _row_peak(b, row, dim), ir.Constant(I32, i))
    inverse = _emit_powers(b, peaks, logs, inverses)
    lanes = [b.extract_element(inverse, ir.Constant(I32, i)) for i in range(16)]
    factors = [splat(b, x, _V8F32) for x in lanes]
    outs = row_addresses(b, target, b.shl(dim, ir.Constant(I64, 2)), 8)
    for i, out in enumerate(outs):
        with cgutils.for_range(b, b.ashr(dim, ir.Constant(I64, 3))) as loop:
            at = _times(b, loop.index, 16)
            low, high = (
                _round(b, b.fmul(_halves(b, b.add(rows[j], at), 0), factors[j]))
                for j in (2 * i, 2 * i + 1)
            )
            store(b, _pairs(b, low, high), b.add(out, _times(b, loop.index, 32)), 0)


def _emit_powers(b: ir.IRBuilder, magnitudes: Any, logs: Any, inverses: Any) -> Any:
    """Store ln(2^e) and 2^-e for the least e with peak <= WEIGHT_LIMIT * 2^e; returns 2^-e."""
    halves = b.bitcast(magnitudes, ir.VectorType(ir.HalfType(), 16))
    ints = ir.VectorType(I32, 16)
    peaks = larger(b)(b.fpext(halves, _V16F32), _number(_V16F32, 2.0**-24))  # fp16's smallest
    steps = b.fmul(peaks, _number(_V16F32, float(np.float32(1 / WEIGHT_LIMIT))))
    bits = b.add(b.bitcast(steps, ints), ir.Constant(ints, [(1 << 23) - 1] * 16))
    exponent = b.ashr(bits, ir.Constant(ints, [23] * 16))
    power = b.sitofp(b.sub(exponent, ir.Constant(ints, [127] * 16)), _V16F32)
    store(b, b.fmul(power, _number(_V16F32, float(np.float32(math.log(2))))), logs, 0)
    inverse = b.sub(ir.Constant(ints, [254] * 16), exponent)
    inverse = b.bitcast(b.shl(inverse, ir.Constant(ints, [23] * 16)), _V16F32)
    store(b, inverse, inverses, 0)
    return inverse


def _eighths(b: ir.IRBuilder, x: Any) -> list[Any]:
    starts = range(0, x.type.count, 8)
    orders = [ir.Constant(_V8I32, list(range(start, start + 8))) for start in starts]
    return [b.shuffle_vector(x, x, order) for order in orders]


@emitted(types.float32(types.int64, types.float32, types.int64, types.int64))
def weigh_span(b: ir.IRBuilder, scores: Any, top: Any, inverses: Any, target: Any) -> Any:
    """Round 64 weights exp(score - top), top the largest score, to int16; of MASKED ones none.

    Returns the sum of the weights times `inverses`, the powers of two that the scores contain.
    """

    fma = b.module.declare_intrinsic("llvm.fma.v16f32", (), ir.FunctionType(_V16F32, [_V16F32] * 3))
    total: Any = _number(_V16F32, 0.0)
    for i in range(0, 4 * SPAN, 64):
        found = load(b, scores, i, _V16F32)
        weights = emit_exp(b, b.fsub(found, splat(b, top, _V16F32)))
        seen = b.fcmp_ordered(">", found, _number(_V16F32, float(MASKED / 2)))
        weights = b.select(seen, weights, _number(_V16F32, 0.0))
        total = b.call(fma, [weights, load(b, inverses, i, _V16F32), total])
        steps = b.fmul(weights, _number(_V16F32, float(WEIGHT_LIMIT)))
        store(b, b.trunc(_round_sixteen(b, steps), _V16I16), target, i // 2, 2)
    return fold(b, _eighths(b, total), b.fadd)


@emitted(types.float32(*[types.int64] * 3, types.float32))
def row_inverse(b: ir.IRBuilder, row: Any, dim: Any, scale: Any, limit: Any) -> Any:
    """Store the scale of `dim` floats, a multiple of 16, and return its inverse."""
    fabs = b.module.declare_intrinsic("llvm.fabs.v8f32", (), ir.FunctionType(_V8F32, [_V8F32]))
    ((slot,),) = accumulators(b, 1, 1, _number(_V8F32, 0.0))
    with cgutils.for_range(b, b.ashr(dim, ir.Constant(I64, 3))) as loop:
        x = b.call(fabs, [load(b, b.add(row, _times(b, loop.index, 32)), 0, _V8F32)])
        b.store(larger(b)(x, b.load(slot)), slot)
    peak = _at_least(b, fold(b, [b.load(slot)], larger(b)))
    store(b, b.fdiv(peak, limit), scale, 0)
    return b.fdiv(limit, peak)


@emitted(types.void(*[types.int64] * 3, types.float32))
def round_by(b: ir.IRBuilder, row: Any, dim: Any, target: Any, inverse: Any) -> None:
    """Round `dim` floats times `inverse` to int16."""
    factor = splat(b, inverse, _V8F32)
    with cgutils.for_range(b, b.ashr(dim, ir.Constant(I64, 3))) as loop:
        x = load(b, b.add(row, _times(b, loop.index, 32)), 0, _V8F32)
        rounded = b.trunc(_round(b, b.fmul(x, factor)), ir.VectorType(ir.IntType(16), 8))
        store(b, rounded, b.add(target, _times(b, loop.index, 16)), 0, 2)


@emitted(types.int16(types.float32))
def half_bits(b: ir.IRBuilder, x: Any) -> Any:
    """A float32 as the bits of the nearest fp16, the largest instead of infinity."""
    high, low = _number(F32, 65504.0), _number(F32, -65504.0)
    x = b.select(b.fcmp_ordered(">", x, high), high, x)
    x = b.select(b.fcmp_ordered("<", x, low), low, x)
    return b.bitcast(b.fptrunc(x, ir.HalfType()), ir.IntType(16))


# ---------------------------------------------------------------------------- products


def _multiply_add(b: ir.IRBuilder, total: Any, x: Any, y: Any) -> Any:
    """total + products of int16, neighbours added up, in every lane."""
    ints = ir.VectorType(I32, LANES)
    shorts = ir.VectorType(ir.IntType(16), 2 * LANES)
    name = "avx512.pmaddw.d.512" if VNNI else "avx2.pmadd.wd"
    kind = ir.FunctionType(ints, [shorts, shorts])
    madd = b.module.declare_intrinsic(f"llvm.x86.{name}", (), kind)
    return b.add(total, b.call(madd, [b.bitcast(x, shorts), b.bitcast(y, shorts)]))


def _emit_tile(
    b: ir.IRBuilder, rows: int, vectors: int, add: bool, first: Any, args: list[Any]
) -> None:
    a, lda, w, ldw, pairs, row_scales, column_scales, logs, c, ldc = args
    ints, floats = ir.VectorType(I32, LANES), ir.VectorType(F32, LANES)
    fma = b.module.declare_intrinsic(
        f"llvm.fma.v{LANES}f32", (), ir.FunctionType(floats, [floats] * 3)
    )
    total = accumulators(b, rows, vectors, ir.Constant(ints, [0] * LANES))
    lines = row_addresses(b, b.add(a, b.mul(first, lda)), lda, rows)
    step = ir.Constant(I64, 2)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), pairs, step) as (pair, _):
        at, a_at = b.add(w, b.mul(pair, ldw)), _times(b, pair, 4)
        for turn in range(2):
            others = [load(b, at, 4 * LANES * v, ints) for v in range(vectors)]
            for line, slots in zip(lines, total, strict=True):
                both = splat(b, load(b, b.add(line, a_at), 4 * turn, I32, 2), ints)
                for slot, other in zip(slots, others, strict=True):
                    b.store(_multiply_add(b, b.load(slot), both, other), slot)
            at = b.add(at, ldw)
    outs = row_addresses(b, b.add(c, b.mul(first, ldc)), ldc, rows)
    scales = row_addresses(b, b.add(row_scales, _times(b, first, 4)), ir.Constant(I64, 4), rows)
    for out, scale_at, slots in zip(outs, scales, total, strict=True):
        scale = splat(b, load(b, scale_at, 0, F32), floats)
        for v, slot in enumerate(slots):
            where, value = 4 * LANES * v, b.sitofp(b.load(slot), floats)
            if add:
                value = b.call(fma, [value, scale, load(b, out, where, floats)])
            else:
                column = load(b, column_scales, where, floats), load(b, logs, where, floats)
                value = b.call(fma, [b.fmul(value, scale), *column])
            store(b, value, out, where)


def _make_product(vectors: int, add: bool) -> Any:
    """C[m, columns] = (A @ W) * row_scales * column_scales + logs, or C += (A @ W) * row_scales.

    `a` is int16 [m, 2 * pairs], `w` int16 [pairs, columns, 2]; `pairs` is even.
    """

    @emitted(types.void(types.UniTuple(types.int64, 10), types.int64))
    def product(b: ir.IRBuilder, args: Any, m: Any) -> None:
        args, m = cgutils.unpack_tuple(b, args), m
        first: Any = ir.Constant(I64, 0)
        for rows in _TILE_ROWS:
            count = b.udiv(b.sub(m, first), ir.Constant(I64, rows))
            with cgutils.for_range(b, count) as loop:
                start = b.add(first, _times(b, loop.index, rows))
                _emit_tile(b, rows, vectors, add, start, args)
            first = b.add(first, _times(b, count, rows))

    return product


_NARROW = 16 // LANES  # vectors of 16 columns
_scores_16, _add_16 = _make_product(_NARROW, False), _make_product(_NARROW, True)
_scores_64 = _make_product(4 * _NARROW, False) if VNNI else _scores_16
_add_64 = _make_product(4 * _NARROW, True) if VNNI else _add_16


@compiled
def score_span(
    q: int, q_scales: int, dim: int, keys: int, columns: int, slices: int, m: int, s: int
) -> None:
    """S[m, 64] = Q[m, dim] @ rounded keys of a span; past its slices S is left as it was.

    At `columns` lie the keys' scales, and 256 bytes on the logarithms of their values' scales.
    """
    pairs = dim // 2
    if VNNI and slices == 4:
        _scores_64((q, 2 * dim, keys, 256, pairs, q_scales, columns, columns + 256, s, 256), m)
        return
    for j in range(0, 64 * slices, 64):
        at = columns + j
        _scores_16((q, 2 * dim, keys + j, 256, pairs, q_scales, at, at + 256, s + j, 256), m)


@compiled
def add_span(p: int, p_scales: int, values: int, slices: int, dim: int, m: int, c: int) -> None:
    """C[m, dim] += rounded weights P[m, 64] @ rounded values of a span."""
    d, pairs = 0, 8 * slices
    while VNNI and d + 256 <= 4 * dim:
        _add_64((p, 128, values + d, 4 * dim, pairs, p_scales, 0, 0, c + d, 4 * dim), m)
        d += 256
    while d < 4 * dim:
        _add_16((p, 128, values + d, 4 * dim, pairs, p_scales, 0, 0, c + d, 4 * dim), m)
        d += 64
