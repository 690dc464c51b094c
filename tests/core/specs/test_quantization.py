"""quantization_config: what published checkpoints say, and what is refused by name."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest

from tokenmill.core.specs.quantization import QuantizationSpec, read_quantization
from tokenmill.core.types import ModelLoadError

# As llm-compressor writes FP8_DYNAMIC, and Qwen3-8B-FP8 its blocks.
FP8_DYNAMIC: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "block_structure": None,
                "dynamic": True,
                "group_size": None,
                "num_bits": 8,
                "strategy": "token",
                "symmetric": True,
                "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "block_structure": None,
                "dynamic": False,
                "group_size": None,
                "num_bits": 8,
                "observer": "minmax",
                "strategy": "channel",
                "symmetric": True,
                "type": "float",
            },
        }
    },
    "format": "float-quantized",
    "global_compression_ratio": 1.24,
    "ignore": ["lm_head", "re:.*layers\\.0\\.mlp"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
}
FP8_BLOCK: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
}
WEIGHTS = "config_groups.group_0.weights"
INPUTS = "config_groups.group_0.input_activations"


def read(settings: dict[str, Any], **changes: Any) -> QuantizationSpec:
    """Parse after changes, whose keys are paths with "__" for dots."""
    settings = deepcopy(settings)
    for path, value in changes.items():
        *parents, last = path.split("__")
        target = settings
        for parent in parents:
            target = target[parent]
        target[last] = value
    spec = read_quantization({"quantization_config": settings})
    assert spec is not None
    return spec


def test_no_quantization() -> None:
    assert read_quantization({}) is None
    assert read_quantization({"quantization_config": None}) is None


def test_channel_scales() -> None:
    spec = read(FP8_DYNAMIC)
    assert (spec.kind, spec.block, spec.scale_names) == ("channel", None, ("weight_scale",))
    assert spec.scale_shapes(300, 200) == ((300, 1), (300,))
    assert spec.describe() == "fp8 with a scale per row"


def test_tensor_scales() -> None:
    weights = {"config_groups__group_0__weights__strategy": "tensor"}
    inputs = {"config_groups__group_0__input_activations__dynamic": False}
    assert read(FP8_DYNAMIC, **weights, **inputs).scale_shapes(300, 200) == ((1,), (), (1, 1))
    plain = read({"quant_method": "fp8", "activation_scheme": "static"})
    assert (plain.kind, plain.block) == ("tensor", None)
    assert plain.scale_names == ("weight_scale", "weight_scale_inv")


@pytest.mark.parametrize("structure", [[64, 128], "64x128"])
def test_block_scales(structure: Any) -> None:
    spec = read(FP8_BLOCK)
    assert (spec.kind, spec.block, spec.scale_names) == ("block", (128, 128), ("weight_scale_inv",))
    assert spec.scale_shapes(300, 256) == ((3, 2),)
    assert spec.describe() == "fp8 with a scale per 128x128 block"
    group = FP8_DYNAMIC["config_groups"]["group_0"]
    block = group["weights"] | {"strategy": "block", "block_structure": structure}
    other = read(FP8_DYNAMIC, config_groups={"group_0": group | {"weights": block}})
    assert (other.kind, other.block, other.scale_names) == ("block", (64, 128), ("weight_scale",))


def test_weights_alone_may_be_fp8() -> None:
    assert read(FP8_DYNAMIC, config_groups__group_0__input_activations=None).kind == "channel"


def test_ignored_modules() -> None:
    modules = ["lm_head", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj"]
    assert read(FP8_DYNAMIC).covers(modules) == modules[2:]
    assert read(FP8_BLOCK).covers(modules) == modules
    for field in ("modules_to_not_convert", "ignored_layers"):
        for names in (["lm_head", "model.layers.0"], ["lm_head", r"model.layers.\d.mlp"]):
            assert read(FP8_BLOCK, **{field: names}).covers(modules) == modules[2:]
        assert read(FP8_BLOCK, **{field: ["up_proj"]}).covers(modules) == modules[:1]
    # compressed-tensors names whole modules
    assert read(FP8_DYNAMIC, ignore=["model.layers.0", "up_proj"]).covers(modules) == modules


@pytest.mark.parametrize("method", ["awq", "gptq", "bitsandbytes", "mxfp4", "modelopt", None])
def test_other_methods_are_refused(method: str | None) -> None:
    expected = rf"quantization_config\.quant_method: {method!r} is not supported; use 'compressed"
    with pytest.raises(ModelLoadError, match=expected):
        read(FP8_BLOCK, quant_method=method)


@pytest.mark.parametrize(
    ("settings", "path", "value", "supported"),
    [
        (FP8_BLOCK, "fmt", "e5m2", "'e4m3'"),
        (FP8_BLOCK, "activation_scheme", "int8", "'dynamic' or 'static'"),
        (FP8_BLOCK, "weight_block_size", [128], "two positive integers"),
        (FP8_BLOCK, "weight_block_size", [0, 128], "two positive integers"),
        (FP8_BLOCK, "modules_to_not_convert", "lm_head", "a list of module names"),
        (FP8_DYNAMIC, "format", "int-quantized", "'float-quantized' or 'naive-quantized'"),
        (FP8_DYNAMIC, "format", "pack-quantized", "'float-quantized' or 'naive-quantized'"),
        (FP8_DYNAMIC, "format", None, "'float-quantized' or 'naive-quantized'"),
        (FP8_DYNAMIC, "sparsity_config.format", "sparse-24-bitmask", "'dense'"),
        (FP8_DYNAMIC, "transform_config", {"config_groups": {"u": {}}}, "null"),
        (FP8_DYNAMIC, "config_groups", None, "a JSON object"),
        (FP8_DYNAMIC, "config_groups.group_0.format", "nvfp4-pack-quantized", "'float-quantized'"),
        (FP8_DYNAMIC, "config_groups.group_0.output_activations", {"num_bits": 8}, "null"),
        (FP8_DYNAMIC, f"{WEIGHTS}.type", "int", "'float'"),
        (FP8_DYNAMIC, f"{WEIGHTS}.num_bits", 4, "8"),
        (FP8_DYNAMIC, f"{WEIGHTS}.symmetric", False, "True"),
        (FP8_DYNAMIC, f"{WEIGHTS}.strategy", "group", "'tensor' or 'channel' or 'block'"),
        (FP8_DYNAMIC, f"{INPUTS}.type", "int", "'float'"),
        (FP8_DYNAMIC, f"{INPUTS}.num_bits", 4, "8"),
        (FP8_DYNAMIC, "ignore", ["re:("], "regular expressions"),
    ],
)
def test_errors_name_field_and_alternatives(
    settings: dict[str, Any], path: str, value: Any, supported: str
) -> None:
    with pytest.raises(ModelLoadError) as caught:
        read(settings, **{path.replace(".", "__"): value})
    message = str(caught.value)
    assert message.startswith(f"quantization_config.{path}: ")
    assert f" is not supported; use {supported}" in message


def test_block_strategy_needs_a_block() -> None:
    with pytest.raises(ModelLoadError, match=rf"{WEIGHTS}\.block_structure: None"):
        read(FP8_DYNAMIC, config_groups__group_0__weights__strategy="block")


def test_groups_share_one_scheme() -> None:
    group = FP8_DYNAMIC["config_groups"]["group_0"]
    other = group | {"weights": group["weights"] | {"strategy": "tensor"}}
    assert read(FP8_DYNAMIC, config_groups={"a": group, "b": group}).kind == "channel"
    with pytest.raises(ModelLoadError, match="expected one weight scheme for all, got 2"):
        read(FP8_DYNAMIC, config_groups={"a": group, "b": other})
