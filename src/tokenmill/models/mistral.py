"""Mistral: a Llama whose layers all have the same sliding window, or none."""

from __future__ import annotations

from tokenmill.core.specs.fields import Settings
from tokenmill.core.specs.spec import ModelSpec, even_windows, read_common
from tokenmill.models.family import Architecture, Family
from tokenmill.models.llama import Llama, layer_tensors

MISTRAL = Architecture(
    model_type="mistral",
    defaults={
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    fixed={"attention_bias": False, "mlp_bias": False},
)


def read_spec(architecture: str, settings: Settings) -> ModelSpec:
    return read_common(architecture, "mistral", settings, even_windows(architecture, settings))


FAMILY = Family({"MistralForCausalLM": MISTRAL}, read_spec, layer_tensors, Llama)
