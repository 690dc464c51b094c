"""Row-wise kernels: RMSNorm and SiLU-mul, fp32 inside whatever the tensors hold."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _rms_norm_kernel(x, weight, out, k, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    values = tl.load(x + row * k + columns, mask=inside, other=0.0).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(values * values, axis=0) / k + eps)
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * k + columns, values * inverse * scale, mask=inside)


@triton.jit
def _silu_mul_kernel(gate_up, out, k, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < k
    gate = tl.load(gate_up + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * stride + k + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * k + columns, gate * tl.sigmoid(gate) * up, mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm of x[m, k], in x's type."""
    m, k = x.shape
    out = torch.empty_like(x)
    assert x.is_contiguous() and weight.is_contiguous()
    _rms_norm_kernel[(m,)](x, weight, out, k, eps, BLOCK=triton.next_power_of_2(k))
    return out


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up[m, 2k] -> [m, k]."""
    m, k = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(m, k, dtype=gate_up.dtype, device=gate_up.device)
    assert gate_up.stride(1) == 1
    block = min(1024, triton.next_power_of_2(k))
    _silu_mul_kernel[(m, triton.cdiv(k, block))](gate_up, out, k, gate_up.stride(0), BLOCK=block)
    return out
