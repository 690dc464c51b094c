"""Row-wise kernels: norms, gating and rounding, fp32 inside whatever the tensors hold.

A program takes a whole row, which it reads once: the norm and the scale of an fp8 row need all of
it. Gating without a scale takes a row in parts, so that no row is padded to a power of two.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.rows import Activation, QuantizedRows, Rounding

FP8_LIMIT = tl.constexpr(448.0)
ELEMENTS_PER_WARP = 512  # two 16-byte accesses in flight per thread and tensor
MAX_WARPS = 16
PART = 2048  # elements of a row that a program gates: four warps' worth


@triton.jit
def _store_row(y, out, scales, row, k, columns, FP8: tl.constexpr):
    if FP8:
        peak = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-30)
        tl.store(scales + row, peak / FP8_LIMIT)
        y = y * (FP8_LIMIT / peak)
    tl.store(out + row * k + columns, y.to(out.dtype.element_ty), mask=columns < k)


@quick
@triton.jit
def _rms_norm_kernel(
    x, delta, weight, out, scales, k, eps,
    ADD: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + row * k + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row * k + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / k + eps)
    y = values * inverse * gain
    _store_row(y, out, scales, row, k, columns, FP8)


@quick
@triton.jit
def _layer_norm_kernel(
    x, delta, weight, bias, out, k, eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        values += tl.load(delta + row * k + columns, mask=inside, other=0.0).to(tl.float32)
        rounded = values.to(x.dtype.element_ty)
        tl.store(x + row * k + columns, rounded, mask=inside)
        values = rounded.to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / k, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=0) / k + eps)
    y = centred * inverse * gain + shift
    tl.store(out + row * k + columns, y.to(out.dtype.element_ty), mask=inside)


@quick
@triton.jit
def _norm_pair_kernel(
    a, b, a_weight, b_weight, out, k, eps, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    wait(EARLY)
    if half == 0:
        gain = tl.load(a_weight + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(a + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    else:
        gain = tl.load(b_weight + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(b + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values, axis=0) / k + eps) * gain
    line = out + (2 * row + half) * k + columns
    tl.store(line, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """silu(x), or gelu_tanh(x) = x * sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)."""
    if ACTIVATION == "silu":
        return x * tl.sigmoid(x)
    else:
        tl.static_assert(ACTIVATION == "gelu_tanh")
        return x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def clamped_swiglu(gate, up, alpha, limit):
    gate, up = tl.minimum(gate, limit), tl.minimum(tl.maximum(up, -limit), limit)
    return gate * tl.sigmoid(alpha * gate) * (up + 1.0)


@quick
@triton.jit
def _act_and_mul_kernel(
    gate_up, out, scales, k, stride, alpha, limit,
    ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < k
    line = gate_up + row * stride
    if ACTIVATION == "clamped_swiglu":  # gate and up in turns
        gate = tl.load(line + 2 * columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + 2 * columns + 1, mask=inside, other=0.0).to(tl.float32)
        y = clamped_swiglu(gate, up, alpha, limit)
    else:
        gate = tl.load(line + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(line + k + columns, mask=inside, other=0.0).to(tl.float32)
        y = activate(gate, ACTIVATION) * up
    _store_row(y, out, scales, row, k, columns, FP8)


@quick
@triton.jit
def _quantize_kernel(x, out, scales, k, stride, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    wait(EARLY)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    values = tl.load(x + row * stride + columns, mask=columns < k, other=0.0).to(tl.float32)
    _store_row(values, out, scales, row, k, columns, True)


def _empty_rows(
    like: torch.Tensor, k: int, rounding: Rounding | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Values and, in fp8, scales of like.shape[0] rows of k."""
    if rounding is None:
        return torch.empty(like.shape[0], k, dtype=like.dtype, device=like.device), None
    values = torch.empty(like.shape[0], k, dtype=rounding.dtype, device=like.device)
    return values, torch.empty(like.shape[0], device=like.device)


def _found(values: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor | QuantizedRows:
    return values if scales is None else QuantizedRows(values, scales)


def _whole_row(k: int) -> dict[str, int]:
    block = next_power_of_2(k)
    warps = max(1, min(MAX_WARPS, block // ELEMENTS_PER_WARP))
    return {"BLOCK": block, "num_warps": warps, **launch_options()}


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedRows:
    m, k = x.shape
    assert x.is_contiguous() and weight.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    out, scales = _empty_rows(x, k, rounding)
    _rms_norm_kernel[(m,)](
        x, delta, weight, out, scales, k, eps,
        ADD=delta is not None, FP8=scales is not None, **_whole_row(k),
    )  # fmt: skip
    return _found(out, scales)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    m, k = x.shape
    assert x.is_contiguous() and weight.is_contiguous() and bias.is_contiguous()
    assert delta is None or (delta.is_contiguous() and delta.shape == x.shape)
    out, add = torch.empty_like(x), delta is not None
    _layer_norm_kernel[(m,)](x, delta, weight, bias, out, k, eps, ADD=add, **_whole_row(k))
    return out


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_weight: torch.Tensor, b_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    m, k = a.shape
    assert a.is_contiguous() and b.is_contiguous() and a.shape == b.shape and a.dtype == b.dtype
    out = torch.empty(m, 2 * k, dtype=a.dtype, device=a.device)
    _norm_pair_kernel[(m, 2)](a, b, a_weight, b_weight, out, k, eps, **_whole_row(k))
    return out


def act_and_mul(
    gate_up: torch.Tensor, rounding: Rounding | None = None, activation: Activation = "silu"
) -> torch.Tensor | QuantizedRows:
    m, k = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.stride(1) == 1
    out, scales = _empty_rows(gate_up, k, rounding)
    named = isinstance(activation, str)
    clamp = (0.0, 0.0) if isinstance(activation, str) else (activation.alpha, activation.limit)
    launch = _whole_row(min(k, PART) if rounding is None else k)
    _act_and_mul_kernel[(m, cdiv(k, launch["BLOCK"]))](
        gate_up, out, scales, k, gate_up.stride(0), *clamp,
        ACTIVATION=activation if named else "clamped_swiglu", FP8=scales is not None, **launch,
    )  # fmt: skip
    return _found(out, scales)


def quantize_rows(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    m, k = x.shape
    assert x.stride(1) == 1
    out, scales = _empty_rows(x, k, rounding)
    assert scales is not None
    _quantize_kernel[(m,)](x, out, scales, k, x.stride(0), **_whole_row(k))
    return QuantizedRows(out, scales)
