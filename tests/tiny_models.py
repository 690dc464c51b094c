"""Tiny random transformers models, one for each variant of the families."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
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
    Qwen3VLConfig,
    Qwen3VLMoeConfig,
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
QWEN3_VL: dict[str, Any] = {
    "hidden_size": 64,
    "head_dim": 16,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10_000.0,
        "mrope_section": [4, 2, 2],
        "mrope_interleaved": True,
    },
}
VISION: dict[str, Any] = {
    "depth": 3,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "out_hidden_size": 64,
    "num_position_embeddings": 36,
    "deepstack_visual_indexes": [0, 1],
}
IMAGE_TOKENS = {
    "image_token_id": 60,
    "video_token_id": 61,
    "vision_start_token_id": 62,
    "vision_end_token_id": 63,
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
    "qwen3-vl": (Qwen3VLConfig, QWEN3_VL),
    "qwen3-vl-moe": (Qwen3VLMoeConfig, QWEN3_MOE | QWEN3_VL),
}


def make_model(variant: str, **changes: Any) -> PreTrainedModel:
    """A random transformers model with no zero in sight."""
    config_class, own = VARIANTS[variant]
    torch.manual_seed(7)
    settings = SMALL | own | changes
    if issubclass(config_class, Qwen3VLConfig | Qwen3VLMoeConfig):
        tied = settings.pop("tie_word_embeddings", False)
        outer = IMAGE_TOKENS | {"tie_word_embeddings": tied, "vision_config": VISION}
        config = config_class(text_config=settings, **outer)
        model = AutoModelForImageTextToText.from_config(config)
    else:
        model = AutoModelForCausalLM.from_config(config_class(**settings))
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
    if model.config.model_type == "qwen3_vl_moe":  # as published, not as transformers has it
        save_file(stored_tensors(model), folder / "model.safetensors")
    return folder


def stored_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The model's tensors under the names of its checkpoints; experts mostly lie one by one."""
    tensors = dict(model.state_dict())
    if model.config.tie_word_embeddings:
        del tensors["lm_head.weight"]
    if model.config.model_type == "gpt_oss":  # experts of a layer lie in one tensor
        return tensors
    if model.config.model_type == "qwen3_vl_moe":  # the same, transposed
        experts = {name: t.mT.contiguous() for name, t in tensors.items() if ".experts." in name}
        return tensors | experts
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


def _our_name(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def assert_same(found: dict[str, torch.Tensor], model: PreTrainedModel) -> None:
    expected = {_our_name(name): tensor for name, tensor in stored_tensors(model).items()}
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor.float(), expected[name].float()), name
