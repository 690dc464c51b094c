"""The residual stream of a decoder: what layers read through a norm and add their results to."""

from __future__ import annotations

import torch

from tokenmill.kernels.matmul import norm_matmul, norm_matmul_gated
from tokenmill.kernels.rows import Activation, QuantizedRows, Rounding, rms_norm
from tokenmill.layers.linear import Linear
from tokenmill.parallel import ONE, Ranks


class Residual:
    """x[tokens, hidden], updated in place.

    A product that cannot add to its output leaves it as `delta`, which the next norm adds to x in
    the same pass.
    """

    __slots__ = ("delta", "eps", "x")

    def __init__(self, x: torch.Tensor, eps: float) -> None:
        self.x, self.eps = x, eps
        self.delta: torch.Tensor | None = None

    def project(self, norm: torch.Tensor | None, linear: Linear) -> torch.Tensor:
        """linear(RMSNorm(x)), or linear(x) without a norm, [tokens, n]."""
        if norm is None:
            return linear(self.complete())
        return norm_matmul(self.x, norm, self.eps, linear.weight, linear.bias, self._take())

    def normed(self, norm: torch.Tensor) -> torch.Tensor:
        """RMSNorm(x), [tokens, hidden]; nothing is left to be added to x then."""
        rows = rms_norm(self.x, norm, self.eps, None, self._take())
        assert isinstance(rows, torch.Tensor)
        return rows

    def gate(
        self,
        norm: torch.Tensor,
        gate_up: Linear,
        rounding: Rounding | None,
        activation: Activation = "silu",
    ) -> torch.Tensor | QuantizedRows:
        """activation(gate) * up of gate_up(RMSNorm(x)), [tokens, n / 2], rounded as asked."""
        weight, bias, delta = gate_up.weight, gate_up.bias, self._take()
        return norm_matmul_gated(self.x, norm, self.eps, weight, bias, delta, rounding, activation)

    def add(
        self,
        linear: Linear,
        rows: torch.Tensor | QuantizedRows,
        ranks: Ranks = ONE,
        norm: torch.Tensor | None = None,
    ) -> None:
        """x += linear(rows), or its RMSNorm, summed over ranks that have some columns each."""
        assert self.delta is None
        if norm is not None:
            product = self._product(linear, rows, ranks).to(self.x.dtype)
            self.delta = Residual(product, self.eps).normed(norm)
        elif ranks.size > 1:
            self.x.add_(self._product(linear, rows, ranks))
        elif linear.adds_in_place(rows):
            linear.add(rows, self.x)
        else:
            self.delta = linear(rows)

    def _product(
        self, linear: Linear, rows: torch.Tensor | QuantizedRows, ranks: Ranks
    ) -> torch.Tensor:
        """linear(rows) of all ranks together, [tokens, n], in fp32 where sums have one order."""
        part = linear.partial(rows, ranks.size)
        return ranks.add_up(linear(rows)) if part is None else ranks.add_in_order(part)

    def complete(self) -> torch.Tensor:
        """x with everything added, [tokens, hidden]."""
        delta = self._take()
        return self.x if delta is None else self.x.add_(delta)

    def _take(self) -> torch.Tensor | None:
        delta, self.delta = self.delta, None
        return delta
