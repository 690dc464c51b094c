"""The config.json of a tiny Llama, for random weights without transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}


def write_config(folder: Path, **changes: Any) -> Path:
    """Write it into the folder, which is returned."""
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"} | SIZES | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# A model of experts.
EXPERTS: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
    "max_position_embeddings": 256,
    "eos_token_id": 0,
}
