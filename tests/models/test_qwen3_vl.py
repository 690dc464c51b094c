"""Qwen3-VL against transformers: images of several sizes, positions, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from harness import Harness
from tiny_images import Prompt, image, prompt, reference_logits
from tiny_models import make_model, save, stored_tensors, tame
from tokenmill.core.types import ModelLoadError
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.weights import open_checkpoint, read_spec

SMALL, WIDE, TALL = image(1, (1, 4, 4)), image(2, (1, 4, 12)), image(3, (1, 10, 6))
PROMPTS = {
    "text": prompt(1, 40),
    "one": prompt(2, 9, WIDE, 14),
    "several": prompt(3, 5, TALL, 2, SMALL, WIDE, 11, SMALL, 3),
    "first and last": prompt(4, TALL, 7, SMALL),
}


@pytest.mark.parametrize("variant", ["qwen3-vl", "qwen3-vl-moe"])
def test_logits_are_those_of_transformers(variant: str, tmp_path: Path) -> None:
    reference = tame(make_model(variant))
    harness = Harness(save(reference, tmp_path), "fp32")
    for name, asked in PROMPTS.items():
        expected, total = reference_logits(reference, asked), len(asked.token_ids)
        for chunks in ([total], [1, 12, 7, total - 20], [total - 9] + [1] * 9):
            found = harness.logits(asked.token_ids, chunks, asked.images)
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=0, msg=name)


def test_fp8_experts_in_one_tensor(tmp_path: Path) -> None:
    """As `quant_method: fp8` stores them: codes, and a scale for each block of each expert."""
    reference = tame(make_model("qwen3-vl-moe"))
    tensors = stored_tensors(reference)
    for name in [name for name in tensors if ".experts." in name]:
        blocks = tensors[name].unfold(1, 8, 8).unfold(2, 8, 8)  # [experts, rows, columns, 8, 8]
        scales = blocks.abs().amax((3, 4)) / 448
        spread = scales.repeat_interleave(8, 1).repeat_interleave(8, 2)
        codes = (tensors[name] / spread).to(torch.float8_e4m3fn)
        tensors |= {name: codes, f"{name}_scale_inv": scales}
        reference.get_parameter(name).data.copy_((codes.float() * spread).mT)
    reference.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    quantization = {"quant_method": "fp8", "weight_block_size": [8, 8]}
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))
    asked, harness = PROMPTS["one"], Harness(tmp_path, "fp32")
    found = harness.logits(asked.token_ids, [len(asked.token_ids)], asked.images)
    expected = reference_logits(reference, asked)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_fp8_experts_taken_apart(tmp_path: Path) -> None:
    """As compressed-tensors stores them: each expert's three weights, a scale for each channel.

    The encoder, the router and the head are plain.
    """
    reference = tame(make_model("qwen3-vl-moe"))
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in stored_tensors(reference).items():
        if ".experts." in name:
            meant = [_apart(tensors, name, index, part) for index, part in enumerate(tensor)]
            reference.get_parameter(name).data.copy_(torch.stack(meant))
        elif "language_model" in name and name.endswith("_proj.weight"):
            meant_weight = _rounded(tensors, name.removesuffix(".weight"), tensor)
            reference.get_parameter(name).data.copy_(meant_weight)
        else:
            tensors[name] = tensor
    reference.save_pretrained(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    file = tmp_path / "config.json"
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "dynamic": False}
    group = {"targets": ["Linear"], "weights": weights | {"symmetric": True}}
    ignored = ["re:.*lm_head", "re:visual.*", "re:model.visual.*", "re:.*mlp.gate$"]
    quantization = {"quant_method": "compressed-tensors", "format": "float-quantized"}
    quantization |= {"config_groups": {"group_0": group}, "ignore": ignored}
    config = json.loads(file.read_text()) | {"quantization_config": quantization}
    file.write_text(json.dumps(config))
    asked, harness = PROMPTS["one"], Harness(tmp_path, "fp32")
    found = harness.logits(asked.token_ids, [len(asked.token_ids)], asked.images)
    torch.testing.assert_close(found, reference_logits(reference, asked), atol=1e-4, rtol=0)


def _apart(
    tensors: dict[str, torch.Tensor], name: str, index: int, stored: torch.Tensor
) -> torch.Tensor:
    """Write one expert's part of a tensor, which is transposed; what its codes stand for."""
    module = f"{name.rpartition('.')[0]}.{index}"
    if name.endswith("down_proj"):
        return _rounded(tensors, f"{module}.down_proj", stored.mT.contiguous())
    gate, up = (part.contiguous() for part in stored.mT.chunk(2))
    meant = (
        _rounded(tensors, f"{module}.gate_proj", gate),
        _rounded(tensors, f"{module}.up_proj", up),
    )
    return torch.cat(meant)


def _rounded(tensors: dict[str, torch.Tensor], module: str, weight: torch.Tensor) -> torch.Tensor:
    scales = weight.abs().amax(1, keepdim=True) / 448
    codes = (weight / scales).to(torch.float8_e4m3fn)
    tensors |= {f"{module}.weight": codes, f"{module}.weight_scale": scales}
    return codes.float() * scales


def test_images_change_what_is_said(tmp_path: Path) -> None:
    """Else the test above could not fail."""
    harness = Harness(save(tame(make_model("qwen3-vl")), tmp_path), "fp32")
    asked = PROMPTS["one"]
    total = len(asked.token_ids)
    seen = harness.logits(asked.token_ids, [total], asked.images)[-1]
    other = Prompt(asked.token_ids, prompt(2, 9, image(7, (1, 4, 12)), 14).images)
    for images in (other.images, ()):
        unlike = harness.logits(asked.token_ids, [total], images)[-1]
        assert (seen - unlike).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("vision_config", None, "vision_config: expected an object"),
        ("vision_config.depth", 0, "vision_config.depth: expected a positive integer, got 0"),
        ("vision_config.num_heads", 3, "vision_config.hidden_size: 32 with num_heads 3"),
        ("vision_config.hidden_act", "silu", "vision_config.hidden_act: only 'gelu_pytorch_tanh'"),
        ("vision_config.out_hidden_size", 32, "vision_config.out_hidden_size: expected the text"),
        ("vision_config.num_position_embeddings", 35, "num_position_embeddings: expected the size"),
        ("vision_config.deepstack_visual_indexes", [3], "indexes: expected layers below depth 3"),
        ("vision_config.deepstack_visual_indexes", [0, 1, 2], "the text model has 2 layers"),
        ("text_config", 1, "text_config: expected an object, got 1"),
        ("text_config.rope_parameters.mrope_section", [4, 4], "mrope_section: expected three"),
        ("text_config.rope_parameters.mrope_interleaved", False, "mrope_interleaved: only true"),
        ("image_token_id", -1, "image_token_id: expected an integer of zero or more"),
    ],
)
def test_a_wrong_field_is_named(field: str, value: Any, says: str, tmp_path: Path) -> None:
    make_model("qwen3-vl").config.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text()) | {"architectures": ["Qwen3VLForConditionalGeneration"]}
    *outer, last = field.split(".")
    inner = config
    for name in outer:
        inner = inner[name]
    inner[last] = value
    file.write_text(json.dumps(config))
    with pytest.raises(ModelLoadError, match=r"config\.json") as error:
        read_spec(tmp_path)
    assert says in str(error.value)


def test_the_published_shapes_have_their_parameters() -> None:
    """235B-A22B: 0.41 B in the encoder's layers, 0.16 B in its mergers, 235.1 B in the text."""
    config = {
        "architectures": ["Qwen3VLMoeForConditionalGeneration"],
        "text_config": {
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 94,
            "num_attention_heads": 64,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 1536,
            "rope_theta": 5e6,
            "max_position_embeddings": 262144,
            "rope_scaling": {
                "rope_type": "default",
                "mrope_section": [24, 20, 20],
                "mrope_interleaved": True,
            },
        },
        "vision_config": {"out_hidden_size": 4096},
    }
    spec = spec_of(config)
    assert spec.vision is not None and not spec.tie_embeddings
    assert round(spec.vision.num_params() / 1e9, 2) == 0.58
    assert round((spec.num_params() - spec.vision.num_params()) / 1e9, 1) == 235.1


def test_random_weights_need_no_checkpoint(tmp_path: Path) -> None:
    model = make_model("qwen3-vl-moe")
    model.config.architectures = ["Qwen3VLMoeForConditionalGeneration"]
    model.config.save_pretrained(tmp_path)
    checkpoint = open_checkpoint(tmp_path, random_weights=True)
    found = dict(checkpoint.tensors())
    assert sum(t.numel() for t in found.values()) == checkpoint.spec.num_params()
    assert found["visual.blocks.0.norm1.weight"].eq(1).all()
