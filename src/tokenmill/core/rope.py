"""Rotary embedding as config.json describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.fields import Settings, number, positive_int
from tokenmill.core.types import ModelLoadError

RopeKind = Literal["default", "linear", "llama3", "yarn", "factors"]

_ROPE_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "llama3": frozenset(
        {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}
    ),
    "yarn": frozenset(
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        }
    ),
}
_ROPE_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_ORIGINAL = "original_max_position_embeddings"


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """Rotary embedding: theta and how the inverse frequencies are rescaled."""

    theta: float = 10_000.0
    kind: RopeKind = "default"
    factor: float = 1.0  # linear, llama3, yarn
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 0  # llama3, yarn: the context before scaling
    attention_factor: float = 1.0  # multiplies cos and sin; resolved, never None
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the correction range to whole dimensions
    factors: tuple[float, ...] = ()  # factors: what each inverse frequency is divided by


def read_rope(settings: Settings) -> RopeSpec:
    """Read transformers 5's rope_parameters, or the older rope_theta with rope_scaling."""
    field = "rope_scaling" if settings.get("rope_scaling") else "rope_parameters"
    params: Settings = settings.get(field) or {}
    kind = params.get("rope_type", params.get("type", "default"))
    if kind not in _ROPE_KEYS:
        raise ModelLoadError(
            f"{field}.rope_type: {kind!r} is not supported; use {', '.join(_ROPE_KEYS)}"
        )
    unknown = sorted(params.keys() - _ROPE_KEYS[kind] - _ROPE_COMMON_KEYS)
    if unknown:
        raise ModelLoadError(f"{field}.{unknown[0]}: not a parameter of rope_type {kind!r}")
    rotary = params.get("partial_rotary_factor", settings.get("partial_rotary_factor"))
    if rotary not in (None, 1.0):
        raise ModelLoadError(f"partial_rotary_factor: only 1.0 is supported, got {rotary!r}")
    max_position = positive_int(settings, "max_position_embeddings")
    fallback = {
        "rope_theta": settings.get("rope_theta", 10_000.0),
        _ORIGINAL: settings.get(_ORIGINAL, max_position),
    }
    return _rope_of_kind(kind, fallback | params, max_position)


def _rope_of_kind(kind: RopeKind, params: Settings, max_position: int) -> RopeSpec:
    theta = number(params, "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    original = positive_int(params, _ORIGINAL)
    if kind == "yarn" and params.get("factor") is None:
        params = params | {"factor": max_position / original}
    factor = number(params, "factor")
    if kind == "linear":
        return RopeSpec(theta=theta, kind=kind, factor=factor)
    if kind == "llama3":
        return RopeSpec(
            theta=theta,
            kind=kind,
            factor=factor,
            low_freq_factor=number(params, "low_freq_factor"),
            high_freq_factor=number(params, "high_freq_factor"),
            original_max_position=original,
        )
    return RopeSpec(
        theta=theta,
        kind="yarn",
        factor=factor,
        original_max_position=original,
        attention_factor=_yarn_attention_factor(params, factor),
        beta_fast=params.get("beta_fast") or 32.0,
        beta_slow=params.get("beta_slow") or 1.0,
        truncate=params.get("truncate", True),
    )


def _yarn_attention_factor(params: Settings, factor: float) -> float:
    if params.get("attention_factor") is not None:
        return number(params, "attention_factor")

    def mscale(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params["mscale"]) / mscale(params["mscale_all_dim"])
    return mscale(1.0)
