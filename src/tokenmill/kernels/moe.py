"""Mixture of experts: the router's choice, the products of each expert's tokens, their sum.

On a GPU nothing of this waits for the host: tokens are sorted by expert into tiles whose number has
a bound that the shapes alone give, and programs beyond the last tile end at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from tokenmill.kernels import (
    MODE,
    compiled,
    cpu_kernels,
    cpu_twin,
    gpu_twin,
    triton_kernels,
    use_triton,
)
from tokenmill.kernels.matmul import PackedWeight, QuantizedRows, Rounding, matmul, quantize_rows
from tokenmill.kernels.norm import Activation, act_and_mul

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
    """The same matrix W[n, k] of every expert, packed one by one into one tensor."""

    num_experts: int
    data: torch.Tensor | None = None  # [experts, ...] as PackedWeight.data
    scales: torch.Tensor | None = None  # fp32 [experts, n]
    n: int = 0
    k: int = 0
    tiled: bool = False

    def put(self, expert: int, weight: PackedWeight) -> None:
        """Keep an expert's weight; the first one decides the shape."""
        if self.data is None:
            self.n, self.k, self.tiled = weight.n, weight.k, weight.tiled
            self.data = weight.data.new_empty(self.num_experts, *weight.data.shape)
            if weight.scales is not None:
                self.scales = weight.scales.new_empty(self.num_experts, *weight.scales.shape)
        self.data[expert] = weight.data
        if weight.scales is not None:
            assert self.scales is not None
            self.scales[expert] = weight.scales

    def expert(self, index: int) -> PackedWeight:
        """One expert's weight."""
        assert self.data is not None
        scales = None if self.scales is None else self.scales[index]
        return PackedWeight(self.data[index], scales, self.n, self.k, self.tiled)

    @property
    def rounding(self) -> Rounding | None:
        return self.expert(0).rounding

    @property
    def num_bytes(self) -> int:
        assert self.data is not None
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)


def router_logits(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """x[t, k] times the router's W[experts, k], in fp32 whatever x is: [t, experts]."""
    if weight.tiled:
        return matmul(x, weight)
    if not use_triton(x):
        return x.float() @ weight.data.float().T
    if MODE.batch_invariant:
        zeros = torch.zeros(x.shape[0], weight.n, device=x.device)
        out: torch.Tensor = triton_kernels("matmul").matmul(x, weight, None, zeros)
        return out
    return torch.mm(x, weight.data.T, out_dtype=torch.float32)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts int32 [t, top_k] and their weights fp32 [t, top_k], from logits[t, experts].

    `bias` is added to the scores for the choice alone.
    """
    choose = route_reference
    if use_triton(logits, "route"):
        choose = gpu_twin(route_reference)
    elif _compiled(logits):
        choose = cpu_twin(route_reference)
    return choose(logits, bias, routing)


def _compiled(x: torch.Tensor) -> bool:
    return x.dtype == torch.float32 and not x.is_cuda and cpu_kernels()


def route_reference(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
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


def apply_experts(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    """down(act(gate(x)) * up(x)) of x[t, k] by each of its experts ids[t, top_k], a row each."""
    if not ids.numel():
        return x.new_empty(0, down.n)
    apply = gpu_twin(apply_experts_reference) if use_triton(x) else apply_experts_reference
    if gate_up.tiled and (gate_up.scales is not None or x.shape[0] > FEW_ROWS):
        apply = _apply_experts_tiled
    return apply(x, ids, gate_up, down, activation)


def add_choices(results: torch.Tensor, weights: torch.Tensor, add_to: torch.Tensor) -> None:
    """Add to add_to[t, n] the sum of results[t * top_k, n] by weights[t, top_k], in this order."""
    if not weights.numel():
        return
    add = gpu_twin(add_choices_reference) if use_triton(results) else add_choices_reference
    if _compiled(results):
        add = cpu_twin(add_choices_reference)
    add(results, weights, add_to)


def _apply_experts_tiled(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    """All experts in two launches, over rows sorted by expert."""
    order, segments = compiled("moe").sort_by_expert(ids, gate_up.num_experts)
    rows = x if gate_up.rounding is None else quantize_rows(x, gate_up.rounding)
    inner = _multiply(_pick(rows, order // ids.shape[1]), gate_up, segments)
    outer = _multiply(act_and_mul(inner, down.rounding, activation), down, segments)
    return torch.empty_like(outer).index_copy_(0, order, outer)


def _multiply(
    x: torch.Tensor | QuantizedRows, weight: PackedExperts, segments: object
) -> torch.Tensor:
    """Each segment's rows x[m, k] by the weight of its expert, [m, n]."""
    values, scales = x if isinstance(x, QuantizedRows) else (x, None)
    out = torch.empty(values.shape[0], weight.n + -weight.n % 8)
    compiled("grouped").multiply_segments(values, scales, weight.data, weight.scales, segments, out)
    return out[:, : weight.n].contiguous()


def apply_experts_reference(
    x: torch.Tensor,
    ids: torch.Tensor,
    gate_up: PackedExperts,
    down: PackedExperts,
    activation: Activation = "silu",
) -> torch.Tensor:
    """Expert by expert, all its tokens at once."""
    flat, top_k = ids.flatten().long(), ids.shape[1]
    order = flat.argsort(stable=True)
    rows = x if gate_up.rounding is None else quantize_rows(x, gate_up.rounding)
    results = x.new_empty(flat.shape[0], down.n)
    counts = torch.bincount(flat, minlength=gate_up.num_experts).tolist()
    for expert, places in enumerate(order.split(counts)):
        if places.shape[0]:
            inner = matmul(_pick(rows, places // top_k), gate_up.expert(expert))
            gated = act_and_mul(inner, down.rounding, activation)
            results[places] = matmul(gated, down.expert(expert))
    return results


def add_choices_reference(
    results: torch.Tensor, weights: torch.Tensor, add_to: torch.Tensor
) -> None:
    by_token = results.unflatten(0, weights.shape)
    total = torch.zeros(add_to.shape, device=add_to.device)
    for choice in range(weights.shape[1]):
        total += by_token[:, choice].float() * weights[:, choice, None]
    add_to += total


def _pick(x: torch.Tensor | QuantizedRows, rows: torch.Tensor) -> torch.Tensor | QuantizedRows:
    if isinstance(x, QuantizedRows):
        values = x.values
        if values.dtype.itemsize == 1:  # fp8 has no indexing of its own on CPU
            values = values.view(torch.uint8)[rows].view(values.dtype)
        else:
            values = values[rows]
        return QuantizedRows(values, x.scales[rows])
    return x[rows]
