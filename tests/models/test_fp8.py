"""fp8 checkpoints, written by hand in each published layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from driver import complete
from tiny_models import load_stored, make_model, save
from tokenmill.core.config import CacheConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.types import ModelLoadError, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.models.checkpoints import weights

Tensors = dict[str, torch.Tensor]
FLOAT8 = torch.float8_e4m3fn
SIZES = {"hidden_size": 160, "intermediate_size": 200, "head_dim": 16}  # no multiples of 128
DEEPSEEK = {
    "hidden_size": 160,
    "intermediate_size": 200,
    "moe_intermediate_size": 136,
    "num_hidden_layers": 2,
    "q_lora_rank": 144,
    "n_routed_experts": 8,
}
UP = "model.layers.1.mlp.up_proj"


def compressed(strategy: str, **changes: Any) -> dict[str, Any]:
    """A compressed-tensors quantization_config."""
    args = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = args | {"strategy": strategy, "dynamic": False, "block_structure": None}
    if strategy == "block":
        weights["block_structure"] = [128, 128]
    inputs = args | {"strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    return config | {"config_groups": {"group_0": group}, "ignore": ["lm_head"]} | changes


POWERS = torch.float8_e8m0fnu  # DeepSeek-V3.1's scale_fmt "ue8m0", stored as such
BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}
# quantization_config, the scales' name, their kind, shape and type
LAYOUTS: dict[str, tuple[dict[str, Any], str, str, Any, torch.dtype]] = {
    "channel": (compressed("channel"), "weight_scale", "channel", (-1, 1), torch.float32),
    "channel-bf16": (compressed("channel"), "weight_scale", "channel", (-1, 1), torch.bfloat16),
    "channel-flat": (compressed("channel"), "weight_scale", "channel", (-1,), torch.float32),
    "tensor": (compressed("tensor"), "weight_scale", "tensor", (1,), torch.float32),
    "tensor-0d": (compressed("tensor"), "weight_scale", "tensor", (), torch.float32),
    "compressed-block": (compressed("block"), "weight_scale", "block", None, torch.bfloat16),
    "block": (BLOCKS, "weight_scale_inv", "block", None, torch.float32),
    "block-bf16": (BLOCKS, "weight_scale_inv", "block", None, torch.bfloat16),
    "block-ue8m0": (BLOCKS | {"scale_fmt": "ue8m0"}, "weight_scale_inv", "block", None, POWERS),
    "fp8-tensor": ({"quant_method": "fp8"}, "weight_scale", "tensor", (), torch.float32),
}


def tiles(rows: int, columns: int, kind: str) -> list[tuple[slice, slice]]:
    """Which parts of a matrix share a scale, row of tiles by row of tiles."""
    height, width = {"tensor": (rows, columns), "channel": (1, columns), "block": (128, 128)}[kind]
    starts = [(r, c) for r in range(0, rows, height) for c in range(0, columns, width)]
    return [(slice(r, r + height), slice(c, c + width)) for r, c in starts]


def quantize(
    weight: torch.Tensor, kind: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """codes, scales in tile order, and what the codes stand for."""
    codes, meant = torch.empty_like(weight, dtype=FLOAT8), torch.empty_like(weight)
    scales = []
    for part in tiles(*weight.shape, kind):
        scale = (weight[part].abs().max() / 448).to(dtype)
        codes[part] = (weight[part] / scale.float()).clamp(-448, 448).to(FLOAT8)
        meant[part] = codes[part].float() * scale.float()
        scales.append(scale)
    return codes, torch.stack(scales), meant


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(model: PreTrainedModel, folder: Path, layout: str) -> Tensors:
    """Save the model with fp8 linear layers; returns what its tensors stand for."""
    config, scale_name, kind, shape, dtype = LAYOUTS[layout]
    save(model, folder)
    meant: Tensors = {}
    stored: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        stored[name] = meant[name] = tensor.bfloat16()
        if is_linear(name):
            stored[name], scales, meant[name] = quantize(tensor, kind, dtype)
            grid = [-(-size // 128) for size in tensor.shape]
            scales = scales.reshape(grid if shape is None else shape)
            stored[f"{name.removesuffix('weight')}{scale_name}"] = scales
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    reconfigure(folder, config)
    return meant


def reconfigure(folder: Path, quantization: dict[str, Any]) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[Tensors], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_tensors_are_codes_times_scales(layout: str, tmp_path: Path) -> None:
    meant = write(make_model("llama", **SIZES), tmp_path, layout)
    checkpoint = weights.open_checkpoint(tmp_path)
    seen: list[tuple[int, int]] = []
    found = dict(checkpoint.tensors(lambda done, total: seen.append((done, total))))
    assert found.keys() == meant.keys()
    for name, tensor in found.items():
        assert tensor.dtype == (torch.float32 if is_linear(name) else torch.bfloat16)
        assert torch.equal(tensor, meant[name]), name
    by_threads = dict(weights.read_by_threads(checkpoint.readable, "cpu"))
    assert list(by_threads) == list(found)
    assert all(torch.equal(tensor, found[name]) for name, tensor in by_threads.items())
    assert checkpoint.file_type == "F8_E4M3"
    stored = load_file(tmp_path / "model.safetensors")
    assert checkpoint.num_bytes == sum(tensor.nbytes for tensor in stored.values())
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)


def reference_logprobs(model: PreTrainedModel, ids: list[int]) -> torch.Tensor:
    """Log-probability of every token but the first."""
    with torch.inference_mode():
        logprobs = model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


@pytest.mark.parametrize(
    ("variant", "sizes", "layout"),
    [("llama", SIZES, "channel"), ("llama", SIZES, "block"), ("deepseek-v3", DEEPSEEK, "block")],
)
def test_engine_matches_transformers(
    variant: str, sizes: dict[str, int], layout: str, tmp_path: Path
) -> None:
    model = make_model(variant, **sizes).eval()
    for parameter in model.parameters():
        parameter.data.mul_(0.15)
    ids = torch.randint(64, (100,), generator=torch.manual_seed(1)).tolist()
    original = reference_logprobs(model, ids)
    load_stored(model, write(model, tmp_path, layout))
    expected = reference_logprobs(model, ids)
    config = ModelConfig(str(tmp_path), "fp32", "cpu")
    built = build_engine(
        resolve_setup(Setup(config, CacheConfig(num_blocks=16), SchedulerConfig(max_num_seqs=4)))
    )
    (answer,) = complete(built.engine, [ids], SamplingParams(max_tokens=1, prompt_logprobs=0))
    assert answer.prompt_logprobs is not None
    found = torch.tensor([row.logprobs[0] for row in answer.prompt_logprobs if row])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=0)
    assert (found - original).abs().max() > 1e-2  # rounding to fp8 is seen


def test_transformers_reads_the_same_blocks(tmp_path: Path) -> None:
    whole = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
    write(make_model("llama", **whole), tmp_path, "block")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    found = dict(weights.open_checkpoint(tmp_path).tensors())
    assert found.keys() == theirs.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.float(), theirs[name].float(), rtol=2**-7, atol=0)


def requantized(weight: torch.Tensor) -> torch.Tensor:
    """Codes with a scale per row, as fp8 compute rounds weights."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    return (weight / scales).to(FLOAT8)


@pytest.mark.parametrize(("layout", "same"), [("channel", True), ("block", False)])
def test_a_second_rounding_per_row(layout: str, same: bool, tmp_path: Path) -> None:
    write(make_model("llama", **SIZES), tmp_path, layout)
    stored = load_file(tmp_path / "model.safetensors")
    for name, tensor in weights.open_checkpoint(tmp_path).tensors():
        if is_linear(name):
            codes, before = requantized(tensor).float(), stored[name].float()
            assert not same or bool((before.abs().amax(1) == 448).all())
            assert torch.equal(codes, before) is same, name


def test_static_scales_are_read_past_and_said(tmp_path: Path) -> None:
    meant = write(make_model("llama", **SIZES), tmp_path, "tensor")
    assert "MB" in weights.open_checkpoint(tmp_path).describe()
    assert "not used" not in weights.open_checkpoint(tmp_path).describe()

    def add(tensors: Tensors) -> None:
        for name in meant:
            if is_linear(name):
                tensors[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.v_scale"] = torch.ones(1)

    rewrite(tmp_path, add)
    checkpoint = weights.open_checkpoint(tmp_path)
    assert (
        "F8_E4M3 (fp8 with a scale per tensor; 16 static activation and KV scales are not used)"
        in checkpoint.describe()
    )
    assert dict(checkpoint.tensors()).keys() == meant.keys()


def test_ignored_modules_are_plain(tmp_path: Path) -> None:
    meant = write(make_model("llama", **SIZES), tmp_path, "channel")
    reconfigure(tmp_path, compressed("channel", ignore=["lm_head", UP]))
    with pytest.raises(ModelLoadError) as caught:
        weights.open_checkpoint(tmp_path)
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"  1 unexpected: {UP}.weight_scale [200, 1]")
    assert lines[2].startswith(f"  1 of an unsupported type: {UP}.weight is F8_E4M3")

    def plain(tensors: Tensors) -> None:
        del tensors[f"{UP}.weight_scale"]
        tensors[f"{UP}.weight"] = meant[f"{UP}.weight"].bfloat16()

    rewrite(tmp_path, plain)
    found = dict(weights.open_checkpoint(tmp_path).tensors())[f"{UP}.weight"]
    assert torch.equal(found, meant[f"{UP}.weight"].bfloat16())


Change = Callable[[Tensors], object]
SPOILED: dict[str, tuple[str, Change, str]] = {
    "missing": (
        "channel",
        lambda tensors: tensors.pop(f"{UP}.weight_scale"),
        f"  1 missing: {UP}.weight_scale [200, 1] or [200]",
    ),
    "missing-block": (
        "block",
        lambda tensors: tensors.pop(f"{UP}.weight_scale_inv"),
        f"  1 missing: {UP}.weight_scale_inv [2, 2]",
    ),
    "columns-instead-of-rows": (
        "channel",
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(160, 1)}),
        f"  1 mis-shaped: {UP}.weight_scale expected [200, 1] or [200], found [160, 1]",
    ),
    "too-few-blocks": (
        "block",
        lambda tensors: tensors.update({f"{UP}.weight_scale_inv": torch.ones(1, 2)}),
        f"  1 mis-shaped: {UP}.weight_scale_inv expected [2, 2], found [1, 2]",
    ),
    "leftover": (
        "channel",
        lambda tensors: tensors.update({f"{UP}.weight": torch.ones(200, 160)}),
        f"  1 unexpected: {UP}.weight_scale [200, 1]",
    ),
    "zero-points": (
        "channel",
        lambda tensors: tensors.update({f"{UP}.weight_zero_point": torch.ones(200, 1)}),
        f"  1 unexpected: {UP}.weight_zero_point [200, 1]",
    ),
    "e5m2": (
        "channel",
        lambda tensors: tensors.update(
            {f"{UP}.weight": torch.ones(200, 160).to(torch.float8_e5m2)}
        ),
        f"  1 of an unsupported type: {UP}.weight is F8_E5M2",
    ),
    "scale-type": (
        "channel",
        lambda tensors: tensors.update({f"{UP}.weight_scale": torch.ones(200, 1).int()}),
        f"  1 of an unsupported type: {UP}.weight_scale is I32",
    ),
    "fp8-embedding": (
        "channel",
        lambda tensors: tensors.update(
            {"model.embed_tokens.weight": torch.ones(64, 160).to(FLOAT8)}
        ),
        "  1 of an unsupported type: model.embed_tokens.weight is F8_E4M3",
    ),
}


@pytest.mark.parametrize("case", SPOILED)
def test_wrong_scales_are_listed(case: str, tmp_path: Path) -> None:
    layout, change, message = SPOILED[case]
    write(make_model("llama", **SIZES), tmp_path, layout)
    rewrite(tmp_path, change)
    with pytest.raises(ModelLoadError) as caught:
        weights.open_checkpoint(tmp_path)
    assert any(line.startswith(message) for line in str(caught.value).splitlines()), caught.value


def test_fp8_without_a_quantization_config(tmp_path: Path) -> None:
    write(make_model("llama", **SIZES), tmp_path, "channel")
    reconfigure(tmp_path, {})
    with pytest.raises(ModelLoadError, match=r"(?s)14 unexpected: .*14 of an unsupported"):
        weights.open_checkpoint(tmp_path)


def test_unsupported_methods_name_the_file_and_field(tmp_path: Path) -> None:
    write(make_model("llama", **SIZES), tmp_path, "channel")
    reconfigure(tmp_path, {"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelLoadError, match=r"config\.json: quantization_config\.quant_method"):
        weights.open_checkpoint(tmp_path)


def test_random_weights_do_not_mind(tmp_path: Path) -> None:
    write(make_model("llama", **SIZES), tmp_path, "block")
    checkpoint = weights.open_checkpoint(tmp_path, random_weights=True)
    assert {tensor.dtype for _, tensor in checkpoint.tensors()} == {torch.float32}
    assert "fp8" not in checkpoint.describe()
