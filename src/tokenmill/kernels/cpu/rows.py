"""Row-wise kernels: RMSNorm, gating and rounding, to int16 rows or by groups, as a finish."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.cpu.compiler import VNNI, compiled
from tokenmill.kernels.cpu.groups import empty_rows
from tokenmill.kernels.cpu.threads import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.tiles import (
    as_float,
    exp32,
    f32_at,
    i16_at,
    i32_at,
    round_block,
    row_peak,
    square_sum,
)
from tokenmill.kernels.rows import Activation, QuantizedRows, Rounding

_VALUE_BYTES = 1 if VNNI else 2  # of rows rounded by groups
_HEAD = 2 if VNNI else 1  # words of a row in front of its groups' shifts
_ACTIVATIONS = {"silu": 0, "gelu_tanh": 1}
_CLAMPED_SWIGLU = 2
_TWICE_ROOT = np.float32((8 / np.pi) ** 0.5)


@compiled
def _quantize(x: Any, values: Any, k: int, limit: int) -> Any:
    """values = round(x / scale) with scale = max|x| / limit; returns the scale."""
    peak = np.float32(1e-30)
    for i in range(k):
        peak = max(peak, abs(x[i]))
    scale = peak / np.float32(limit)
    inverse = np.float32(limit) / peak
    for i in range(k):
        values[i] = np.int16(np.rint(x[i] * inverse))
    return scale


@compiled
def _round_groups(at: int, values: int, scales: int, k: int, limit: int) -> None:
    """Round k floats, a multiple of 64, by groups: the row's peak becomes `limit`, 127 << most."""
    peak = max(row_peak(at, k), np.float32(1e-30))
    inverse = np.float32(limit) / peak
    most = 0
    while 127 << most < limit:
        most += 1
    total = 0
    for i in range(k // 64):
        shifts = scales + 4 * _HEAD + 16 * i
        total += round_block(at + 256 * i, values + 64 * _VALUE_BYTES * i, shifts, inverse, most)
    carray(f32_at(scales), (1,))[0] = peak / np.float32(limit)
    if VNNI:
        carray(i32_at(scales + 4), (1,))[0] = np.int32(-128 * total)


@compiled
def _finish(at: int, values: int, scales: int, r: int, k: int, limit: int) -> None:
    """Round the row of k floats at an address as row r: by groups if limit is below 0.

    Then zeros follow the row up to a multiple of 64.
    """
    if limit < 0:
        wide = (k + 63) // 64 * 64
        stride = 8 + wide // 4 if VNNI else 4
        _round_groups(at, values + r * wide * _VALUE_BYTES, scales + r * stride, wide, -limit)
    else:
        scale = carray(f32_at(scales + 4 * r), (1,))
        rounded = carray(i16_at(values + 2 * r * k), (k,))
        scale[0] = _quantize(carray(f32_at(at), (k,)), rounded, k, limit)


@compiled
def _normalize(at: int, weight: Any, out: Any, k: int, eps: float) -> None:
    x = carray(f32_at(at), (k,))
    inverse = np.float32(1.0) / np.sqrt(square_sum(at, k) / np.float32(k) + np.float32(eps))
    for i in range(k):
        out[i] = x[i] * inverse * weight[i]


@compiled
def _act_and_mul(gate: Any, up: Any, out: Any, k: int, activation: int) -> None:
    """gelu_tanh(g) = g * sigmoid(2 u), u = sqrt(2 / pi) (g + 0.044715 g^3); silu has u = g / 2."""
    if activation == 0:
        for i in range(k):
            g = gate[i]
            out[i] = g / (np.float32(1.0) + exp32(-g)) * up[i]
    else:
        for i in range(k):
            g = gate[i]
            u = _TWICE_ROOT * (g + np.float32(0.044715) * g * g * g)
            out[i] = g / (np.float32(1.0) + exp32(-u)) * up[i]


@compiled
def _clamped_swiglu(gate_up: Any, out: Any, k: int, alpha: Any, limit: Any) -> None:
    one = np.float32(1.0)
    for i in range(k):
        g, u = min(gate_up[2 * i], limit), max(-limit, min(gate_up[2 * i + 1], limit))
        out[i] = g / (one + exp32(-alpha * g)) * (u + one)


@compiled
def _gate_row(at: int, out: Any, k: int, activation: int, alpha: Any, limit: Any) -> None:
    if activation == _CLAMPED_SWIGLU:
        _clamped_swiglu(carray(f32_at(at), (2 * k,)), out, k, alpha, limit)
    else:
        up = carray(f32_at(at + 4 * k), (k,))
        _act_and_mul(carray(f32_at(at), (k,)), up, out, k, activation)


def _norm_body(args: Any, task: int) -> None:
    m, k, rows, limit, eps = args[4], args[5], args[6], args[7], as_float(args[8])
    weight = carray(f32_at(args[1]), (k,))
    scratch = np.zeros((k + 63) // 64 * 64, np.float32)
    for r in range(task * rows, min(m, task * rows + rows)):
        x = args[0] + 4 * r * k
        if limit == 0:
            _normalize(x, weight, carray(f32_at(args[2] + 4 * r * k), (k,)), k, eps)
        else:
            _normalize(x, weight, scratch, k, eps)
            _finish(scratch.ctypes.data, args[2], args[3], r, k, limit)


def _act_body(args: Any, task: int) -> None:
    m, k, rows, limit, stride = args[4], args[5], args[6], args[7], args[8]
    alpha, clamp = np.float32(as_float(args[9])), np.float32(as_float(args[10]))
    scratch = np.zeros((k + 63) // 64 * 64, np.float32)
    for r in range(task * rows, min(m, task * rows + rows)):
        at = args[0] + 4 * r * stride
        if limit == 0:
            out = carray(f32_at(args[2] + 4 * r * k), (k,))
            _gate_row(at, out, k, args[1], alpha, clamp)
        else:
            _gate_row(at, scratch, k, args[1], alpha, clamp)
            _finish(scratch.ctypes.data, args[2], args[3], r, k, limit)


def _quantize_body(args: Any, task: int) -> None:
    m, k, rows, limit, stride = args[4], args[5], args[6], args[7], args[8]
    scratch = np.zeros((k + 63) // 64 * 64, np.float32)
    for r in range(task * rows, min(m, task * rows + rows)):
        at = args[0] + 4 * r * stride
        if limit < 0 and k % 64 != 0:
            scratch[:k] = carray(f32_at(at), (k,))
            at = scratch.ctypes.data
        _finish(at, args[2], args[3], r, k, limit)


NORM = task_kernel(_norm_body)
ACT = task_kernel(_act_body)
QUANTIZE = task_kernel(_quantize_body)


def _run(
    kernel: Any, x: torch.Tensor, weight: int, k: int, rounding: Rounding | None, *extra: int
) -> torch.Tensor | QuantizedRows:
    """Launch over chunks of rows, each rounded as asked or left in fp32."""
    m, limit = x.shape[0], rounding.code if rounding else 0
    rows = rows_of_task(m, k)
    if limit < 0:
        out, scales = empty_rows(m, k)
    else:
        out = torch.empty(m, k, dtype=torch.int16 if limit else torch.float32)
        scales = torch.empty(m)
    launch(
        kernel, -(-m // rows), x.data_ptr(), weight, out.data_ptr(), scales.data_ptr(), m, k, rows,
        limit, *extra,
    )  # fmt: skip
    return QuantizedRows(out, scales) if rounding else out


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedRows:
    if delta is not None:
        x.add_(delta)
    assert x.is_contiguous() and weight.is_contiguous()
    return _run(NORM, x, weight.data_ptr(), x.shape[1], rounding, float_bits(eps))


def act_and_mul(
    gate_up: torch.Tensor, rounding: Rounding | None = None, activation: Activation = "silu"
) -> torch.Tensor | QuantizedRows:
    assert gate_up.stride(1) == 1
    k, stride = gate_up.shape[1] // 2, gate_up.stride(0)
    if isinstance(activation, str):
        return _run(ACT, gate_up, _ACTIVATIONS[activation], k, rounding, stride, 0, 0)
    clamp = float_bits(activation.alpha), float_bits(activation.limit)
    return _run(ACT, gate_up, _CLAMPED_SWIGLU, k, rounding, stride, *clamp)


def quantize_rows(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    assert x.stride(1) == 1
    rows = _run(QUANTIZE, x, 0, x.shape[1], rounding, x.stride(0))
    assert isinstance(rows, QuantizedRows)
    return rows
