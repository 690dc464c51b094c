"""EAGLE-3 heads: one Llama layer that drafts from the states of three layers of any model.

A folder has config.json and safetensors, as SpecForge, NVIDIA and EAGLE's authors publish them. The
states that enter three layers, side by side, are projected to one; embedding and state, each
normed, side by side are what the layer attends with; the state itself is the residual stream. Its
own result serves as the next state. The head has a part of the vocabulary: `d2t` says how far a
token's id is from the model's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.kernels.attention import AttentionBatch, paged_attention, rope_and_cache
from tokenmill.kernels.rows import norm_pair
from tokenmill.layers.linear import ComputeType, Linear, Tensors, activation_dtype
from tokenmill.layers.mlp import MLP
from tokenmill.layers.residual import Residual
from tokenmill.layers.rotary import rotary_table
from tokenmill.models import spec_of
from tokenmill.models.checkpoints.shards import shard
from tokenmill.models.checkpoints.tensor_checks import check_tensors
from tokenmill.models.checkpoints.weights import SafetensorsTensor, read_stored
from tokenmill.models.decoder import Decoder
from tokenmill.models.family import Shape
from tokenmill.models.names import layer_tensors

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM")
COPIES = ("embed_tokens.weight", "t2d")  # of the model's embedding; and the inverse of d2t
NUM_STATES = 3
_SAME = ("hidden_size", "vocab_size", "num_heads", "num_kv_heads", "head_dim")
_KEYS = {"num_heads": "num_attention_heads", "num_kv_heads": "num_key_value_heads"}


@dataclass(frozen=True, slots=True)
class Eagle3Files:
    """A head on disk that is known to fit its model."""

    spec: ModelSpec  # of its layer
    tensors: Mapping[str, SafetensorsTensor]  # by names without those of its layer
    layers: tuple[int, ...]  # of the model: the states that enter them are read
    norm_before_residual: bool


def is_eagle3(path: Path) -> bool:
    file = path / "config.json"
    return path.is_dir() and file.is_file() and bool(set(_config(file)["architectures"]) & _NAMES)


def open_eagle3(path: Path, target: ModelSpec) -> Eagle3Files:
    """Read the headers of a head's folder, and check that it fits the model."""
    config = _config(path / "config.json")
    described = config | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
    spec = spec_of(described)
    _check_sizes(path, spec, target)
    options = config.get("eagle_config") or {}
    if not options.get("use_aux_hidden_state", True):
        problem = "drafts from the last layer alone; heads that read three layers are supported"
        raise ModelLoadError(f"{path}: use_aux_hidden_state is false: the head {problem}")
    stored = {_short(name): tensor for name, tensor in read_stored(path).items()}
    vocab_size = config.get("draft_vocab_size") or spec.vocab_size
    expected = _expected(spec, vocab_size, "lm_head.weight" in stored)
    _check_targets(path, stored, vocab_size, target)
    known = {name: tensor for name, tensor in stored.items() if name != "d2t"}
    check_tensors(known, spec, path, expected, COPIES, owner="an EAGLE-3 head of this model")
    layers = _layers(path, config, options, target.num_layers)
    before = bool(config.get("norm_before_residual", False))
    return Eagle3Files(spec, stored, layers, before)


_NAMES = set(ARCHITECTURES)


def _config(file: Path) -> dict[str, Any]:
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    names = config.get("architectures") if isinstance(config, dict) else None
    return {**config, "architectures": names} if isinstance(names, list) else {"architectures": []}


def _short(name: str) -> str:
    """The name of a tensor without its layer's."""
    for prefix in ("model.", "midlayer.", "layers.0."):
        name = name.removeprefix(prefix)
    return name


def _check_sizes(path: Path, spec: ModelSpec, target: ModelSpec) -> None:
    """The head's KV is one more layer of the model's, and its states are the model's."""
    if target.mla is not None:
        problem = f"an EAGLE-3 head has a KV cache of heads, {target.architecture} has a latent one"
        raise ModelLoadError(f"{path}: {problem}")
    for name in _SAME:
        own, theirs = getattr(spec, name), getattr(target, name)
        if own != theirs:
            key = _KEYS.get(name, name)
            raise ModelLoadError(
                f"{path}: {key} of the EAGLE-3 head is {own}, the model has {theirs}"
            )


def _expected(spec: ModelSpec, vocab_size: int, has_head: bool) -> dict[str, Shape]:
    hidden = spec.hidden_size
    layer = layer_tensors(spec, 0) | {"hidden_norm.weight": (hidden,)}
    for name in ("q_proj", "k_proj", "v_proj"):
        rows = layer[f"self_attn.{name}.weight"][0]
        layer[f"self_attn.{name}.weight"] = (rows, 2 * hidden)
    outer: dict[str, Shape] = {
        "fc.weight": (hidden, NUM_STATES * hidden),
        "norm.weight": (hidden,),
    }
    if has_head or vocab_size != spec.vocab_size:
        outer["lm_head.weight"] = (vocab_size, hidden)
    return outer | layer


def _check_targets(
    path: Path, stored: Mapping[str, SafetensorsTensor], vocab_size: int, target: ModelSpec
) -> None:
    """d2t leads from every id of the head to one of the model."""
    table = stored.get("d2t")
    if table is None:
        if vocab_size != target.vocab_size:
            problem = f"d2t [{vocab_size}] is missing: draft_vocab_size is {vocab_size}"
            raise ModelLoadError(f"{path}: {problem}, the model's vocab_size {target.vocab_size}")
        return
    if table.shape != (vocab_size,) or table.type_name not in ("I64", "I32"):
        found = f"{table.type_name} {list(table.shape)}"
        raise ModelLoadError(f"{path}: d2t is {found}, expected I64 [{vocab_size}]")
    ids = _targets(table)
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= target.vocab_size:
        wrong = low if low < 0 else high
        problem = f"d2t leads to token {wrong}, the model has {target.vocab_size}"
        raise ModelLoadError(f"{path}: {problem}")


def _targets(table: SafetensorsTensor) -> torch.Tensor:
    """The model's id of each id of the head."""
    distances = table.read().long()
    return distances + torch.arange(len(distances))


def _layers(
    path: Path, config: dict[str, Any], options: dict[str, Any], num_layers: int
) -> tuple[int, ...]:
    """The layers whose inputs are read.

    vLLM's key, at the top of a config, counts so; eagle_config's names layers by their outputs.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    ids = config.get(key)
    if not ids:
        ids = [index + 1 for index in options.get(key) or ()]
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
    if len(ids) != NUM_STATES or not all(0 <= index <= num_layers for index in ids):
        problem = f"expected {NUM_STATES} layers of the model's {num_layers}"
        raise ModelLoadError(f"{path}: {key} gives {list(ids)}, {problem}")
    return tuple(ids)


class Eagle3Head:
    """A Drafter, see proposer.py, over the embedding and KV cache of its model.

    Ranks that divide the model's heads and vocabulary divide the head's alike.
    """

    def __init__(self, files: Eagle3Files, model: Decoder, dtype: ComputeType) -> None:
        spec, device = files.spec, model.device
        self.layout, self.ranks = model.layout, model.layout.tensor_ranks
        tensors: Tensors = {
            name: shard(name, tensor.read(), spec, self.ranks)
            for name, tensor in files.tensors.items()
            if name not in COPIES
        }
        stream = activation_dtype(dtype)

        def norm(name: str) -> torch.Tensor:
            return tensors[f"{name}.weight"].to(device, stream)

        def linear(*names: str) -> Linear:
            return Linear.named(tensors, list(names), dtype, device)

        self.model, self.eps, self.layers = model, spec.rms_eps, files.layers
        self.norm_before_residual = files.norm_before_residual
        self.num_heads, self.scale = spec.num_heads // self.ranks.size, spec.softmax_scale
        self.input_norm, self.state_norm = norm("input_layernorm"), norm("hidden_norm")
        self.norm, self.fc = norm("norm"), linear("fc")
        self.qkv = linear("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.out = linear("self_attn.o_proj")
        self.mlp = MLP(norm("post_attention_layernorm"), tensors, dtype, device, self.ranks)
        length = model.cos_sin[0].shape[0]
        self.cos_sin = rotary_table(spec.layer_ropes[0], spec.head_dim, length, device)
        self.head: Linear | None = None
        self.vocab_size = spec.vocab_size
        if "lm_head.weight" in tensors:
            self.vocab_size = files.tensors["lm_head.weight"].shape[0]
            plain: ComputeType = "bf16" if dtype == "fp8" else dtype
            self.head = Linear([tensors["lm_head.weight"]], [], plain, device)
        table = files.tensors.get("d2t")
        self.targets = None if table is None else _targets(table).int().to(device)

    def forward(
        self,
        token_ids: torch.Tensor,
        states: torch.Tensor,
        cache: tuple[torch.Tensor, torch.Tensor],
        batch: AttentionBatch,
    ) -> torch.Tensor:
        """Tokens [t] and the states before them, the model's or the head's -> [t, hidden]."""
        hidden = self.input_norm.shape[0]
        states = states.clone() if states.shape[1] == hidden else self.fc(states)
        embedded = self.model.embedding(token_ids)
        pairs = norm_pair(embedded, states, self.input_norm, self.state_norm, self.eps)
        if self.norm_before_residual:
            states = pairs[:, hidden:].contiguous()
        stream = Residual(states, self.eps)
        qkv = self.qkv(pairs)
        q = rope_and_cache(qkv, *cache, self.cos_sin, batch, self.num_heads, self.scale)
        stream.add(self.out, paged_attention(q, *cache, batch, self.num_heads), self.ranks)
        self.mlp(stream)
        return stream.complete()

    def logits(self, out: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] -> [rows, the head's vocabulary], as the model's logits()."""
        if self.head is None:
            return self.model.score(out, self.norm)
        if not (self.layout.samples or self.layout.split_heads):
            return out.new_empty(out.shape[0], 0)
        part = Residual(out, self.eps).project(self.norm, self.head)
        return self.ranks.side_by_side(part, self.vocab_size)

    def target_ids(self, ids: torch.Tensor) -> torch.Tensor:
        """The model's ids of the head's, int32 [rows]."""
        return ids if self.targets is None else self.targets[ids.long()]

    def states(self, out: torch.Tensor) -> torch.Tensor:
        return out

    @property
    def num_bytes(self) -> int:
        linears = (self.fc, self.qkv, self.out, *self.mlp.linears)
        own = 0 if self.head is None else self.head.num_bytes
        return own + sum(linear.num_bytes for linear in linears)
