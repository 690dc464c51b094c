"""The Llama family: Llama 2, 3 and 3.1, SmolLM2, and all that is built like them.

Mistral, Mixtral and Qwen differ in what config.json says; their layers are these. A layer has an
attention and one gated MLP, or experts in its place.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from tokenmill.core.specs.fields import Settings
from tokenmill.core.specs.spec import ModelSpec, even_windows, read_common
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.stack import DenseLayer, Heads, make_stack, run_stack
from tokenmill.layers.mlp import MLP
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, KVCache, LayerTensors
from tokenmill.models.family import Architecture, Family, GGUFSource, Shape
from tokenmill.models.names import attention_tensors, feed_forward_tensors, norm_tensors

LLAMA = Architecture(
    model_type="llama",
    defaults={"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    # A file with a window is a Mistral.
    gguf=GGUFSource("llama", {"architectures": ["MistralForCausalLM"]}, permuted=True),
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    spec = read_common(architecture, "llama", settings, even_windows(architecture, settings))
    if spec.sliding_window:
        raise ModelLoadError(f"sliding_window: {architecture} has none, got {spec.sliding_window}")
    return spec


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    norms = norm_tensors(spec, "input_layernorm", "post_attention_layernorm")
    return norms | attention_tensors(spec) | feed_forward_tensors(spec, index)


class LlamaLayer:
    """Attention and MLP, which both add to the residual stream."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.norm = tensors.optional_norm("input_layernorm")
        self.attention = tensors.attention()
        self.mlp = tensors.mlp(tensors.norm("post_attention_layernorm"))

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        self.attention(stream, self.norm, cache, cos_sin, batch)
        self.mlp(stream)

    @property
    def num_bytes(self) -> int:
        return self.attention.num_bytes + self.mlp.num_bytes

    @property
    def dense(self) -> DenseLayer | None:
        """Its weights for the kernels that run all layers in one call; None with experts."""
        mlp, norm, attention = self.mlp, self.norm, self.attention
        if norm is None or not isinstance(mlp, MLP) or attention.ranks.size > 1:
            return None
        if mlp.gate_up.bias is not None or mlp.down.bias is not None:
            return None
        return DenseLayer(
            norm,
            attention.qkv.weight,
            attention.qkv.bias,
            attention.qk_norms,
            attention.out.weight,
            attention.out.bias,
            mlp.norm,
            mlp.gate_up.weight,
            mlp.down.weight,
            attention.window,
        )


class Llama(Decoder):
    """A decoder-only transformer with grouped-query attention."""

    layer_type = LlamaLayer

    def run_layers(self, x: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch) -> torch.Tensor:
        """On CPU in one call, where all layers are alike and no draft head reads between them."""
        if x.is_cuda or self.read_layers or not self._run_stack(x, kv_cache, batch):
            return super().run_layers(x, kv_cache, batch)
        return x

    def _run_stack(self, x: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch) -> bool:
        block_size = kv_cache[0][1].shape[2]
        if block_size not in self._stacks:
            spec = self.spec
            dense = [layer.dense for layer in self.layers if isinstance(layer, LlamaLayer)]
            layers = [layer for layer in dense if layer is not None]
            heads = Heads(
                spec.num_heads, spec.num_kv_heads, spec.head_dim, block_size, spec.softmax_scale
            )
            whole = len(layers) == len(self.layers)
            stack = make_stack(layers, heads, spec.rms_eps) if whole else None
            self._stacks[block_size] = stack
        return run_stack(self._stacks[block_size], x, kv_cache, self.cos_sin[0], batch)

    @functools.cached_property
    def _stacks(self) -> dict[int, Any]:
        return {}


FAMILY = Family({"LlamaForCausalLM": LLAMA}, read_spec, layer_tensors, Llama)
