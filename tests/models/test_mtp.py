"""The MTP module against a plain torch reimplementation, and the files it comes from."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draft_heads import head_tensors
from tiny_models import make_model, save, stored_tensors, tame
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import ModelLoadError, SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.drafts.open_drafts import has_mtp
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.shards import shard
from tokenmill.models.checkpoints.weights import open_mtp, read_spec
from tokenmill.parallel import Ranks
from tokenmill.sched.sequence import Batch, Sequence

PROMPT = [5, 9, 3, 60, 33, 2, 17, 17, 8]
WIDE = {"head_dim": 16, "hidden_size": 64}


def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * weight


def eagle_head(tensors: dict[str, torch.Tensor], bias: bool) -> dict[str, torch.Tensor]:
    """The same layer as EAGLE's files have it: without norms, except one."""
    own = {name.split(".", 3)[3]: tensor for name, tensor in tensors.items()}
    head = {"fc.weight": own.pop("eh_proj.weight"), "embed_tokens.weight": torch.ones(3, 3)}
    if bias:
        head["fc.bias"] = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(1))
    gone = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight", "input_layernorm.weight")
    return head | {f"layers.0.{name}": own[name] for name in own if name not in gone}


@pytest.mark.parametrize("form", ["mtp", "mtp-wide", "eagle", "eagle-bias"])
@torch.no_grad()
def test_drafts_are_those_of_plain_torch(form: str, tmp_path: Path) -> None:
    model = tame(make_model("llama", **WIDE), 0.3)
    wide = 2 * model.config.intermediate_size + 16
    tensors = head_tensors(model, scale=0.2, inner=wide if form == "mtp-wide" else None)
    own = {name.split(".", 3)[3]: tensor for name, tensor in tensors.items()}
    config = copy.deepcopy(model.config)
    config.intermediate_size = own["mlp.gate_proj.weight"].shape[0]
    layer = LlamaDecoderLayer(config, layer_idx=0)
    layer.load_state_dict({name: own[name] for name in layer.state_dict()})
    bias = torch.zeros(64)
    if form.startswith("eagle"):
        tensors = eagle_head(tensors, form == "eagle-bias")
        bias = tensors.get("fc.bias", bias)
        layer.input_layernorm = torch.nn.Identity()
    save_file(tensors, tmp_path / "head.safetensors")

    def normed(x: torch.Tensor, name: str) -> torch.Tensor:
        return norm(x, own[f"{name}.weight"]) if form.startswith("mtp") else x

    built = build_engine(
        resolve_setup(
            Setup(
                ModelConfig(
                    str(save(model, tmp_path / "model")),
                    dtype="fp32",
                    draft=str(tmp_path / "head.safetensors"),
                ),
                CacheConfig(num_blocks=8),
                SchedulerConfig(max_num_seqs=2),
                ExecutionConfig(mtp=3),
            )
        )
    )
    request = Request("0", Generate(PROMPT, SamplingParams(temperature=0.0)))
    seq = Sequence(request, (0, 0, 0), 100, frozenset())
    seq.block_ids, seq.slot, seq.capacity = [1, 2], 0, 32
    batch = Batch([(seq, len(PROMPT))], len(PROMPT), [(seq, 0)], num_to_draft=3)
    result = built.engine._runner.run(batch)

    states = model.model(torch.tensor([PROMPT])).last_hidden_state[0]  # after the final norm
    newest = int(model.lm_head(states[-1]).argmax())
    assert result.token_ids == [[newest]]
    ids, drafts = [*PROMPT[1:], newest], []
    for _ in range(3):
        embedded = normed(model.model.embed_tokens(torch.tensor(ids)), "enorm")
        pairs = torch.cat([embedded, normed(states, "hnorm")], dim=1)
        places = torch.arange(len(ids))[None]
        rotary = LlamaRotaryEmbedding(model.config)(pairs, places)
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        found = layer(
            (pairs @ own["eh_proj.weight"].T + bias)[None], attention_mask=mask,
            position_embeddings=rotary,
        )  # fmt: skip
        out = (found[0] if isinstance(found, tuple) else found).view(len(ids), -1)
        recycled = normed(out, "shared_head.norm")
        drafts.append(int(model.lm_head(recycled[-1]).argmax()))
        ids, states = [*ids, drafts[-1]], torch.cat([states, recycled[-1:]])
    assert result.draft_ids == [drafts]


def test_a_module_is_found_in_a_checkpoint_or_refused_by_name(tmp_path: Path) -> None:
    model = tame(make_model("deepseek-v3"), 0.3)
    folder = save(model, tmp_path / "plain")
    spec = read_spec(folder)
    with pytest.raises(ModelLoadError, match=r"no tensor's name begins with model\.layers\.3\."):
        open_mtp(folder, spec)
    model.config.num_nextn_predict_layers = 1
    model.config.save_pretrained(folder)
    head = head_tensors(model)
    copies = {
        f"model.layers.3.{name}": model.model.embed_tokens.weight.data.clone()
        for name in ("embed_tokens.weight", "shared_head.head.weight")
    }
    save_file(stored_tensors(model) | head | copies, folder / "model.safetensors")
    assert open_mtp(folder, spec).keys() == head.keys()
    assert has_mtp(ModelConfig(), folder)
    head.pop("model.layers.3.eh_proj.weight")
    head["model.layers.3.hnorm.weight"] = torch.ones(3)
    head["model.layers.3.extra.weight"] = torch.ones(3)
    file = tmp_path / "head.safetensors"
    save_file(head, file)
    with pytest.raises(ModelLoadError) as failed:
        open_mtp(file, spec)
    for problem in (
        "missing: model.layers.3.eh_proj.weight",
        "hnorm.weight expected [64]",
        "extra",
    ):
        assert problem in str(failed.value)
    with pytest.raises(ModelLoadError, match=r"none: expected a \.safetensors .* found nothing"):
        open_mtp(tmp_path / "none", spec)
    file.write_text("version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelLoadError, match=r"head\.safetensors: a Git LFS pointer"):
        open_mtp(file, spec)


def test_a_module_of_another_model_is_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    folder = save(make_model("llama", **WIDE), tmp_path / "model")
    file = tmp_path / "head.safetensors"
    save_file(head_tensors(make_model("llama", hidden_size=32)), file)
    read: list[int] = []
    with pytest.raises(ModelLoadError) as failed:
        build(folder, str(file), read)
    assert f"{file}: the tensors do not fit an MTP module of this Llama" in str(failed.value)
    assert "enorm.weight expected [64], found [32]" in str(failed.value) and not read
    save_file({"odd.weight": torch.ones(2, 2)}, file)  # a head of another form
    with pytest.raises(ModelLoadError, match=r"begins with model\.layers\.2\., the first is odd"):
        build(folder, str(file), read)


def test_eagle_heads_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    folder, file = save(make_model("llama", **WIDE), tmp_path / "model"), tmp_path / "h.safetensors"
    head = eagle_head(head_tensors(make_model("llama", **WIDE)), bias=False)
    for change, message in (
        ({"d2t": torch.ones(3)}, "an EAGLE-3 head"),
        ({"fc.weight": torch.ones(64, 192)}, r"fc\.weight expected \[64, 128\], found \[64, 192\]"),
        ({"layers.1.mlp.up_proj.weight": torch.ones(2)}, r"unexpected: layers\.1\.mlp\.up_proj"),
    ):
        save_file(head | change, file)
        with pytest.raises(ModelLoadError, match=message):
            build(folder, str(file), [])
    save_file(head, file)
    with pytest.raises(ModelLoadError, match="is for a dense model, not DeepseekV3ForCausalLM"):
        build(save(make_model("deepseek-v3"), tmp_path / "deepseek"), str(file), [])


def build(folder: Path, draft: str, read: list[int]) -> None:
    build_engine(
        resolve_setup(
            Setup(
                ModelConfig(str(folder), dtype="fp32", draft=draft),
                CacheConfig(num_blocks=8),
                SchedulerConfig(),
                ExecutionConfig(mtp=1),
            )
        ),
        progress=lambda done, total: read.append(done),
    )


def test_what_drafts_needs_drafts(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    with pytest.raises(ModelLoadError, match=r"^--draft a\.safetensors needs --mtp N"):
        build_engine(
            resolve_setup(
                Setup(
                    ModelConfig(str(folder), dtype="fp32", draft="a.safetensors"),
                    CacheConfig(num_blocks=8),
                    SchedulerConfig(),
                )
            )
        )


def test_a_model_without_a_module_says_how_to_give_one(tmp_path: Path) -> None:
    folder = save(make_model("llama"), tmp_path)
    assert not has_mtp(ModelConfig(), folder)
    with pytest.raises(ModelLoadError, match="has no MTP module; give one with --draft"):
        build_engine(
            resolve_setup(
                Setup(
                    ModelConfig(str(folder), dtype="fp32"),
                    CacheConfig(),
                    SchedulerConfig(),
                    ExecutionConfig(mtp=1),
                )
            )
        )


def test_ranks_that_do_not_divide_a_wide_mlp_are_refused() -> None:
    spec = spec_of(make_model("llama").config.to_dict() | {"architectures": ["LlamaForCausalLM"]})
    with pytest.raises(ModelLoadError, match="--tp 4 does not divide an MLP of 10 channels"):
        shard("mlp.gate_proj.weight", torch.zeros(10, 4), spec, Ranks(0, 4))
