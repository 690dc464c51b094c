"""Which tensors a checkpoint holds: names and shapes are data, most of them alike in all families.

Layers are built from the same short names whatever a checkpoint calls them; see `canonical`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from tokenmill.core.specs.moe import MoESpec
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.models import family_of
from tokenmill.models.family import Shape

EMBEDDING = "model.embed_tokens.weight"
IGNORABLE = (
    r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq",
    r"model\.rotary_emb\.inv_freq",
)
IGNORABLE_WHEN_TIED = (r"lm_head\.weight",)
# Read past on purpose: activations are scaled per row as they come, the KV cache by no file.
STATIC_SCALES = (
    r".+\.(input|activation)_scale",
    r"model\.layers\.\d+\.self_attn\.[kv]_scale",
)
# Beside those of its decoder layer; DeepSeek's files also hold copies of embedding and head.
MTP_OUTER = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
MTP_COPIES = ("embed_tokens.weight", "shared_head.head.weight")
EAGLE_COPIES = ("embed_tokens.weight", "lm_head.weight")
_STACKED = re.compile(r"mlp\.experts\.(gate_up|down)_proj(?:_(blocks|scales|bias))?")
_EXPERTS = re.compile(r"mlp\.experts\.(\d+)\.(gate|up|down)_proj\.weight")


def expected_tensors(spec: ModelSpec) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of every tensor that the model needs."""
    tensors: dict[str, Shape] = {EMBEDDING: (spec.vocab_size, spec.hidden_size)}
    for index in range(spec.num_layers):
        for name, shape in layer_tensors(spec, index).items():
            tensors[f"model.layers.{index}.{_stored(spec, name)}"] = shape
    tensors["model.norm.weight"] = (spec.hidden_size,)
    if not spec.tie_embeddings:
        tensors["lm_head.weight"] = (spec.vocab_size, spec.hidden_size)
    return tensors | family_of(spec).outer_tensors(spec)


def layer_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """Short name -> shape of the tensors of one layer, as the family says."""
    return family_of(spec).layer_tensors(spec, index)


def norm_tensors(spec: ModelSpec, *names: str) -> dict[str, Shape]:
    return {f"{name}.weight": (spec.hidden_size,) for name in names}


def attention_tensors(spec: ModelSpec) -> dict[str, Shape]:
    hidden = spec.hidden_size
    matrices: dict[str, tuple[int, int, bool]] = {  # rows, columns, bias
        "q_proj": (spec.q_size, hidden, spec.attention_bias),
        "k_proj": (spec.kv_size, hidden, spec.attention_bias),
        "v_proj": (spec.kv_size, hidden, spec.attention_bias),
        "o_proj": (hidden, spec.q_size, spec.output_bias),
    }
    expected: dict[str, Shape] = {}
    for name, (rows, columns, bias) in matrices.items():
        expected[f"self_attn.{name}.weight"] = (rows, columns)
        if bias:
            expected[f"self_attn.{name}.bias"] = (rows,)
    if spec.qk_norm:
        expected |= {f"self_attn.{x}_norm.weight": (spec.head_dim,) for x in ("q", "k")}
    return expected


def feed_forward_tensors(spec: ModelSpec, index: int) -> dict[str, Shape]:
    """One gated MLP, or experts where the layer has them."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    if spec.moe and spec.moe.layers[index]:
        return _experts(spec.moe, hidden)
    expected = _mlp("mlp", hidden, inner)
    if spec.mlp_bias:
        expected |= {f"mlp.{name}_proj.bias": (inner,) for name in ("gate", "up")}
        expected["mlp.down_proj.bias"] = (hidden,)
    return expected


def mtp_spec(spec: ModelSpec) -> ModelSpec:
    """The spec with one more layer, which is like the last one."""
    moe = spec.moe and replace(spec.moe, layers=(*spec.moe.layers, spec.moe.layers[-1]))
    windows = (*spec.layer_windows, spec.layer_windows[-1])
    return replace(spec, num_layers=spec.num_layers + 1, layer_windows=windows, moe=moe)


def mtp_tensors(spec: ModelSpec, inner: int | None = None) -> dict[str, Shape]:
    """Name in the checkpoint -> shape of the tensors of the MTP module after the last layer.

    `inner` is the width of its MLP, if it is another one than the model's.
    """
    if inner is not None:
        spec = replace(spec, intermediate_size=inner)
    hidden, index = spec.hidden_size, spec.num_layers
    shapes = [(hidden,), (hidden,), (hidden, 2 * hidden), (hidden,)]
    tensors: dict[str, Shape] = dict(zip(MTP_OUTER, shapes, strict=True))
    tensors |= layer_tensors(mtp_spec(spec), index)
    return {f"model.layers.{index}.{_stored(spec, name)}": s for name, s in tensors.items()}


def eagle_tensors(spec: ModelSpec, bias: bool) -> dict[str, Shape]:
    """Name -> shape of the tensors of an EAGLE head: an MTP module with one of its five norms."""
    hidden, index = spec.hidden_size, spec.num_layers
    tensors: dict[str, Shape] = {"fc.weight": (hidden, 2 * hidden)}
    if bias:
        tensors["fc.bias"] = (hidden,)
    layer = layer_tensors(mtp_spec(spec), index)
    del layer["input_layernorm.weight"]
    return tensors | {f"layers.0.{name}": shape for name, shape in layer.items()}


def eagle_to_mtp(spec: ModelSpec, name: str) -> str:
    """What a tensor of an EAGLE head is called in an MTP module."""
    short = name.removeprefix("layers.0.")
    if short.startswith("fc."):
        short = short.replace("fc.", "eh_proj.")
    return f"model.layers.{spec.num_layers}.{short}"


def canonical(spec: ModelSpec, name: str) -> str:
    """The short name of a layer's tensor, from the architecture's own."""
    ours = {theirs: name for name, theirs in _stored_names(spec).items()}
    return ".".join(ours.get(part, part) for part in name.split("."))


def expert_of(name: str) -> tuple[int, str] | None:
    """Number and kind ("gate", "up", "down") of a routed expert's tensor, by its short name."""
    found = _EXPERTS.fullmatch(name)
    return (int(found[1]), found[2]) if found else None


def stacked_experts(name: str) -> tuple[str, str] | None:
    """Kind and part of a tensor that has all experts' matrices; see RoutedExperts.put_stacked."""
    found = _STACKED.fullmatch(name)
    return (found[1], found[2] or "weight") if found else None


def ignorable(spec: ModelSpec) -> re.Pattern[str]:
    """Names of tensors that a checkpoint may hold and the model does not need."""
    static = STATIC_SCALES if spec.quantization else ()
    last = spec.num_layers + spec.num_mtp_layers
    mtp = tuple(rf"model\.layers\.{index}\..+" for index in range(spec.num_layers, last))
    return re.compile(
        "|".join(IGNORABLE + IGNORABLE_WHEN_TIED * spec.tie_embeddings + static + mtp)
    )


def _stored(spec: ModelSpec, name: str) -> str:
    if not name.startswith("mlp."):
        return name
    theirs = _stored_names(spec)
    return ".".join(theirs.get(part, part) for part in name.split("."))


def _stored_names(spec: ModelSpec) -> Mapping[str, str]:
    return family_of(spec).architectures[spec.architecture].stored_names


def _experts(moe: MoESpec, hidden: int) -> dict[str, Shape]:
    expected: dict[str, Shape] = {"mlp.gate.weight": (moe.num_experts, hidden)}
    if moe.correction_bias:
        expected["mlp.gate.e_score_correction_bias"] = (moe.num_experts,)
    if moe.shared_size:
        expected |= _mlp("mlp.shared_experts", hidden, moe.shared_size)
    for expert in range(moe.num_experts):
        expected |= _mlp(f"mlp.experts.{expert}", hidden, moe.intermediate_size)
    return expected


def _mlp(module: str, hidden: int, inner: int) -> dict[str, Shape]:
    return {
        f"{module}.gate_proj.weight": (inner, hidden),
        f"{module}.up_proj.weight": (inner, hidden),
        f"{module}.down_proj.weight": (hidden, inner),
    }
