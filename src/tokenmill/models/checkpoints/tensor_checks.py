"""Whether the tensors of a checkpoint fit its model: their names, shapes and stored types."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints import gguf
from tokenmill.models.family import Shape
from tokenmill.models.names import EMBEDDING, STATIC_SCALES, expected_tensors, ignorable

FP8 = "F8_E4M3"
POWERS = "F8_E8M0"  # of two, as scales
CODES = "U8"  # of MXFP4's blocks and scales
PLAIN_BYTES = {"F32": 4, "BF16": 2, "F16": 2}
MXFP4_PARTS = ("_blocks", "_scales")  # ends of their names
MAX_LISTED = 8


class StoredTensor(Protocol):
    """A tensor in a file, known by its header."""

    @property
    def file(self) -> Path: ...
    @property
    def shape(self) -> Shape: ...
    @property
    def type_name(self) -> str: ...
    @property
    def supported(self) -> bool: ...


def check_tensors(
    stored: Mapping[str, StoredTensor],
    spec: ModelSpec,
    path: Path,
    wanted: Mapping[str, Shape] | None = None,
    ignored: Collection[str] = (),
    owner: str = "",
) -> None:
    """Raise one error that lists missing, unexpected, mis-shaped and unreadable tensors.

    `wanted` are the model's unless given; a part of a checkpoint is checked by its own, and
    `owner` says whose they are if not an MTP module's.
    """
    whole = wanted is None
    wanted = expected_tensors(spec) if wanted is None else wanted
    scales = scale_names(stored, spec, wanted)
    expected = _allowed_shapes(scales, spec, wanted)
    types = _allowed_types(scales, spec, wanted)
    known = ignorable(spec) if whole else re.compile("|".join(STATIC_SCALES))
    missing = [
        f"{name} {_or(shapes)}{_beside(name, stored)}"
        for name, shapes in expected.items()
        if name not in stored
    ]
    unexpected, misshaped, unreadable = [], [], []
    for name, tensor in stored.items():
        where = f"in {tensor.file.name}"
        if name not in expected:
            if not known.fullmatch(name) and name not in ignored:
                unexpected.append(f"{name} {list(tensor.shape)} {where}")
        elif tensor.shape not in expected[name]:
            found = f"expected {_or(expected[name])}, found {list(tensor.shape)}"
            misshaped.append(f"{name} {found} {where}")
        elif not _readable(tensor, types.get(name)):
            only = f", expected {CODES}" if types.get(name) == (CODES,) else ""
            unreadable.append(f"{name} is {tensor.type_name} {where}{only}")
    problems = _listed("missing", missing) + _listed("unexpected", unexpected)
    problems += _listed("mis-shaped", misshaped) + _listed("of an unsupported type", unreadable)
    if unreadable:
        problems.append(f"  supported types: {', '.join((*PLAIN_BYTES, *_gguf_types()))}")
        problems[-1] += f", {FP8} in linear layers that a quantization_config covers"
    if problems:
        if whole:
            owner = f"the {spec.architecture} that its config describes"
        elif not owner:
            owner = f"an MTP module of this {spec.architecture}, hidden_size {spec.hidden_size}"
        head = f"{path}: the tensors do not fit {owner}"
        raise ModelLoadError("\n".join([head, *problems]))


def scale_names(
    stored: Mapping[str, StoredTensor], spec: ModelSpec, expected: Mapping[str, Shape]
) -> dict[str, str]:
    """Weight -> its scales, for every linear weight that is stored as fp8 and may be."""
    if spec.quantization is None or spec.mxfp4:
        return {}
    modules = [
        name.removesuffix(".weight")
        for name, shape in expected.items()
        if len(shape) in (2, 3) and name != EMBEDDING
        if name in stored and stored[name].type_name == FP8
    ]
    names = {}
    for module in spec.quantization.covers(modules):
        if module in expected:  # all experts of a layer: its name has no ".weight"
            names[module] = f"{module}_scale_inv"
            continue
        known = [f"{module}.{scale}" for scale in spec.quantization.scale_names]
        names[f"{module}.weight"] = next((name for name in known if name in stored), known[0])
    return names


def _allowed_shapes(
    scales: Mapping[str, str], spec: ModelSpec, expected: Mapping[str, Shape]
) -> dict[str, tuple[Shape, ...]]:
    allowed: dict[str, tuple[Shape, ...]] = {name: (shape,) for name, shape in expected.items()}
    for weight, scale in scales.items():
        assert spec.quantization is not None
        *stacked, rows, columns = expected[weight]
        shapes = spec.quantization.scale_shapes(rows, columns)
        allowed[scale] = tuple((*stacked, *shape) for shape in shapes)
    return allowed


def _allowed_types(
    scales: Mapping[str, str], spec: ModelSpec, expected: Mapping[str, Shape]
) -> dict[str, tuple[str, ...]]:
    """Of tensors that are codes or scales of codes; others have any plain type."""
    allowed = {name: (*PLAIN_BYTES, FP8) for name in scales}
    allowed |= {name: (*PLAIN_BYTES, POWERS) for name in scales.values()}
    if spec.mxfp4:
        allowed |= {name: (CODES,) for name in expected if name.endswith(MXFP4_PARTS)}
    return allowed


def _readable(tensor: StoredTensor, types: tuple[str, ...] | None) -> bool:
    return tensor.supported if types is None else tensor.type_name in types


def _beside(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """For scales that are missing: where their codes are."""
    codes = stored.get(f"{name.removesuffix('_scales')}_blocks")
    return f", the scales of its _blocks in {codes.file.name}" if codes else ""


def _or(shapes: Iterable[Shape]) -> str:
    return " or ".join(str(list(shape)) for shape in shapes)


def _gguf_types() -> Iterable[str]:
    return (f"GGUF {name}" for name in gguf.SUPPORTED_TYPES if name not in PLAIN_BYTES)


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    rest = [f"and {len(items) - MAX_LISTED} more"] if len(items) > MAX_LISTED else []
    return [f"  {len(items)} {title}: " + "; ".join(items[:MAX_LISTED] + rest)]
