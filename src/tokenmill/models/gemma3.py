"""Gemma 3, text models: Gemma3ForCausalLM.

Unlike Llama: the embedding is multiplied by sqrt(hidden_size); a norm multiplies by 1 + its weight;
what attention and MLP add to the stream is normed, too; each head of q and k is normed; the gate is
GELU; five layers of six have a sliding window, and with it a rotary embedding of their own.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.core.specs.fields import Settings, number, positive_int
from tokenmill.core.specs.rope import RopeSpec, read_rope
from tokenmill.core.specs.spec import ModelSpec, Windows, listed_windows, read_common
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, LayerTensors
from tokenmill.models.family import Architecture, Family, Shape
from tokenmill.models.names import attention_tensors, feed_forward_tensors, norm_tensors

FULL, SLIDING = "full_attention", "sliding_attention"
NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
GEMMA3 = Architecture(
    model_type="gemma3_text",
    defaults={
        "vocab_size": 262_208,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "sliding_window_pattern": 6,
        "rope_theta": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
        "bos_token_id": 2,
        "eos_token_id": 1,
    },
    fixed={"mlp_bias": False},
    only={
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
    },
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    if settings.get("use_bidirectional_attention"):
        raise ModelLoadError("use_bidirectional_attention: only false is supported, got true")
    full = _rope_settings(settings, FULL)
    spec = read_common(architecture, "gemma3", settings | full, _windows(settings))
    return replace(
        spec,
        softmax_scale=number(settings, "query_pre_attn_scalar") ** -0.5,
        qk_norm=True,
        num_norms=len(NORMS),
        window_rope=_window_rope(settings),
    )


def _windows(settings: Settings) -> Windows:
    """layer_types decides; without it, every sliding_window_pattern-th layer sees everything."""
    if settings["layer_types"] is None:
        pattern = positive_int(settings, "sliding_window_pattern")
        layers = range(positive_int(settings, "num_hidden_layers"))
        kinds = [SLIDING if (layer + 1) % pattern else FULL for layer in layers]
        settings = settings | {"layer_types": kinds}
    return listed_windows(settings)


def _window_rope(settings: Settings) -> RopeSpec:
    """That of layers with a window: rope_scaling does not apply to it."""
    own = {"rope_theta": settings["rope_local_base_freq"], "rope_scaling": None}
    return read_rope(settings | own | _rope_settings(settings, SLIDING))


def _rope_settings(settings: Settings, kind: str) -> Settings:
    """rope_parameters of one kind of layer: transformers 5 lists them by the names of layer_types.

    Older files have rope_theta, rope_scaling and rope_local_base_freq instead.
    """
    by_kind = settings.get("rope_parameters") or {}
    if not isinstance(by_kind, dict) or not by_kind.keys() <= {FULL, SLIDING}:
        raise ModelLoadError(
            f"rope_parameters: expected an object with {FULL} and {SLIDING}, got {by_kind!r}"
        )
    return {"rope_parameters": by_kind.get(kind)}


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    norms = norm_tensors(spec, *NORMS)
    return norms | attention_tensors(spec) | feed_forward_tensors(spec, index)


def gain(weight: torch.Tensor) -> torch.Tensor:
    """What a norm multiplies with; in fp32, since 1 + w has too few digits in bf16."""
    return weight.float() + 1.0


class Gemma3Layer:
    """Attention and MLP, each between two norms."""

    def __init__(self, tensors: LayerTensors) -> None:
        names = *NORMS, "self_attn.q_norm", "self_attn.k_norm"
        gains = [gain(tensors.norm(name, torch.float32)) for name in names]
        self.norm, self.post_norm, mlp_norm, mlp_post_norm, q_norm, k_norm = gains
        self.attention = tensors.attention((q_norm, k_norm))
        self.mlp = tensors.mlp(mlp_norm, "gelu_tanh", mlp_post_norm)

    def __call__(
        self,
        stream: Residual,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
    ) -> None:
        self.attention(stream, self.norm, cache, cos_sin, batch, self.post_norm)
        self.mlp(stream)

    @property
    def num_bytes(self) -> int:
        return self.attention.num_bytes + self.mlp.num_bytes


class Gemma3(Decoder):
    """A decoder-only transformer of these layers, over a scaled embedding."""

    layer_type = Gemma3Layer

    @property
    def embedding_scale(self) -> float:
        return float(self.spec.hidden_size**0.5)

    def norm_gain(self, weight: torch.Tensor) -> torch.Tensor:
        return gain(weight)


FAMILY = Family({"Gemma3ForCausalLM": GEMMA3}, read_spec, layer_tensors, Gemma3)
