"""Row-wise kernels: RMSNorm, SiLU-mul and rounding, with int16 rows as the optional finish."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.cpu.build import VNNI, compiled
from tokenmill.kernels.cpu.pool import float_bits, launch, rows_of_task, task_kernel
from tokenmill.kernels.cpu.tiles import (
    as_float,
    exp32,
    f32_at,
    i16_at,
    round_group,
    square_sum,
)

VALUE_TYPE = (
    torch.int8 if VNNI else torch.int16
)  # of values rounded by groups: AVX2's tiles want 16
_VALUE_BYTES = VALUE_TYPE.itemsize


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
def _round_groups(at: int, values: int, scales: int, k: int) -> None:
    """Round k floats by groups of 32, the last filled up with zeros."""
    groups = (k + 31) // 32
    for g in range(k // 32):
        where = scales + 4 * g
        round_group(at + 128 * g, values + 32 * _VALUE_BYTES * g, where, where + 4 * groups)
    if k % 32 != 0:
        last = np.zeros(32, np.float32)
        last[: k % 32] = carray(f32_at(at), (k,))[k - k % 32 :]
        g = groups - 1
        where = scales + 4 * g
        values += 32 * _VALUE_BYTES * g
        round_group(last.ctypes.data, values, where, where + 4 * groups)


@compiled
def _finish(at: int, values: int, scales: int, r: int, k: int, limit: int) -> None:
    """Round the row of k floats at an address as row r: by groups if limit is below 0."""
    if limit < 0:
        groups = (k + 31) // 32
        values += r * groups * 32 * _VALUE_BYTES
        _round_groups(at, values, scales + 8 * r * groups, k)
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
def _silu_mul(gate: Any, up: Any, out: Any, k: int) -> None:
    for i in range(k):
        g = gate[i]
        out[i] = g / (np.float32(1.0) + exp32(-g)) * up[i]


def _norm_body(args: Any, task: int) -> None:
    m, k, rows, limit, eps = args[4], args[5], args[6], args[7], as_float(args[8])
    weight = carray(f32_at(args[1]), (k,))
    scratch = np.empty(k, np.float32)
    for r in range(task * rows, min(m, task * rows + rows)):
        x = args[0] + 4 * r * k
        if limit == 0:
            _normalize(x, weight, carray(f32_at(args[2] + 4 * r * k), (k,)), k, eps)
        else:
            _normalize(x, weight, scratch, k, eps)
            _finish(scratch.ctypes.data, args[2], args[3], r, k, limit)


def _silu_body(args: Any, task: int) -> None:
    m, k, rows, limit, stride = args[4], args[5], args[6], args[7], args[8]
    scratch = np.empty(k, np.float32)
    for r in range(task * rows, min(m, task * rows + rows)):
        gate = carray(f32_at(args[0] + 4 * r * stride), (k,))
        up = carray(f32_at(args[0] + 4 * (r * stride + k)), (k,))
        if limit == 0:
            _silu_mul(gate, up, carray(f32_at(args[2] + 4 * r * k), (k,)), k)
        else:
            _silu_mul(gate, up, scratch, k)
            _finish(scratch.ctypes.data, args[2], args[3], r, k, limit)


def _quantize_body(args: Any, task: int) -> None:
    m, k, rows, limit, stride = args[4], args[5], args[6], args[7], args[8]
    for r in range(task * rows, min(m, task * rows + rows)):
        _finish(args[0] + 4 * r * stride, args[2], args[3], r, k, limit)


NORM = task_kernel(_norm_body)
SILU = task_kernel(_silu_body)
QUANTIZE = task_kernel(_quantize_body)


def _run(
    kernel: Any, x: torch.Tensor, weight: int, k: int, limit: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over chunks of rows; returns ([m, k] int16 or fp32, [m] scales).

    For limit -1: integers with k padded to groups of 32, and scales [m, 2 * groups], whose second
    half is what groups.py takes off the sums.
    """
    m = x.shape[0]
    rows = rows_of_task(m, k)
    if limit < 0:
        groups = -(-k // 32)
        out = torch.empty(m, 32 * groups, dtype=VALUE_TYPE)
        scales = torch.empty(m, 2 * groups)
    else:
        out = torch.empty(m, k, dtype=torch.int16 if limit else torch.float32)
        scales = torch.empty(m)
    launch(
        kernel,
        -(-m // rows),
        x.data_ptr(),
        weight,
        out.data_ptr(),
        scales.data_ptr(),
        m,
        k,
        rows,
        limit,
        extra,
    )
    return out, scales


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, limit: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of x[m, k]; limit 0 leaves fp32, -1 rounds by groups, else to [-limit, limit]."""
    assert x.is_contiguous() and weight.is_contiguous()
    return _run(NORM, x, weight.data_ptr(), x.shape[1], limit, float_bits(eps))


def silu_mul(gate_up: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of gate_up[m, 2k]; limit as in rms_norm."""
    assert gate_up.stride(1) == 1
    return _run(SILU, gate_up, 0, gate_up.shape[1] // 2, limit, gate_up.stride(0))


def quantize_rows(x: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.stride(1) == 1
    return _run(QUANTIZE, x, 0, x.shape[1], limit, x.stride(0))
