"""GGUF files against transformers' loader and the gguf package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor

from tiny_models import SMALL, assert_same, make_model, save
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import gguf as gguf_files
from tokenmill.models.checkpoints import store, weights
from tokenmill.models.checkpoints.weights_digest import weights_digest

Kind = gguf.GGMLQuantizationType

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
K_QUANT_SIZES = SMALL | {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1}
ANY_BLOCKS = (Kind.Q4_K, Kind.Q6_K)  # the gguf package reads but does not write these


def gguf_name(name: str) -> str:
    if match := re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name):
        return f"blk.{match[1]}.{LAYER_NAMES[match[2]]}.{match[3]}"
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, _, suffix = name.rpartition(".")
    return f"{top[stem]}.{suffix}"


def permute(tensor: np.ndarray, heads: int) -> np.ndarray:
    """The row order that llama.cpp's converter gives to q and k of the llama architecture."""
    halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
    return halves.swapaxes(1, 2).reshape(tensor.shape)


def random_blocks(shape: tuple[int, ...], kind: Kind) -> np.ndarray:
    """Valid blocks of any content: random bytes whose fp16 scales are finite."""
    elements, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(1).integers(0, 256, (*shape[:-1], shape[-1] // elements, size))
    blocks = blocks.astype(np.uint8)
    scales = slice(0, 4) if kind is Kind.Q4_K else slice(-2, None)
    blocks[..., scales] = np.array([0.01, 0.02], np.float16).view(np.uint8)[
        : blocks[..., scales].shape[-1]
    ]
    return blocks.reshape(*shape[:-1], -1)


def write_gguf(
    path: Path,
    model: PreTrainedModel,
    arch: str = "llama",
    kind: Kind = Kind.F32,
    extra: Callable[[gguf.GGUFWriter], object] = lambda writer: None,
) -> Path:
    """Write a model as llama.cpp's converter does, matrices in `kind`."""
    config = model.config
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    writer.add_eos_token_id(2)
    if head_dim := getattr(config, "head_dim", None):
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    extra(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        data = tensor.float().numpy()
        if arch == "llama" and re.search(r"\.[qk]_proj\.", name):
            query = ".q_proj." in name
            data = permute(
                data, config.num_attention_heads if query else config.num_key_value_heads
            )
        add_tensor(writer, gguf_name(name), data, kind if data.ndim == 2 else Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tensor(writer: gguf.GGUFWriter, name: str, data: np.ndarray, kind: Kind) -> None:
    if kind in ANY_BLOCKS:
        writer.add_tensor(name, random_blocks(data.shape, kind), raw_dtype=kind)
    else:
        writer.add_tensor(name, gguf.quants.quantize(data, kind), raw_dtype=kind)


@pytest.mark.parametrize(
    ("variant", "arch"),
    [
        ("llama", "llama"),
        ("llama-tied", "llama"),
        ("llama-bias", "llama"),
        ("qwen2", "qwen2"),
        ("qwen3-tied", "qwen3"),
    ],
)
def test_gguf_round_trip(variant: str, arch: str, tmp_path: Path) -> None:
    model = make_model(variant)
    checkpoint = weights.open_checkpoint(write_gguf(tmp_path / "m.gguf", model, arch))
    assert_same(dict(checkpoint.tensors()), model)
    saved = weights.open_checkpoint(save(model, tmp_path / "folder")).spec
    for field in ("architecture", "head_dim", "num_kv_heads", "rope", "layer_windows", "qk_norm"):
        assert getattr(checkpoint.spec, field) == getattr(saved, field), field
    assert checkpoint.spec.rms_eps == pytest.approx(saved.rms_eps)
    assert checkpoint.spec.eos_token_ids == (2,)


@pytest.mark.parametrize("kind", gguf_files.SUPPORTED_TYPES)
def test_gguf_types_agree_with_transformers(kind: str, tmp_path: Path) -> None:
    model = make_model("llama", **K_QUANT_SIZES)
    path = write_gguf(tmp_path / "m.gguf", model, kind=Kind[kind])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    found = dict(weights.open_checkpoint(path).tensors())
    assert_same(found, reference)
    stored = {"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32)
    assert found["model.layers.0.self_attn.v_proj.weight"].dtype == stored


def test_large_tensors_are_dequantised_in_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama", **K_QUANT_SIZES), kind=Kind.Q8_0)
    whole = dict(weights.open_checkpoint(path).tensors())
    monkeypatch.setattr(gguf_files, "_CHUNK_ELEMENTS", 96)
    for name, tensor in weights.open_checkpoint(path).tensors():
        assert torch.equal(tensor, whole[name]), name


def test_smollm2_agrees_with_the_gguf_package() -> None:
    path = store.resolve("smollm2")
    checkpoint = weights.open_checkpoint(path)
    assert (checkpoint.kind, checkpoint.file_type) == ("gguf", "Q4_1")
    assert checkpoint.describe() == (
        "SmolLM2-135M-Instruct.Q4_1.gguf: LlamaForCausalLM, 134.5M parameters, 30 layers, "
        "gguf Q4_1, 96.6 MB"
    )
    spec = checkpoint.spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (9, 3, 64)
    assert (spec.rope.theta, spec.tie_embeddings, spec.eos_token_ids) == (100_000.0, True, (2,))
    processor = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3})
    reader = gguf.GGUFReader(path)
    assert len(reader.tensors) == len(checkpoint.readable)
    compared = ("token_embd.weight", "output_norm.weight", "blk.0.", "blk.29.")
    for tensor in reader.tensors:
        if tensor.name.startswith(compared):
            data = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            data = processor.process(data, tensor.name).weights
            mine = checkpoint.readable[gguf_files.canonical_name(tensor.name)].read()
            assert np.array_equal(mine.numpy(), data), tensor.name


def spec_of(
    tmp_path: Path, extra: Callable[[gguf.GGUFWriter], object], **options: Any
) -> ModelSpec:
    model = make_model(options.pop("variant", "llama"))
    path = write_gguf(tmp_path / "m.gguf", model, extra=extra, **options)
    return weights.open_checkpoint(path).spec


def test_gguf_rope_factors(tmp_path: Path) -> None:
    factors = np.array([1.0, 1.0, 2.5, 8.0], np.float32)
    spec = spec_of(tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", factors))
    assert (spec.rope.kind, spec.rope.factors) == ("factors", (1.0, 1.0, 2.5, 8.0))


def test_gguf_rope_factors_must_fit(tmp_path: Path) -> None:
    message = r"rope_freqs\.weight: expected F32 \[4\], found F32 \[3\]"
    with pytest.raises(ModelLoadError, match=message):
        spec_of(
            tmp_path, lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(3, np.float32))
        )


def test_gguf_rope_scaling(tmp_path: Path) -> None:
    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.0)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(64)
        writer.add_rope_scaling_yarn_beta_fast(16.0)

    assert spec_of(tmp_path, lambda writer: None).rope.kind == "default"
    rope = spec_of(tmp_path, linear).rope
    assert (rope.kind, rope.factor) == ("linear", 2.0)
    rope = spec_of(tmp_path, yarn).rope
    assert (rope.kind, rope.factor, rope.original_max_position) == ("yarn", 4.0, 64)
    assert (rope.beta_fast, rope.beta_slow) == (16.0, 1.0)
    assert rope.attention_factor == pytest.approx(1.1386294)  # 0.1 ln 4 + 1


def test_gguf_window_and_turn_ends(tmp_path: Path) -> None:
    def extra(writer: gguf.GGUFWriter) -> None:
        writer.add_sliding_window(8)
        writer.add_eot_token_id(3)

    spec = spec_of(tmp_path, extra)
    assert (spec.architecture, spec.layer_windows) == ("MistralForCausalLM", (8, 8))
    assert spec.eos_token_ids == (2, 3)
    qwen = spec_of(tmp_path, extra, variant="qwen2", arch="qwen2")
    assert qwen.layer_windows == (8, 8)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (lambda w: w.add_expert_count(8), r"llama\.expert_count: 8 is not supported"),
        (
            lambda w: w.add_value_length(4),
            r"llama\.attention\.value_length: expected the key_length 8",
        ),
        (lambda w: w.add_rope_dimension_count(4), "partial_rotary_factor: only 1.0 is supported"),
        (
            lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
            "rope_type: 'longrope' is not supported",
        ),
        (lambda w: w.add_uint16("split.count", 2), r"split\.count: split GGUF files"),
        (
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(4, np.float32)),
            r"1 unexpected: blk\.0\.attn_sinks\.weight \[4\] in m\.gguf",
        ),
    ],
)
def test_gguf_errors_name_the_key(
    extra: Callable[[gguf.GGUFWriter], object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        spec_of(tmp_path, extra)


def test_gguf_other_architecture(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match=r"general\.architecture: 'gemma3' is not supported"):
        spec_of(tmp_path, lambda writer: None, arch="gemma3")


def test_gguf_other_type_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama", **K_QUANT_SIZES), kind=Kind.Q5_0)
    with pytest.raises(
        ModelLoadError, match=r"model\.layers\.0\.self_attn\.q_proj\.weight is Q5_0"
    ):
        weights.open_checkpoint(path)


def test_damaged_gguf(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", make_model("llama"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-64])
    with pytest.raises(ModelLoadError, match=r"m\.gguf: truncated: .* lies past the end"):
        weights.open_checkpoint(path)
    for length in (4, 30, 200, 900):
        path.write_bytes(whole[:length])
        with pytest.raises(ModelLoadError, match=r"m\.gguf: the GGUF header is truncated"):
            weights.open_checkpoint(path)
    path.write_bytes(b"PK" + whole[2:])
    with pytest.raises(ModelLoadError, match="not a GGUF file"):
        weights.open_checkpoint(path)
    path.write_bytes(whole[:4] + b"\x00\x00\x00\x03" + whole[8:])
    with pytest.raises(ModelLoadError, match="GGUF version 0x3000000 is not supported"):
        weights.open_checkpoint(path)


def test_a_digest_tells_files_apart(tmp_path: Path) -> None:
    digests = []
    for number, std in enumerate((0.1, 0.1, 0.2)):
        model = make_model("llama")
        model.model.layers[1].mlp.up_proj.weight.data.mul_(std)
        path = write_gguf(tmp_path / f"{number}.gguf", model)
        digests.append(weights_digest(weights.open_checkpoint(path).readable))
    assert digests[0] == digests[1] != digests[2]
