"""Rotary position tables for every scaling that the Llama family uses.

Cosines and sines are made of sums and products in float64, which round alike on every CPU; those of
torch and numpy depend on the instruction set, and on where in a tensor an element lies.
"""

from __future__ import annotations

import math

import torch

from tokenmill.core.specs.rope import RopeSpec

# pi / 2 in parts of 33 bits, so that their products with a number below 2**20 are exact
_HALF_PI = (1.57079632673412561417e00, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
_POSITIONS = 2048  # of a table that are computed at once
_SINE = tuple((-1) ** i / math.factorial(2 * i + 1) for i in range(9, 0, -1))
_COSINE = tuple((-1) ** i / math.factorial(2 * i) for i in range(9, -1, -1))


def rotary_table(
    rope: RopeSpec, dim: int, num_positions: int, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """fp32 [num_positions, dim]: cosines in the first half, sines in the second.

    A GPU computes the same bits; on CPU an intermediate of a few positions stays in its caches.
    """
    frequencies = inverse_frequencies(rope, dim).to(device)
    positions = torch.arange(num_positions, device=device).float()[:, None]
    table = torch.empty(num_positions, dim, device=device)
    for own, rows in zip(positions.split(_POSITIONS), table.split(_POSITIONS), strict=True):
        rows.copy_(torch.cat(_cos_sin((own * frequencies).double()), dim=1))
    return table.mul_(rope.attention_factor)


def _cos_sin(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of float64 angles up to 2**20, to about its last bit."""
    turns = torch.round(x * (2 / math.pi))
    for part in _HALF_PI:
        x = x - turns * part
    square = x * x
    sin = _polynomial(square, _SINE) * square * x + x
    cos = _polynomial(square, _COSINE)
    quarter = turns.long() & 3
    odd = quarter % 2 == 1
    cos, sin = torch.where(odd, sin, cos), torch.where(odd, cos, sin)
    return torch.where((quarter == 1) | (quarter == 2), -cos, cos), torch.where(
        quarter >= 2, -sin, sin
    )


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    total = torch.full_like(x, coefficients[0])
    for coefficient in coefficients[1:]:
        total = total * x + coefficient
    return total


def inverse_frequencies(rope: RopeSpec, dim: int) -> torch.Tensor:
    """fp32 [dim / 2], rescaled as `rope.kind` says."""
    base = 1.0 / torch.tensor([rope.theta ** (i / dim) for i in range(0, dim, 2)])
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
