"""Logits of every family variant against transformers: whole, chunked, token by token."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import Harness, assert_same_logits
from tiny_models import make_model, save, tame
from tokenmill.layers import attention
from tokenmill.models.checkpoints.weights import open_checkpoint

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
WIDE = {"head_dim": 16, "hidden_size": 64}  # what the compiled attention takes
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", WIDE),
    "llama-narrow-heads": ("llama", {}),  # head_dim 8: torch's attention
    "llama-tied": ("llama-tied", WIDE),
    "llama-bias": ("llama-bias", WIDE),
    "llama3-rope": ("llama", WIDE | {"rope_parameters": LLAMA3_ROPE}),
    "yarn-rope": ("llama", WIDE | {"rope_parameters": YARN_ROPE}),
    "linear-rope": ("llama", WIDE | {"rope_parameters": LINEAR_ROPE}),
    "odd-vocabulary": ("llama-tied", WIDE | {"vocab_size": 61}),
    "one-kv-head": ("llama", WIDE | {"num_key_value_heads": 1}),
    "mistral-window": ("mistral", WIDE),
    "qwen2": ("qwen2", {"hidden_size": 64}),
    "qwen2-window": (
        "qwen2",
        {
            "hidden_size": 64,
            "use_sliding_window": True,
            "sliding_window": 8,
            "max_window_layers": 1,
        },
    ),
    "qwen3": ("qwen3-tied", {"hidden_size": 64}),
    "qwen3-moe": ("qwen3-moe", {}),
    "qwen3-moe-some-dense": (
        "qwen3-moe",
        {
            "norm_topk_prob": False,
            "num_hidden_layers": 4,
            "mlp_only_layers": [3],
            "decoder_sparse_step": 2,
        },
    ),
    "mixtral": ("mixtral", {}),
    "mixtral-window": ("mixtral", {"sliding_window": 8}),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    variant, changes = CASES[case]
    reference = tame(make_model(variant, **changes))
    assert_same_logits(reference, save(reference, tmp_path))


def test_a_head_of_its_own_is_used_though_the_config_ties_it(tmp_path: Path) -> None:
    reference = tame(make_model("llama"))
    config = save(reference, tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    checkpoint = open_checkpoint(tmp_path)
    assert "lm_head.weight differs from the embedding" in checkpoint.describe()
    assert checkpoint.spec.num_params() == sum(p.numel() for p in reference.parameters())
    assert_same_logits(reference, tmp_path)


def test_chunking_does_not_change_a_bit(tmp_path: Path) -> None:
    folder = save(tame(make_model("llama", **WIDE)), tmp_path)
    ids = list(range(60)) + list(range(40))
    for dtype in ("fp32", "int8"):
        harness = Harness(folder, dtype)
        whole = harness.logits(ids, [100])
        assert torch.equal(harness.logits(ids, [1, 30, 16, 53]), whole)
        assert torch.equal(harness.logits(ids, [1] * 100), whole)


def test_int8_stays_close(tmp_path: Path) -> None:
    reference = tame(make_model("llama", **WIDE))
    harness = Harness(save(reference, tmp_path), "int8")
    ids = list(range(60))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    error = (harness.logits(ids, [60]) - expected).norm() / expected.norm()
    assert error < 0.05


@pytest.mark.parametrize("case", ["llama-bias", "qwen3"])
def test_fp8_stays_close(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of the GPU's arithmetic; attention on CPU takes fp32 alone."""
    variant, changes = CASES[case]
    reference = tame(make_model(variant, **changes))
    rope = attention.rope_and_cache
    monkeypatch.setattr(attention, "rope_and_cache", lambda qkv, *rest: rope(qkv.float(), *rest))
    harness = Harness(save(reference, tmp_path), "fp8")
    assert harness.model.layers[0].mlp.down.weight.data.dtype == torch.float8_e4m3fn
    assert harness.model.head.weight.data.dtype == torch.bfloat16
    ids = list(range(60))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    error = (harness.logits(ids, [60]) - expected).norm() / expected.norm()
    # e4m3 is 2.6 % off (rms) on either side of a product, and there are eight products in a row.
    assert 0.02 < error < 0.2
