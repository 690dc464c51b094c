"""What a decoder layer does after its attention: one gated MLP, or a mixture of experts."""

from __future__ import annotations

import torch

from tokenmill.core.moe import MoESpec
from tokenmill.kernels.matmul import pack
from tokenmill.kernels.moe import PackedExperts, Routing, mix_experts, route, router_logits
from tokenmill.kernels.norm import silu_mul
from tokenmill.layers.linear import ComputeType, Device, Linear, Tensors, plain_type
from tokenmill.layers.residual import Residual


class MLP:
    """down(silu(gate(x)) * up(x)) of the normed stream, added to it."""

    def __init__(
        self, norm: torch.Tensor, tensors: Tensors, dtype: ComputeType, device: Device
    ) -> None:
        self.norm = norm
        self.gate_up = Linear.named(tensors, ["mlp.gate_proj", "mlp.up_proj"], dtype, device)
        self.down = Linear.named(tensors, ["mlp.down_proj"], dtype, device)

    def __call__(self, stream: Residual) -> None:
        stream.add(self.down, stream.gate(self.norm, self.gate_up, self.down.rounding))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.gate_up, self.down

    @property
    def num_bytes(self) -> int:
        return sum(linear.num_bytes for linear in self.linears)


class RoutedExperts:
    """The matrices of all experts of a layer, packed as they come out of a checkpoint."""

    def __init__(self, num_experts: int, dtype: ComputeType, device: Device) -> None:
        self.gate_up, self.down = PackedExperts(num_experts), PackedExperts(num_experts)
        self._dtype, self._device = dtype, device
        self._halves: dict[int, Tensors] = {}

    def put(self, expert: int, kind: str, weight: torch.Tensor) -> None:
        """Take one matrix: "gate", "up" or "down"; gate and up are packed once both are there."""
        if kind == "down":
            self.down.put(expert, pack(weight, self._dtype, self._device))
            return
        halves = self._halves.setdefault(expert, {})
        halves[kind] = weight.to(self._device)
        if len(halves) == 2:
            del self._halves[expert]
            both = torch.cat([halves["gate"], halves["up"]])
            self.gate_up.put(expert, pack(both, self._dtype, self._device))

    @property
    def num_bytes(self) -> int:
        return self.gate_up.num_bytes + self.down.num_bytes


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
    ) -> None:
        self.norm, self.experts = norm, experts
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
        x = stream.normed(self.norm)
        ids, weights = route(router_logits(x, self.router.weight), self.bias, self.routing)
        mix_experts(x, ids, weights, self.experts.gate_up, self.experts.down, stream.x)
        if self.shared is not None:
            gate_up, down = self.shared
            stream.add(down, silu_mul(gate_up(x), down.rounding))

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.shared or ()

    @property
    def num_bytes(self) -> int:
        linears = [self.router, *self.linears]
        return self.experts.num_bytes + sum(linear.num_bytes for linear in linears)
