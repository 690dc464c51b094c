"""EAGLE-3 heads against transformers' own layers, and the folders they come from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
)

from draft_heads import eagle3_tensors, save_eagle3
from driver import build
from tiny_models import make_model, save, tame
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import ModelLoadError, SamplingParams
from tokenmill.sched.sequence import Batch, Sequence

PROMPT = [5, 9, 3, 60, 33, 2, 17, 17, 8]
WIDE = {"head_dim": 16, "hidden_size": 64, "num_hidden_layers": 5}
KEY = "eagle_aux_hidden_state_layer_ids"


def expected_drafts(
    model: PreTrainedModel, tensors: dict[str, torch.Tensor], layers: list[int], before: bool
) -> list[int]:
    """Three drafts by modules of transformers; the layers are numbered by their inputs."""
    bias = "midlayer.self_attn.q_proj.bias" in tensors
    config = LlamaConfig(
        hidden_size=64, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, rope_theta=500_000.0, rms_norm_eps=1e-5, attention_bias=bias,
    )  # fmt: skip
    config._attn_implementation = "eager"
    attention, mlp = LlamaAttention(config, 0), LlamaMLP(config)
    for name in ("q", "k", "v"):
        old = getattr(attention, f"{name}_proj")
        setattr(attention, f"{name}_proj", torch.nn.Linear(128, old.out_features, bias=bias))
    own = {name.removeprefix("midlayer."): tensor for name, tensor in tensors.items()}
    for module, prefix in ((attention, "self_attn."), (mlp, "mlp.")):
        module.load_state_dict({name: own[prefix + name] for name in module.state_dict()})

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        layer = LlamaRMSNorm(64, 1e-5)
        layer.weight.data = own[f"{name}.weight"]
        return layer(x)

    found = model(torch.tensor([PROMPT]), output_hidden_states=True)
    states = torch.cat([found.hidden_states[layer][0] for layer in layers], 1) @ own["fc.weight"].T
    newest = int(found.logits[0, -1].argmax())
    ids, drafts = [*PROMPT[1:], newest], []
    for _ in range(3):
        embedded = model.model.embed_tokens(torch.tensor(ids))
        normed = norm(states, "hidden_norm")
        pairs = torch.cat([norm(embedded, "input_layernorm"), normed], 1)[None]
        rotary = LlamaRotaryEmbedding(config)(pairs, torch.arange(len(ids))[None])
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        attended = attention(pairs, position_embeddings=rotary, attention_mask=mask)[0][0]
        stream = (normed if before else states) + attended
        out = stream + mlp(norm(stream, "post_attention_layernorm"))
        draft = int((norm(out[-1], "norm") @ own["lm_head.weight"].T).argmax())
        drafts.append(draft + int(own["d2t"][draft]))
        ids, states = [*ids, drafts[-1]], torch.cat([states, out[-1:]])
    return [newest, *drafts]


@pytest.mark.parametrize("variant", ["llama", "gpt-oss"])
@pytest.mark.parametrize(
    ("changes", "layers", "bias"),
    [
        ({}, [2, 2, 2], False),  # 2, half of five, and all but three
        ({"eagle_config": {KEY: [0, 1, 4]}}, [1, 2, 5], True),
        ({KEY: [0, 1, 4], "norm_before_residual": True}, [0, 1, 4], False),
    ],
)
@torch.no_grad()
def test_drafts_are_those_of_transformers_layers(
    variant: str, changes: dict[str, Any], layers: list[int], bias: bool, tmp_path: Path
) -> None:
    model = tame(make_model(variant, **WIDE), 0.3)
    if layers[-1] == 5:  # transformers has the state after the last layer normed
        model.model.norm = torch.nn.Identity()
    tensors = eagle3_tensors(model, bias)
    expected = expected_drafts(model, tensors, layers, "norm_before_residual" in changes)
    folder = save_eagle3(model, tmp_path / "head", tensors, **changes)
    if layers[-1] == 5:
        model = tame(make_model(variant, **WIDE), 0.3)
        expected[0] = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    built = build(
        save(model, tmp_path / "model"), "fp32", chunked=False, prefix_cache=False, num_blocks=8,
        mtp=3, draft=folder,
    )  # fmt: skip
    seq = Sequence(
        Request("0", Generate(PROMPT, SamplingParams(temperature=0.0))), (0, 0, 0), 100, frozenset()
    )
    seq.block_ids, seq.slot, seq.capacity = [1, 2], 0, 32
    seq.window_ids = [3, 4] if built.runner.sliding.num_groups else []
    batch = Batch([(seq, len(PROMPT))], len(PROMPT), [(seq, 0)], num_to_draft=3)
    result = built.engine._runner.run(batch)
    assert [result.token_ids[0][0], *result.draft_ids[0]] == expected


def test_heads_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    model = tame(make_model("llama", **WIDE), 0.3)
    target, tensors = save(model, tmp_path / "model"), eagle3_tensors(model)
    wrong: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"hidden_size": 128}, {}, "hidden_size of the EAGLE-3 head is 128, the model has 64"),
        ({"vocab_size": 99}, {}, "vocab_size of the EAGLE-3 head is 99, the model has 64"),
        ({"num_key_value_heads": 4}, {}, "num_key_value_heads .* is 4, the model has 2"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, {}, "use_aux_hidden_state is false"),
        ({KEY: [1, 2, 6]}, {}, r"layer_ids gives \[1, 2, 6\], expected 3 layers of .* 5"),
        ({}, {"d2t": None}, r"d2t \[56\] is missing: draft_vocab_size is 56"),
        ({}, {"d2t": torch.ones(3, dtype=torch.long)}, r"d2t is I64 \[3\], expected I64 \[56\]"),
        ({}, {"d2t": torch.arange(56) // 7 + 9}, "d2t leads to token 71, the model has 64"),
        ({}, {"fc.weight": None}, r"EAGLE-3 head of this model\n.*missing: fc\.weight \[64, 192\]"),
        ({}, {"fc.weight": torch.ones(2, 2)}, r"fc\.weight expected \[64, 192\], found \[2, 2\]"),
        ({}, {"odd.weight": torch.ones(2)}, r"unexpected: odd\.weight"),
    ]  # fmt: skip
    for changes, others, message in wrong:
        both = {name: tensor for name, tensor in (tensors | others).items() if tensor is not None}
        settings = {"draft_vocab_size": 56} | changes
        head = save_eagle3(model, tmp_path / "head", both, **settings)
        with pytest.raises(ModelLoadError, match=message):
            build(
                target, "fp32", chunked=False, prefix_cache=False, num_blocks=8, mtp=1, draft=head
            )
