"""Row-wise kernels: RMSNorm, SiLU-mul and rounding, with int16 rows as the optional finish."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import carray

from tokenmill.kernels.cpu.build import compiled
from tokenmill.kernels.cpu.pool import float_bits, get_num_threads, launch, task_kernel
from tokenmill.kernels.cpu.tiles import (
    as_float,
    exp32,
    f32_at,
    i16_at,
    square_sum,
)


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
            scale = carray(f32_at(args[3] + 4 * r), (1,))
            values = carray(i16_at(args[2] + 2 * r * k), (k,))
            scale[0] = _quantize(scratch, values, k, limit)


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
            scale = carray(f32_at(args[3] + 4 * r), (1,))
            values = carray(i16_at(args[2] + 2 * r * k), (k,))
            scale[0] = _quantize(scratch, values, k, limit)


def _quantize_body(args: Any, task: int) -> None:
    m, k, rows, limit, stride = args[4], args[5], args[6], args[7], args[8]
    for r in range(task * rows, min(m, task * rows + rows)):
        x = carray(f32_at(args[0] + 4 * r * stride), (k,))
        scale = carray(f32_at(args[3] + 4 * r), (1,))
        scale[0] = _quantize(x, carray(i16_at(args[2] + 2 * r * k), (k,)), k, limit)


_norm_kernel = task_kernel(_norm_body)
_silu_kernel = task_kernel(_silu_body)
_quantize_kernel = task_kernel(_quantize_body)


def _run(
    kernel: Any, x: torch.Tensor, weight: int, k: int, limit: int, extra: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch over chunks of rows; returns ([m, k] int16 or fp32, [m] scales)."""
    m = x.shape[0]
    rows = -(-m // (4 * get_num_threads()))
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
    """RMSNorm of x[m, k]; limit 0 leaves fp32, else int16 rows in [-limit, limit]."""
    assert x.is_contiguous() and weight.is_contiguous()
    return _run(_norm_kernel, x, weight.data_ptr(), x.shape[1], limit, float_bits(eps))


def silu_mul(gate_up: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of gate_up[m, 2k]; limit as in rms_norm."""
    assert gate_up.stride(1) == 1
    return _run(_silu_kernel, gate_up, 0, gate_up.shape[1] // 2, limit, gate_up.stride(0))


def quantize_rows(x: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    assert x.stride(1) == 1
    return _run(_quantize_kernel, x, 0, x.shape[1], limit, x.stride(0))
