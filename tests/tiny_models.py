"""Tiny random transformers models, one for each variant of the families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from tiny_configs import SIZES

SMALL = SIZES | {"eos_token_id": 2}
QWEN3_MOE: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "num_experts": 12,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
DEEPSEEK: dict[str, Any] = {
    "hidden_size": 64,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 24,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
}
GEMMA3: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "query_pre_attn_scalar": 24,
    "sliding_window": 8,
    "sliding_window_pattern": 3,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1_000_000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
GPT_OSS: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 32,
    "head_dim": 16,
    "num_hidden_layers": 4,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 24,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 64,
    },
}
VARIANTS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "llama-bias": (LlamaConfig, {"attention_bias": True, "mlp_bias": True}),
    "mistral": (MistralConfig, {"sliding_window": 8}),
    "qwen2": (Qwen2Config, {}),
    "qwen3-tied": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "qwen3-moe": (Qwen3MoeConfig, QWEN3_MOE),
    "mixtral": (MixtralConfig, {"hidden_size": 64, "head_dim": 16, "num_local_experts": 6}),
    "deepseek-v3": (DeepseekV3Config, DEEPSEEK),
    "gemma3": (Gemma3TextConfig, GEMMA3),
    "gpt-oss": (GptOssConfig, GPT_OSS),
}


def make_model(variant: str, **changes: Any) -> PreTrainedModel:
    """A random transformers model with no zero in sight."""
    config_class, own = VARIANTS[variant]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config_class(**(SMALL | own | changes)))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            torch.nn.init.normal_(buffer, std=0.2)
    return model


def tame(model: PreTrainedModel, scale: float = 0.15) -> PreTrainedModel:
    """Weights small enough for logits of ordinary size, norms near one."""
    by_one_more = model.config.model_type == "gemma3_text"  # what its norms multiply with
    for name, parameter in model.named_parameters():
        parameter.data.mul_(scale)
        if "norm" in name and not by_one_more:
            parameter.data.add_(1.0)
    return model.eval()


def save(model: PreTrainedModel, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    return folder


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its checkpoints; experts mostly lie one by one."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if model.config.model_type == "gpt_oss":  # experts of a layer lie in one tensor
        return tensors
    mixtral = model.config.model_type == "mixtral"
    gate, up, down = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
    for name in [name for name in tensors if ".mlp.experts." in name]:
        fused, module = tensors.pop(name), name.rpartition(".")[0]
        for i, matrix in enumerate(fused):
            parts = {down: matrix}
            if name.endswith("gate_up_proj"):
                parts = dict(zip((gate, up), matrix.chunk(2), strict=True))
            tensors |= {f"{module}.{i}.{part}.weight": value for part, value in parts.items()}
    moe = ".block_sparse_moe." if mixtral else ".mlp."
    return {name.replace(".mlp.", moe): tensor for name, tensor in tensors.items()}


def load_stored(model: PreTrainedModel, tensors: dict[str, torch.Tensor]) -> None:
    """Give the model the tensors of a checkpoint, the inverse of stored_tensors."""
    with torch.no_grad():
        for name, parameter in model.state_dict().items():
            if ".mlp.experts." not in name:
                parameter.copy_(tensors[name])
                continue
            module, _, kind = name.rpartition(".")
            for i, matrix in enumerate(parameter):
                gated = kind == "gate_up_proj"
                parts = ("gate_proj", "up_proj") if gated else ("down_proj",)
                matrix.copy_(torch.cat([tensors[f"{module}.{i}.{p}.weight"] for p in parts]))


def assert_same(found: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    expected = stored_tensors(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name
