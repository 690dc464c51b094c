"""Row-wise kernels of a diffusion transformer, fp32 inside whatever the tensors hold.

A program takes a whole row, which it reads once. Rows come back as (values, scales), scales being
None unless the values are fp8.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.rows import ELEMENTS_PER_WARP, FP8_LIMIT, MAX_WARPS, Rows, activate


@triton.jit
def _store(y, out, scales, row, k, columns, FP8: tl.constexpr):
    if FP8:
        peak = tl.maximum(tl.max(tl.abs(y), axis=0), 1e-30)
        tl.store(scales + row, peak / FP8_LIMIT)
        y = y * (FP8_LIMIT / peak)
    tl.store(out + row * k + columns, y.to(out.dtype.element_ty), mask=columns < k)


@triton.jit
def norm_modulate_kernel(
    x, factor, shift, out, scales, k, eps,
    FP8: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    wait(EARLY)
    values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    gain = tl.load(factor + columns, mask=inside, other=0.0).to(tl.float32)
    offset = tl.load(shift + columns, mask=inside, other=0.0).to(tl.float32)
    centred = tl.where(inside, values - tl.sum(values, axis=0) / k, 0.0)
    inverse = tl.rsqrt(tl.sum(centred * centred, axis=0) / k + eps)
    _store(centred * inverse * gain + offset, out, scales, row, k, columns, FP8)


@triton.jit
def add_gated_kernel(x, delta, gate, k, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    wait(EARLY)
    values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    added = tl.load(delta + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.load(gate + columns, mask=inside, other=0.0).to(tl.float32)
    total = values + added * share
    tl.store(x + row * k + columns, total.to(x.dtype.element_ty), mask=inside)


@triton.jit
def gelu_rows_kernel(x, out, scales, k, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    wait(EARLY)
    values = tl.load(x + row * k + columns, mask=columns < k, other=0.0).to(tl.float32)
    _store(activate(values, "gelu_tanh"), out, scales, row, k, columns, True)


def norm_modulate(
    x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, eps: float, fp8: bool
) -> Rows:
    """x[m, k] with fp32 factor[k] and shift[k]."""
    m, k = x.shape
    assert x.is_contiguous() and factor.is_contiguous() and shift.is_contiguous()
    out, scales = _outputs(x, fp8)
    norm_modulate_kernel[(m,)](
        x, factor, shift, out, out if scales is None else scales, k, eps, FP8=fp8, **_row(k)
    )
    return out, scales


def add_gated(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """Adds delta[m, k] * gate[k] to x[m, k], in place."""
    m, k = x.shape
    assert x.is_contiguous() and delta.is_contiguous() and gate.is_contiguous()
    add_gated_kernel[(m,)](x, delta, gate, k, **_row(k))
    return x


def gelu_rows(x: torch.Tensor) -> Rows:
    """x[m, k] -> fp8 [m, k] and fp32 scales [m]."""
    m, k = x.shape
    assert x.is_contiguous()
    out, scales = _outputs(x, True)
    gelu_rows_kernel[(m,)](x, out, scales, k, **_row(k))
    return out, scales


def _outputs(x: torch.Tensor, fp8: bool) -> Rows:
    if not fp8:
        return torch.empty_like(x), None
    scales = torch.empty(len(x), device=x.device, dtype=torch.float32)
    return torch.empty_like(x, dtype=torch.float8_e4m3fn), scales


def _row(k: int) -> dict[str, int | bool]:
    block = triton.next_power_of_2(k)
    warps = min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP))
    return {"BLOCK": block, "num_warps": warps, **launch_options()}
