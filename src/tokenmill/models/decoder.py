"""What all decoder-only families share: embedding, layers one after the other, norm and head."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

import torch

from tokenmill.core.kv_groups import layer_groups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.rows import Activation
from tokenmill.layers.attention import Attention
from tokenmill.layers.experts import RoutedExperts
from tokenmill.layers.images import ImageEncoder, StepRows
from tokenmill.layers.linear import (
    ComputeType,
    Device,
    Embedding,
    Linear,
    Tensors,
    activation_dtype,
)
from tokenmill.layers.mlp import MLP, MoE
from tokenmill.layers.residual import Residual
from tokenmill.layers.rotary import rotary_table
from tokenmill.models.checkpoints.shards import local_spec, shard
from tokenmill.models.names import canonical, expert_of, layer_tensors, stacked_experts
from tokenmill.parallel import ALONE, Layout

KVCache = list[tuple[torch.Tensor, torch.Tensor]]  # two parts per layer: ModelSpec.cache_dims


class Layer(Protocol):
    """Adds its attention and its MLP to the stream."""

    mlp: MLP | MoE

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None: ...
    @property
    def num_bytes(self) -> int: ...


class LayerTensors:
    """The tensors of one layer as they come; those of routed experts are packed at once."""

    def __init__(
        self,
        full: ModelSpec,
        index: int,
        dtype: ComputeType,
        device: Device,
        layout: Layout = ALONE,
    ) -> None:
        self.full, self.layout = full, layout
        self.spec = local_spec(full, layout)
        self.index, self.dtype, self.device = index, dtype, device
        self.plain: Tensors = {}
        self.experts: RoutedExperts | None = None
        if full.moe and full.moe.layers[index]:
            self.experts = RoutedExperts(full.moe.num_experts, dtype, device, layout)
        elsewhere = set() if self.experts is None else self.experts.elsewhere
        found = map(expert_of, layer_tensors(full, index))
        self.missing = sum(not expert or expert[0] not in elsewhere for expert in found)

    def put(self, name: str, tensor: torch.Tensor) -> None:
        self.missing -= 1
        if self.experts is not None and (found := expert_of(name)):
            self.experts.put(*found, tensor)
        elif self.experts is not None and (stacked := stacked_experts(name)):
            self.experts.put_stacked(*stacked, tensor)
        else:
            self.plain[name] = shard(name, tensor, self.full, self.layout.tensor_ranks)

    def norm(self, name: str, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A norm's weights, in the stream's type unless asked otherwise."""
        return self.plain[f"{name}.weight"].to(self.device, dtype or activation_dtype(self.dtype))

    def optional_norm(self, name: str) -> torch.Tensor | None:
        """The same, or None where an EAGLE head has no such norm."""
        return self.norm(name) if f"{name}.weight" in self.plain else None

    def linear(self, *names: str) -> Linear:
        return Linear.named(self.plain, list(names), self.dtype, self.device)

    def attention(self, qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None) -> Attention:
        """The layer's grouped-query attention; norms of q and k as they are, unless given."""
        qkv = self.linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        if self.spec.qk_norm and qk_norms is None:
            q_norm, k_norm = (self.norm(f"self_attn.{x}_norm", torch.float32) for x in ("q", "k"))
            qk_norms = q_norm, k_norm
        window, out = self.spec.layer_windows[self.index], self.linear("self_attn.o_proj")
        sinks = None
        if self.spec.attention_sinks:
            sinks = self.plain["self_attn.sinks"].to(self.device, torch.float32)
        return Attention(self.spec, window, qkv, out, qk_norms, self.layout.tensor_ranks, sinks)

    def mlp(
        self,
        norm: torch.Tensor,
        activation: Activation = "silu",
        post_norm: torch.Tensor | None = None,
    ) -> MLP | MoE:
        """What follows the attention in this layer; norms as in MLP."""
        if self.experts is None:
            ranks = self.layout.tensor_ranks
            return MLP(norm, self.plain, self.dtype, self.device, ranks, activation, post_norm)
        moe, experts = self.spec.moe, self.experts
        assert moe is not None and post_norm is None
        return MoE(moe, norm, self.plain, experts, self.dtype, self.device, activation)


class Decoder:
    """A decoder-only transformer over a paged KV cache."""

    layer_type: Callable[[LayerTensors], Layer]

    def __init__(
        self,
        spec: ModelSpec,
        tensors: Iterable[tuple[str, torch.Tensor]],
        dtype: ComputeType,
        max_model_len: int,
        device: Device = "cpu",
        layout: Layout = ALONE,
    ) -> None:
        self.full, self.layout, self.spec = spec, layout, local_spec(spec, layout)
        self.dtype, self.device = dtype, device
        self.visual: ImageEncoder | None = None
        self.read_layers: tuple[int, ...] = ()  # an EAGLE-3 head reads the states that enter them
        self._read_states: torch.Tensor | None = None  # of the last step
        tables = {
            rope: rotary_table(rope, spec.cache_dims[0], max_model_len, device)
            for rope in set(spec.layer_ropes)
        }
        self.cos_sin = [tables[rope] for rope in spec.layer_ropes]  # of each layer
        self.layers, outer = self._load(tensors)
        table = outer["model.embed_tokens.weight"]
        self.norm = self.norm_gain(outer["model.norm.weight"].to(device))
        head = table if spec.tie_embeddings else outer.get("lm_head.weight", table[:0])
        self.head = Linear([head], [], "bf16" if dtype == "fp8" else dtype, device)
        ranks = layout.tensor_ranks
        rows = self.head.weight if spec.tie_embeddings else table.to(device, copy=ranks.size > 1)
        own = ranks.own(spec.vocab_size)
        self.embedding = Embedding(rows, dtype, own, ranks, self.embedding_scale)

    @property
    def embedding_scale(self) -> float:
        return 1.0

    def norm_gain(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(activation_dtype(self.dtype))

    def _load(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> tuple[list[Layer], Tensors]:
        """Pack each layer as soon as it is complete; the rest belongs to no layer."""
        outer: Tensors = {}
        parts: dict[int, LayerTensors] = {}
        done: dict[int, Layer] = {}
        for name, tensor in tensors:
            if not name.startswith("model.layers."):
                outer[name] = shard(name, tensor, self.full, self.layout.tensor_ranks)
                continue
            number, _, short = name.removeprefix("model.layers.").partition(".")
            index = int(number)
            if index not in parts:
                parts[index] = LayerTensors(self.full, index, self.dtype, self.device, self.layout)
            parts[index].put(canonical(self.full, short), tensor)
            if not parts[index].missing:
                done[index] = self.layer_type(parts.pop(index))
        return [done[i] for i in range(self.spec.num_layers)], outer

    def forward(
        self,
        token_ids: torch.Tensor,
        kv_cache: KVCache,
        batch: AttentionBatch,
        images: StepRows | None = None,
    ) -> torch.Tensor:
        """int64 [tokens] -> hidden states before the final norm, [tokens, hidden]."""
        assert images is None, "a model without a vision encoder has no images"
        return self.run_layers(self.embedding(token_ids), kv_cache, batch)

    def run_layers(self, x: torch.Tensor, kv_cache: KVCache, batch: AttentionBatch) -> torch.Tensor:
        stream = Residual(x, self.spec.rms_eps)
        parts = self.layers, kv_cache, self.cos_sin, self._batches(batch)
        states: dict[int, torch.Tensor] = {}
        for index, (layer, cache, table, own) in enumerate(zip(*parts, strict=True)):
            if index in self.read_layers:
                states[index] = stream.complete().clone()
            layer(stream, cache, table, own)
        states[len(self.layers)] = stream.complete()
        if self.read_layers:
            self._read_states = torch.cat([states[index] for index in self.read_layers], dim=1)
        return stream.x

    def _batches(self, batch: AttentionBatch) -> list[AttentionBatch]:
        """What each layer sees of a step: its group's."""
        if not batch.sliding:
            return [batch] * len(self.layers)
        groups = layer_groups(self.spec.layer_windows, len(batch.sliding))
        return [(batch, *batch.sliding)[group] for group in groups]

    def assist(self) -> None:
        """Take part in a step without tokens of its own: compute for other ranks."""
        for layer in self.layers:
            if isinstance(layer.mlp, MoE):
                layer.mlp.assist()

    def normed(self, hidden: torch.Tensor) -> torch.Tensor:
        """The final norm of hidden states, [rows, hidden]."""
        return Residual(hidden, self.spec.rms_eps).normed(self.norm)

    def draft_states(self, hidden: torch.Tensor) -> torch.Tensor:
        """What drafts are made from, [rows, .]: `hidden` normed, or the layers that are read.

        `hidden` is what the last forward() returned.
        """
        return self.normed(hidden) if self._read_states is None else self._read_states

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, vocab], in the stream's type.

        Of ranks that compute the same tokens all call this and rank 0 gets the whole vocabulary.
        """
        return self.score(hidden, self.norm)

    def score(self, hidden: torch.Tensor, norm: torch.Tensor | None) -> torch.Tensor:
        """logits(), through a norm that may be another one, or none."""
        if not (self.layout.samples or self.layout.split_heads):
            return hidden.new_empty(hidden.shape[0], 0)
        part = Residual(hidden, self.spec.rms_eps).project(norm, self.head)
        return self.layout.tensor_ranks.side_by_side(part, self.spec.vocab_size)

    @property
    def experts(self) -> list[RoutedExperts]:
        return [layer.mlp.experts for layer in self.layers if isinstance(layer.mlp, MoE)]

    @property
    def num_bytes(self) -> int:
        layers = sum(layer.num_bytes for layer in self.layers)
        return self.embedding.num_bytes + self.head.num_bytes + layers
