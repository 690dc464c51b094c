"""Qwen2, Qwen3 and Qwen3-MoE.

Qwen2 is a Llama with biases on q, k and v; Qwen3 has an RMSNorm on each head of q and k instead.
Layers from max_window_layers on may have a sliding window; some of Qwen3-MoE's have experts.
"""

from __future__ import annotations

from dataclasses import replace

from tokenmill.core.specs.fields import Settings, flag, positive_int
from tokenmill.core.specs.moe import MoESpec, read_choice
from tokenmill.core.specs.spec import (
    ModelSpec,
    Windows,
    even_windows,
    listed_windows,
    read_common,
    read_window,
)
from tokenmill.core.types import ModelLoadError
from tokenmill.models.family import Architecture, Family, GGUFSource
from tokenmill.models.llama import Llama, layer_tensors

_DEFAULTS: Settings = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32_768,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
}
_WINDOWED: Settings = {"use_sliding_window": True, "max_window_layers": 0}
ARCHITECTURES = {
    "Qwen2ForCausalLM": Architecture(
        model_type="qwen2",
        defaults=_DEFAULTS,
        fixed={"attention_bias": True, "mlp_bias": False},
        gguf=GGUFSource("qwen2", _WINDOWED),
    ),
    "Qwen3ForCausalLM": Architecture(
        model_type="qwen3",
        defaults=_DEFAULTS | {"head_dim": 128},
        fixed={"mlp_bias": False},
        gguf=GGUFSource("qwen3", _WINDOWED),
    ),
    "Qwen3MoeForCausalLM": Architecture(
        model_type="qwen3_moe",
        defaults=_DEFAULTS
        | {
            "num_key_value_heads": 4,
            "intermediate_size": 6144,
            "num_local_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        fixed={"mlp_bias": False},
    ),
}


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    if architecture == "Qwen3MoeForCausalLM":
        windows = even_windows(architecture, settings)
        spec = read_common(architecture, "qwen", settings, windows)
        return replace(spec, qk_norm=True, moe=read_experts(settings, spec.num_layers))
    spec = read_common(architecture, "qwen", settings, _windows(settings))
    if architecture == "Qwen2ForCausalLM":
        return replace(spec, output_bias=False)
    return replace(spec, qk_norm=True)


def _windows(settings: Settings) -> Windows:
    """layer_types decides; without it, max_window_layers."""
    if settings["layer_types"] is not None:
        return listed_windows(settings)
    window, first = read_window(settings), settings["max_window_layers"]
    layers = range(positive_int(settings, "num_hidden_layers"))
    return tuple(window if layer >= first else None for layer in layers)


def read_experts(settings: Settings, num_layers: int) -> MoESpec:
    """The experts of Qwen3-MoE."""
    top_k, num_experts = read_choice(settings, ("num_experts", "num_local_experts"))
    step, dense = positive_int(settings, "decoder_sparse_step"), settings["mlp_only_layers"] or []
    if not isinstance(dense, list):
        raise ModelLoadError(f"mlp_only_layers: expected a list of layers, got {dense!r}")
    layers = range(num_layers)
    return MoESpec(
        layers=tuple(layer not in dense and (layer + 1) % step == 0 for layer in layers),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=positive_int(settings, "moe_intermediate_size"),
        renormalise=flag(settings, "norm_topk_prob"),
    )


FAMILY = Family(ARCHITECTURES, read_spec, layer_tensors, Llama)
