"""The Llama family: Llama 2/3/3.1, SmolLM2, Mistral, Qwen2, Qwen3; ModelSpec tells them apart."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from tokenmill.core.spec import ModelSpec
from tokenmill.kernels.attention import AttentionBatch, paged_attention, rope_and_cache
from tokenmill.kernels.norm import rms_norm, silu_mul
from tokenmill.layers.linear import ComputeType, Embedding, Linear
from tokenmill.layers.rotary import rotary_table

KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # (k_cache, v_cache) per layer
Tensors = dict[str, torch.Tensor]


class DecoderLayer:
    """Attention and MLP around one residual stream, which both update in place."""

    def __init__(self, spec: ModelSpec, index: int, tensors: Tensors, dtype: ComputeType) -> None:
        self.spec = spec
        self.window = spec.layer_windows[index] or 0
        self.attention_norm = tensors["input_layernorm.weight"].float()
        self.mlp_norm = tensors["post_attention_layernorm.weight"].float()
        self.qkv = _linear(tensors, "self_attn", ("q_proj", "k_proj", "v_proj"), dtype)
        self.out = _linear(tensors, "self_attn", ("o_proj",), dtype)
        self.gate_up = _linear(tensors, "mlp", ("gate_proj", "up_proj"), dtype)
        self.down = _linear(tensors, "mlp", ("down_proj",), dtype)
        self.qk_norms = None
        if spec.qk_norm:
            q, k = tensors["self_attn.q_norm.weight"], tensors["self_attn.k_norm.weight"]
            self.qk_norms = (q.float(), k.float())

    def __call__(
        self,
        x: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's attention and MLP to x[tokens, hidden]."""
        heads, scale, eps = self.spec.num_heads, self.spec.head_dim**-0.5, self.spec.rms_eps
        qkv = self.qkv(rms_norm(x, self.attention_norm, eps, self.qkv.limit))
        q = rope_and_cache(qkv, *cache, cos_sin, batch, heads, scale, self.qk_norms, eps)
        self.out(paged_attention(q, *cache, batch, heads, self.window), add_to=x)
        gate_up = self.gate_up(rms_norm(x, self.mlp_norm, eps, self.gate_up.limit))
        self.down(silu_mul(gate_up, self.down.limit), add_to=x)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return self.qkv, self.out, self.gate_up, self.down


class Llama:
    """A decoder-only transformer over a paged KV cache."""

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: ComputeType,
        max_model_len: int,
    ) -> None:
        self.spec, self.dtype = spec, dtype
        self.layers: list[DecoderLayer] = []
        self.cos_sin = rotary_table(spec.rope, spec.head_dim, max_model_len)
        outer = self._load_layers(tensors)
        table = outer["model.embed_tokens.weight"]
        self.norm = outer["model.norm.weight"].float()
        self.head = Linear([table if spec.tie_embeddings else outer["lm_head.weight"]], [], dtype)
        self.embedding = Embedding(self.head.weight if spec.tie_embeddings else table)

    def _load_layers(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> Tensors:
        """Pack each layer as soon as it is complete; returns what belongs to no layer."""
        expected = 9 + 2 * self.spec.qk_norm + 3 * self.spec.attention_bias
        expected += self.spec.output_bias + 3 * self.spec.mlp_bias
        outer: Tensors = {}
        parts: dict[int, Tensors] = {}
        done: dict[int, DecoderLayer] = {}
        for name, tensor in tensors:
            if not name.startswith("model.layers."):
                outer[name] = tensor
                continue
            number, _, short = name.removeprefix("model.layers.").partition(".")
            part = parts.setdefault(int(number), {})
            part[short] = tensor
            if len(part) == expected:
                index = int(number)
                done[index] = DecoderLayer(self.spec, index, parts.pop(index), self.dtype)
        self.layers = [done[i] for i in range(self.spec.num_layers)]
        return outer

    def forward(
        self, token_ids: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """int64 [tokens] -> hidden states before the final norm, [tokens, hidden]."""
        x = self.embedding(token_ids)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            layer(x, cache, self.cos_sin, batch)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> fp32 [rows, vocab]."""
        return self.head(rms_norm(hidden, self.norm, self.spec.rms_eps, self.head.limit))

    @property
    def num_bytes(self) -> int:
        """Bytes of weights as they lie in memory."""
        linears = [linear for layer in self.layers for linear in layer.linears]
        return self.embedding.num_bytes + sum(x.num_bytes for x in [self.head, *linears])


def _linear(tensors: Tensors, block: str, names: tuple[str, ...], dtype: ComputeType) -> Linear:
    weights = [tensors[f"{block}.{name}.weight"] for name in names]
    biases = [tensors[key] for name in names if (key := f"{block}.{name}.bias") in tensors]
    return Linear([w.float() for w in weights], biases, dtype)
