"""What a decoder layer does after its attention: one gated MLP, or a mixture of experts."""

from __future__ import annotations

from functools import partial

import torch

from tokenmill.core.specs.moe import MoESpec
from tokenmill.kernels.moe import Routing, add_choices, apply_experts, route, router_logits
from tokenmill.kernels.rows import Activation, act_and_mul
from tokenmill.layers.experts import RoutedExperts
from tokenmill.layers.linear import ComputeType, Device, Linear, Tensors, plain_type
from tokenmill.layers.residual import Residual
from tokenmill.parallel import ONE, Ranks


class MLP:
    """down(activation(gate(x)) * up(x)) of the normed stream, added to it through `post_norm`."""

    def __init__(
        self,
        norm: torch.Tensor,
        tensors: Tensors,
        dtype: ComputeType,
        device: Device,
        ranks: Ranks = ONE,
        activation: Activation = "silu",
        post_norm: torch.Tensor | None = None,
    ) -> None:
        self.norm, self.post_norm, self.ranks = norm, post_norm, ranks
        self.activation = activation
        self.gate_up = Linear.named(tensors, ["mlp.gate_proj", "mlp.up_proj"], dtype, device)
        self.down = Linear.named(tensors, ["mlp.down_proj"], dtype, device)

    def __call__(self, stream: Residual) -> None:
        gated = stream.gate(self.norm, self.gate_up, self.down.rounding, self.activation)
        stream.add(self.down, gated, self.ranks, self.post_norm)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self.linears)


class MoE:
    """Each token's chosen experts, and where there is one the shared expert, added to the stream.

    The router stays in the stream's type: its logits decide, and rounding would change the choice.
    """

    def __init__(
        self,
        spec: MoESpec,
        norm: torch.Tensor,
        tensors: Tensors,
        experts: RoutedExperts,
        dtype: ComputeType,
        device: Device,
        activation: Activation = "silu",
    ) -> None:
        self.norm, self.experts, self.activation = norm, experts, activation
        self.routing = Routing(
            spec.top_k,
            spec.scoring == "sigmoid",
            spec.renormalise,
            spec.scaling,
            spec.num_groups,
            spec.top_groups,
        )
        self.router = Linear.named(tensors, ["mlp.gate"], plain_type(dtype), device)
        bias = tensors.get("mlp.gate.e_score_correction_bias")
        self.bias = None if bias is None else bias.to(device, torch.float32)
        self.shared: tuple[Linear, Linear] | None = None
        if spec.shared_size:
            names = [f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")]
            gate_up = Linear.named(tensors, names[:2], dtype, device)
            self.shared = gate_up, Linear.named(tensors, names[2:], dtype, device)

    def __call__(self, stream: Residual) -> None:
        layout = self.experts.layout
        if layout.ranks.size == 1:
            self._add(stream)
        else:  # the host has to know how many rows travel
            do = self._add_own if layout.own_tokens else self._add_shared
            layout.ranks.together(partial(do, eps=stream.eps), stream.complete())

    def _add_own(self, x: torch.Tensor, eps: float, room: int | None = None) -> None:
        """Add the experts' results to this rank's rows."""
        stream = Residual(x, eps)
        self._add(stream, room)
        stream.complete()

    def _add_shared(self, x: torch.Tensor, eps: float) -> None:
        """The same for rows that every rank has; each takes a share of them."""
        ranks = self.experts.layout.ranks
        part, room = x[ranks.own(x.shape[0])], self.experts.room(x.shape[0], self.routing.top_k)
        if part.shape[0]:
            self._add_own(part, eps, room)
        else:
            self.assist(room)
        ranks.join(x)

    def _add(self, stream: Residual, room: int | None = None) -> None:
        """The shared expert runs while rows travel."""
        x, experts = stream.normed(self.norm), self.experts
        logits = router_logits(x, self.router.weight)
        ids, weights = route(logits, self.bias, self.routing, self.router.bias)
        sent = experts.dispatch(x, ids, room) if experts.layout.ranks.size > 1 else None
        if self.shared is not None:
            gate_up, down = self.shared
            stream.add(down, act_and_mul(gate_up(x), down.rounding))
        if sent is None:
            results = apply_experts(x, ids, experts.gate_up, experts.down, self.activation)
        else:
            results = experts.combine(sent, self.activation)
        add_choices(results, weights, stream.x)

    def assist(self, room: int | None = None) -> None:
        x = self.norm.new_empty(0, self.norm.shape[0])
        ids = torch.empty(0, self.routing.top_k, dtype=torch.int32, device=x.device)
        self.experts.combine(self.experts.dispatch(x, ids, room), self.activation)

    @property
    def num_bytes(self) -> int:
        linears: list[Linear] = [self.router, *(self.shared or ())]
        return self.experts.num_bytes + sum(linear.num_bytes for linear in linears)
