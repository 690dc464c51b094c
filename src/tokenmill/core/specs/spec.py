"""Describes a model: its dimensions, its kinds of layers, and a token's cost in bytes and FLOPs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple, cast

from tokenmill.core.specs.fields import Settings, flag, number, positive_int
from tokenmill.core.specs.mla import MLASpec
from tokenmill.core.specs.moe import MoESpec
from tokenmill.core.specs.quantization import (
    MXFP4,
    MXFP4_BYTES,
    QuantizationSpec,
    read_quantization,
)
from tokenmill.core.specs.rope import ORIGINAL, RopeSpec, read_rope, rope_fields
from tokenmill.core.specs.vision import VisionSpec
from tokenmill.core.types import ModelLoadError

Windows = tuple[int | None, ...]  # for each layer: how many positions a query sees; None: all
_DTYPES = ("float32", "bfloat16", "float16")


class StepParams(NamedTuple):
    """Matrix parameters of the layers that a step reads."""

    rounded: float  # that fp8 rounds, without experts
    plain: float  # that keep the stream's type
    experts: float


def attended(window: int | None, num_tokens: int) -> int:
    """Positions that the first `num_tokens` tokens of a sequence attend to in one layer."""
    ramp = min(num_tokens, window or num_tokens)  # each of these sees one more position
    return ramp * (ramp + 1) // 2 + (num_tokens - ramp) * ramp


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """One decoder-only model, as its checkpoint describes it."""

    architecture: str
    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float
    max_position: int
    tie_embeddings: bool
    rope: RopeSpec
    attention_bias: bool  # q, k and v projections
    output_bias: bool  # attention output projection
    mlp_bias: bool
    qk_norm: bool
    sliding_window: int | None  # a query sees this many positions, itself included
    layer_windows: Windows
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    softmax_scale: float  # what queries are multiplied with
    quantization: QuantizationSpec | None = None  # of the weights as stored
    moe: MoESpec | None = None
    mla: MLASpec | None = None  # then num_kv_heads is 1: all heads share what is cached
    num_mtp_layers: int = 0  # of the checkpoint, after the model's own; the first can draft
    num_norms: int = 2  # of a layer, each as wide as the stream
    window_rope: RopeSpec | None = None  # of layers with a window, where theirs is another
    attention_sinks: bool = False  # a score per head that takes part in each softmax, without value
    vision: VisionSpec | None = None  # the encoder of a model that takes images

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def cache_dims(self) -> tuple[int, int]:
        """Channels per token and KV head in the two parts of the cache.

        Keys and values; with latent attention the rotated part of the keys, and the latent that is
        both the rest of the keys and the values.
        """
        return (self.mla.rope_dim, self.mla.kv_rank) if self.mla else (self.head_dim, self.head_dim)

    @property
    def layer_ropes(self) -> tuple[RopeSpec, ...]:
        local = self.window_rope or self.rope
        return tuple(local if window else self.rope for window in self.layer_windows)

    def num_params(self) -> int:
        """Parameters of the model; a tied output head counts once."""
        hidden = self.hidden_size
        norms = self.num_norms * hidden + (2 * self.head_dim if self.qk_norm else 0)
        norms += self.mla.norm_params() if self.mla else 0
        biases = (self.q_size + 2 * self.kv_size) * self.attention_bias
        biases += hidden * self.output_bias
        biases += (2 * self.intermediate_size + hidden) * self.mlp_bias
        biases += self.num_heads * self.attention_sinks
        layers = self.num_layers * (norms + biases) + round(self._matmul_params())
        if self.moe:
            layers += sum(self.moe.layers) * self.moe.bias_params(hidden)
        embeddings = self.vocab_size * hidden * (1 if self.tie_embeddings else 2)
        seen = self.vision.num_params() if self.vision else 0
        return embeddings + layers + hidden + seen

    def weight_bytes(self, bytes_per_param: float = 2) -> int:
        """Bytes of all weights at one width; experts that are stored in MXFP4 stay so."""
        experts = 0
        if self.moe and self.mxfp4:
            each = self.moe.expert_params(self.hidden_size)
            experts = sum(self.moe.layers) * self.moe.num_experts * each
        return round((self.num_params() - experts) * bytes_per_param + experts * MXFP4_BYTES)

    @property
    def mxfp4(self) -> bool:
        """Experts are stored in MXFP4, which GPU kernels read as it is."""
        return self.quantization is not None and self.quantization.method == MXFP4

    def kv_bytes_per_token(self, dtype_bytes: int = 2) -> int:
        """Bytes that one token leaves in the cache, over all layers."""
        return self.num_layers * self.num_kv_heads * sum(self.cache_dims) * dtype_bytes

    def flops_per_token(self, context_len: int) -> int:
        """FLOPs of one decoded token that sees `context_len` positions, logits included."""
        experts = self.moe.top_k if self.moe else 0
        matmul = self._matmul_params(experts) + self.vocab_size * self.hidden_size
        seen = sum(min(context_len, window or context_len) for window in self.layer_windows)
        return round(2 * matmul) + self.seen_flops(decode=True) * seen

    def seen_flops(self, decode: bool) -> int:
        """FLOPs of one token for each position that it attends to, in one layer."""
        return self.mla.seen_flops(self.num_heads, decode) if self.mla else 4 * self.q_size

    def step_params(self, num_tokens: float) -> StepParams:
        """What a step of `num_tokens` reads.

        Of the experts it reads as many as tokens that choose evenly hit: see
        MoESpec.distinct_experts.
        """
        plain, experts = 0, 0.0
        if self.mla:
            plain += self.num_layers * self.mla.unpacked(self.num_heads)
        if self.moe:
            num_sparse = sum(self.moe.layers)
            plain += num_sparse * self.hidden_size * self.moe.num_experts
            each = self.moe.expert_params(self.hidden_size)
            experts = num_sparse * self.moe.distinct_experts(num_tokens) * each
        return StepParams(self._matmul_params(0) - plain, plain, experts)

    def attended_positions(self, num_tokens: int) -> int:
        """Positions that the first `num_tokens` tokens of a sequence attend to, over all layers."""
        layers = Counter(self.layer_windows).items()
        return sum(count * attended(window, num_tokens) for window, count in layers)

    def _matmul_params(self, num_experts: float | None = None) -> float:
        """Matrix parameters of all layers, with so many experts of each sparse one; or with all."""
        hidden = self.hidden_size
        attention = hidden * (2 * self.q_size + 2 * self.kv_size)
        if self.mla:
            attention = self.mla.matmul_params(hidden, self.num_heads)
        dense, moe = 3 * hidden * self.intermediate_size, self.moe
        if moe is None:
            return self.num_layers * (attention + dense)
        read = moe.num_experts if num_experts is None else num_experts
        sparse = moe.other_params(hidden) + read * moe.expert_params(hidden)
        num_sparse = sum(moe.layers)
        return (
            self.num_layers * attention
            + num_sparse * sparse
            + (self.num_layers - num_sparse) * dense
        )


def read_common(
    architecture: str, family: str, settings: Settings, windows: Windows | None = None
) -> ModelSpec:
    """What all families read alike from a config.json with its defaults filled in.

    Without `windows` every layer sees everything.
    """
    num_heads = positive_int(settings, "num_attention_heads")
    num_layers = positive_int(settings, "num_hidden_layers")
    windows = windows or (None,) * num_layers
    bias, rope = flag(settings, "attention_bias"), read_rope(settings)
    head_dim = _head_dim(settings, num_heads)
    return ModelSpec(
        architecture=architecture,
        family=family,
        vocab_size=positive_int(settings, "vocab_size"),
        hidden_size=positive_int(settings, "hidden_size"),
        intermediate_size=positive_int(settings, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(settings, num_heads),
        head_dim=head_dim,
        rms_eps=number(settings, "rms_norm_eps"),
        max_position=_max_position(settings, rope),
        tie_embeddings=flag(settings, "tie_word_embeddings"),
        rope=rope,
        attention_bias=bias,
        output_bias=bias,
        mlp_bias=flag(settings, "mlp_bias"),
        qk_norm=False,
        sliding_window=next((window for window in windows if window), None),
        layer_windows=windows,
        eos_token_ids=token_ids(settings, "eos_token_id"),
        bos_token_id=next(iter(token_ids(settings, "bos_token_id")), None),
        dtype=_dtype(settings),
        softmax_scale=head_dim**-0.5,
        quantization=read_quantization(settings),
    )


def token_ids(settings: Settings, key: str) -> tuple[int, ...]:
    """Token ids under `key`, which holds an int, a list of ints or null."""
    value = settings.get(key)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise ModelLoadError(f"{key}: expected a token id or a list of them, got {value!r}")
    return tuple(dict.fromkeys(ids))


def _max_position(settings: Settings, rope: RopeSpec) -> int:
    """max_position_embeddings, or what YaRN makes of the context before it: users add the one and
    leave the other as it was."""
    known = positive_int(settings, "max_position_embeddings")
    if rope.kind != "yarn" or ORIGINAL not in rope_fields(settings)[1]:
        return known
    return max(known, round(rope.original_max_position * rope.factor))


def _num_kv_heads(settings: Settings, num_heads: int) -> int:
    if settings["num_key_value_heads"] is None:
        return num_heads
    num_kv_heads = positive_int(settings, "num_key_value_heads")
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"num_key_value_heads: {num_kv_heads} does not divide num_attention_heads {num_heads}"
        )
    return num_kv_heads


def _head_dim(settings: Settings, num_heads: int) -> int:
    hidden = positive_int(settings, "hidden_size")
    if settings["head_dim"] is not None:
        head_dim = positive_int(settings, "head_dim")
    elif hidden % num_heads:
        raise ModelLoadError(
            f"hidden_size: {hidden} is not a multiple of num_attention_heads {num_heads}"
        )
    else:
        head_dim = hidden // num_heads
    if head_dim % 2:
        raise ModelLoadError(f"head_dim: rotary embedding needs an even size, got {head_dim}")
    return head_dim


def _dtype(settings: Settings) -> str:
    dtype = settings.get("dtype") or settings.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ModelLoadError(f"dtype: expected one of {', '.join(_DTYPES)}, got {dtype!r}")
    return cast(str, dtype)


def read_window(settings: Settings) -> int | None:
    """The sliding window, where config.json has one that is in use."""
    in_use = settings["use_sliding_window"] and settings["sliding_window"] is not None
    return positive_int(settings, "sliding_window") if in_use else None


def even_windows(architecture: str, settings: Settings) -> Windows:
    """The same window for every layer; layer_types may say it again, and nothing else."""
    window = read_window(settings)
    windows = (window,) * positive_int(settings, "num_hidden_layers")
    if settings["layer_types"] is not None and listed_windows(settings) != windows:
        raise ModelLoadError(
            f"layer_types: {architecture} gives every layer sliding_window {window}, "
            "but layer_types says otherwise"
        )
    return windows


def listed_windows(settings: Settings) -> Windows:
    layer_types: list[str] = settings["layer_types"]
    window, num_layers = read_window(settings), positive_int(settings, "num_hidden_layers")
    if len(layer_types) != num_layers:
        raise ModelLoadError(
            f"layer_types: expected {num_layers} entries as num_hidden_layers says, "
            f"got {len(layer_types)}"
        )
    kinds = {"full_attention": None, "sliding_attention": window}
    for layer, kind in enumerate(layer_types):
        if kind not in kinds:
            raise ModelLoadError(
                f"layer_types[{layer}]: expected one of {list(kinds)}, got {kind!r}"
            )
    if "sliding_attention" in layer_types and window is None:
        raise ModelLoadError(
            "layer_types: has sliding_attention but sliding_window is off or not given"
        )
    return tuple(kinds[kind] for kind in layer_types)
