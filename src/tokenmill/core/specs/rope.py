"""Rotary embedding as config.json describes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from tokenmill.core.specs.fields import Settings, flag, number, positive_int
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
ORIGINAL = "original_max_position_embeddings"


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


def rope_fields(settings: Settings) -> tuple[str, Settings]:
    """The field that describes the scaling, rope_scaling before rope_parameters, and its content.

    Where both are given, what rope_scaling leaves out is rope_parameters' theta.
    """
    found: dict[str, Settings] = {}
    for field in ("rope_parameters", "rope_scaling"):
        params = settings.get(field) or {}
        if not isinstance(params, dict):
            raise ModelLoadError(f"{field}: expected an object, got {params!r}")
        found[field] = params
    base, scaling = found.values()
    theta = {"rope_theta": base["rope_theta"]} if "rope_theta" in base else {}
    return ("rope_scaling", theta | scaling) if scaling else ("rope_parameters", base)


def read_rope(settings: Settings) -> RopeSpec:
    """Read transformers 5's rope_parameters, or the older rope_theta with rope_scaling."""
    field, params = rope_fields(settings)
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
        ORIGINAL: settings.get(ORIGINAL, max_position),
    }
    return _rope_of_kind(kind, fallback | params, max_position)


def _rope_of_kind(kind: RopeKind, params: Settings, max_position: int) -> RopeSpec:
    theta = number(params, "rope_theta")
    if kind == "default":
        return RopeSpec(theta=theta)
    original = positive_int(params, ORIGINAL)
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
        beta_fast=number(params, "beta_fast") if params.get("beta_fast") else 32.0,
        beta_slow=number(params, "beta_slow") if params.get("beta_slow") else 1.0,
        truncate=flag({"truncate": True} | params, "truncate"),
    )


def _yarn_attention_factor(params: Settings, factor: float) -> float:
    if params.get("attention_factor") is not None:
        return number(params, "attention_factor")

    if params.get("mscale") and params.get("mscale_all_dim"):
        return mscale(params, "mscale", factor) / mscale(params, "mscale_all_dim", factor)
    return mscale({"mscale": 1.0}, "mscale", factor)


def mscale(params: Settings, key: str, factor: float) -> float:
    """How much sharper YaRN makes the softmax at this factor; 1 where the weight is absent or 0."""
    if not params.get(key) or factor <= 1:
        return 1.0
    return 0.1 * number(params, key) * math.log(factor) + 1.0
