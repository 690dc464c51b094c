"""UMT5's encoder: token ids of a prompt to one embedding per token.

Every layer has a bias for the distance of two tokens of its own; attention is not scaled. A prompt
is encoded without padding, which its mask would hide from it; what is padded is zeros.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn.functional import gelu, pad, scaled_dot_product_attention

from tokenmill.core.specs.wan import TextEncoderSpec
from tokenmill.kernels.rows import rms_norm
from tokenmill.layers.linear import ComputeType, Device, Linear, activation_dtype
from tokenmill.models.family import Shape


def encoder_tensors(spec: TextEncoderSpec) -> dict[str, Shape]:
    """Name -> shape, as transformers stores an UMT5EncoderModel."""
    hidden, inner = spec.hidden_size, spec.num_heads * spec.head_dim
    tensors: dict[str, Shape] = {
        "shared.weight": (spec.vocab_size, hidden),
        "encoder.final_layer_norm.weight": (hidden,),
    }
    for index in range(spec.num_layers):
        attention, mlp = (f"encoder.block.{index}.layer.{part}" for part in (0, 1))
        own = f"{attention}.SelfAttention"
        tensors |= {
            f"{attention}.layer_norm.weight": (hidden,),
            f"{mlp}.layer_norm.weight": (hidden,),
            f"{own}.relative_attention_bias.weight": (spec.num_buckets, spec.num_heads),
            f"{own}.o.weight": (hidden, inner),
            **{f"{own}.{part}.weight": (inner, hidden) for part in "qkv"},
            f"{mlp}.DenseReluDense.wi_0.weight": (spec.ffn_dim, hidden),
            f"{mlp}.DenseReluDense.wi_1.weight": (spec.ffn_dim, hidden),
            f"{mlp}.DenseReluDense.wo.weight": (hidden, spec.ffn_dim),
        }
    return tensors


class EncoderLayer:
    """Attention with a bias by distance, then a gated MLP, both of the normed stream."""

    def __init__(
        self,
        spec: TextEncoderSpec,
        tensors: Mapping[str, torch.Tensor],
        name: str,
        dtype: ComputeType,
        device: Device,
    ) -> None:
        own, mlp = f"{name}.layer.0.SelfAttention", f"{name}.layer.1.DenseReluDense"

        def linear(*names: str) -> Linear:
            return Linear([tensors[f"{each}.weight"] for each in names], [], dtype, device)

        self.qkv = linear(*(f"{own}.{part}" for part in "qkv"))
        self.out, self.down = linear(f"{own}.o"), linear(f"{mlp}.wo")
        self.gate_up = linear(f"{mlp}.wi_0", f"{mlp}.wi_1")
        self.bias = tensors[f"{own}.relative_attention_bias.weight"].to(device, torch.float32)
        self.norms = [
            tensors[f"{name}.layer.{part}.layer_norm.weight"].to(device, torch.float32)
            for part in (0, 1)
        ]
        self.num_heads, self.eps = spec.num_heads, spec.eps

    def __call__(self, x: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        """[n, hidden] -> [n, hidden]."""
        x = x + self._attend(_normed(x, self.norms[0], self.eps), buckets)
        gate, up = self.gate_up(_normed(x, self.norms[1], self.eps)).chunk(2, dim=-1)
        return x + self.down((gelu(gate, approximate="tanh") * up).contiguous())

    def _attend(self, x: torch.Tensor, buckets: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(1, (3, self.num_heads, -1)).permute(1, 2, 0, 3)
        bias = self.bias[buckets].permute(2, 0, 1).to(x.dtype)
        seen = scaled_dot_product_attention(q[None], k[None], v[None], bias[None], scale=1.0)
        return self.out(seen[0].transpose(0, 1).flatten(1))


def _normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    normed = rms_norm.reference(x, weight, eps)
    assert isinstance(normed, torch.Tensor)
    return normed


class TextEncoder:
    """Embedding, layers and a last norm."""

    def __init__(
        self,
        spec: TextEncoderSpec,
        tensors: Mapping[str, torch.Tensor],
        dtype: ComputeType,
        device: Device,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self.table = tensors["shared.weight"].to(device, activation_dtype(dtype))
        self.layers = [
            EncoderLayer(spec, tensors, f"encoder.block.{index}", dtype, device)
            for index in range(spec.num_layers)
        ]
        self.norm = tensors["encoder.final_layer_norm.weight"].to(device, torch.float32)

    def __call__(self, token_ids: Sequence[int], length: int) -> torch.Tensor:
        """Embeddings of the first `length` tokens, [length, hidden]; zeros where there are none."""
        ids = torch.tensor(token_ids[:length], dtype=torch.int64, device=self.device)
        x, buckets = self.table[ids], self._buckets(len(ids))
        for layer in self.layers:
            x = layer(x, buckets)
        return pad(_normed(x, self.norm, self.spec.eps), (0, 0, 0, length - len(ids)))

    def _buckets(self, length: int) -> torch.Tensor:
        """The bucket of each pair's distance, [queries, keys].

        Half of them are for keys behind the query; of each half the first are one distance each,
        the others grow with the logarithm.
        """
        places = torch.arange(length)
        distance = places[None, :] - places[:, None]
        half = self.spec.num_buckets // 2
        exact = half // 2
        ratio = torch.log(distance.abs().clamp(min=1).float() / exact)
        ratio = ratio / math.log(self.spec.max_distance / exact) * (half - exact)
        far = (exact + ratio.long()).clamp(max=half - 1)
        near = torch.where(distance.abs() < exact, distance.abs(), far)
        return (near + half * (distance > 0)).to(self.device)
