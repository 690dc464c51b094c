"""LayerNorm with a factor and a shift for all rows, and a residual that is added through a gate."""

from __future__ import annotations

import torch
from torch.nn.functional import layer_norm


def norm_modulate(
    x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm(x[m, k]) * factor[k] + shift[k], computed in fp32, in x's type."""
    return norm_modulate_reference(x, factor, shift, eps)


def norm_modulate_reference(
    x: torch.Tensor, factor: torch.Tensor, shift: torch.Tensor, eps: float
) -> torch.Tensor:
    return layer_norm(x.float(), x.shape[-1:], factor, shift, eps).to(x.dtype)


def add_gated(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    """x[m, k] + delta[m, k] * gate[k], computed in fp32, into x."""
    return add_gated_reference(x, delta, gate)


def add_gated_reference(x: torch.Tensor, delta: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if x.dtype == torch.float32:
        return x.addcmul_(delta, gate)
    return x.copy_(torch.addcmul(x.float(), delta.float(), gate))
