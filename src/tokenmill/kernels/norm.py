"""Norms and gating, with the rounding of the next linear fused in, and around a linear."""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tokenmill.kernels import MODE, compiled, triton_kernels, use_triton
from tokenmill.kernels.matmul import (
    SKINNY_ROWS,
    PackedWeight,
    QuantizedRows,
    Rounding,
    compiled_rows,
    matmul,
    quantize_rows_reference,
)
from tokenmill.kernels.product_trials import second_is_faster


class ClampedSwiGLU(NamedTuple):
    """g * sigmoid(alpha * g) * (u + 1) of a gate g up to `limit` and an up u within +-limit.

    Gate and up lie in turns, g0 u0 g1 u1 ...; those of other activations one after the other.
    """

    alpha: float = 1.702
    limit: float = 7.0


# Of the gate; gelu_tanh is GELU by its tanh formula.
Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedRows:
    """RMSNorm of x[m, k], rounded as asked; `delta`[m, k] is first added to x in place."""
    if use_triton(x, "rms_norm"):
        fp8, channels = rounding is not None, rounding and rounding.channels
        found = triton_kernels("rows").rms_norm(x, weight, eps, fp8, delta, channels)
        return _rows(found, rounding)
    if compiled_rows(x, rounding):
        if delta is not None:
            x.add_(delta)
        limit = rounding.code if rounding else 0
        return _rows(compiled("rows").rms_norm(x, weight, eps, limit), rounding)
    return rms_norm_reference(x, weight, eps, rounding, delta)


def rms_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedRows:
    if delta is not None:
        x.add_(delta)
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return quantize_rows_reference(y, rounding) if rounding else y.to(x.dtype)


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm of x[m, k]; `delta`[m, k] is first added to x in place."""
    if use_triton(x, "layer_norm"):
        out: torch.Tensor = triton_kernels("rows").layer_norm(x, weight, bias, eps, delta)
        return out
    return layer_norm_reference(x, weight, bias, eps, delta)


def layer_norm_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    if delta is not None:
        x.add_(delta)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_weight: torch.Tensor, b_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of a[m, k] and of b[m, k] side by side, [m, 2k]."""
    if use_triton(a, "rms_norm"):
        out: torch.Tensor = triton_kernels("rows").norm_pair(a, b, a_weight, b_weight, eps)
        return out
    left, right = rms_norm(a, a_weight, eps), rms_norm(b, b_weight, eps)
    assert isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return torch.cat([left, right], dim=1)


def act_and_mul(
    gate_up: torch.Tensor, rounding: Rounding | None = None, activation: Activation = "silu"
) -> torch.Tensor | QuantizedRows:
    """activation(gate) * up of gate_up[m, 2k] -> [m, k], rounded as asked."""
    if use_triton(gate_up, "act_and_mul"):
        fp8, channels = rounding is not None, rounding and rounding.channels
        found = triton_kernels("rows").act_and_mul(gate_up, fp8, channels, activation)
        return _rows(found, rounding)
    if compiled_rows(gate_up, rounding):
        limit = rounding.code if rounding else 0
        return _rows(compiled("rows").act_and_mul(gate_up, limit, activation), rounding)
    return act_and_mul_reference(gate_up, rounding, activation)


def act_and_mul_reference(
    gate_up: torch.Tensor, rounding: Rounding | None = None, activation: Activation = "silu"
) -> torch.Tensor | QuantizedRows:
    gate, up = gate_up.float().chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        y = _clamped_swiglu(gate_up.float(), activation)
    elif activation == "silu":
        y = torch.nn.functional.silu(gate) * up
    else:
        y = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return quantize_rows_reference(y, rounding) if rounding else y.to(gate_up.dtype)


def _clamped_swiglu(gate_up: torch.Tensor, activation: ClampedSwiGLU) -> torch.Tensor:
    alpha, limit = activation
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)


def _rows(
    found: tuple[torch.Tensor, torch.Tensor], rounding: Rounding | None
) -> torch.Tensor | QuantizedRows:
    """What a kernel returned: values with their scales, or values alone."""
    return QuantizedRows(*found) if rounding else found[0]


def norm_matmul(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """The product with W of x's RMSNorm, [m, k] -> [m, n]; `delta` as in rms_norm."""
    if _one_kernel(x, weight, delta):
        skinny = triton_kernels("matmul").skinny_matmul
        out: torch.Tensor = skinny(x, weight, bias, norm=(norm, eps))
        return out
    return matmul(rms_norm(x, norm, eps, weight.rounding, delta), weight, bias)


def norm_matmul_gated(
    x: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    weight: PackedWeight,
    bias: torch.Tensor | None = None,
    delta: torch.Tensor | None = None,
    rounding: Rounding | None = None,
    activation: Activation = "silu",
) -> torch.Tensor | QuantizedRows:
    """act_and_mul of the same product with gate and up stacked in W, [m, k] -> [m, n / 2]."""
    if _one_kernel(x, weight, delta):
        if isinstance(activation, str) and rounding is None:
            skinny = triton_kernels("matmul").skinny_matmul
            out: torch.Tensor = skinny(x, weight, bias, norm=(norm, eps), gated=activation)
            return out
        return act_and_mul(norm_matmul(x, norm, eps, weight, bias), rounding, activation)
    rows = rms_norm(x, norm, eps, weight.rounding, delta)
    if rounding is None and bias is None and activation == "silu" and _gates_itself(rows, weight):
        assert isinstance(rows, torch.Tensor)
        return _product_that_gates(rows, weight.data)
    return act_and_mul(matmul(rows, weight, bias), rounding, activation)


def _gates_itself(x: torch.Tensor | QuantizedRows, weight: PackedWeight) -> bool:
    """True where one kernel for Hopper computes the product and its gate, unless a trial was lost.

    Kernels that no trial was held for run, too: so the warm-up knows all that are to be compiled.
    """
    if not use_triton(weight.data, "gated_product") or not isinstance(x, torch.Tensor):
        return False
    suits = triton_kernels("hopper.gated").suits
    if x.shape[0] <= SKINNY_ROWS or not suits(x.shape[0], weight.data):
        return False
    ways = _product_and_gate, _product_that_gates
    return second_is_faster(ways, x, weight.data, untried=True)


def _product_and_gate(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    n, k = weight.shape
    gated = act_and_mul(matmul(x, PackedWeight(weight, None, n, k, tiled=False)))
    assert isinstance(gated, torch.Tensor)
    return gated


def _product_that_gates(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    gated: torch.Tensor = triton_kernels("hopper.gated").gated_product(x, weight)
    return gated


def _one_kernel(x: torch.Tensor, weight: PackedWeight, delta: torch.Tensor | None) -> bool:
    """True where the norm is part of the product: a few rows, which need no rounding."""
    few = x.shape[0] <= SKINNY_ROWS and not MODE.batch_invariant
    return few and delta is None and weight.rounding is None and use_triton(x)
