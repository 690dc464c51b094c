"""GPT-OSS against transformers: logits, MXFP4 as published, YaRN, and what is refused."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config, PreTrainedModel
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding

from harness import Harness, assert_same_logits
from tiny_models import make_model, save, tame
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import ModelLoadError, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.kernels.moe import route
from tokenmill.layers import attention, mlp
from tokenmill.layers.rotary import _cos_sin, inverse_frequencies, rotary_table
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.weights import open_checkpoint, open_mtp, read_spec

Tensors = dict[str, torch.Tensor]
CASES: dict[str, dict[str, Any]] = {
    "windows": {},
    "no-bias": {"attention_bias": False},
    "narrow-heads": {"head_dim": 24},  # torch's attention
    "listed-layers": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "one-expert": {"num_experts_per_tok": 1},
    "default-rope": {"rope_parameters": None},
}
ALL = {"num_experts_per_tok": 6}  # rounding changes no choice then
EXPERTS = "model.layers.1.mlp.experts"
PUBLISHED: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
GPT_OSS_120B: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_local_experts": 128,
    "experts_per_token": 4,
    "initial_context_length": 4096,
    "rope_theta": 150_000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "swiglu_limit": 7.0,
    "eos_token_id": 200_002,
    "quantization_config": PUBLISHED,
}


@pytest.mark.parametrize("case", CASES)
def test_logits_match_transformers(case: str, tmp_path: Path) -> None:
    reference = tame(make_model("gpt-oss", **CASES[case]))
    assert_same_logits(reference, save(reference, tmp_path))


def test_logits_match_transformers_where_gates_are_clamped(tmp_path: Path) -> None:
    reference, clamped = tame(make_model("gpt-oss")), []
    for layer in reference.model.layers:
        layer.mlp.experts.gate_up_proj_bias.data.mul_(40.0)
        gate = layer.mlp.experts._apply_gate
        layer.mlp.experts._apply_gate = lambda x, gate=gate: (clamped.append(x), gate(x))[1]
    assert_same_logits(reference, save(reference, tmp_path))
    shares = [(x.abs() > 7.0).float().mean().item() for x in clamped]
    assert min(shares) > 0.02


def write_published(folder: Path, **changes: Any) -> PreTrainedModel:
    """A folder as published; returns transformers' model of what its codes stand for."""
    model = tame(make_model("gpt-oss", **changes))
    save(model, folder)
    tensors, generator = load_file(folder / "model.safetensors"), torch.manual_seed(3)
    stored = {name: t.bfloat16() for name, t in tensors.items() if not name.endswith("_proj")}
    for name, parameter in model.named_parameters():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            count, k, n = parameter.shape
            shape = (count, n, k // 32, 16)
            blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
            scales = torch.randint(119, 124, shape[:3], dtype=torch.uint8, generator=generator)
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.data = convert_moe_packed_tensors(blocks, scales).float()
        else:
            parameter.data = parameter.data.bfloat16().float()
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    reconfigure(folder, {"quantization_config": PUBLISHED})
    return model


def reconfigure(folder: Path, changes: dict[str, Any]) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def test_a_published_folder(tmp_path: Path) -> None:
    """Its weights are transformers' to the last bit, and so the logits agree."""
    reference = write_published(tmp_path)
    assert_same_logits(reference, tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)
    )
    expected = reference.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor.float(), expected[name]), name
    checkpoint = open_checkpoint(tmp_path)
    assert "safetensors BF16 (experts in MXFP4)" in checkpoint.describe()
    layers = Harness(tmp_path, "bf16").model.layers
    for index, layer in enumerate(layers):
        experts = layer.mlp.experts
        for kind, packed in (("gate_up", experts.gate_up), ("down", experts.down)):
            stacked = expected[f"model.layers.{index}.mlp.experts.{kind}_proj"]
            for expert in range(packed.num_experts):
                assert torch.equal(packed.expert(expert).data, stacked[expert].mT.bfloat16())


def test_codes_stay_codes_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The references of the GPU's arithmetic; attention on CPU takes fp32 alone."""
    reference = write_published(tmp_path, **ALL)
    rope, attend = attention.rope_and_cache, attention.paged_attention
    monkeypatch.setattr(attention, "rope_and_cache", lambda qkv, *rest: rope(qkv.float(), *rest))
    monkeypatch.setattr(attention, "paged_attention", lambda *rest: attend(*rest).bfloat16())
    for dtype, bound in (("bf16", 0.05), ("fp8", 0.2)):
        harness = Harness(tmp_path, dtype)
        assert 0.0 < _error(reference, harness) < bound
        experts = harness.model.experts[0]
        num_weights, num_biases = 6 * 3 * 64 * 32, 6 * (2 * 32 + 64)
        assert experts.num_bytes == num_weights * 17 // 32 + 2 * num_biases


def test_int8_stays_close(tmp_path: Path) -> None:
    reference = write_published(tmp_path, **ALL)
    assert 0.0 < _error(reference, Harness(tmp_path, "int8")) < 0.05


def _error(reference: Any, harness: Harness) -> float:
    ids = list(range(60))
    with torch.inference_mode():
        expected = reference(torch.tensor([ids])).logits[0]
    return float((harness.logits(ids, [60]) - expected).norm() / expected.norm())


def test_yarn_is_that_of_transformers() -> None:
    spec = spec_of(GPT_OSS_120B)
    config = GptOssConfig(**GPT_OSS_120B)
    theirs = GptOssRotaryEmbedding(config)
    close = torch.testing.assert_close
    close(inverse_frequencies(spec.rope, 64), theirs.inv_freq, rtol=2e-7, atol=0)
    assert spec.rope.attention_factor == theirs.attention_scaling == pytest.approx(1.346574)
    table = rotary_table(spec.rope, 64, 5000)
    for position in (0, 1, 127, 4095, 4096, 4999):
        cos, sin = theirs(torch.zeros(1), torch.tensor([[position]]))
        expected = torch.cat([cos[0, 0], sin[0, 0]])  # angles have 24 bits, there and here
        close(table[position], expected, rtol=0, atol=4e-7 * (1 + position))


def test_a_rotary_table_is_the_same_in_parts() -> None:
    """Positions are computed a few at a time; where the parts begin changes no bit."""
    rope = spec_of(GPT_OSS_120B).rope
    table = rotary_table(rope, 64, 5000)
    angles = torch.arange(5000).float()[:, None] * inverse_frequencies(rope, 64)
    cos, sin = _cos_sin(angles.double())
    assert torch.equal(table, torch.cat([cos, sin], 1).float() * rope.attention_factor)
    assert torch.equal(table[:1], rotary_table(rope, 64, 1))


@pytest.mark.parametrize(
    ("layers", "experts", "expected"), [(36, 128, 116_829_156_672), (24, 32, 20_914_757_184)]
)
def test_the_published_sizes(layers: int, experts: int, expected: int) -> None:
    config = GPT_OSS_120B | {"num_hidden_layers": layers, "num_local_experts": experts}
    with torch.device("meta"):
        plain = {k: v for k, v in config.items() if k != "quantization_config"}
        model = AutoModelForCausalLM.from_config(GptOssConfig(**plain))
    spec = spec_of(config)
    assert spec.num_params() == model.num_parameters() == expected
    assert spec == spec_of(GptOssConfig(**config).to_dict() | {"eos_token_id": 200_002})
    assert spec.layer_windows == (128, None) * (layers // 2)
    assert spec.max_position == 131_072 and spec.q_size == 4096 and not spec.tie_embeddings
    each = 3 * 2880 * 2880 * layers * experts
    assert spec.weight_bytes(2) == 2 * (expected - each) + each * 17 // 32


def test_random_weights_are_codes(tmp_path: Path) -> None:
    write_published(tmp_path)
    checkpoint = open_checkpoint(tmp_path, random_weights=True)
    found = dict(checkpoint.tensors())
    again = dict(checkpoint.tensors())
    assert {name: t.dtype for name, t in found.items() if t.dtype != torch.float32} == {
        f"model.layers.{layer}.mlp.experts.{kind}_proj_{part}": torch.uint8
        for layer in range(4)
        for kind in ("gate_up", "down")
        for part in ("blocks", "scales")
    }
    assert all(torch.equal(found[name], again[name]) for name in found)
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in found.values())
    blocks, scales = (found[f"{EXPERTS}.gate_up_proj_{part}"] for part in ("blocks", "scales"))
    weights = convert_moe_packed_tensors(blocks, scales).float()
    assert weights.std().item() == pytest.approx(0.018, rel=0.05)
    assert blocks.unique().numel() > 250 and weights.mean().abs() < 1e-3
    blocks, scales = (found[f"{EXPERTS}.down_proj_{part}"] for part in ("blocks", "scales"))
    weights = convert_moe_packed_tensors(blocks, scales).float()
    assert weights.std().item() == pytest.approx(0.018 / 4, rel=0.05)  # near sqrt(2 * 4)


def test_random_routers_choose_about_evenly(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of the busiest expert of a deep model; drawn evenly it has 1.3 times the mean."""
    experts, shares = 16, []

    def record(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        ids, weights = route(*args)
        counts = torch.bincount(ids.flatten(), minlength=experts).float()
        shares.append((counts.max() / counts.mean()).item())
        return ids, weights

    monkeypatch.setattr(mlp, "route", record)
    sizes = {"hidden_size": 256, "intermediate_size": 32, "num_hidden_layers": 24}
    config = GPT_OSS_120B | sizes | {"num_local_experts": experts, "vocab_size": 512}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    source = random.Random(0)
    model = ModelConfig(str(tmp_path), "fp32", "cpu", random_weights=True)
    engine = build_engine(resolve_setup(Setup(model, CacheConfig(), SchedulerConfig()))).engine
    for i in range(16):
        prompt = [source.randrange(512) for _ in range(32)]
        engine.submit(Request(str(i), Generate(prompt, SamplingParams(max_tokens=1))))
    shares.clear()  # of the warm-up, whose tokens are all the same
    engine.step()
    assert len(shares) == 24 and sum(shares) / 24 < 1.6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "swiglu_limit: only 7.0 is supported, got 5.0"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha: only 1.702 is supported, got 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act: only 'silu' is supported, got 'gelu'"),
        ({"sliding_window": None}, "layer_types: has sliding_attention but sliding_window is off"),
        ({"num_experts_per_tok": 200}, "num_experts_per_tok: 200 of 128 experts"),
        ({"hidden_size": 2896}, "hidden_size: MXFP4 needs a multiple of 32, got 2896"),
        (
            {"quantization_config": {"quant_method": "gptq"}},
            r"quantization_config.quant_method: 'gptq' is not supported; use 'mxfp4', or float32",
        ),
    ],
)
def test_errors_name_the_field(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(GPT_OSS_120B | changes)


def test_mxfp4_is_of_this_family_alone() -> None:
    other = {"architectures": ["LlamaForCausalLM"], "quantization_config": PUBLISHED}
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 8}
    heads = {"num_attention_heads": 4, "num_hidden_layers": 1}
    with pytest.raises(ModelLoadError, match="quant_method: 'mxfp4' is not supported; use 'compre"):
        spec_of(other | sizes | heads)


SPOILED: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "blocks": (
        lambda t: t.update({f"{EXPERTS}.down_proj_blocks": torch.zeros(6, 64, 16).byte()}),
        f"  1 mis-shaped: {EXPERTS}.down_proj_blocks expected [6, 64, 1, 16], "
        "found [6, 64, 16] in model.safetensors",
    ),
    "half-a-block": (
        lambda t: t.update({f"{EXPERTS}.down_proj_blocks": torch.zeros(6, 64, 2, 8).byte()}),
        f"  1 mis-shaped: {EXPERTS}.down_proj_blocks expected [6, 64, 1, 16], "
        "found [6, 64, 2, 8] in model.safetensors",
    ),
    "no-scales": (
        lambda t: t.pop(f"{EXPERTS}.gate_up_proj_scales"),
        f"  1 missing: {EXPERTS}.gate_up_proj_scales [6, 64, 2], "
        "the scales of its _blocks in model.safetensors",
    ),
    "float-scales": (
        lambda t: t.update({f"{EXPERTS}.down_proj_scales": torch.ones(6, 64, 1)}),
        f"  1 of an unsupported type: {EXPERTS}.down_proj_scales is F32 in model.safetensors, "
        "expected U8",
    ),
    "no-sinks": (
        lambda t: t.pop("model.layers.0.self_attn.sinks"),
        "  1 missing: model.layers.0.self_attn.sinks [4]",
    ),
    "both": (
        lambda t: t.update({f"{EXPERTS}.down_proj": torch.ones(6, 32, 64)}),
        f"  1 unexpected: {EXPERTS}.down_proj [6, 32, 64] in model.safetensors",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_wrong_tensors_are_listed(case: str, tmp_path: Path) -> None:
    change, message = SPOILED[case]
    write_published(tmp_path)
    rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError) as caught:
        open_checkpoint(tmp_path)
    assert str(tmp_path) in str(caught.value)
    assert message in str(caught.value).splitlines(), caught.value


def test_an_unknown_quantisation_names_the_file(tmp_path: Path) -> None:
    write_published(tmp_path)
    reconfigure(tmp_path, {"quantization_config": {"quant_method": "nvfp4"}})
    with pytest.raises(
        ModelLoadError, match=r"config\.json: quantization_config\.quant_method: 'n"
    ):
        open_checkpoint(tmp_path)


def test_an_eagle_head_is_refused(tmp_path: Path) -> None:
    write_published(tmp_path / "model")
    file = tmp_path / "head.safetensors"
    save_file({"fc.weight": torch.zeros(2, 4)}, file)
    with pytest.raises(ModelLoadError, match="an EAGLE head is for a dense model, not GptOssFor"):
        open_mtp(file, read_spec(tmp_path / "model"))
