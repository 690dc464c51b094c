"""GGUF files: metadata as a Hugging Face config, tensors under their canonical names."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from math import log, prod
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmill.core.specs.gguf import Metadata, read_gguf_header
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models import all_families, spec_of
from tokenmill.models.family import Architecture, GGUFSource

SUPPORTED_TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K")
_PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_CHUNK_ELEMENTS = 1 << 17  # dequantised at a time: the temporaries fit in a core's L2 cache

_REQUIRED_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
}
_OPTIONAL_KEYS = {
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.sliding_window": "sliding_window",
}
# Keys that change the computation in ways this family does not have, unless 0 or absent.
_UNSUPPORTED_KEYS = (
    "expert_count",
    "attention.sliding_window_pattern",
    "attention.scale",
    "attention.clamp_kqv",
    "attention.max_alibi_bias",
    "attention.temperature_scale",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "embedding_scale",
    "residual_scale",
    "logit_scale",
    "rope.scaling.yarn_log_multiplier",
)
_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_TOP_NAME = re.compile(r"(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_IGNORABLE = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """One tensor of a GGUF file; nothing but the header is read before read()."""

    file: Path
    shape: tuple[int, ...]
    type_name: str
    begin: int
    num_bytes: int
    num_permuted_heads: int = 0  # 0: rows are in Hugging Face order already

    @property
    def supported(self) -> bool:
        return self.type_name in SUPPORTED_TYPES

    def read(self) -> torch.Tensor:
        """F32, F16 and BF16 as stored, quantised types as fp32; rows in Hugging Face order."""
        raw = np.memmap(self.file, np.uint8, "r", self.begin, (self.num_bytes,))
        if self.type_name in _PLAIN_TYPES:
            tensor = torch.from_numpy(np.array(raw)).view(_PLAIN_TYPES[self.type_name])
        else:
            tensor = torch.from_numpy(_dequantize(raw, self.type_name, prod(self.shape)))
        return _unpermute(tensor.view(self.shape), self.num_permuted_heads)


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """A GGUF model: what its metadata says and where its tensors are, by canonical name."""

    spec: ModelSpec
    file_type: str  # as llama.cpp names it, such as Q4_1 or Q4_K_M
    tensors: dict[str, GGUFTensor]


def open_gguf(path: Path) -> GGUFFile:
    """Read a GGUF header: metadata as a ModelSpec, tensors under canonical names."""
    metadata, stored = read_header(path)
    try:
        spec = spec_of(config_from_metadata(metadata, frozenset(stored)))
    except ModelLoadError as error:
        raise ModelLoadError(f"{path}: {error}") from None
    if factors := stored.pop(_ROPE_FACTORS, None):
        spec = replace(spec, rope=_with_factors(spec, factors))
    tensors = {}
    _, _, source = _source(metadata)
    for name, tensor in stored.items():
        heads = _num_permuted_heads(name, spec) if source.permuted else 0
        if not _IGNORABLE.fullmatch(name):
            tensors[canonical_name(name)] = replace(tensor, num_permuted_heads=heads)
    return GGUFFile(spec, _file_type(metadata), tensors)


def canonical_name(name: str) -> str:
    """The Hugging Face name of a GGUF tensor; an unknown name stays as it is."""
    if (match := _LAYER_NAME.fullmatch(name)) and match[2] in _LAYER_NAMES:
        return f"model.layers.{match[1]}.{_LAYER_NAMES[match[2]]}.{match[3]}"
    if (match := _TOP_NAME.fullmatch(name)) and match[1] in _NAMES:
        return f"{_NAMES[match[1]]}.{match[2]}"
    return name


def config_from_metadata(metadata: Metadata, tensor_names: frozenset[str]) -> dict[str, Any]:
    """The config.json that the GGUF metadata and tensor names amount to."""
    name, architecture, source = _source(metadata)
    if metadata.get("split.count", 1) > 1:
        raise ModelLoadError("split.count: split GGUF files are not supported; merge them first")
    arch = source.name
    prefix = f"{arch}."
    own = {key[len(prefix) :]: value for key, value in metadata.items() if key.startswith(prefix)}
    _check_keys(arch, own)
    config: dict[str, Any] = {"architectures": [name], "dtype": "float32"}
    config |= {name: own[key] for key, name in _REQUIRED_KEYS.items()}
    config |= {name: own.get(key) or None for key, name in _OPTIONAL_KEYS.items()}
    if config["sliding_window"] is not None:
        config |= source.windowed
    config |= _rope_config(own, config)
    if "attention_bias" not in architecture.fixed:
        config["attention_bias"] = "blk.0.attn_q.bias" in tensor_names
    config["mlp_bias"] = "blk.0.ffn_gate.bias" in tensor_names
    config["tie_word_embeddings"] = "output.weight" not in tensor_names
    config["vocab_size"] = len(metadata.get("tokenizer.ggml.tokens", ())) or own.get("vocab_size")
    config["bos_token_id"] = metadata.get("tokenizer.ggml.bos_token_id")
    config["eos_token_id"] = eos_token_ids(metadata)
    return config


def _source(metadata: Metadata) -> tuple[str, Architecture, GGUFSource]:
    """The architecture of a file: its name, what its family says of it, and of its GGUF files."""
    known = {
        each.gguf.name: (name, each, each.gguf)
        for family in all_families()
        for name, each in family.architectures.items()
        if each.gguf
    }
    found = metadata.get("general.architecture")
    if found not in known:
        raise ModelLoadError(
            f"general.architecture: {found!r} is not supported; use {', '.join(known)}"
        )
    return known[found]


def eos_token_ids(metadata: Metadata) -> list[int]:
    """End-of-sequence, end-of-turn and end-of-message ids, as far as the metadata has them."""
    found = (metadata.get(f"tokenizer.ggml.{key}") for key in _EOS_KEYS)
    return list(dict.fromkeys(token for token in found if token is not None))


def _check_keys(arch: str, own: Metadata) -> None:
    for key in _REQUIRED_KEYS:
        value = own.get(key)
        if not isinstance(value, int | float) or value <= 0:
            raise ModelLoadError(f"{arch}.{key}: expected a positive number, got {value!r}")
    for key in _UNSUPPORTED_KEYS:
        if own.get(key):
            raise ModelLoadError(f"{arch}.{key}: {own[key]!r} is not supported")
    key_length = own.get("attention.key_length")
    if own.get("attention.value_length", key_length) != key_length:
        raise ModelLoadError(
            f"{arch}.attention.value_length: expected the key_length {key_length}, "
            f"got {own['attention.value_length']}"
        )


def _rope_config(own: Metadata, config: dict[str, Any]) -> dict[str, Any]:
    head_dim = config["head_dim"] or config["hidden_size"] // config["num_attention_heads"]
    result: dict[str, Any] = {
        "rope_theta": own.get("rope.freq_base", 10_000.0),
        "partial_rotary_factor": own.get("rope.dimension_count", head_dim) / head_dim,
    }
    factor = own.get("rope.scaling.factor") or own.get("rope.scale_linear", 1.0)
    kind = own.get("rope.scaling.type") or ("none" if factor == 1.0 else "linear")
    if kind == "none":
        return result
    result["rope_scaling"] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        result["rope_scaling"] |= _yarn_config(own, factor)
    return result


def _yarn_config(own: Metadata, factor: float) -> dict[str, Any]:
    if own.get("rope.scaling.yarn_ext_factor", 1.0) != 1.0:
        raise ModelLoadError("rope.scaling.yarn_ext_factor: only 1.0 is supported")
    keys = {"original_context_length": "original_max_position_embeddings"}
    keys |= {"yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}
    scaling = {
        name: own[f"rope.scaling.{key}"]
        for key, name in keys.items()
        if f"rope.scaling.{key}" in own
    }
    attention = own.get("rope.scaling.yarn_attn_factor", own.get("rope.scaling.attn_factor"))
    if attention:  # llama.cpp multiplies it with the paper's value, config.json replaces that
        scaling["attention_factor"] = attention * (0.1 * log(factor) + 1.0)
    return scaling


def _with_factors(spec: ModelSpec, stored: GGUFTensor) -> RopeSpec:
    if stored.shape != (spec.head_dim // 2,) or stored.type_name != "F32":
        raise ModelLoadError(
            f"{stored.file}: {_ROPE_FACTORS}: expected F32 [{spec.head_dim // 2}], "
            f"found {stored.type_name} {list(stored.shape)}"
        )
    if spec.rope.kind != "default":
        raise ModelLoadError(
            f"{stored.file}: {_ROPE_FACTORS} together with {spec.rope.kind} rope scaling "
            "is not supported"
        )
    return replace(spec.rope, kind="factors", factors=tuple(stored.read().tolist()))


def _num_permuted_heads(name: str, spec: ModelSpec) -> int:
    match = _LAYER_NAME.fullmatch(name)
    heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
    return heads.get(match[2], 0) if match else 0


def _unpermute(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows of each head from adjacent pairs (x0 y0 x1 y1 ...) to halves (x0 x1 ... y0 y1 ...)."""
    if num_heads == 0:
        return tensor
    pairs = tensor.view(num_heads, -1, 2, *tensor.shape[1:])
    return pairs.transpose(1, 2).reshape(tensor.shape)


def _package() -> Any:
    try:
        import gguf
        import gguf.quants
    except ImportError as error:
        raise ModelLoadError("GGUF files need the gguf package: pip install gguf") from error
    return gguf


def _dequantize(raw: np.ndarray, type_name: str, num_elements: int) -> np.ndarray:
    package = _package()
    quantization = package.GGMLQuantizationType[type_name]
    block_elements, block_bytes = package.GGML_QUANT_SIZES[quantization]
    step = _CHUNK_ELEMENTS // block_elements
    out = np.empty(num_elements, np.float32)
    for block in range(0, num_elements // block_elements, step):
        blocks = raw[block * block_bytes : (block + step) * block_bytes]
        start = block * block_elements
        out[start : start + step * block_elements] = package.quants.dequantize(blocks, quantization)
    return out


def _file_type(metadata: Metadata) -> str:
    try:
        name: str = _package().LlamaFileType(metadata["general.file_type"]).name
    except (KeyError, ValueError):
        return "unknown"
    return name.removeprefix("MOSTLY_").removeprefix("ALL_")


def read_header(path: Path) -> tuple[Metadata, dict[str, GGUFTensor]]:
    """Metadata and tensors of a GGUF file, under the file's own names."""
    header = read_gguf_header(path)
    tensors: dict[str, GGUFTensor] = {}
    for place in header.tensors:
        if place.name in tensors:
            raise ModelLoadError(f"{path}: {place.name} is in the file twice")
        tensor = _tensor(path, place.name, place.shape, place.kind, place.offset)
        if tensor.begin + tensor.num_bytes > header.file_bytes:
            raise ModelLoadError(f"{path}: truncated: {place.name} lies past the end of the file")
        tensors[place.name] = tensor
    return header.metadata, tensors


def _tensor(path: Path, name: str, shape: tuple[int, ...], kind: int, offset: int) -> GGUFTensor:
    package = _package()
    try:
        quantization = package.GGMLQuantizationType(kind)
    except ValueError:
        return GGUFTensor(path, shape, f"type {kind}", offset, 0)
    block_elements, block_bytes = package.GGML_QUANT_SIZES[quantization]
    if not shape or shape[-1] % block_elements:
        raise ModelLoadError(
            f"{path}: {name}: shape {list(shape)}: rows are not a multiple of the "
            f"{quantization.name} block of {block_elements}"
        )
    num_bytes = prod(shape) // block_elements * block_bytes
    return GGUFTensor(path, shape, quantization.name, offset, num_bytes)
