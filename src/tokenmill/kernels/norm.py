"""RMSNorm and SiLU-mul, with the rounding of the next linear fused in when it is int8."""

from __future__ import annotations

import torch

from tokenmill.kernels import compiled, cpu_kernels, triton_kernels
from tokenmill.kernels.matmul import QuantizedRows, quantize_rows_reference


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, limit: int = 0
) -> torch.Tensor | QuantizedRows:
    """RMSNorm of x[m, k]; with limit > 0 the rows come back as int16 in [-limit, limit]."""
    if x.is_cuda:
        normed: torch.Tensor = triton_kernels("rows").rms_norm(x, weight, eps)
        return normed
    if not cpu_kernels():
        return rms_norm_reference(x, weight, eps, limit)
    values, scales = compiled("rows").rms_norm(x, weight, eps, limit)
    return QuantizedRows(values, scales) if limit else values


def rms_norm_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, limit: int = 0
) -> torch.Tensor | QuantizedRows:
    y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight
    return quantize_rows_reference(y, limit) if limit else y


def silu_mul(gate_up: torch.Tensor, limit: int = 0) -> torch.Tensor | QuantizedRows:
    """silu(gate) * up of gate_up[m, 2k] -> [m, k]; limit as in rms_norm."""
    if gate_up.is_cuda:
        product: torch.Tensor = triton_kernels("rows").silu_mul(gate_up)
        return product
    if not cpu_kernels():
        return silu_mul_reference(gate_up, limit)
    values, scales = compiled("rows").silu_mul(gate_up, limit)
    return QuantizedRows(values, scales) if limit else values


def silu_mul_reference(gate_up: torch.Tensor, limit: int = 0) -> torch.Tensor | QuantizedRows:
    gate, up = gate_up.chunk(2, dim=-1)
    y = torch.nn.functional.silu(gate) * up
    return quantize_rows_reference(y, limit) if limit else y
