"""DeepSeek-V3 and R1: latent attention, a few dense layers, then experts beside a shared one.

Attention is computed in the latent space, in prefill and decode alike. A head's scores are
(W_UK^T q_nope) . latent + q_rope . k_rope, its result is W_UV (sum of weighted latents), where
kv_b_proj stacks W_UK and W_UV of each head; only latent and k_rope are cached.
"""

from __future__ import annotations

import torch

from tokenmill.core.mla import LATENT_NORM_EPS
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.matmul import pack
from tokenmill.kernels.mla import latent_attention, latent_cache, per_head
from tokenmill.kernels.moe import PackedExperts
from tokenmill.kernels.norm import norm_matmul
from tokenmill.layers.linear import Linear, plain_type
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, LayerTensors


class LatentAttention:
    """The attention of one layer, from the normed stream to the input of its output product."""

    def __init__(self, tensors: LayerTensors) -> None:
        spec, mla = tensors.spec, tensors.spec.mla
        assert mla is not None
        self.mla, self.num_heads = mla, spec.num_heads
        queries = "q_proj" if mla.q_rank is None else "q_a_proj"
        self.down = tensors.linear(f"self_attn.{queries}", "self_attn.kv_a_proj_with_mqa")
        self.q_norm, self.q_up = None, None
        if mla.q_rank is not None:
            self.q_norm = tensors.norm("self_attn.q_a_layernorm")
            self.q_up = tensors.linear("self_attn.q_b_proj")
        self.kv_norm = tensors.norm("self_attn.kv_a_layernorm", torch.float32)
        kv_up = tensors.plain["self_attn.kv_b_proj.weight"].unflatten(0, (self.num_heads, -1))
        halves = kv_up.split([mla.nope_dim, mla.value_dim], dim=1)
        self.into, self.out_of = PackedExperts(self.num_heads), PackedExperts(self.num_heads)
        for head, (w_uk, w_uv) in enumerate(zip(*halves, strict=True)):
            self.into.put(head, pack(w_uk.mT, plain_type(tensors.dtype), tensors.device))
            self.out_of.put(head, pack(w_uv, plain_type(tensors.dtype), tensors.device))

    def __call__(
        self,
        stream: Residual,
        norm: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """[t, heads * value_dim]."""
        mla = self.mla
        latent_size = mla.kv_rank + mla.rope_dim
        projected = stream.project(norm, self.down)
        q, kv = projected[:, :-latent_size], projected[:, -latent_size:]
        if self.q_up is not None and self.q_norm is not None:
            q_up = self.q_up
            q = norm_matmul(q.contiguous(), self.q_norm, LATENT_NORM_EPS, q_up.weight, q_up.bias)
        q = q.unflatten(1, (self.num_heads, -1))
        latent_cache(q, kv, *cache, self.kv_norm, LATENT_NORM_EPS, cos_sin, batch, mla.interleaved)
        q_latent = per_head(q[..., : mla.nope_dim], self.into)
        latents = latent_attention(q_latent, q, *cache, batch, mla.softmax_scale)
        return per_head(latents, self.out_of).flatten(1)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return (self.down,) if self.q_up is None else (self.down, self.q_up)

    @property
    def num_bytes(self) -> int:
        unpacked = self.into.num_bytes + self.out_of.num_bytes
        return unpacked + sum(linear.num_bytes for linear in self.linears)


class DecoderLayer:
    """Attention and MLP or experts, which both add to the residual stream."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.ranks = tensors.layout.tensor_ranks
        self.norm = tensors.norm("input_layernorm")
        self.attention = LatentAttention(tensors)
        self.out = tensors.linear("self_attn.o_proj")
        self.mlp = tensors.mlp()

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        """Add this layer's attention and MLP to the stream."""
        attended = self.attention(stream, self.norm, cache, cos_sin, batch)
        stream.add(self.out, attended, self.ranks)
        self.mlp(stream)

    @property
    def linears(self) -> tuple[Linear, ...]:
        return *self.attention.linears, self.out, *self.mlp.linears

    @property
    def num_bytes(self) -> int:
        return self.attention.num_bytes + self.out.num_bytes + self.mlp.num_bytes


class DeepseekV3(Decoder):
    """A decoder-only transformer with latent attention; models/mtp.py has its MTP layer."""

    layer_type = DecoderLayer
