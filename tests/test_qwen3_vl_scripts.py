"""The scripts that measure Qwen3-VL: the requests of a peer, and its weights."""

from __future__ import annotations

import json
from collections import UserDict
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from qwen3_vl_peer import (
    SHAPE,
    SPECIAL,
    draw_as_ours,
    make_folder,
    prompt_of,
    with_own_image,
)
from qwen3_vl_requests import Work
from tokenizers import Tokenizer

from tokenmill.core.requests import Request
from tokenmill.models import spec_of

ONE = torch.ones(1, 3)


def test_the_peer_gets_the_same_requests() -> None:
    spec = spec_of(json.loads(SHAPE.read_text()))
    assert spec.vision is not None
    work = Work(spec.vision, spec.vocab_size)
    for index in range(3):
        request = work.sample()
        (span,) = request.task.images
        prompt = prompt_of(request, index)
        ids, image = prompt["prompt_token_ids"], prompt["multi_modal_data"]["image"]
        assert ids.count(SPECIAL["<|image_pad|>"]) == 1
        assert len(ids) == len(request.task.prompt_token_ids) - span.num_tokens + 1
        assert (image.width // 32) * (image.height // 32) == span.num_tokens


@dataclass(frozen=True)
class Place:
    """As vLLM's PlaceholderRange."""

    offset: int
    length: int
    is_embed: None = None


@dataclass
class Elem:
    """As vLLM's MultiModalFieldElem."""

    data: torch.Tensor
    field: str


def test_a_processed_image_is_that_of_others_of_its_size() -> None:
    spec = spec_of(json.loads(SHAPE.read_text()))
    assert spec.vision is not None
    work, by_grid = Work(spec.vision, spec.vocab_size), dict[object, list[Request]]()
    while max(map(len, by_grid.values()), default=0) < 2:
        request = work.sample()
        by_grid.setdefault(request.task.images[0].image.grid, []).append(request)
    first, second = max(by_grid.values(), key=len)
    (span,), (other,) = first.task.images, second.task.images
    item = UserDict(pixel_values=Elem(torch.zeros(8, 4), "flat"), image_grid_thw=Elem(ONE, "grid"))
    made = {
        "type": "multimodal",
        "prompt_token_ids": first.task.prompt_token_ids,
        "mm_kwargs": UserDict(image=[item]),
        "mm_hashes": {"image": ["first"]},
        "mm_placeholders": {"image": [Place(span.offset, span.num_tokens)]},
    }
    found = with_own_image(made, second, "second")
    assert found["prompt_token_ids"] == second.task.prompt_token_ids
    assert found["mm_placeholders"] == {"image": [Place(other.offset, other.num_tokens)]}
    assert found["mm_hashes"] == {"image": ["second-image-0"]} and found["type"] == "multimodal"
    (own,) = found["mm_kwargs"]["image"]
    assert own["image_grid_thw"] is item["image_grid_thw"]
    assert own["pixel_values"].data.std() > 0.3 and not item["pixel_values"].data.any()


def test_its_folder_has_the_special_tokens_under_the_ids_of_the_config(tmp_path: Path) -> None:
    make_folder(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    found = tokenizer.encode("é<|vision_start|><|image_pad|><|vision_end|>").ids[2:]
    names = ("vision_start_token_id", "image_token_id", "vision_end_token_id")
    assert found == [config[name] for name in names]


def test_its_weights_are_drawn_as_ours() -> None:
    def module(**parts: torch.nn.Module) -> torch.nn.Module:
        made = torch.nn.Module()
        for name, part in parts.items():
            made.add_module(name, part)
        return made

    layer = module(
        gate=torch.nn.Linear(512, 512),
        o_proj=torch.nn.Linear(512, 512),
        input_layernorm=torch.nn.LayerNorm(512),
    )
    model = module(embed_tokens=torch.nn.Embedding(64, 512), layers=torch.nn.ModuleList([layer]))
    assert draw_as_ours(model) == 7
    model.requires_grad_(False)
    assert float(layer.gate.weight.std()) == pytest.approx(0.02, rel=0.05)
    assert float(layer.o_proj.weight.std()) == pytest.approx(0.02 / 96**0.5, rel=0.05)
    assert float(model.embed_tokens.weight.std()) == pytest.approx(0.02 * 512**0.5, rel=0.05)
    assert layer.input_layernorm.weight.eq(1).all()
