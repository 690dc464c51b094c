"""The model families by the architecture that config.json names; a family is one module."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenmill.core.types import ModelLoadError

if TYPE_CHECKING:
    from tokenmill.core.specs.spec import ModelSpec
    from tokenmill.models.family import Family

# A family is imported when a model of it is read: its layers need torch.
FAMILIES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "MixtralForCausalLM": "mixtral",
    "Qwen2ForCausalLM": "qwen",
    "Qwen3ForCausalLM": "qwen",
    "Qwen3MoeForCausalLM": "qwen",
    "Qwen3VLForConditionalGeneration": "qwen3_vl",
    "Qwen3VLMoeForConditionalGeneration": "qwen3_vl",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Gemma3ForCausalLM": "gemma3",
    "GptOssForCausalLM": "gpt_oss",
}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """The spec of the model that a Hugging Face config.json describes."""
    name = _architecture(config)
    family = load_family(FAMILIES[name])
    settings = family.architectures[name].settings(name, config)
    return family.read_spec(name, settings)


def family_of(spec: ModelSpec) -> Family:
    return load_family(spec.family)


def all_families() -> list[Family]:
    """Every family, in the order of the table above."""
    return [load_family(module) for module in dict.fromkeys(FAMILIES.values())]


def load_family(module: str) -> Family:
    family: Family = import_module(f"tokenmill.models.{module}").FAMILY
    return family


def _architecture(config: dict[str, Any]) -> str:
    """The architecture's name; a config.json without it has model_type."""
    kind = config.get("model_type")
    names = config.get("architectures") or [_by_model_type().get(kind)]
    if names[0] in FAMILIES:
        name: str = names[0]
        return name
    found = names[0] or f"model_type {kind!r}"
    raise ModelLoadError(f"architectures: {found} is not supported; use {', '.join(FAMILIES)}")


def _by_model_type() -> dict[Any, str]:
    families = all_families()
    return {a.model_type: name for each in families for name, a in each.architectures.items()}
