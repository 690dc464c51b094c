"""DeepSeek-V3 and R1: latent attention, a few dense layers, then experts beside a shared one.

Attention is computed in the latent space, in prefill and decode alike. A head's scores are
(W_UK^T q_nope) . latent + q_rope . k_rope, its result is W_UV (sum of weighted latents), where
kv_b_proj stacks W_UK and W_UV of each head; only latent and k_rope are cached.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.core.specs.fields import Settings, count, flag, number, positive_int
from tokenmill.core.specs.mla import MLASpec
from tokenmill.core.specs.moe import MoESpec, read_choice
from tokenmill.core.specs.rope import mscale, rope_fields
from tokenmill.core.specs.spec import ModelSpec, read_common
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.matmul import norm_matmul, pack
from tokenmill.kernels.mla import latent_attention, latent_cache, per_head
from tokenmill.kernels.moe import PackedExperts
from tokenmill.layers.linear import plain_type
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, LayerTensors
from tokenmill.models.family import Architecture, Family, Shape
from tokenmill.models.names import feed_forward_tensors, norm_tensors

LATENT_NORM_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps says
DEEPSEEK_V3 = Architecture(
    model_type="deepseek_v3",
    defaults={
        "max_position_embeddings": 4096,
        "kv_lora_rank": 512,
        "q_lora_rank": 1536,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "rope_interleave": True,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 2048,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "first_k_dense_replace": 3,
        "num_nextn_predict_layers": 1,
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
    fixed={"attention_bias": False, "mlp_bias": False, "sliding_window": None},
    only={
        "hidden_act": "silu",
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    """All heads share what is cached, so there is one KV head."""
    mla = _latents(settings)
    shape = {"head_dim": mla.rope_dim, "num_key_value_heads": 1}
    spec = read_common(architecture, "deepseek_v3", settings | shape)
    head_dim = mla.nope_dim + mla.rope_dim
    # YaRN makes the softmax sharper with the context; RopeSpec.attention_factor is apart from it.
    sharper = mscale(rope_fields(settings)[1], "mscale_all_dim", spec.rope.factor)
    return replace(
        spec,
        head_dim=head_dim,
        softmax_scale=head_dim**-0.5 * sharper**2,
        moe=_experts(settings, spec.num_layers),
        mla=mla,
        num_mtp_layers=count(settings, "num_nextn_predict_layers"),
    )


def _latents(settings: Settings) -> MLASpec:
    heads = positive_int(settings, "num_attention_heads")
    if settings["num_key_value_heads"] not in (None, heads):
        raise ModelLoadError(
            f"num_key_value_heads: expected num_attention_heads {heads}, "
            f"got {settings['num_key_value_heads']!r}"
        )
    nope, rope = (positive_int(settings, f"qk_{part}_head_dim") for part in ("nope", "rope"))
    if rope % 2:
        raise ModelLoadError(f"qk_rope_head_dim: rotary embedding needs an even size, got {rope}")
    ranked = settings["q_lora_rank"] is not None
    return MLASpec(
        q_rank=positive_int(settings, "q_lora_rank") if ranked else None,
        kv_rank=positive_int(settings, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=positive_int(settings, "v_head_dim"),
        interleaved=flag(settings, "rope_interleave"),
    )


def _experts(settings: Settings, num_layers: int) -> MoESpec:
    top_k, num_experts = read_choice(settings, ("num_local_experts", "n_routed_experts"))
    num_groups, top_groups = positive_int(settings, "n_group"), positive_int(settings, "topk_group")
    if num_experts % num_groups or num_experts < 2 * num_groups:
        raise ModelLoadError(
            f"n_group: {num_groups} groups of two or more do not divide {num_experts} experts"
        )
    if top_groups > num_groups or top_groups * (num_experts // num_groups) < top_k:
        raise ModelLoadError(
            f"topk_group: {top_groups} of {num_groups} groups do not hold {top_k} experts"
        )
    dense, shared = count(settings, "first_k_dense_replace"), settings["n_shared_experts"]
    inner = positive_int(settings, "moe_intermediate_size")
    return MoESpec(
        layers=tuple(layer >= dense for layer in range(num_layers)),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_size=inner * (count(settings, "n_shared_experts") if shared else 0),
        scoring="sigmoid",
        renormalise=flag(settings, "norm_topk_prob"),
        scaling=number(settings, "routed_scaling_factor"),
        num_groups=num_groups,
        top_groups=top_groups,
        correction_bias=True,
    )


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    norms = norm_tensors(spec, "input_layernorm", "post_attention_layernorm")
    assert spec.mla is not None
    attention = {
        f"self_attn.{name}.weight": shape for name, shape in _attention(spec, spec.mla).items()
    }
    return norms | attention | feed_forward_tensors(spec, index)


def _attention(spec: ModelSpec, mla: MLASpec) -> dict[str, Shape]:
    hidden, heads = spec.hidden_size, spec.num_heads
    queries: dict[str, Shape] = {"q_proj": (spec.q_size, hidden)}
    if mla.q_rank is not None:
        queries = {
            "q_a_proj": (mla.q_rank, hidden),
            "q_a_layernorm": (mla.q_rank,),
            "q_b_proj": (spec.q_size, mla.q_rank),
        }
    return queries | {
        "kv_a_proj_with_mqa": (mla.kv_rank + mla.rope_dim, hidden),
        "kv_a_layernorm": (mla.kv_rank,),
        "kv_b_proj": (heads * (mla.nope_dim + mla.value_dim), mla.kv_rank),
        "o_proj": (hidden, heads * mla.value_dim),
    }


class LatentAttention:
    """The attention of one layer, from the normed stream to the input of its output product."""

    def __init__(self, tensors: LayerTensors) -> None:
        spec, mla = tensors.spec, tensors.spec.mla
        assert mla is not None
        self.mla, self.num_heads, self.scale = mla, spec.num_heads, spec.softmax_scale
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
        latents = latent_attention(q_latent, q, *cache, batch, self.scale)
        return per_head(latents, self.out_of).flatten(1)

    @property
    def num_bytes(self) -> int:
        unpacked = self.into.num_bytes + self.out_of.num_bytes + self.down.num_bytes
        return unpacked + (0 if self.q_up is None else self.q_up.num_bytes)


class DeepseekV3Layer:
    """Attention and MLP or experts, which both add to the residual stream."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.ranks = tensors.layout.tensor_ranks
        self.norm = tensors.norm("input_layernorm")
        self.attention = LatentAttention(tensors)
        self.out = tensors.linear("self_attn.o_proj")
        self.mlp = tensors.mlp(tensors.norm("post_attention_layernorm"))

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        attended = self.attention(stream, self.norm, cache, cos_sin, batch)
        stream.add(self.out, attended, self.ranks)
        self.mlp(stream)

    @property
    def num_bytes(self) -> int:
        return self.attention.num_bytes + self.out.num_bytes + self.mlp.num_bytes


class DeepseekV3(Decoder):
    """A decoder-only transformer with latent attention; models/mtp.py has its MTP layer."""

    layer_type = DeepseekV3Layer


FAMILY = Family({"DeepseekV3ForCausalLM": DEEPSEEK_V3}, read_spec, layer_tensors, DeepseekV3)
