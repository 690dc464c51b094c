"""Mixtral: a Mistral with experts in every layer, under names of its own."""

from __future__ import annotations

from dataclasses import replace

from tokenmill.core.specs.fields import Settings
from tokenmill.core.specs.moe import MoESpec, read_choice
from tokenmill.core.specs.spec import ModelSpec, even_windows, read_common
from tokenmill.models.family import Architecture, Family
from tokenmill.models.llama import Llama, layer_tensors

MIXTRAL = Architecture(
    model_type="mixtral",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
    stored_names={
        "mlp": "block_sparse_moe",
        "gate_proj": "w1",
        "down_proj": "w2",
        "up_proj": "w3",
    },
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    """Softmax over all experts; the weights of the chosen ones are made to sum to one."""
    windows = even_windows(architecture, settings)
    spec = read_common(architecture, "mixtral", settings, windows)
    top_k, num_experts = read_choice(settings, ("num_experts", "num_local_experts"))
    moe = MoESpec((True,) * spec.num_layers, num_experts, top_k, spec.intermediate_size)
    return replace(spec, moe=moe)


FAMILY = Family({"MixtralForCausalLM": MIXTRAL}, read_spec, layer_tensors, Llama)
