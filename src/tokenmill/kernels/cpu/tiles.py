"""Building blocks of the CPU kernels: register tiles and a vectorisable exp, written in LLVM IR.

Addresses travel as int64 and strides in bytes: nothing is allocated or checked inside a tile.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from tokenmill.kernels.cpu.compiler import VNNI, compiled, emitted

I32, I64, F32 = ir.IntType(32), ir.IntType(64), ir.FloatType()
_V16I8 = ir.VectorType(ir.IntType(8), 16)
_V16I16 = ir.VectorType(ir.IntType(16), 16)
_V8I32 = ir.VectorType(I32, 8)
_V8F32 = ir.VectorType(F32, 8)
LANES = 16 if VNNI else 8  # floats of a register; each is an element's own sum, whatever the width


def _pointer_to(element: types.Type, kind: ir.Type) -> Any:
    @emitted(types.CPointer(element)(types.int64))
    def cast(b: ir.IRBuilder, address: Any) -> Any:
        return b.inttoptr(address, kind.as_pointer())

    return cast


f32_at, i16_at = _pointer_to(types.float32, F32), _pointer_to(types.int16, ir.IntType(16))
i32_at, i64_at = _pointer_to(types.int32, I32), _pointer_to(types.int64, I64)


@emitted(types.float64(types.int64))
def as_float(b: ir.IRBuilder, bits: Any) -> Any:
    """Reinterpret an int64 launch argument as the double it was packed from."""
    return b.bitcast(bits, ir.DoubleType())


_EXP_COEFFICIENTS = (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)


def _constant(kind: ir.Type, value: float) -> ir.Constant:
    """A float32 constant, in every lane if `kind` is a vector."""
    exact = float(np.float32(value))
    return ir.Constant(kind, [exact] * kind.count if isinstance(kind, ir.VectorType) else exact)


def emit_exp(b: ir.IRBuilder, x: Any) -> Any:
    """exp(x) to about 2 ulp, x clamped to [-87, 88]; straight-line code for scalars and vectors."""
    kind = x.type
    lanes = f".v{kind.count}f32" if isinstance(kind, ir.VectorType) else ".f32"
    whole = ir.VectorType(I32, kind.count) if isinstance(kind, ir.VectorType) else I32
    x = b.select(b.fcmp_ordered("<", x, _constant(kind, -87.0)), _constant(kind, -87.0), x)
    x = b.select(b.fcmp_ordered(">", x, _constant(kind, 88.0)), _constant(kind, 88.0), x)
    floor = b.module.declare_intrinsic("llvm.floor" + lanes, (), ir.FunctionType(kind, [kind]))
    fma = b.module.declare_intrinsic("llvm.fma" + lanes, (), ir.FunctionType(kind, [kind] * 3))
    n = b.call(floor, [b.call(fma, [x, _constant(kind, 1.442695041), _constant(kind, 0.5)])])
    r = b.call(fma, [n, _constant(kind, -0.693359375), x])  # ln 2 in two parts keeps r exact
    r = b.call(fma, [n, _constant(kind, 2.12194440e-4), r])
    p = _constant(kind, 1.9875691500e-4)
    for coefficient in _EXP_COEFFICIENTS:
        p = b.call(fma, [p, r, _constant(kind, coefficient)])
    p = b.fadd(b.call(fma, [b.fmul(p, r), r, r]), _constant(kind, 1.0))
    ones = ir.Constant(whole, [127] * kind.count if isinstance(kind, ir.VectorType) else 127)
    shift = ir.Constant(whole, [23] * kind.count if isinstance(kind, ir.VectorType) else 23)
    power = b.shl(b.add(b.fptosi(n, whole), ones), shift)
    return b.fmul(p, b.bitcast(power, kind))


@emitted(types.float32(types.float32))
def exp32(b: ir.IRBuilder, x: Any) -> Any:
    """exp of a float32; loops over it vectorise."""
    return emit_exp(b, x)


def fold(b: ir.IRBuilder, vectors: list[Any], combine: Any) -> Any:
    """Combine vectors pairwise, then the lanes of the last one, always in the same order."""
    while len(vectors) > 1:
        vectors = [combine(x, y) for x, y in zip(vectors[::2], vectors[1::2], strict=True)]
    lanes = vectors[0]
    for count in (8, 4, 2):
        even, odd = (
            b.shuffle_vector(
                lanes,
                lanes,
                ir.Constant(ir.VectorType(I32, count // 2), list(range(start, count, 2))),
            )
            for start in (0, 1)
        )
        lanes = combine(even, odd)
    return b.extract_element(lanes, ir.Constant(I32, 0))


def larger(b: ir.IRBuilder) -> Any:
    return lambda x, y: b.select(b.fcmp_ordered(">", x, y), x, y)


@emitted(types.float32(types.int64))
def span_max(b: ir.IRBuilder, scores: Any) -> Any:
    """The largest of the 64 floats at an address."""
    vectors = [load(b, scores, 32 * i, _V8F32) for i in range(8)]
    return fold(b, vectors, larger(b))


@emitted(types.void(types.int64, types.float32))
def span_exp(b: ir.IRBuilder, scores: Any, top: Any) -> None:
    """Replace the 64 floats at an address by exp(x - top)."""
    kind = ir.VectorType(F32, LANES)
    top = splat(b, top, kind)
    for i in range(0, 256, 4 * LANES):
        store(b, emit_exp(b, b.fsub(load(b, scores, i, kind), top)), scores, i)


def _emit_shifts(b: ir.IRBuilder, lanes: list[Any], inverse: Any, most: Any) -> Any:
    """Of 64 floats the bits that each group of 16 is shifted by, groups along the lanes, twice."""
    fabs = b.module.declare_intrinsic("llvm.fabs.v8f32", (), ir.FunctionType(_V8F32, [_V8F32]))
    peaks = [b.call(fabs, [x]) for x in lanes]
    while len(peaks) > 1:
        peaks = [larger(b)(x, y) for x, y in zip(peaks[::2], peaks[1::2], strict=True)]
    halves = ir.Constant(_V8I32, [4, 5, 6, 7, 0, 1, 2, 3])
    peak = larger(b)(peaks[0], b.shuffle_vector(peaks[0], peaks[0], halves))
    steps = b.fmul(peak, splat(b, b.fmul(inverse, _constant(F32, 1 / 127)), _V8F32))
    bits = b.add(b.bitcast(steps, _V8I32), ir.Constant(_V8I32, [(1 << 23) - 1] * 8))
    shift = b.sub(b.ashr(bits, ir.Constant(_V8I32, [23] * 8)), ir.Constant(_V8I32, [127] * 8))
    none = ir.Constant(_V8I32, [0] * 8)
    shift = b.select(b.icmp_signed(">", shift, none), shift, none)
    most = splat(b, b.trunc(most, I32), _V8I32)
    return b.select(b.icmp_signed("<", shift, most), shift, most)


@emitted(types.int64(*[types.int64] * 3, types.float32, types.int64))
def round_block(
    b: ir.IRBuilder, source: Any, values: Any, shifts: Any, inverse: Any, most: Any
) -> Any:
    """Round the 64 floats at `source` times `inverse` to int8 << shift, a shift for each group.

    A group's shift is the least that makes it fit, `most` at most. AVX2's values are int16, shifted
    already. The others are bytes, by groups; their shifts go to `shifts`. Returns the sum.
    """
    lanes = [load(b, source, 32 * i, _V8F32) for i in range(8)]
    shift = _emit_shifts(b, lanes, inverse, most)
    power = b.shl(b.sub(ir.Constant(_V8I32, [127] * 8), shift), ir.Constant(_V8I32, [23] * 8))
    factor = b.fmul(splat(b, inverse, _V8F32), b.bitcast(power, _V8F32))
    convert = b.module.declare_intrinsic(
        "llvm.x86.avx.cvt.ps2dq.256", (), ir.FunctionType(_V8I32, [_V8F32])
    )
    rounded = [b.call(convert, [b.fmul(x, factor)]) for x in lanes]
    if VNNI:
        _store_bytes(b, rounded, values)
        four = ir.Constant(ir.VectorType(I32, 4), [0, 1, 2, 3])
        store(b, b.shuffle_vector(shift, shift, four), shifts, 0)
    else:
        for i, x in enumerate(rounded):
            store(b, b.trunc(b.shl(x, shift), ir.VectorType(ir.IntType(16), 8)), values, 16 * i)
    while len(rounded) > 1:
        rounded = [b.add(x, y) for x, y in zip(rounded[::2], rounded[1::2], strict=True)]
    return b.sext(fold(b, [b.shl(rounded[0], shift)], b.add), I64)


def _store_bytes(b: ir.IRBuilder, parts: list[Any], address: Any) -> None:
    """64 integers as bytes, those of a group side by side: channel 4 i + g becomes 16 g + i."""
    parts = [b.trunc(x, ir.VectorType(ir.IntType(8), 8)) for x in parts]
    while len(parts) > 1:
        both = ir.Constant(
            ir.VectorType(I32, 2 * parts[0].type.count), list(range(2 * parts[0].type.count))
        )
        parts = [b.shuffle_vector(x, y, both) for x, y in zip(parts[::2], parts[1::2], strict=True)]
    order = ir.Constant(ir.VectorType(I32, 64), [4 * (i % 16) + i // 16 for i in range(64)])
    store(b, b.shuffle_vector(parts[0], parts[0], order), address, 0, 1)


@emitted(types.float32(types.int64, types.int64))
def row_peak(b: ir.IRBuilder, row: Any, k: Any) -> Any:
    """The largest magnitude of k floats at an address, k a multiple of 64."""
    fabs = b.module.declare_intrinsic("llvm.fabs.v8f32", (), ir.FunctionType(_V8F32, [_V8F32]))
    (peaks,) = accumulators(b, 1, 8, ir.Constant(_V8F32, [0.0] * 8))
    step = ir.Constant(I64, 64)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), k, step) as (i, _):
        at = b.add(row, b.shl(i, ir.Constant(I64, 2)))
        for v, slot in enumerate(peaks):
            x = b.call(fabs, [load(b, at, 32 * v, _V8F32)])
            b.store(larger(b)(x, b.load(slot)), slot)
    return fold(b, [b.load(slot) for slot in peaks], larger(b))


@emitted(types.float32(types.int64))
def span_sum(b: ir.IRBuilder, scores: Any) -> Any:
    """The sum of the 64 floats at an address."""
    return fold(b, [load(b, scores, 32 * i, _V8F32) for i in range(8)], b.fadd)


@emitted(types.float32(types.int64, types.int64))
def square_sum(b: ir.IRBuilder, row: Any, k: Any) -> Any:
    """The sum of the squares of k floats at an address, in four vectors side by side."""
    wide, one = (
        b.module.declare_intrinsic(f"llvm.fma{lanes}", (), ir.FunctionType(kind, [kind] * 3))
        for lanes, kind in ((".v8f32", _V8F32), (".f32", F32))
    )
    (sums,) = accumulators(b, 1, 4, ir.Constant(_V8F32, [0.0] * 8))
    stride = ir.Constant(I64, 32)
    whole = b.mul(b.udiv(k, stride), stride)
    with cgutils.for_range_slice(b, ir.Constant(I64, 0), whole, stride) as (i, _):
        at = b.add(row, b.shl(i, ir.Constant(I64, 2)))
        for v, slot in enumerate(sums):
            x = load(b, at, 32 * v, _V8F32)
            b.store(b.call(wide, [x, x, b.load(slot)]), slot)
    total = cgutils.alloca_once_value(b, fold(b, [b.load(slot) for slot in sums], b.fadd))
    with cgutils.for_range_slice(b, whole, k, ir.Constant(I64, 1)) as (i, _):
        x = load(b, b.add(row, b.shl(i, ir.Constant(I64, 2))), 0, F32)
        b.store(b.call(one, [x, x, b.load(total)]), total)
    return b.load(total)


# ---------------------------------------------------------------------------- register tiles


def load(b: ir.IRBuilder, address: Any, offset: int, kind: ir.Type, align: int = 4) -> Any:
    where = b.add(address, ir.Constant(I64, offset)) if offset else address
    value = b.load(b.inttoptr(where, kind.as_pointer()))
    value.align = align
    return value


def store(b: ir.IRBuilder, value: Any, address: Any, offset: int, align: int = 4) -> None:
    where = b.add(address, ir.Constant(I64, offset)) if offset else address
    b.store(value, b.inttoptr(where, value.type.as_pointer())).align = align


def splat(b: ir.IRBuilder, scalar: Any, kind: ir.VectorType) -> Any:
    undefined = ir.Constant(kind, ir.Undefined)
    first = b.insert_element(undefined, scalar, ir.Constant(I32, 0))
    lanes = ir.Constant(ir.VectorType(I32, kind.count), [0] * kind.count)
    return b.shuffle_vector(first, undefined, lanes)


def row_addresses(b: ir.IRBuilder, base: Any, stride: Any, count: int) -> list[Any]:
    return [b.add(base, b.mul(stride, ir.Constant(I64, r))) for r in range(count)]


def accumulators(b: ir.IRBuilder, rows: int, vectors: int, zero: ir.Constant) -> list[list[Any]]:
    """Stack slots that LLVM keeps in registers, zeroed here."""
    slots = [[cgutils.alloca_once(b, zero.type) for _ in range(vectors)] for _ in range(rows)]
    for row in slots:
        for slot in row:
            b.store(zero, slot)
    return slots


def make_f32_tile(rows: int, vectors: int) -> Any:
    """C[rows, 8*vectors] (+)= A[rows, k] @ B[k, 8*vectors]; adds to C if `keep`."""

    @emitted(types.void(*[types.int64] * 8))
    def tile(
        b: ir.IRBuilder, a: Any, lda: Any, base: Any, ldb: Any, k: Any, c: Any, ldc: Any, keep: Any
    ) -> None:
        fma = b.module.declare_intrinsic(
            "llvm.fma.v8f32", (), ir.FunctionType(_V8F32, [_V8F32] * 3)
        )
        total = accumulators(b, rows, vectors, ir.Constant(_V8F32, [0.0] * 8))
        out = row_addresses(b, c, ldc, rows)
        lines = row_addresses(b, a, lda, rows)
        with cgutils.for_range(b, k) as loop:
            line = b.add(base, b.mul(loop.index, ldb))
            weights = [load(b, line, 32 * v, _V8F32) for v in range(vectors)]
            step = b.shl(loop.index, ir.Constant(I64, 2))
            for r in range(rows):
                x = splat(b, load(b, b.add(lines[r], step), 0, F32), _V8F32)
                for v in range(vectors):
                    slot = total[r][v]
                    b.store(b.call(fma, [x, weights[v], b.load(slot)]), slot)
        with b.if_then(b.icmp_signed("!=", keep, ir.Constant(I64, 0))):
            for r in range(rows):
                for v in range(vectors):
                    before = load(b, out[r], 32 * v, _V8F32)
                    b.store(b.fadd(b.load(total[r][v]), before), total[r][v])
        for r in range(rows):
            for v in range(vectors):
                store(b, b.load(total[r][v]), out[r], 32 * v)

    return tile


def finish_integers(
    b: ir.IRBuilder,
    total: list[list[Any]],
    row_scales: list[Any],
    w_scale: Any,
    bias: Any,
    c: Any,
    ldc: Any,
    keep: Any,
) -> None:
    """C (+)= integer sums * scale of the row * scales of the columns (+ bias)."""
    floats = ir.VectorType(F32, total[0][0].type.pointee.count)
    for r, out in enumerate(row_addresses(b, c, ldc, len(total))):
        for v, slot in enumerate(total[r]):
            where = 4 * floats.count * v
            value = b.fmul(b.sitofp(b.load(slot), floats), splat(b, row_scales[r], floats))
            result = cgutils.alloca_once(b, floats)
            b.store(b.fmul(value, load(b, w_scale, where, floats)), result)
            with b.if_then(b.icmp_signed("!=", bias, ir.Constant(I64, 0))):
                b.store(b.fadd(b.load(result), load(b, bias, where, floats)), result)
            with b.if_then(b.icmp_signed("!=", keep, ir.Constant(I64, 0))):
                b.store(b.fadd(b.load(result), load(b, out, where, floats)), result)
            store(b, b.load(result), out, where)


def make_int_tile(rows: int, vectors: int) -> Any:
    """C[rows, 8*vectors] (+)= (A16[rows, k] @ W8[k, 8*vectors]) * a_scale * w_scale (+ bias).

    `w` is packed by pairs of k, [k/2, 8*vectors, 2]: one vpmaddwd multiplies sixteen int16 pairs
    and adds neighbours into eight int32 sums, exactly. k is a multiple of 4.
    """

    @emitted(types.void(*[types.int64] * 10))
    def tile(
        b: ir.IRBuilder,
        a: Any,
        lda: Any,
        w: Any,
        k: Any,
        a_scale: Any,
        w_scale: Any,
        bias: Any,
        c: Any,
        ldc: Any,
        keep: Any,
    ) -> None:
        madd = b.module.declare_intrinsic(
            "llvm.x86.avx2.pmadd.wd", (), ir.FunctionType(_V8I32, [_V16I16, _V16I16])
        )
        total = accumulators(b, rows, vectors, ir.Constant(_V8I32, [0] * 8))
        lines = row_addresses(b, a, lda, rows)
        pair_bytes = 16 * vectors
        with cgutils.for_range_slice(
            b, ir.Constant(I64, 0), b.ashr(k, ir.Constant(I64, 1)), ir.Constant(I64, 2)
        ) as (pair, _):
            weights_at = b.add(w, b.mul(pair, ir.Constant(I64, pair_bytes)))
            step = b.shl(pair, ir.Constant(I64, 2))
            for unroll in range(2):
                weights = [
                    b.sext(load(b, weights_at, unroll * pair_bytes + 16 * v, _V16I8, 1), _V16I16)
                    for v in range(vectors)
                ]
                for r in range(rows):
                    both = load(b, b.add(lines[r], step), 4 * unroll, I32)
                    x = b.bitcast(splat(b, both, _V8I32), _V16I16)
                    for v in range(vectors):
                        slot = total[r][v]
                        b.store(b.add(b.load(slot), b.call(madd, [x, weights[v]])), slot)
        row_scales = [load(b, a_scale, 4 * r, F32) for r in range(rows)]
        finish_integers(b, total, row_scales, w_scale, bias, c, ldc, keep)

    return tile


_f6x2, _f3x2, _f1x2 = make_f32_tile(6, 2), make_f32_tile(3, 2), make_f32_tile(1, 2)


@compiled
def f32_rows(
    a: Any, lda: Any, b: Any, ldb: Any, k: Any, m: Any, c: Any, ldc: Any, keep: Any
) -> None:
    """C[m, 16] (+)= A[m, k] @ B[k, 16] by tiles of 6, 3 and 1 rows, which sum alike."""
    while m >= 6:
        _f6x2(a, lda, b, ldb, k, c, ldc, keep)
        a, c, m = a + 6 * lda, c + 6 * ldc, m - 6
    while m >= 3:
        _f3x2(a, lda, b, ldb, k, c, ldc, keep)
        a, c, m = a + 3 * lda, c + 3 * ldc, m - 3
    while m >= 1:
        _f1x2(a, lda, b, ldb, k, c, ldc, keep)
        a, c, m = a + lda, c + ldc, m - 1
