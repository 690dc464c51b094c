"""Norms and activations of a video model: of a transformer's rows, and of a decoder's frames.

What a linear reads next is rounded to fp8 in the same pass where the linear asks for it, and what
is to be added to the stream before a norm is added in the norm's pass.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.nn.functional import gelu, layer_norm, normalize, silu

from tokenmill.kernels import always, kernel
from tokenmill.kernels.rows import QuantizedRows, Rounding, quantize_rows


class Added(NamedTuple):
    """delta[m, k] * gate[k], which is to be added to the stream; without a gate it is 1."""

    delta: torch.Tensor
    gate: torch.Tensor | None


@kernel(gpu=always)
def norm_modulate(
    x: torch.Tensor,
    factor: torch.Tensor,
    shift: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    added: Added | None = None,
) -> torch.Tensor | QuantizedRows:
    """LayerNorm(x[m, k]) * factor[k] + shift[k], computed in fp32, rounded as asked or as x is.

    What is `added` is added to x first, in place.
    """
    if added is not None:
        add_gated(x, added)
    y = layer_norm(x.float(), x.shape[-1:], factor, shift, eps)
    return quantize_rows.reference(y, rounding) if rounding else y.to(x.dtype)


def add_gated(x: torch.Tensor, added: Added) -> torch.Tensor:
    """x[m, k] + delta[m, k] * gate[k], computed in fp32, into x."""
    delta, gate = added
    if gate is None:
        return x.add_(delta)
    if x.dtype == torch.float32:
        return x.addcmul_(delta, gate)
    return x.copy_(torch.addcmul(x.float(), delta.float(), gate))


@kernel(gpu=lambda rounding: rounding is not None)
def gelu_rows(x: torch.Tensor, rounding: Rounding | None = None) -> torch.Tensor | QuantizedRows:
    """GELU of x[m, k] by its tanh formula, rounded as asked or as x is."""
    activated = gelu(x, approximate="tanh")
    return activated if rounding is None else quantize_rows(activated, rounding)


@kernel(gpu=lambda rounding: rounding is not None)
def round_rows(x: torch.Tensor, rounding: Rounding | None) -> torch.Tensor | QuantizedRows:
    """x[m, k] as a linear asks for it: in fp8, or as it is."""
    return x if rounding is None else quantize_rows(x, rounding)


@kernel(gpu=always)
def norm_silu(x: torch.Tensor, gamma: torch.Tensor, before: torch.Tensor) -> torch.Tensor:
    """SiLU of the norm of frames x[1, c, t, h, w] behind the frames `before`[1, c, f, h, w].

    So it is what a convolution reads that looks back f frames: [1, c, f + t, h, w].
    """
    return torch.cat([before, silu(norm_frames(x, gamma))], dim=2)


def norm_frames(x: torch.Tensor, gamma: torch.Tensor) -> torch.Tensor:
    """x[n, c, ...] divided by its root mean square over c, times gamma."""
    normed: torch.Tensor = normalize(x.float(), dim=1).to(x.dtype) * x.shape[1] ** 0.5 * gamma
    return normed
