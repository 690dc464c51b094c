"""Mixture of experts: the router's choice, the products of each expert's tokens, their sum.

On a GPU nothing of this waits for the host: tokens are sorted by expert into tiles whose number has
a bound that the shapes alone give, and programs beyond the last tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.kernels import always, kernel, use_triton
from tokenmill.kernels.matmul import PackedWeight, matmul
from tokenmill.kernels.rows import (
    Activation,
    QuantizedRows,
    Rounding,
    act_and_mul,
    quantize_rows,
)

MXFP4_BLOCK = 32  # weights that share a scale, which is a power of two
MXFP4_BIAS = 127  # of a scale's exponent
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MXFP4_VALUES = (*_MAGNITUDES, *(-value for value in _MAGNITUDES))  # of each four-bit code
FEW_ROWS = 4  # up to here fp32 experts on CPU are faster one by one; the bits are the same


class Routing(NamedTuple):
    """How a token chooses `top_k` experts by the router's logits."""

    top_k: int
    sigmoid: bool = False  # scores are sigmoids, else a softmax over all experts
    renormalise: bool = True  # weights of the chosen sum to one
    scaling: float = 1.0  # then times this
    num_groups: int = 1  # the choice is among the experts of the best groups
    top_groups: int = 1


@dataclass(slots=True)
class PackedExperts:
    """The same matrix W[n, k] of every expert, packed one by one into one tensor.

    MXFP4 codes stay as a checkpoint has them: `data` is uint8 [experts, n, k / 32, 16], of two
    codes a byte, the lower four bits first; `scales` is uint8 [experts, n, k / 32]. The kernels of
    a GPU have them in another order, as int32: kernels/gpu/mxfp4.py.
    """

    num_experts: int
    data: torch.Tensor | None = None  # [experts, ...] as PackedWeight.data
    scales: torch.Tensor | None = None  # fp32 [experts, n]
    n: int = 0
    k: int = 0
    tiled: bool = False
    bias: torch.Tensor | None = None  # [experts, n], added to each row of a product

    def put(self, expert: int, weight: PackedWeight) -> None:
        """Keep an expert's weight; the first one decides the shape."""
        self.n, self.k, self.tiled = weight.n, weight.k, weight.tiled
        self.data = self._kept(self.data, expert, weight.data)
        if weight.scales is not None:
            self.scales = self._kept(self.scales, expert, weight.scales)

    def put_mxfp4(self, expert: int, blocks: torch.Tensor, scales: torch.Tensor) -> None:
        """Keep an expert's codes uint8 [n, k / 32, 16] and their scales uint8 [n, k / 32]."""
        self.n, self.k = blocks.shape[0], blocks.shape[1] * MXFP4_BLOCK
        if use_triton(blocks):
            from tokenmill.kernels.gpu import mxfp4

            blocks, scales = mxfp4.pack_expert(blocks, scales)
        self.data = self._kept(self.data, expert, blocks)
        self.scales = self._kept(self.scales, expert, scales)

    def put_bias(self, expert: int, bias: torch.Tensor) -> None:
        """Keep what is added to an expert's rows."""
        self.bias = self._kept(self.bias, expert, bias)

    def _kept(self, of_all: torch.Tensor | None, expert: int, part: torch.Tensor) -> torch.Tensor:
        of_all = part.new_empty(self.num_experts, *part.shape) if of_all is None else of_all
        of_all[expert] = part
        return of_all

    def expert(self, index: int, dtype: torch.dtype = torch.bfloat16) -> PackedWeight:
        """One expert's weight; MXFP4 codes come out as a matrix of this type."""
        assert self.data is not None
        data, scales = self.data[index], None if self.scales is None else self.scales[index]
        if self.mxfp4:
            assert data.dtype == torch.uint8 and scales is not None
            data, scales = dequantize_mxfp4(data, scales, dtype), None
        return PackedWeight(data, scales, self.n, self.k, self.tiled)

    def parts(self, index: int) -> list[torch.Tensor]:
        return [part[index] for part in (self.data, self.scales, self.bias) if part is not None]

    @property
    def mxfp4(self) -> bool:
        return self.data is not None and self.data.dtype in (torch.uint8, torch.int32)

    @property
    def rounding(self) -> Rounding | None:
        return None if self.mxfp4 else self.expert(0).rounding

    @property
    def num_bytes(self) -> int:
        return sum(part.nbytes for part in (self.data, self.scales, self.bias) if part is not None)


def dequantize_mxfp4(
    blocks: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.bfloat16
) -> torch.Tensor:
    """Codes uint8 [..., k / 32, 16] times their scales uint8 [..., k / 32] -> [..., k]."""
    values = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    powers = scales.to(torch.int32)[..., None] - MXFP4_BIAS
    return torch.ldexp(values[codes.int()], powers).flatten(-2).to(dtype)


@kernel(gpu=always)
def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x[t, k] times the router's W[experts, k], in fp32 whatever x is: [t, experts]."""
    return matmul(x, weight) if weight.tiled else x.float() @ weight.data.float().T


@kernel(gpu=always, cpu=lambda logits: logits.dtype == torch.float32)
def route(
    logits: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    logit_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int32 [t, top_k] and their weights fp32 [t, top_k], from logits[t, experts].

    `logit_bias` is added to the logits, `bias` to the scores for the choice alone.
    """
    logits = logits if logit_bias is None else logits + logit_bias
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(2, dim=-1)[0].sum(-1).topk(routing.top_groups, dim=-1)[1]
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter_(1, best, True)
        choice = groups.masked_fill(~kept[..., None], -torch.inf).flatten(1)
    ids = choice.topk(routing.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return ids.int(), weights * routing.scaling


def _pays_tiled(x: torch.Tensor, gate_up: PackedExperts) -> bool:
    return gate_up.tiled and (gate_up.scales is not None or x.shape[0] > FEW_ROWS)


@kernel(gpu=always, cpu=_pays_tiled)
def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) of x[t, k] by each of its experts ids[t, top_k], a row each."""
    flat, top_k = ids.flatten().long(), ids.shape[1]
    order = flat.argsort(stable=True)
    rows = x if gate_up.rounding is None else quantize_rows(x, gate_up.rounding)
    results = x.new_empty(flat.shape[0], down.n)
    counts = torch.bincount(flat, minlength=gate_up.num_experts).tolist()
    for expert, places in enumerate(order.split(counts)):
        if places.shape[0]:
            inner = _product(pick_rows(rows, places // top_k), gate_up, expert, x.dtype)
            gated = act_and_mul(inner, down.rounding, activation)
            results[places] = _product(gated, down, expert, x.dtype)
    return results


def _product(
    x: torch.Tensor | QuantizedRows, weight: PackedExperts, expert: int, dtype: torch.dtype
) -> torch.Tensor:
    out = matmul(x, weight.expert(expert, dtype))
    return out if weight.bias is None else out.add_(weight.bias[expert])


@kernel(gpu=always, cpu=lambda results: results.dtype == torch.float32)
def add_choices(results: torch.Tensor, weights: torch.Tensor, add_to: torch.Tensor) -> None:
    """Add to add_to[t, n] the sum of results[t * top_k, n] by weights[t, top_k], in this order.

    The GPU's experts in MXFP4 may leave results in parts, [parts, t * top_k, n].
    """
    by_token = results.unflatten(0, weights.shape)
    total = torch.zeros(add_to.shape, device=add_to.device)
    for choice in range(weights.shape[1]):
        total += by_token[:, choice].float() * weights[:, choice, None]
    add_to += total


def pick_rows(x: torch.Tensor | QuantizedRows, rows: torch.Tensor) -> torch.Tensor | QuantizedRows:
    if isinstance(x, QuantizedRows):
        values = x.values
        if values.dtype.itemsize == 1:  # fp8 has no indexing of its own on CPU
            values = values.view(torch.uint8)[rows].view(values.dtype)
        else:
            values = values[rows]
        return QuantizedRows(values, x.scales[rows])
    return x[rows]
