"""Reads how a checkpoint stores its linear weights: quantization_config of config.json."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from tokenmill.core.types import ModelLoadError

Settings = dict[str, Any]
Shape = tuple[int, ...]
ScaleKind = Literal["tensor", "channel", "block"]

MXFP4 = "mxfp4"
MXFP4_BLOCK = 32  # weights that share a scale
MXFP4_BYTES = 17 / 32  # of a weight: 4 bits, and its share of the scale
_METHODS = ("compressed-tensors", "fp8")
_FORMATS = ("float-quantized", "naive-quantized")  # for fp8 both store the same tensors
_KINDS: tuple[ScaleKind, ...] = ("tensor", "channel", "block")
_PLAIN = " with fp8 weights, float32, bfloat16 or float16 safetensors, or a GGUF file"
_ROOT = "quantization_config"
_REQUIRED = object()


@dataclass(frozen=True, slots=True)
class QuantizationSpec:
    """Codes: a weight is its code times the scale of its tensor, row or block.

    Codes are fp8 e4m3 in linear layers; "mxfp4" stores experts as fp4 with powers of two as scales.
    """

    method: str  # as config.json names it
    kind: ScaleKind  # how much of a matrix shares a scale
    block: tuple[int, int] | None = None  # rows and columns of a block
    ignored: tuple[str, ...] = ()  # patterns of module names that are stored plain

    def describe(self) -> str:
        if self.method == MXFP4:
            return "experts in MXFP4"
        unit = "row" if self.kind == "channel" else self.kind
        size = "{}x{} ".format(*self.block) if self.block else ""
        return f"fp8 with a scale per {size}{unit}"

    @property
    def scale_names(self) -> tuple[str, ...]:
        """What a module may call the scales of its weight; "inv" multiplies all the same."""
        if self.method == "compressed-tensors":
            return ("weight_scale",)
        return ("weight_scale_inv",) if self.block else ("weight_scale", "weight_scale_inv")

    def scale_shapes(self, rows: int, columns: int) -> tuple[Shape, ...]:
        if self.block:
            return ((-(-rows // self.block[0]), -(-columns // self.block[1])),)
        return ((rows, 1), (rows,)) if self.kind == "channel" else ((1,), (), (1, 1))

    def covers(self, modules: list[str]) -> list[str]:
        patterns = [re.compile(pattern) for pattern in self.ignored]
        return [name for name in modules if not any(p.match(name) for p in patterns)]


def read_quantization(config: Settings) -> QuantizationSpec | None:
    """The contents of quantization_config, or None where there is none."""
    settings = config.get(_ROOT)
    if not settings:
        return None
    method = _one_of(_object(settings, _ROOT), "quant_method", _METHODS, hint=_PLAIN)
    return _read_fp8(settings) if method == "fp8" else _read_compressed_tensors(settings)


def read_mxfp4(config: Settings) -> QuantizationSpec | None:
    """The same for a family whose experts may be stored in MXFP4."""
    settings = config.get(_ROOT)
    if not settings:
        return None
    hint = ", or float32, bfloat16 or float16 safetensors"
    method = _one_of(_object(settings, _ROOT), "quant_method", (MXFP4,), hint=hint)
    return QuantizationSpec(method, "block", (1, MXFP4_BLOCK))


def _read_fp8(settings: Settings) -> QuantizationSpec:
    """DeepSeek's and Qwen3's blocks, or one scale per tensor."""
    _one_of(settings, "fmt", ("e4m3",), default="e4m3")
    _one_of(settings, "activation_scheme", ("dynamic", "static"), default="dynamic")
    size = settings.get("weight_block_size")
    block = None if size is None else _block(size, f"{_ROOT}.weight_block_size")
    field = "modules_to_not_convert" if settings.get("modules_to_not_convert") else "ignored_layers"
    patterns = []
    for name in _names(settings, field):  # as transformers has it: a regex up to a dot, or a suffix
        patterns += [rf"(?:{name})(?:\.|$)", rf".*{re.escape(name)}$"]
    ignored = _patterns(patterns, field)
    return QuantizationSpec("fp8", "block" if block else "tensor", block, ignored)


def _read_compressed_tensors(settings: Settings) -> QuantizationSpec:
    _one_of(settings, "format", _FORMATS)
    _one_of(settings, "transform_config", (), default=None)
    at = f"{_ROOT}.sparsity_config"
    sparsity = _object(settings.get("sparsity_config") or {}, at)
    _one_of(sparsity, "format", ("dense",), default="dense", at=at)
    at = f"{_ROOT}.config_groups"
    groups = _object(settings.get("config_groups"), at)
    schemes = {_scheme(group, f"{at}.{name}") for name, group in groups.items()}
    if len(schemes) != 1:
        raise ModelLoadError(f"{at}: expected one weight scheme for all, got {len(schemes)}")
    ((kind, block),) = schemes
    patterns = [
        name.removeprefix("re:") if name.startswith("re:") else rf"{re.escape(name)}$"
        for name in _names(settings, "ignore")
    ]
    return QuantizationSpec("compressed-tensors", kind, block, _patterns(patterns, "ignore"))


def _scheme(group: Any, at: str) -> tuple[ScaleKind, tuple[int, int] | None]:
    """Check a config group; how its weights are scaled."""
    _one_of(_object(group, at), "format", _FORMATS, default=None, at=at)
    _one_of(group, "output_activations", (), default=None, at=at)
    if group.get("input_activations") is not None:
        _check_float8(group["input_activations"], f"{at}.input_activations")
    weights, at = group.get("weights"), f"{at}.weights"
    _check_float8(weights, at)
    kind: ScaleKind = _one_of(weights, "strategy", _KINDS, at=at)
    if kind != "block":
        return kind, None
    return kind, _block(weights.get("block_structure"), f"{at}.block_structure")


def _check_float8(args: Any, at: str) -> None:
    _one_of(_object(args, at), "num_bits", (8,), at=at)
    _one_of(args, "type", ("float",), at=at)
    _one_of(args, "symmetric", (True,), default=True, at=at)


def _block(value: Any, at: str) -> tuple[int, int]:
    """Rows and columns: [128, 128], or "128x128" as older compressed-tensors wrote it."""
    text = value.split("x") if isinstance(value, str) else value
    sizes = [int(size) for size in text if str(size).isdecimal()] if isinstance(text, list) else []
    if len(sizes) != 2 or min(sizes) < 1:
        raise _refusal(at, value, "two positive integers")
    return sizes[0], sizes[1]


def _names(settings: Settings, field: str) -> list[str]:
    names = settings.get(field) or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise _refusal(f"{_ROOT}.{field}", names, "a list of module names")
    return names


def _patterns(patterns: list[str], field: str) -> tuple[str, ...]:
    for pattern in patterns:
        try:
            re.compile(pattern)
        except re.error as error:
            raise _refusal(f"{_ROOT}.{field}", pattern, f"regular expressions ({error})") from error
    return tuple(patterns)


def _one_of(
    settings: Settings,
    field: str,
    supported: tuple[Any, ...],
    default: Any = _REQUIRED,
    at: str = _ROOT,
    hint: str = "",
) -> Any:
    """The field's value if it is supported; its default where it is absent or empty."""
    value = settings.get(field)
    if default is not _REQUIRED and value in (None, "", {}, []):
        return default
    if value not in supported:
        names = " or ".join(repr(name) for name in supported) or "null"
        raise _refusal(f"{at}.{field}", value, f"{names}{hint}")
    return value


def _object(value: Any, at: str) -> Settings:
    if not isinstance(value, dict):
        raise _refusal(at, value, "a JSON object")
    return value


def _refusal(at: str, value: Any, supported: str) -> ModelLoadError:
    return ModelLoadError(f"{at}: {value!r} is not supported; use {supported}")
