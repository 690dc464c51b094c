"""Safetensors folders and random weights, against the transformers models that wrote them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tiny_models import VARIANTS, assert_same, make_model, save, stored_tensors
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import upload as upload_module
from tokenmill.models.checkpoints import weights
from tokenmill.models.checkpoints.upload import FileTensor, Uploader, upload
from tokenmill.models.checkpoints.weights_digest import weights_digest


def read(path: Path) -> dict[str, torch.Tensor]:
    return dict(weights.open_checkpoint(path).tensors())


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the tensors of a single-file checkpoint."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, {"format": "pt"})


@pytest.mark.parametrize("variant", VARIANTS)
def test_single_file(variant: str, tmp_path: Path) -> None:
    model = make_model(variant)
    checkpoint = weights.open_checkpoint(save(model, tmp_path))
    expected = {name: tuple(value.shape) for name, value in checkpoint.tensors()}
    assert weights.expected_tensors(checkpoint.spec) == expected
    assert_same(dict(checkpoint.tensors()), model)
    assert (checkpoint.kind, checkpoint.file_type, checkpoint.path) == (
        "safetensors",
        "F32",
        tmp_path,
    )
    assert checkpoint.num_bytes == 4 * sum(x.numel() for x in stored_tensors(model).values())


def test_shards_and_progress(tmp_path: Path) -> None:
    model = make_model("llama")
    save(model, tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    seen: list[tuple[int, int]] = []
    checkpoint = weights.open_checkpoint(tmp_path)
    assert_same(dict(checkpoint.tensors(lambda done, total: seen.append((done, total)))), model)
    assert seen == sorted(seen)
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stored_type_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    model = make_model("llama").to(dtype)
    found = read(save(model, tmp_path))
    assert {tensor.dtype for tensor in found.values()} == {dtype}
    assert_same(found, model)


def test_a_config_of_another_depth_is_refused(tmp_path: Path) -> None:
    config = save(make_model("llama"), tmp_path) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(
        ModelLoadError, match=r"9 missing: model\.layers\.2\.input_layernorm.weight"
    ):
        weights.open_checkpoint(tmp_path)


def test_ignorable_tensors_are_skipped(tmp_path: Path) -> None:
    model = make_model("llama-tied")
    save(model, tmp_path)

    def add(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)

    rewrite(tmp_path, add)
    assert_same(read(tmp_path), model)


def test_one_error_lists_every_wrong_tensor(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.self_attn.rotary.weight"] = torch.ones(2, 3)
        tensors["model.layers.1.self_attn.k_proj.weight"] = torch.ones(8, 32)
        tensors["model.layers.1.mlp.up_proj.weight"] = torch.ones(48, 32, dtype=torch.int8)

    rewrite(tmp_path, spoil)
    with pytest.raises(ModelLoadError) as caught:
        weights.open_checkpoint(tmp_path)
    assert str(caught.value).splitlines() == [
        f"{tmp_path}: the tensors do not fit the LlamaForCausalLM that its config describes",
        "  1 missing: model.norm.weight [32]",
        "  1 unexpected: model.layers.0.self_attn.rotary.weight [2, 3] in model.safetensors",
        "  1 mis-shaped: model.layers.1.self_attn.k_proj.weight expected [16, 32], "
        "found [8, 32] in model.safetensors",
        "  1 of an unsupported type: model.layers.1.mlp.up_proj.weight is I8 in model.safetensors",
        "  supported types: F32, BF16, F16, GGUF Q8_0, GGUF Q4_0, GGUF Q4_1, GGUF Q4_K, GGUF Q6_K, "
        "F8_E4M3 in linear layers that a quantization_config covers",
    ]


def test_long_lists_are_cut(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    rewrite(tmp_path, dict.clear)
    with pytest.raises(ModelLoadError, match=r"21 missing: .*; and 13 more"):
        weights.open_checkpoint(tmp_path)


def test_missing_shard_is_named(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="20KB")
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelLoadError, match=f"{shard.name} is missing, though model.safetensors"):
        weights.open_checkpoint(tmp_path)


def test_index_stays_in_its_folder(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="20KB")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"lm_head.weight": "../other.safetensors"}}))
    with pytest.raises(ModelLoadError, match="which is not in this folder"):
        weights.open_checkpoint(tmp_path)


def test_tensor_in_two_shards(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path, max_shard_size="20KB")
    first, second = sorted(tmp_path.glob("*.safetensors"))[:2]
    second.write_bytes(first.read_bytes())
    with pytest.raises(ModelLoadError, match=f"is in {first.name} as well"):
        weights.open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", "{", "config.json: cannot be read as JSON"),
        ("config.json", "[]", "config.json: expected a JSON object, got list"),
        ("config.json", '{"model_type": "bert"}', "config.json: architectures: model_type 'bert'"),
        ("generation_config.json", '{"eos_token_id": "x"}', "generation_config.json: eos_token_id"),
        ("model.safetensors", "garbage", "model.safetensors: not a readable safetensors file"),
    ],
)
def test_damaged_files_are_named(file: str, content: str, message: str, tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    (tmp_path / file).write_text(content)
    with pytest.raises(ModelLoadError, match=message):
        weights.open_checkpoint(tmp_path)


def test_pickle_is_refused(tmp_path: Path) -> None:
    save(make_model("llama"), tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    refusal = "only pytorch_model.bin; pickle checkpoints are refused"
    with pytest.raises(ModelLoadError, match=refusal):
        weights.open_checkpoint(tmp_path)
    with pytest.raises(ModelLoadError, match="pickle checkpoints are refused"):
        weights.open_checkpoint(tmp_path / "pytorch_model.bin")


def test_folders_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        weights.open_checkpoint(tmp_path / "absent")
    with pytest.raises(ModelLoadError, match=r"no config\.json in this folder$"):
        weights.open_checkpoint(tmp_path)
    (tmp_path / "a.gguf").touch()
    with pytest.raises(ModelLoadError, match=r"give one of its GGUF files: a\.gguf"):
        weights.open_checkpoint(tmp_path)


def test_eos_ids_are_merged(tmp_path: Path) -> None:
    model = make_model("llama")
    model.generation_config.eos_token_id = [5, 2]
    save(model, tmp_path)
    assert weights.open_checkpoint(tmp_path).spec.eos_token_ids == (2, 5)


def test_random_weights_need_a_config_only(tmp_path: Path) -> None:
    make_model("qwen3-tied").config.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_type": "qwen3"}))
    with pytest.raises(ModelLoadError, match=r"no model\.safetensors"):
        weights.open_checkpoint(tmp_path)
    checkpoint = weights.open_checkpoint(tmp_path, random_weights=True, seed=3)
    assert checkpoint.kind == "config"
    seen: list[tuple[int, int]] = []
    first = dict(checkpoint.tensors(lambda done, total: seen.append((done, total))))
    assert seen[-1] == (checkpoint.num_bytes, checkpoint.num_bytes)
    shapes = {name: tuple(tensor.shape) for name, tensor in first.items()}
    assert shapes == weights.expected_tensors(checkpoint.spec)
    again, other = (
        dict(weights.open_checkpoint(tmp_path, random_weights=True, seed=seed).tensors())
        for seed in (3, 4)
    )
    for name, tensor in first.items():
        assert torch.equal(tensor, again[name])
        assert torch.equal(tensor, other[name]) == name.endswith("norm.weight")
        assert name.endswith("norm.weight") == bool((tensor == 1).all())
    embedding = first["model.embed_tokens.weight"]
    assert embedding.std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(*(first[f"model.layers.{i}.mlp.up_proj.weight"] for i in (0, 1)))


def test_random_values_follow_seed_and_name_alone() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    digest = blake2b(f"3:{name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "big"))
    expected = torch.empty(48, 32).normal_(0.0, 0.02, generator=generator)
    assert torch.equal(weights.RandomTensor(name, (48, 32), 3).read(), expected)


def test_random_weights_are_bf16_on_a_gpu(tmp_path: Path) -> None:
    make_model("llama").config.save_pretrained(tmp_path)
    checkpoint = weights.open_checkpoint(tmp_path, random_weights=True)
    made: list[str] = []

    def record(tensor: weights.RandomTensor) -> torch.Tensor:
        made.append(tensor.device)
        return torch.empty(tensor.shape, dtype=tensor.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weights.RandomTensor, "read", record)
        seen: list[tuple[int, int]] = []
        found = dict(checkpoint.tensors(lambda *both: seen.append(both), "cuda"))
    assert set(made) == {"cuda"}
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}
    assert seen[-1] == (checkpoint.spec.weight_bytes(2), checkpoint.spec.weight_bytes(2))


@pytest.mark.parametrize("piece_bytes", [1 << 20, 100])
def test_threads_upload_the_same_bits(piece_bytes: int, tmp_path: Path) -> None:
    """Pieces of 100 bytes divide no tensor of the model, and end within elements."""
    save(make_model("llama").to(torch.bfloat16), tmp_path, max_shard_size="10KB")
    stored = weights.read_stored(tmp_path)
    uploaded = upload(stored.values(), "cpu", piece_bytes)
    for tensor, found in zip(stored.values(), uploaded, strict=True):
        assert found.dtype == torch.bfloat16 and torch.equal(found, tensor.read())


def test_few_bytes_are_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tensor that is larger than what may be ahead is read when it is alone."""
    stored = list(weights.read_stored(save(make_model("llama"), tmp_path)).values())
    started: list[int] = []
    start = Uploader.start

    def record(self: Uploader, tensor: FileTensor) -> object:
        started.append(tensor.num_bytes)
        return start(self, tensor)

    monkeypatch.setattr(upload_module, "AHEAD_BYTES", 5000)
    monkeypatch.setattr(Uploader, "start", record)
    assert max(tensor.num_bytes for tensor in stored) > 5000
    for count, tensor in enumerate(upload(stored, "cpu")):
        ahead = started[count:]
        assert sum(ahead) <= 5000 or len(ahead) == 1
        assert torch.equal(tensor, stored[count].read())
    assert len(started) == len(stored)


def test_a_checkpoint_is_read_by_threads(tmp_path: Path) -> None:
    """Files in threads and what is not in a file as it is, in the order of the mapping."""
    checkpoint = weights.open_checkpoint(save(make_model("llama"), tmp_path))
    mixed = {"drawn.weight": weights.RandomTensor("drawn.weight", (3, 4), 0)}
    readable = {**checkpoint.readable, **mixed}
    found = dict(weights.read_by_threads(readable, "cpu"))
    assert list(found) == list(readable)
    assert all(torch.equal(found[name], tensor.read()) for name, tensor in readable.items())


def test_a_file_that_is_cut_while_it_is_read(tmp_path: Path) -> None:
    stored = weights.read_stored(save(make_model("llama"), tmp_path))
    last = max(stored.values(), key=lambda tensor: tensor.begin)
    with last.file.open("rb+") as file:
        file.truncate(last.begin + 1)
    with pytest.raises(ModelLoadError, match=rf"model.safetensors: {last.name} cannot be read: it"):
        list(upload(stored.values(), "cpu"))
    last.file.unlink()
    with pytest.raises(ModelLoadError, match="cannot be read: No such file"):
        list(upload(stored.values(), "cpu"))


def test_a_digest_tells_weights_apart(tmp_path: Path) -> None:
    """By what is in the files, not by their path, size or time."""

    def digest(path: Path, **options: Any) -> str:
        return weights_digest(weights.open_checkpoint(path, **options).readable)

    folder = save(make_model("llama"), tmp_path / "one", max_shard_size="20KB")
    copy = shutil.copytree(folder, tmp_path / "copy", copy_function=shutil.copyfile)
    assert digest(copy) == digest(folder)
    drawn = [digest(path, random_weights=True, seed=s) for path in (folder, copy) for s in (0, 1)]
    assert drawn[:2] == drawn[2:] and len({*drawn, digest(folder)}) == 3
    for file in sorted(copy.glob("*.safetensors")):  # a change of any file is found
        before, data = digest(copy), load_file(file)
        time = file.stat().st_mtime_ns
        save_file({name: -tensor for name, tensor in data.items()}, file, {"format": "pt"})
        os.utime(file, ns=(time, time))
        assert digest(copy) != before


def test_a_digest_reads_little(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, sizes = tmp_path / "a.safetensors", [1, 4096, 100_000] * 1000
    readable = {
        str(i): weights.SafetensorsTensor(file, str(i), (size,), "F32", 0)
        for i, size in enumerate(sizes)
    }
    file.write_bytes(bytes(4 * max(sizes)))
    read, pread = [], os.pread
    monkeypatch.setattr(os, "pread", lambda fd, n, at: (read.append(n), pread(fd, n, at))[1])
    weights_digest(readable)
    assert 400 < len(read) <= 512 and max(read) == 4096
