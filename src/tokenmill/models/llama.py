"""The Llama family: Llama 2/3/3.1, SmolLM2, Mistral, Mixtral, Qwen2, Qwen3 and Qwen3-MoE.

ModelSpec tells them apart; a layer of Mixtral or Qwen3-MoE has experts where others have one MLP.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tokenmill.kernels.attention import AttentionBatch, paged_attention, rope_and_cache
from tokenmill.kernels.stack import DenseLayer, Heads, make_stack, run_stack
from tokenmill.layers.linear import Linear
from tokenmill.layers.mlp import MLP
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, KVCache, LayerTensors


class DecoderLayer:
    """Attention and MLP, which both add to the residual stream."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.spec, self.ranks = tensors.spec, tensors.layout.tensor_ranks
        self.window = self.spec.layer_windows[tensors.index] or 0
        self.norm = tensors.optional_norm("input_layernorm")
        self.qkv = tensors.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = tensors.linear("self_attn.o_proj")
        self.qk_norms = None
        if self.spec.qk_norm:
            names = "self_attn.q_norm", "self_attn.k_norm"
            q_norm, k_norm = (tensors.norm(name, torch.float32) for name in names)
            self.qk_norms = q_norm, k_norm
        self.mlp = tensors.mlp()

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's attention and MLP to the stream."""
        heads, scale, eps = self.spec.num_heads, self.spec.head_dim**-0.5, self.spec.rms_eps
        qkv = stream.project(self.norm, self.qkv)
        q = rope_and_cache(qkv, *cache, cos_sin, batch, heads, scale, self.qk_norms, eps)
        attended = paged_attention(q, *cache, batch, heads, self.window)
        stream.add(self.out, attended, self.ranks)
        self.mlp(stream)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, *self.mlp.linears

    @property
    def num_bytes(self) -> int:
        return self.qkv.num_bytes + self.out.num_bytes + self.mlp.num_bytes

    @property
    def dense(self) -> DenseLayer | None:
        """Its weights for the kernels that run all layers in one call; None with experts."""
        mlp, norm = self.mlp, self.norm
        if norm is None or not isinstance(mlp, MLP) or self.ranks.size > 1:
            return None
        if mlp.gate_up.bias is not None or mlp.down.bias is not None:
            return None
        qkv, out = self.qkv, self.out
        return DenseLayer(
            norm,
            qkv.weight,
            qkv.bias,
            self.qk_norms,
            out.weight,
            out.bias,
            mlp.norm,
            mlp.gate_up.weight,
            mlp.down.weight,
            self.window,
        )


class Llama(Decoder):
    """A decoder-only transformer with grouped-query attention."""

    layer_type = DecoderLayer

    def run_layers(self, x: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch) -> torch.Tensor:
        """On CPU in one call, where all layers are alike and nobody looks at the stream."""
        if x.is_cuda or self.stream is not Residual or not self._run_stack(x, kv_cache, batch):
            return super().run_layers(x, kv_cache, batch)
        return x

    def _run_stack(self, x: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch) -> bool:
        block_size = kv_cache[0][1].shape[2]
        if block_size not in self._stacks:
            spec = self.spec
            dense = [layer.dense for layer in self.layers if isinstance(layer, DecoderLayer)]
            layers = [layer for layer in dense if layer is not None]
            heads = Heads(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.head_dim**-0.5
            )
            whole = len(layers) == len(self.layers)
            stack = make_stack(layers, heads, spec.rms_eps) if whole else None
            self._stacks[block_size] = stack
        return run_stack(self._stacks[block_size], x, kv_cache, self.cos_sin, batch)

    @functools.cached_property
    def _stacks(self) -> dict[int, Any]:
        return {}
