"""Multi-head latent attention: keys and values of all heads from one small vector per token."""

from __future__ import annotations

from dataclasses import dataclass

from tokenmill.core.fields import Settings, flag, positive_int
from tokenmill.core.rope import mscale, rope_fields
from tokenmill.core.types import ModelLoadError

LATENT_NORM_EPS = 1e-6  # of the norms inside the attention, whatever rms_norm_eps says
MLA_DEFAULTS: Settings = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "rope_interleave": True,
}


@dataclass(frozen=True, slots=True)
class MLASpec:
    """The cache holds a normed latent and one rotated key part per token, for all heads."""

    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a head's query and key: the part without position
    rope_dim: int
    value_dim: int
    interleaved: bool  # a rotation turns channels 2i and 2i + 1, not i and i + rope_dim / 2
    softmax_scale: float

    def matmul_params(self, hidden: int, num_heads: int) -> int:
        """Matrix parameters of one layer's attention."""
        head = self.nope_dim + self.rope_dim
        queries = hidden * num_heads * head
        if self.q_rank is not None:
            queries = self.q_rank * (hidden + num_heads * head)
        latent = hidden * (self.kv_rank + self.rope_dim)
        return queries + latent + self.unpacked(num_heads) + num_heads * self.value_dim * hidden

    def unpacked(self, num_heads: int) -> int:
        """Parameters of kv_b_proj, which stays out of fp8 since it is part of the attention."""
        return self.kv_rank * num_heads * (self.nope_dim + self.value_dim)

    def norm_params(self) -> int:
        return self.kv_rank + (self.q_rank or 0)

    def seen_flops(self, num_heads: int, decode: bool) -> int:
        """FLOPs of one token for each position that it attends to, in one layer.

        A prompt's keys and values are unpacked once for all its tokens; a decoded token takes its
        query into the latent space instead, and never unpacks the cache.
        """
        if decode:
            return 2 * num_heads * (2 * self.kv_rank + self.rope_dim)
        return 2 * num_heads * (self.nope_dim + self.rope_dim + self.value_dim)


def read_mla(architecture: str, settings: Settings, rope_factor: float) -> MLASpec | None:
    """The attention that config.json describes; None for an architecture without latents.

    YaRN makes the softmax sharper with the context; RopeSpec.attention_factor is apart from it.
    """
    if architecture != "DeepseekV3ForCausalLM":
        return None
    heads = positive_int(settings, "num_attention_heads")
    if settings.get("num_key_value_heads") not in (None, heads):
        raise ModelLoadError(
            f"num_key_value_heads: expected num_attention_heads {heads}, "
            f"got {settings['num_key_value_heads']!r}"
        )
    nope, rope = (positive_int(settings, f"qk_{part}_head_dim") for part in ("nope", "rope"))
    if rope % 2:
        raise ModelLoadError(f"qk_rope_head_dim: rotary embedding needs an even size, got {rope}")
    ranked = settings["q_lora_rank"] is not None
    sharper = mscale(rope_fields(settings)[1], "mscale_all_dim", rope_factor)
    return MLASpec(
        q_rank=positive_int(settings, "q_lora_rank") if ranked else None,
        kv_rank=positive_int(settings, "kv_lora_rank"),
        nope_dim=nope,
        rope_dim=rope,
        value_dim=positive_int(settings, "v_head_dim"),
        interleaved=flag(settings, "rope_interleave"),
        softmax_scale=(nope + rope) ** -0.5 * sharper**2,
    )
