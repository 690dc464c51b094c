"""The Llama family: Llama 2/3/3.1, SmolLM2, Mistral, Qwen2, Qwen3; ModelSpec tells them apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from tokenmill.core.spec import ModelSpec
from tokenmill.kernels.attention import AttentionBatch, paged_attention, rope_and_cache
from tokenmill.layers.linear import ComputeType, Device, Embedding, Linear, activation_dtype
from tokenmill.layers.residual import Residual
from tokenmill.layers.rotary import rotary_table

KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # (k_cache, v_cache) per layer
Tensors = dict[str, torch.Tensor]


class DecoderLayer:
    """Attention and MLP, which both add to the residual stream."""

    def __init__(
        self, spec: ModelSpec, index: int, tensors: Tensors, dtype: ComputeType, device: Device
    ) -> None:
        self.spec = spec
        self.window = spec.layer_windows[index] or 0

        def norm(name: str, norm_dtype: torch.dtype = torch.float32) -> torch.Tensor:
            return tensors[f"{name}.weight"].to(device, norm_dtype)

        def linear(*names: str) -> Linear:
            weights = [tensors[f"{name}.weight"] for name in names]
            biases = [tensors[key] for name in names if (key := f"{name}.bias") in tensors]
            return Linear(weights, biases, dtype, device)

        self.attention_norm = norm("input_layernorm", activation_dtype(dtype))
        self.mlp_norm = norm("post_attention_layernorm", activation_dtype(dtype))
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.gate_up = linear("mlp.gate_proj", "mlp.up_proj")
        self.down = linear("mlp.down_proj")
        self.qk_norms = None
        if spec.qk_norm:
            self.qk_norms = norm("self_attn.q_norm"), norm("self_attn.k_norm")

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's attention and MLP to the stream."""
        heads, scale, eps = self.spec.num_heads, self.spec.head_dim**-0.5, self.spec.rms_eps
        qkv = stream.project(self.attention_norm, self.qkv)
        q = rope_and_cache(qkv, *cache, cos_sin, batch, heads, scale, self.qk_norms, eps)
        stream.add(self.out, paged_attention(q, *cache, batch, heads, self.window))
        stream.add(self.down, stream.gate(self.mlp_norm, self.gate_up, self.down.rounding))

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
        device: Device = "cpu",
    ) -> None:
        self.spec, self.dtype, self.device = spec, dtype, device
        self.stream: Callable[[torch.Tensor, float], Residual] = Residual
        self.layers: list[DecoderLayer] = []
        self.cos_sin = rotary_table(spec.rope, spec.head_dim, max_model_len).to(device)
        outer = self._load_layers(tensors)
        table = outer["model.embed_tokens.weight"]
        self.norm = outer["model.norm.weight"].to(device, activation_dtype(dtype))
        head = table if spec.tie_embeddings else outer["lm_head.weight"]
        self.head = Linear([head], [], "bf16" if dtype == "fp8" else dtype, device)
        rows = self.head.weight if spec.tie_embeddings else table.to(device)
        self.embedding = Embedding(rows, dtype)

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
                part = parts.pop(index)
                done[index] = DecoderLayer(self.spec, index, part, self.dtype, self.device)
        self.layers = [done[i] for i in range(self.spec.num_layers)]
        return outer

    def forward(
        self, token_ids: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch
    ) -> torch.Tensor:
        """int64 [tokens] -> hidden states before the final norm, [tokens, hidden]."""
        stream = self.stream(self.embedding(token_ids), self.spec.rms_eps)
        for layer, cache in zip(self.layers, kv_cache, strict=True):
            layer(stream, cache, self.cos_sin, batch)
        return stream.complete()

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], in the stream's type."""
        return Residual(hidden, self.spec.rms_eps).project(self.norm, self.head)

    @property
    def linears(self) -> list[Linear]:
        """The products of all layers; the head is not one of them."""
        return [linear for layer in self.layers for linear in layer.linears]

    @property
    def num_bytes(self) -> int:
        """Bytes of weights as they lie in memory."""
        return self.embedding.num_bytes + sum(x.num_bytes for x in [self.head, *self.linears])
