"""Row-wise operations of a diffusion transformer: modulated LayerNorm, gated residual, GELU.

What a linear reads next is rounded to fp8 in the same pass where the linear asks for it.
"""

from __future__ import annotations

import torch
from torch.nn.functional import gelu, layer_norm

from tokenmill.kernels import gpu_twin, triton_kernels, use_triton
from tokenmill.kernels.matmul import (
    QuantizedRows,
    Rounding,
    quantize_rows,
    quantize_rows_reference,
)


def norm_modulate(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
) -> torch.Tensor | QuantizedRows:
    """LayerNorm(x[m, k]) * factor[k] + shift[k], computed in fp32, rounded as asked or as x is."""
    if use_triton(x, "norm_modulate"):
        fp8 = rounding is not None
        found = triton_kernels("modulation").norm_modulate(x, factor, shift, eps, fp8)
        return QuantizedRows(*found) if fp8 else found[0]
    return norm_modulate_reference(x, factor, shift, eps, rounding)


def norm_modulate_reference(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
) -> torch.Tensor | QuantizedRows:
    y = layer_norm(x.float(), x.shape[-1:], factor, shift, eps)
    return quantize_rows_reference(y, rounding) if rounding else y.to(x.dtype)


def add_gated(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x[m, k] + delta[m, k] * gate[k], computed in fp32, into x."""
    if use_triton(x, "add_gated"):
        return gpu_twin(add_gated_reference)(x, delta, gate)
    return add_gated_reference(x, delta, gate)


def add_gated_reference(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return x.addcmul_(delta, gate)
    return x.copy_(torch.addcmul(x.float(), delta.float(), gate))


def gelu_rows(x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor | QuantizedRows:
    """GELU of x[m, k] by its tanh formula, rounded as asked or as x is."""
    if rounding is not None and use_triton(x, "gelu_rows"):
        return QuantizedRows(*triton_kernels("modulation").gelu_rows(x))
    activated = gelu(x, approximate="tanh")
    return activated if rounding is None else quantize_rows(activated, rounding)
