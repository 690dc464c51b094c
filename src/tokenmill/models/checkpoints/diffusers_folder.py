"""Folders of diffusers pipelines: one folder a part, whose tensors are read when they are used."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from tokenmill.core.specs.fields import fixed, number
from tokenmill.core.specs.wan import (
    SHAPES,
    WanSpec,
    read_text_encoder,
    read_transformer,
    read_vae,
)
from tokenmill.core.types import ModelLoadError
from tokenmill.models.checkpoints.tensor_checks import MAX_LISTED
from tokenmill.models.checkpoints.weights import (
    CONFIG_FILE,
    Progress,
    RandomTensor,
    ReadableTensor,
    naming,
    read_json,
    read_stored,
)
from tokenmill.models.family import Shape
from tokenmill.models.wan.umt5_encoder import encoder_tensors
from tokenmill.models.wan.wan_transformer import transformer_tensors
from tokenmill.models.wan.wan_vae import decoder_tensors

_INDEX = "model_index.json"
_DIFFUSION = "diffusion_pytorch_model"
Part = TypeVar("Part")
_EXPERTS = ("transformer", "transformer_2")
_TEXT_COPIES = {"encoder.embed_tokens.weight": "shared.weight"}


class LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors by name, each read from its file, or drawn, whenever it is asked for."""

    def __init__(self, readable: Mapping[str, ReadableTensor], seen: Callable[[int], None]) -> None:
        self._readable, self._seen = readable, seen

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor = self._readable[name]
        self._seen(tensor.num_bytes)
        return tensor.read()

    def __iter__(self) -> Iterator[str]:
        return iter(self._readable)

    def __len__(self) -> int:
        return len(self._readable)


@dataclass(frozen=True, slots=True)
class WanCheckpoint:
    """A text-to-video pipeline whose tensors are known to fit its shapes."""

    name: str
    spec: WanSpec
    parts: Mapping[str, Mapping[str, ReadableTensor]] = field(repr=False)
    tokenizer: Path | None  # None: random weights

    @property
    def experts(self) -> list[str]:
        """The parts that denoise: high noise first."""
        return [part for part in _EXPERTS if part in self.parts]

    @property
    def num_bytes(self) -> int:
        return _num_bytes(self.parts)

    def readers(
        self, device: torch.device | str, progress: Progress | None = None
    ) -> dict[str, LazyTensors]:
        """The tensors of each part, random ones on `device`; `progress` hears of each one read."""
        placed = {part: _placed(own, str(device)) for part, own in self.parts.items()}
        done, total = 0, _num_bytes(placed)

        def seen(num_bytes: int) -> None:
            nonlocal done
            done = min(total, done + num_bytes)
            if progress is not None:
                progress(done, total)

        return {part: LazyTensors(own, seen) for part, own in placed.items()}


def _placed(part: Mapping[str, ReadableTensor], device: str) -> dict[str, ReadableTensor]:
    """With random tensors on the device, on which their type depends."""
    return {
        name: replace(tensor, device=device) if isinstance(tensor, RandomTensor) else tensor
        for name, tensor in part.items()
    }


def _num_bytes(parts: Mapping[str, Mapping[str, ReadableTensor]]) -> int:
    return sum(tensor.num_bytes for part in parts.values() for tensor in part.values())


def open_wan(folder: Path) -> WanCheckpoint:
    """Read the configs and headers of a Wan text-to-video folder, and check every tensor."""
    index = _read(folder / _INDEX, _text_to_video)
    two = _has(index, "transformer_2")
    experts = _EXPERTS[: 1 + two]
    shapes = {part: _read(folder / part / CONFIG_FILE, read_transformer) for part in experts}
    if len(set(shapes.values())) > 1:
        raise ModelLoadError(f"{folder}: transformer and transformer_2 have different shapes")
    boundary = index.get("boundary_ratio")
    if two and not isinstance(boundary, float):
        problem = f"expected a number, got {boundary!r}: transformer_2 is for what is below it"
        raise ModelLoadError(f"{folder / _INDEX}: boundary_ratio: {problem}")
    spec = WanSpec(
        shapes["transformer"],
        _read(folder / "text_encoder" / CONFIG_FILE, read_text_encoder),
        _read(folder / "vae" / CONFIG_FILE, read_vae),
        boundary if two else None,
        _read(folder / "scheduler" / "scheduler_config.json", _read_flow_shift),
    )
    _check_widths(folder, spec)
    parts = {name: _open_part(folder, name, shapes) for name, shapes in _expected(spec).items()}
    return WanCheckpoint(folder.name, spec, parts, folder / "tokenizer")


def random_wan(name: str, seed: int = 0) -> WanCheckpoint:
    """A pipeline of random weights in one of the known shapes."""
    if name not in SHAPES:
        known = ", ".join(SHAPES)
        raise ModelLoadError(f"model {name!r}: with random weights --model must be one of {known}")
    spec = SHAPES[name]
    parts = {
        part: {key: RandomTensor(key, shape, _part_seed(seed, part)) for key, shape in own.items()}
        for part, own in _expected(spec).items()
    }
    return WanCheckpoint(f"{name} with random weights", spec, parts, None)


def _part_seed(seed: int, part: str) -> int:
    return 2 * seed + (part == "transformer_2")  # two experts have the same names


def _expected(spec: WanSpec) -> dict[str, dict[str, Shape]]:
    """The tensors that are used, by part; of the autoencoder its decoder alone."""
    experts = _EXPERTS[: 1 if spec.boundary_ratio is None else 2]
    return {
        **{part: transformer_tensors(spec.transformer) for part in experts},
        "text_encoder": encoder_tensors(spec.text),
        "vae": decoder_tensors(spec.vae),
    }


def _read(file: Path, reader: Callable[[dict[str, Any]], Part]) -> Part:
    if not file.exists():
        problem = "no such file; expected the folder of a diffusers pipeline, such as that of"
        raise ModelLoadError(f"{file}: {problem} Wan-AI/Wan2.2-T2V-A14B-Diffusers")
    with naming(file):
        return reader(read_json(file))


def _has(index: dict[str, Any], part: str) -> bool:
    found = index.get(part)
    return isinstance(found, list) and found[0] is not None


def _text_to_video(index: dict[str, Any]) -> dict[str, Any]:
    """The index of a pipeline without images or controls, and one timestep for all patches."""
    fixed(index, "_class_name", "WanPipeline")
    fixed(index, "expand_timesteps", False)
    return index


def _read_flow_shift(config: dict[str, Any]) -> float:
    """From the config of the scheduler whose steps video/unipc.py computes."""
    for key, only in (
        ("_class_name", "UniPCMultistepScheduler"),
        ("prediction_type", "flow_prediction"),
        ("use_flow_sigmas", True),
        ("solver_order", 2),
        ("solver_type", "bh2"),
    ):
        fixed(config, key, only)
    return number({"flow_shift": WanSpec().flow_shift} | config, "flow_shift")


def _check_widths(folder: Path, spec: WanSpec) -> None:
    for what, first, second in (
        ("text_dim", spec.transformer.text_dim, spec.text.hidden_size),
        ("in_channels", spec.transformer.in_channels, spec.vae.z_dim),
        ("out_channels", spec.transformer.out_channels, spec.vae.z_dim),
    ):
        if first != second:
            problem = f"{what} is {first}, and the part beside it has {second}"
            raise ModelLoadError(f"{folder}/transformer/config.json: {problem}")


def _open_part(folder: Path, part: str, expected: dict[str, Shape]) -> dict[str, ReadableTensor]:
    """The expected tensors of a part; only a text encoder and an autoencoder may hold others."""
    stem = "model" if part == "text_encoder" else _DIFFUSION
    stored = read_stored(folder / part, stem)
    for copy, name in _TEXT_COPIES.items():
        if name not in stored and copy in stored:
            stored[name] = stored[copy]
    missing = [name for name in expected if name not in stored]
    if missing:
        listed = ", ".join(missing[:MAX_LISTED])
        raise ModelLoadError(f"{folder / part}: {len(missing)} tensors are missing: {listed}")
    others = [name for name in stored if name not in expected] if part in _EXPERTS else []
    if others:
        listed = ", ".join(others[:MAX_LISTED])
        problem = f"{len(others)} tensors are not of a text-to-video model: {listed}"
        raise ModelLoadError(f"{folder / part}: {problem}")
    for name, shape in expected.items():
        if stored[name].shape != shape:
            problem = f"{name} has the shape {stored[name].shape}, config.json makes it {shape}"
            raise ModelLoadError(f"{stored[name].file}: {problem}")
        if not stored[name].supported:
            problem = f"{name} is stored as {stored[name].type_name}, which is not supported"
            raise ModelLoadError(f"{stored[name].file}: {problem}")
    return {name: stored[name] for name in expected}
