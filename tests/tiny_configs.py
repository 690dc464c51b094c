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
