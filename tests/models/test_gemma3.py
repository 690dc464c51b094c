"""Gemma 3 against transformers: logits, both forms of its config.json, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, Gemma3TextConfig

from harness import Harness, assert_same_logits
from tiny_models import make_model, save, tame
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.layers import attention
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.weights import open_mtp, read_spec

CASES: dict[str, dict[str, Any]] = {
    "windows": {},
    "no-scaling": {"rope_parameters": None},
    "bias": {"attention_bias": True},
    "untied": {"tie_word_embeddings": False},
    "narrow-heads": {"head_dim": 24},  # torch's attention
    "listed-layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
}
GEMMA3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "vocab_size": 262_144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "max_position_embeddings": 32_768,
    "query_pre_attn_scalar": 256,
    "rope_local_base_freq": 10_000,
    "rope_scaling": None,
    "rope_theta": 1_000_000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "eos_token_id": [1, 106],
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    reference = tame(make_model("gemma3", **CASES[case]))
    assert_same_logits(reference, save(reference, tmp_path))


def test_int8_stays_close(tmp_path: Path) -> None:
    reference = tame(make_model("gemma3"))
    assert 0.0 < _error(reference, Harness(save(reference, tmp_path), "int8")) < 0.05


def test_fp8_stays_close(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of the GPU's arithmetic; attention on CPU takes fp32 alone."""
    reference = tame(make_model("gemma3"))
    rope = attention.rope_and_cache
    monkeypatch.setattr(attention, "rope_and_cache", lambda qkv, *rest: rope(qkv.float(), *rest))
    harness = Harness(save(reference, tmp_path), "fp8")
    assert harness.model.norm.dtype == torch.float32  # 1 + w
    assert 0.0 < _error(reference, harness) < 0.2


def _error(reference: Any, harness: Harness) -> float:
    ids = list(range(60))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    return float((harness.logits(ids, [60]) - expected).norm() / expected.norm())


def test_older_files_read_the_same(tmp_path: Path) -> None:
    """rope_theta, rope_scaling and a pattern instead of rope_parameters and layer_types."""
    save(make_model("gemma3"), tmp_path)
    file = tmp_path / "config.json"
    spec, config = read_spec(tmp_path), json.loads(file.read_text())
    del config["layer_types"]
    ropes = config.pop("rope_parameters")
    scaling = {"rope_type": "linear", "factor": ropes["full_attention"]["factor"]}
    config |= {"rope_theta": 1_000_000.0, "rope_local_base_freq": 10_000.0}
    config |= {"rope_scaling": scaling, "sliding_window_pattern": 3}
    assert spec_of(config) == spec
    assert spec.layer_windows == (8, 8, None, 8)
    local, everywhere = RopeSpec(10_000.0), RopeSpec(1_000_000.0, "linear", 4.0)
    assert spec.layer_ropes == (local, local, everywhere, local)


def test_the_published_1b() -> None:
    config = Gemma3TextConfig(**GEMMA3_1B)
    with torch.device("meta"):
        expected = AutoModelForCausalLM.from_config(config).num_parameters()
    spec = spec_of(GEMMA3_1B)
    assert spec.num_params() == expected == 999_885_952
    assert spec.tie_embeddings and spec.eos_token_ids == (1, 106)
    assert spec.layer_windows == (*([512] * 5 + [None]) * 4, 512, 512)
    assert (spec.softmax_scale, spec.head_dim, spec.bos_token_id) == (1 / 16, 256, 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_activation": "gelu"}, "hidden_activation: only 'gelu_pytorch_tanh' is supported"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping: only None is supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping: only None is supported"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention: only false"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar: expected a positive number, got 0"),
        ({"sliding_window": None}, "layer_types: has sliding_attention but sliding_window is off"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern: expected a positive integer"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_parameters: expected an object with full"),
        ({"rope_local_base_freq": "1"}, "rope_theta: expected a positive number, got '1'"),
        (
            {"architectures": ["Gemma3ForConditionalGeneration"]},
            "is not supported; use .*Gemma3For",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(GEMMA3_1B | changes)


def test_an_eagle_head_is_refused(tmp_path: Path) -> None:
    spec, file = spec_of(GEMMA3_1B), tmp_path / "head.safetensors"
    save_file({"fc.weight": torch.zeros(2, 4)}, file)
    with pytest.raises(ModelLoadError, match="Gemma3ForCausalLM has 4 norms in a layer, where an"):
        open_mtp(file, spec)
