"""Random weights made on the GPU."""

import json
from pathlib import Path

import torch

from tokenmill.models.checkpoints.weights import open_checkpoint

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def tensors(folder: Path, seed: int) -> dict[str, torch.Tensor]:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(folder, random_weights=True, seed=seed)
    return dict(checkpoint.tensors(device="cuda"))


def test_random_weights_are_made_there(tmp_path: Path) -> None:
    first, again, other = tensors(tmp_path, 3), tensors(tmp_path, 3), tensors(tmp_path, 4)
    for name, tensor in first.items():
        assert (tensor.device.type, tensor.dtype) == ("cuda", torch.bfloat16)
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == name.endswith("norm.weight")
    assert bool((first["model.norm.weight"] == 1).all())
    assert 0.018 < first["lm_head.weight"].float().std().item() < 0.022
