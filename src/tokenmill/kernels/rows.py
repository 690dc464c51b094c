"""Row-wise operations: rounding, norms and gating, with the rounding of the next linear fused in.

int8: rows are rounded to as many integers as keep the int32 sum of a product exact whatever the
values; except for experts, only the 8 highest bits of each group of GROUP channels are kept.
fp8 (e4m3): each row has a scale.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from tokenmill.kernels import always, kernel

INT32_MAX = 2**31 - 1
GROUP = 16  # channels of a row that are shifted alike: every fourth of BLOCK
BLOCK = 64


@dataclass(frozen=True, slots=True)
class Rounding:
    """What rows are rounded to: `dtype`, each row scaled so that its peak becomes `limit`."""

    dtype: torch.dtype
    limit: int
    group: int = 0  # channels whose highest 8 bits count, if not all bits do

    @property
    def code(self) -> int:
        return -self.limit if self.group else self.limit


FP8 = Rounding(torch.float8_e4m3fn, 448)


class QuantizedRows(NamedTuple):
    """x[m, k] ~ values[m, k] * scales[m, None].

    Rows that the compiled kernels round by groups have a form of their own, see cpu/groups.py.
    """

    values: torch.Tensor  # int16 or fp8
    scales: torch.Tensor  # fp32 [m]


@functools.cache
def activation_limit(k: int) -> Rounding:
    """The widest int16 rounding whose dot products with k weights of at most 127 fit an int32."""
    return Rounding(torch.int16, min(32767, INT32_MAX // (127 * k)))


@functools.cache
def by_groups(k: int) -> Rounding:
    """The same range, or the next smaller power of two, with 8 bits for each group."""
    steps = activation_limit(k).limit // 127
    return Rounding(torch.int16, 127 << max(0, steps.bit_length() - 1), group=GROUP)


class ClampedSwiGLU(NamedTuple):
    """g * sigmoid(alpha * g) * (u + 1) of a gate g up to `limit` and an up u within +-limit.

    Gate and up lie in turns, g0 u0 g1 u1 ...; those of other activations one after the other.
    """

    alpha: float = 1.702
    limit: float = 7.0


# Of the gate; gelu_tanh is GELU by its tanh formula.
Activation = Literal["silu", "gelu_tanh"] | ClampedSwiGLU


def _not_fp8(x: torch.Tensor, rounding: Rounding | None) -> bool:
    """Whether the compiled kernels, which have no fp8, round x so."""
    return x.dtype == torch.float32 and (rounding is None or rounding.dtype != FP8.dtype)


@kernel(gpu=always, cpu=_not_fp8)
def quantize_rows(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    """Round each row of x[m, k]."""
    if rounding == FP8:
        scaled, scales = scaled_fp8(x)
        return QuantizedRows(scaled.to(FP8.dtype), scales)
    if rounding.group:
        return _quantize_groups(x.float(), rounding)
    scales = x.float().abs().amax(1).clamp(min=1e-30) / rounding.limit
    return QuantizedRows((x.float() / scales[:, None]).round().to(rounding.dtype), scales)


def _quantize_groups(x: torch.Tensor, rounding: Rounding) -> QuantizedRows:
    k = x.shape[1]
    peaks = x.abs().amax(1).clamp(min=1e-30)
    steps = torch.nn.functional.pad(x * (rounding.limit / peaks)[:, None], (0, -k % BLOCK))
    groups = steps.unflatten(1, (-1, rounding.group, BLOCK // rounding.group))
    most = (rounding.limit // 127).bit_length() - 1
    fractions, bits = torch.frexp(groups.abs().amax(2, keepdim=True) / 127)
    shifts = (bits - (fractions == 0.5).int()).clamp(0, most)
    values = torch.ldexp(torch.ldexp(groups, -shifts).round(), shifts).to(rounding.dtype)
    return QuantizedRows(values.flatten(1)[:, :k], peaks / rounding.limit)


def scaled_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of x as fp32 within fp8's range, and their scales."""
    x = x.float()
    peaks = x.abs().amax(1).clamp(min=1e-30)
    return (x * (FP8.limit / peaks)[:, None]).clamp(-FP8.limit, FP8.limit), peaks / FP8.limit


@kernel(gpu=always, cpu=_not_fp8)
def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    rounding: Rounding | None = None,
    delta: torch.Tensor | None = None,
) -> torch.Tensor | QuantizedRows:
    """RMSNorm of x[m, k], rounded as asked; `delta`[m, k] is first added to x in place."""
    if delta is not None:
        x.add_(delta)
    wide = x.float()
    y = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    return quantize_rows.reference(y, rounding) if rounding else y.to(x.dtype)


@kernel(gpu=always)
def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    eps: float,
    delta: torch.Tensor | None = None,
) -> torch.Tensor:
    """LayerNorm of x[m, k]; `delta`[m, k] is first added to x in place."""
    if delta is not None:
        x.add_(delta)
    return torch.nn.functional.layer_norm(x, weight.shape, weight, bias, eps)


@kernel(gpu=always)
def norm_pair(
    a: torch.Tensor, b: torch.Tensor, a_weight: torch.Tensor, b_weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """RMSNorm of a[m, k] and of b[m, k] side by side, [m, 2k]."""
    left, right = rms_norm(a, a_weight, eps), rms_norm(b, b_weight, eps)
    assert isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor)
    return torch.cat([left, right], dim=1)


@kernel(gpu=always, cpu=lambda gate_up, rounding: _not_fp8(gate_up, rounding))
def act_and_mul(
    gate_up: torch.Tensor, rounding: Rounding | None = None, activation: Activation = "silu"
) -> torch.Tensor | QuantizedRows:
    """activation(gate) * up of gate_up[m, 2k] -> [m, k], rounded as asked."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    if isinstance(activation, ClampedSwiGLU):
        y = _clamped_swiglu(gate_up.float(), activation)
    elif activation == "silu":
        y = torch.nn.functional.silu(gate) * up
    else:
        y = torch.nn.functional.gelu(gate, approximate="tanh") * up
    return quantize_rows.reference(y, rounding) if rounding else y.to(gate_up.dtype)


def _clamped_swiglu(gate_up: torch.Tensor, activation: ClampedSwiGLU) -> torch.Tensor:
    alpha, limit = activation
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return gate * torch.sigmoid(gate * alpha) * (up + 1)
