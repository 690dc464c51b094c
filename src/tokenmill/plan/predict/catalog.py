"""Models that a plan can be made for, read without torch from a Hugging Face config.json."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import tokenmill.bench
from tokenmill.core.specs.mla import MLASpec
from tokenmill.core.specs.moe import MoESpec, read_choice
from tokenmill.core.specs.quantization import MXFP4_BYTES
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.specs.spec import ModelSpec, Windows
from tokenmill.plan.hardware import PlanError

SHAPES = Path(tokenmill.bench.__path__[0]) / "shapes"
_EXPERT_COUNTS = ("n_routed_experts", "num_local_experts", "num_experts")
NVFP4_BYTES = 0.5 + 1 / 16  # an fp8 scale for every 16 values
_BYTES = {"bf16": 2.0, "fp8": 1.0, "int8": 1.0, "fp4": NVFP4_BYTES, "mxfp4": MXFP4_BYTES}
_COMPUTES = {"bf16": "bf16", "fp8": "fp8", "fp4": "fp4"}


@dataclass(frozen=True, slots=True)
class Precision:
    """Types of the weights, by part, and of the KV cache."""

    name: str
    experts: str  # of routed experts, or of all linear layers where there are none
    others: str  # of the other linear layers
    kv: str

    def num_bytes(self, part: str) -> float:
        """Bytes of a parameter with its scales, or of a value in the cache."""
        return _BYTES[getattr(self, part)]

    def compute(self, part: str, has_fp8: bool, has_fp4: bool) -> str:
        """The type that a part is multiplied in: MXFP4 meets fp8 rows, or bf16 before Blackwell."""
        stored: str = getattr(self, part)
        if stored == "mxfp4":
            return "fp8" if has_fp4 else "bf16"
        if stored == "int8":
            return stored
        return str(_COMPUTES[stored]) if has_fp8 else "bf16"


def precisions_of(spec: ModelSpec, name: str) -> Precision:
    """What a name means for a model: gpt-oss has MXFP4 experts, DeepSeek's attention stays fp8."""
    if spec.family == "gpt_oss" and name in ("fp4", "mxfp4"):
        return Precision("mxfp4", experts="mxfp4", others="bf16", kv="fp8")
    if name not in ("bf16", "int8", "fp8", "fp4"):
        raise PlanError(
            f"--precision {name}: expected bf16, int8, fp8 or fp4 (mxfp4 is gpt-oss alone)"
        )
    others = "fp8" if name == "fp4" and spec.mla else name
    kv = "bf16" if name in ("bf16", "int8") else "fp8"
    return Precision(name, experts=name, others=others, kv=kv)


def known_models() -> dict[str, Path]:
    return {file.stem: file for file in sorted(SHAPES.glob("*.json"))}


@cache
def find_model(name: str) -> ModelSpec:
    """A shipped model, or that of a config.json or of its folder."""
    known, path = known_models(), Path(name).expanduser()
    if name in known:
        path = known[name]
    elif path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise PlanError(f"--model {name}: neither a config.json nor one of {', '.join(known)}")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise PlanError(f"--model {name}: {path} cannot be read: {error}") from None
    return read_dimensions(config, str(path))


def read_dimensions(config: dict[str, Any], source: str) -> ModelSpec:
    """The dimensions that cost time and memory; what only changes numbers is left out.

    Families read more (models/<family>.py), which imports torch; a test compares the two.
    """
    text = config.get("text_config", config)
    hidden, heads = _int(text, "hidden_size", source), _int(text, "num_attention_heads", source)
    num_layers = _int(text, "num_hidden_layers", source)
    head_dim = text.get("head_dim") or hidden // heads
    mla = _read_mla(text)
    windows = _read_windows(text, num_layers)
    spec = ModelSpec(
        architecture=(config.get("architectures") or ["?"])[0],
        family=text.get("model_type", config.get("model_type", "?")),
        vocab_size=_int(text, "vocab_size", source),
        hidden_size=hidden,
        intermediate_size=_int(text, "intermediate_size", source),
        num_layers=num_layers,
        num_heads=heads,
        num_kv_heads=1 if mla else text.get("num_key_value_heads") or heads,
        head_dim=mla.nope_dim + mla.rope_dim if mla else head_dim,
        rms_eps=1e-6,
        max_position=text.get("max_position_embeddings", 4096),
        tie_embeddings=bool(text.get("tie_word_embeddings", False)),
        rope=RopeSpec(),
        attention_bias=False,
        output_bias=False,
        mlp_bias=False,
        qk_norm=False,
        sliding_window=next((window for window in windows if window), None),
        layer_windows=windows,
        eos_token_ids=(),
        bos_token_id=None,
        dtype="bfloat16",
        softmax_scale=1.0,
        mla=mla,
        num_mtp_layers=text.get("num_nextn_predict_layers", 0),
    )
    return replace(spec, moe=_read_moe(text, num_layers))


def _int(config: dict[str, Any], key: str, source: str) -> int:
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise PlanError(f"{source}: {key}: expected a positive integer, got {value!r}")
    return value


def _read_mla(config: dict[str, Any]) -> MLASpec | None:
    if not config.get("kv_lora_rank"):
        return None
    return MLASpec(
        q_rank=config.get("q_lora_rank"),
        kv_rank=config["kv_lora_rank"],
        nope_dim=config["qk_nope_head_dim"],
        rope_dim=config["qk_rope_head_dim"],
        value_dim=config["v_head_dim"],
        interleaved=True,
    )


def _read_moe(config: dict[str, Any], num_layers: int) -> MoESpec | None:
    if not any(config.get(name) for name in _EXPERT_COUNTS):
        return None
    top_k, num_experts = read_choice(config, tuple(n for n in _EXPERT_COUNTS if n in config))
    dense = set(range(config.get("first_k_dense_replace", 0))) | set(
        config.get("mlp_only_layers") or ()
    )
    inner = config.get("moe_intermediate_size") or config["intermediate_size"]
    return MoESpec(
        layers=tuple(layer not in dense for layer in range(num_layers)),
        num_experts=num_experts,
        top_k=top_k,
        intermediate_size=inner,
        shared_size=inner * (config.get("n_shared_experts") or 0),
    )


def _read_windows(config: dict[str, Any], num_layers: int) -> Windows:
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window") is False:
        return (None,) * num_layers
    kinds = config.get("layer_types") or ["sliding_attention"] * num_layers
    if "layer_types" not in config and config.get("model_type") == "gpt_oss":
        kinds = [("sliding_attention", "full_attention")[n % 2] for n in range(num_layers)]
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
