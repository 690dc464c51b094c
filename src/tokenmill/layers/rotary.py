"""Rotary position tables for every scaling that the Llama family uses."""

from __future__ import annotations

import math

import torch

from tokenmill.core.rope import RopeSpec


def rotary_table(rope: RopeSpec, dim: int, num_positions: int) -> torch.Tensor:
    """fp32 [num_positions, dim]: cosines in the first half, sines in the second."""
    angles = torch.arange(num_positions).float()[:, None] * inverse_frequencies(rope, dim)
    return torch.cat([angles.cos(), angles.sin()], dim=1) * rope.attention_factor


def inverse_frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    """fp32 [dim / 2], rescaled as `rope.kind` says."""
    base = 1.0 / rope.theta ** (torch.arange(0, dim, 2).float() / dim)
    if rope.kind == "linear":
        return base / rope.factor
    if rope.kind == "llama3":
        return _llama3(base, rope)
    if rope.kind == "yarn":
        return _yarn(base, rope, dim)
    if rope.kind == "factors":
        return base / torch.tensor(rope.factors)
    return base


def _llama3(base: torch.Tensor, rope: RopeSpec) -> torch.Tensor:
    """Long wavelengths divided by factor, short ones kept, a ramp between."""
    wavelength = 2 * math.pi / base
    ratio = rope.original_max_position / wavelength
    smooth = (ratio - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * base / rope.factor + smooth * base


def _yarn(base: torch.Tensor, rope: RopeSpec, dim: int) -> torch.Tensor:
    """Channels that turn often are kept, those that turn rarely are divided by factor."""

    def channel(rotations: float) -> float:
        turns = rope.original_max_position / (rotations * 2 * math.pi)
        return dim * math.log(turns) / (2 * math.log(rope.theta))

    low, high = channel(rope.beta_fast), channel(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / (high - low)).clamp(0.0, 1.0)
    return base / rope.factor * ramp + base * (1 - ramp)
