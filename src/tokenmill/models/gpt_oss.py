"""GPT-OSS, 20b and 120b: GptOssForCausalLM, with experts in MXFP4 as published, or in bfloat16.

Unlike Llama: every second layer, from the first on, has a sliding window; each head has a sink, a
score that takes part in every softmax and adds nothing; all products have biases; the router's
softmax runs over the chosen experts alone, which is a softmax over all that is made to sum to one;
an expert's gate is clamped, and gate and up lie in turns in the rows of one matrix.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from tokenmill.core.specs.fields import Settings, positive_int
from tokenmill.core.specs.moe import MoESpec, read_choice
from tokenmill.core.specs.quantization import MXFP4_BLOCK, read_mxfp4
from tokenmill.core.specs.spec import ModelSpec, Windows, listed_windows, read_common
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.rows import ClampedSwiGLU
from tokenmill.layers.residual import Residual
from tokenmill.models.decoder import Decoder, LayerTensors
from tokenmill.models.family import Architecture, Family, Shape
from tokenmill.models.names import attention_tensors, norm_tensors

SWIGLU = ClampedSwiGLU(alpha=1.702, limit=7.0)
YARN: Settings = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
GPT_OSS = Architecture(
    model_type="gpt_oss",
    defaults={
        "vocab_size": 201_088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 150_000.0,
        "sliding_window": 128,
        "attention_bias": True,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
    },
    fixed={"mlp_bias": False},
    only={"hidden_act": "silu", "swiglu_alpha": SWIGLU.alpha, "swiglu_limit": SWIGLU.limit},
    stored_names={"gate": "router"},
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    if not (settings.get("rope_parameters") or settings.get("rope_scaling")):
        settings = settings | {"rope_scaling": YARN}
    plain = settings | {"quantization_config": None}
    spec = read_common(architecture, "gpt_oss", plain, _windows(settings))
    top_k, num_experts = read_choice(settings, ("num_local_experts",))
    inner, layers = spec.intermediate_size, (True,) * spec.num_layers
    moe = MoESpec(layers, num_experts, top_k, inner, bias=True)
    quantization = read_mxfp4(settings)
    for name in ("hidden_size", "intermediate_size"):
        if quantization and settings[name] % MXFP4_BLOCK:
            problem = f"MXFP4 needs a multiple of {MXFP4_BLOCK}, got {settings[name]}"
            raise ModelLoadError(f"{name}: {problem}")
    return replace(spec, moe=moe, attention_sinks=True, quantization=quantization)


def _windows(settings: Settings) -> Windows:
    """layer_types decides; without it, every second layer sees everything."""
    if settings["layer_types"] is None:
        layers = range(positive_int(settings, "num_hidden_layers"))
        kinds = ["full_attention" if layer % 2 else "sliding_attention" for layer in layers]
        settings = settings | {"layer_types": kinds}
    return listed_windows(settings)


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    assert spec.moe is not None
    norms = norm_tensors(spec, "input_layernorm", "post_attention_layernorm")
    sinks: dict[str, Shape] = {"self_attn.sinks": (spec.num_heads,)}
    hidden, experts = spec.hidden_size, spec.moe.num_experts
    router: dict[str, Shape] = {"mlp.gate.weight": (experts, hidden), "mlp.gate.bias": (experts,)}
    return norms | attention_tensors(spec) | sinks | router | _experts(spec, spec.moe)


def _experts(spec: ModelSpec, moe: MoESpec) -> dict[str, Shape]:
    """All experts of a layer lie in one tensor: MXFP4 by output row, other types transposed."""
    hidden, inner = spec.hidden_size, moe.intermediate_size
    tensors: dict[str, Shape] = {}
    for kind, n, k in (("gate_up", 2 * inner, hidden), ("down", hidden, inner)):
        name = f"mlp.experts.{kind}_proj"
        tensors[f"{name}_bias"] = (moe.num_experts, n)
        if spec.mxfp4:
            scales = (moe.num_experts, n, k // MXFP4_BLOCK)
            tensors |= {f"{name}_blocks": (*scales, MXFP4_BLOCK // 2), f"{name}_scales": scales}
        else:
            tensors[name] = (moe.num_experts, k, n)
    return tensors


class GptOssLayer:
    """Attention and experts, which both add to the residual stream."""

    def __init__(self, tensors: LayerTensors) -> None:
        self.norm = tensors.norm("input_layernorm")
        self.attention = tensors.attention()
        self.mlp = tensors.mlp(tensors.norm("post_attention_layernorm"), SWIGLU)

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


class GptOss(Decoder):
    """A decoder-only transformer of these layers."""

    layer_type = GptOssLayer


FAMILY = Family({"GptOssForCausalLM": GPT_OSS}, read_spec, layer_tensors, GptOss)
