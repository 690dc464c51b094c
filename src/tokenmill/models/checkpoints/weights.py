"""Checkpoints: which tensors a model has, where they lie, and reading them one at a time."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import islice
from math import log2, prod, sqrt
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from safetensors import SafetensorError, safe_open

from tokenmill.core.specs.spec import ModelSpec, token_ids
from tokenmill.core.types import ModelLoadError
from tokenmill.models import family_of, spec_of
from tokenmill.models.checkpoints import gguf
from tokenmill.models.checkpoints.tensor_checks import (
    CODES,
    FP8,
    MAX_LISTED,
    MXFP4_PARTS,
    PLAIN_BYTES,
    POWERS,
    check_tensors,
    scale_names,
)
from tokenmill.models.checkpoints.upload import upload
from tokenmill.models.family import Shape
from tokenmill.models.names import (
    EAGLE_COPIES,
    EMBEDDING,
    MTP_COPIES,
    STATIC_SCALES,
    eagle_tensors,
    eagle_to_mtp,
    expected_tensors,
    mtp_tensors,
)

Progress = Callable[[int, int], None]  # stored bytes read so far, and in all

SINGLE_SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_DTYPES = {
    **{"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, CODES: torch.uint8},
    **{FP8: torch.float8_e4m3fn, POWERS: torch.float8_e8m0fnu},
}
_MXFP4_SCALES = 119, 121  # random ones, 2 ** -8 and 2 ** -7: with all codes a deviation of 0.018
_ONES = (
    *("norm.weight", "norm1.weight", "norm2.weight", "norm_q.weight", "norm_k.weight"),
    ".gamma",
)
_LFS = b"version https://git-lfs"
_RANDOM_STD = 0.02
_OUTPUT = re.compile(r"model\.layers\..*\.(o_proj|down_proj|w2)([._].*)?")  # adds to the stream


class ReadableTensor(Protocol):
    """A tensor that is not in memory yet."""

    @property
    def num_bytes(self) -> int: ...
    def read(self) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class SafetensorsTensor:
    """One tensor of a safetensors file, from byte `begin` on."""

    file: Path
    name: str
    shape: Shape
    type_name: str
    begin: int

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.type_name]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * (self.dtype.itemsize if self.type_name in _DTYPES else 0)

    @property
    def supported(self) -> bool:
        return self.type_name in PLAIN_BYTES

    @property
    def stored(self) -> tuple[SafetensorsTensor, ...]:
        return (self,)

    def join(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def read(self) -> torch.Tensor:
        # A mapping of its own per tensor: its pages leave memory when the tensor does.
        with safe_open(self.file, framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(self.name)
            return tensor


@dataclass(frozen=True, slots=True)
class FP8Tensor:
    """A matrix of fp8 codes with its scales; it reads as fp32, code times scale.

    Rounded to fp8 again with amax / 448 per row, a matrix that was scaled so gets its own codes
    back; one scaled per block or per tensor is rounded a second time.
    """

    codes: SafetensorsTensor
    scales: SafetensorsTensor
    block: tuple[int, int] | None

    @property
    def num_bytes(self) -> int:
        return self.codes.num_bytes + self.scales.num_bytes

    @property
    def type_name(self) -> str:
        return self.codes.type_name

    @property
    def stored(self) -> tuple[SafetensorsTensor, ...]:
        return self.codes, self.scales

    def read(self) -> torch.Tensor:
        return self.join(self.codes.read(), self.scales.read())

    def join(self, codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        weight, scales = codes.float(), scales.float()
        if weight.dim() == 2:
            return self._scale(weight, scales)
        for matrix, own in zip(weight, scales, strict=True):
            self._scale(matrix, own)
        return weight

    def _scale(self, weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
        if self.block is None:
            return weight.mul_(scales.reshape(-1, 1))
        rows, columns = self.block
        scales = scales.repeat_interleave(columns, 1)[:, : weight.shape[1]]
        for part, scale in zip(weight.split(rows), scales, strict=True):
            part.mul_(scale)
        return weight


@dataclass(frozen=True, slots=True)
class RandomTensor:
    """A tensor drawn from N(0, std), or ones for a norm, by seed, name and kind of device.

    Of MXFP4 all codes are drawn alike, and scales by the power of two that is nearest to std.
    """

    name: str
    shape: Shape
    seed: int
    device: str = "cpu"
    std: float = _RANDOM_STD

    @property
    def dtype(self) -> torch.dtype:
        if self.name.endswith(MXFP4_PARTS):
            return torch.uint8
        return torch.float32 if self.device == "cpu" else torch.bfloat16

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        tensor = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        if self.name.endswith(_ONES):
            return tensor.fill_(1.0)
        digest = blake2b(f"{self.seed}:{self.name}".encode(), digest_size=7).digest()
        generator = torch.Generator(self.device).manual_seed(int.from_bytes(digest))
        if self.name.endswith("_blocks"):
            return tensor.random_(0, 256, generator=generator)
        if self.name.endswith("_scales"):
            power = round(log2(self.std / _RANDOM_STD))
            return tensor.random_(*(s + power for s in _MXFP4_SCALES), generator=generator)
        return tensor.normal_(0.0, self.std, generator=generator)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A model on disk whose tensors are known to fit its spec."""

    path: Path
    kind: Literal["safetensors", "gguf", "config"]
    spec: ModelSpec
    file_type: str  # Q4_1, BF16, ...; "random" without a file
    num_bytes: int  # of the tensors as stored
    readable: Mapping[str, ReadableTensor] = field(repr=False)
    num_static_scales: int = 0  # in the file, and not used
    own_head: bool = False  # though its config.json says that the head is the embedding

    def tensors(
        self,
        progress: Progress | None = None,
        device: torch.device | str = "cpu",
        wanted: Callable[[str], bool] | None = None,
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every wanted tensor once, on `device`; those of a GGUF file in CPU memory."""
        expected = expected_tensors(self.spec)
        readable = {
            name: _placed(tensor, device)
            for name, tensor in self.readable.items()
            if name in expected and (wanted is None or wanted(name))
        }
        total, done = sum(tensor.num_bytes for tensor in readable.values()), 0
        for name, tensor in read_all(readable, device):
            yield name, tensor
            done += readable[name].num_bytes
            if progress is not None:
                progress(done, total)

    def describe(self) -> str:
        millions = self.spec.num_params() / 1e6
        size = f"{millions / 1e3:.2f}B" if millions >= 1e3 else f"{millions:.1f}M"
        return (
            f"{self.path.name}: {self.spec.architecture}, {size} parameters, "
            f"{self.spec.num_layers} layers, {self.kind} {self._stored_as()}, "
            f"{self.num_bytes / 1e6:,.1f} MB"
            + self.own_head
            * ", lm_head.weight differs from the embedding and is not tied to it"
        )

    def _stored_as(self) -> str:
        if self.kind != "safetensors" or self.spec.quantization is None:
            return self.file_type
        unused = f"; {self.num_static_scales} static activation and KV scales are not used"
        about = self.spec.quantization.describe() + unused * bool(self.num_static_scales)
        return f"{self.file_type} ({about})"


def open_checkpoint(path: str | Path, *, random_weights: bool = False, seed: int = 0) -> Checkpoint:
    """Read the headers of a folder or .gguf file and check every name, shape and type."""
    path = Path(path)
    if not path.exists():
        raise ModelLoadError(f"{path}: no such file or folder")
    if random_weights:
        spec = read_spec(path)
        random = _random(spec, seed)
        num_bytes = sum(tensor.num_bytes for tensor in random.values())
        return Checkpoint(path, "config", spec, "random", num_bytes, random)
    return _open_gguf(path) if path.is_file() else _open_safetensors(path)


def open_mtp(
    path: Path, spec: ModelSpec, *, random_weights: bool = False, seed: int = 0
) -> Mapping[str, ReadableTensor]:
    """The tensors of an MTP module or an EAGLE head, checked against the spec.

    A file or folder of safetensors; an EAGLE head comes as an MTP module that lacks norms. A
    module's MLP may be wider or narrower than the model's: its file says how wide it is.
    """
    if random_weights:
        shapes = mtp_tensors(spec).items()
        return {name: RandomTensor(name, shape, seed) for name, shape in shapes}
    if path.is_dir():
        stored = read_stored(path)
    elif path.suffix == ".safetensors" and path.exists():
        stored = {tensor.name: tensor for tensor in _read_header(path)}
    else:
        found = "" if path.exists() else ", found nothing"
        raise ModelLoadError(f"{path}: expected a .safetensors file or a folder with one{found}")
    if "fc.weight" in stored:
        return _open_eagle(stored, spec, path)
    prefix = f"model.layers.{spec.num_layers}."
    own = {name: tensor for name, tensor in stored.items() if name.startswith(prefix)}
    if not own:
        problem = f"no tensor's name begins with {prefix}, the first is {min(stored, default=None)}"
        raise ModelLoadError(f"{path}: has no MTP module for this model, {problem}")
    gate = own.get(f"{prefix}mlp.gate_proj.weight")
    expected = mtp_tensors(spec, inner=None if gate is None else gate.shape[0])
    check_tensors(own, spec, path, expected, [prefix + name for name in MTP_COPIES])
    return _with_scales(own, spec, expected)


def _open_eagle(
    stored: Mapping[str, SafetensorsTensor], spec: ModelSpec, path: Path
) -> Mapping[str, ReadableTensor]:
    """The tensors of an EAGLE head under the names that they have in an MTP module."""
    if spec.moe or spec.mla:
        raise ModelLoadError(f"{path}: an EAGLE head is for a dense model, not {spec.architecture}")
    if spec.num_norms != 2:
        norms = f"{spec.num_norms} norms in a layer, where an EAGLE head expects 2"
        raise ModelLoadError(f"{path}: {spec.architecture} has {norms}")
    if "d2t" in stored or any(name.startswith("midlayer.") for name in stored):
        problem = "is given as a folder, with its config.json"
        raise ModelLoadError(f"{path}: an EAGLE-3 head {problem}")
    expected = eagle_tensors(spec, "fc.bias" in stored)
    check_tensors(stored, spec, path, expected, EAGLE_COPIES)
    tensors = _with_scales(stored, spec, expected)
    return {eagle_to_mtp(spec, name): tensor for name, tensor in tensors.items()}


def read_all(
    readable: Mapping[str, ReadableTensor], device: torch.device | str = "cpu"
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor once, on `device`; those of a GGUF file in CPU memory."""
    on_gpu = torch.device(device).type == "cuda"
    return read_by_threads(readable, device) if on_gpu else _read_in_turn(readable, device)


def read_by_threads(
    readable: Mapping[str, ReadableTensor], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    """read_all() for a GPU, where threads read what lies in files as it is."""
    files = [stored for tensor in readable.values() for stored in _in_files(tensor)]
    uploaded = upload(files, device)
    for name, tensor in readable.items():
        if isinstance(tensor, SafetensorsTensor | FP8Tensor):
            yield name, tensor.join(*islice(uploaded, len(tensor.stored)))
        else:
            yield name, _placed(tensor, device).read()


def _read_in_turn(
    readable: Mapping[str, ReadableTensor], device: torch.device | str
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in readable.items():
        yield name, _placed(tensor, device).read()


def _placed(tensor: ReadableTensor, device: torch.device | str) -> ReadableTensor:
    return replace(tensor, device=str(device)) if isinstance(tensor, RandomTensor) else tensor


def _in_files(tensor: ReadableTensor) -> tuple[SafetensorsTensor, ...]:
    return tensor.stored if isinstance(tensor, SafetensorsTensor | FP8Tensor) else ()


def read_spec(path: Path) -> ModelSpec:
    """The spec of a folder, a config.json or a .gguf file, end-of-sequence ids merged."""
    if path.suffix == ".gguf":
        return gguf.open_gguf(path).spec
    config = path / CONFIG_FILE if path.is_dir() else path
    if not config.exists():
        raise ModelLoadError(f"{path}: no {CONFIG_FILE} in this folder{_gguf_hint(path)}")
    with naming(config):
        spec = spec_of(read_json(config))
    generation = config.parent / GENERATION_FILE
    if not generation.exists():
        return spec
    with naming(generation):
        more = token_ids(read_json(generation), "eos_token_id")
    return replace(spec, eos_token_ids=tuple(dict.fromkeys(spec.eos_token_ids + more)))


@contextmanager
def naming(file: Path) -> Iterator[None]:
    """Put the file before what is wrong in it."""
    try:
        yield
    except ModelLoadError as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _random(spec: ModelSpec, seed: int) -> dict[str, RandomTensor]:
    shapes = expected_tensors(spec).items()
    return {n: RandomTensor(n, shape, seed, std=_random_std(n, spec)) for n, shape in shapes}


def _random_std(name: str, spec: ModelSpec) -> float:
    """The deviation of a random tensor: with experts such that routers choose about evenly.

    A token's own embedding must outweigh what layers add to the stream, which tokens have largely
    in common, and not drown it: it is as large as a product of the model's width. Embeddings that
    are the output head as well stay small, or every answer would repeat its last token.
    """
    if spec.moe is None or spec.tie_embeddings:
        return _RANDOM_STD
    if name == EMBEDDING:
        return min(1.0, _RANDOM_STD * sqrt(spec.hidden_size))
    return _RANDOM_STD / sqrt(2 * spec.num_layers) if _OUTPUT.fullmatch(name) else _RANDOM_STD


def _open_gguf(path: Path) -> Checkpoint:
    if path.suffix != ".gguf":
        refuse = "pickle checkpoints are refused, since loading one can run any code it holds; "
        prefix = refuse if path.suffix in PICKLE_SUFFIXES else ""
        raise ModelLoadError(f"{path}: {prefix}give a .gguf file or a folder with {CONFIG_FILE}")
    file = gguf.open_gguf(path)
    check_tensors(file.tensors, file.spec, path)
    num_bytes = sum(tensor.num_bytes for tensor in file.tensors.values())
    return Checkpoint(path, "gguf", file.spec, file.file_type, num_bytes, file.tensors)


def _open_safetensors(path: Path) -> Checkpoint:
    spec = read_spec(path)
    architecture = family_of(spec).architectures[spec.architecture]
    stored = {architecture.our_name(name): t for name, t in read_stored(path).items()}
    own_head = spec.tie_embeddings and _has_own_head(stored)
    spec = replace(spec, tie_embeddings=spec.tie_embeddings and not own_head)
    check_tensors(stored, spec, path)
    tensors = _with_scales(stored, spec, expected_tensors(spec))
    types: Counter[str] = Counter()
    for tensor in tensors.values():
        types[tensor.type_name] += tensor.num_bytes
    (file_type, _), *_ = types.most_common(1)
    static = re.compile("|".join(STATIC_SCALES))
    unused = sum(static.fullmatch(name) is not None for name in stored)
    total = types.total()
    return Checkpoint(path, "safetensors", spec, file_type, total, tensors, unused, own_head)


def _has_own_head(stored: Mapping[str, SafetensorsTensor]) -> bool:
    """True for an output head that is not a copy of the embedding."""
    head, table = stored.get("lm_head.weight"), stored.get(EMBEDDING)
    if head is None or table is None:
        return False
    same = (head.shape, head.type_name) == (table.shape, table.type_name)
    return not (same and torch.equal(head.read(), table.read()))


def _with_scales(
    stored: Mapping[str, SafetensorsTensor], spec: ModelSpec, expected: Mapping[str, Shape]
) -> dict[str, SafetensorsTensor | FP8Tensor]:
    """The expected tensors in the file's order, fp8 codes joined with their scales."""
    scales = scale_names(stored, spec, expected)
    tensors: dict[str, SafetensorsTensor | FP8Tensor] = {}
    block = spec.quantization.block if spec.quantization else None
    for name in (name for name in stored if name in expected):
        tensors[name] = stored[name]
        if name in scales:
            tensors[name] = FP8Tensor(stored[name], stored[scales[name]], block)
    return tensors


def read_stored(folder: Path, stem: str = "model") -> dict[str, SafetensorsTensor]:
    """Headers of the single file `stem`.safetensors, or of every shard that its index names."""
    stored: dict[str, SafetensorsTensor] = {}
    for file in _weight_files(folder, stem):
        for tensor in _read_header(file):
            if tensor.name in stored:
                other = stored[tensor.name].file.name
                raise ModelLoadError(f"{file}: {tensor.name} is in {other} as well")
            stored[tensor.name] = tensor
    return stored


def _weight_files(folder: Path, stem: str) -> list[Path]:
    single, index = folder / (stem + SINGLE_SUFFIX), folder / (stem + INDEX_SUFFIX)
    if single.exists():
        return [single]
    if not index.exists():
        raise ModelLoadError(f"{folder}: {_no_weights(folder, single.name, index.name)}")
    with naming(index):
        weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelLoadError(f"{index}: weight_map is missing or empty")
    files = [folder / str(name) for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != folder:
            raise ModelLoadError(f"{index}: weight_map names {file}, which is not in this folder")
        if not file.exists():
            raise ModelLoadError(f"{folder}: {file.name} is missing, though {index.name} names it")
    return files


def _no_weights(folder: Path, single: str, index: str) -> str:
    wanted = f"no {single} or {index} in this folder"
    pickles = [file for file in folder.glob("*") if file.suffix in PICKLE_SUFFIXES]
    if not pickles:
        return wanted + _gguf_hint(folder)
    return (
        f"{wanted}, only {', '.join(sorted(file.name for file in pickles)[:MAX_LISTED])}; "
        "pickle checkpoints are refused, since loading one can run any code it holds: "
        "convert it to safetensors"
    )


def _gguf_hint(folder: Path) -> str:
    files = sorted(file.name for file in folder.glob("*.gguf")) if folder.is_dir() else []
    return f"; give one of its GGUF files: {', '.join(files[:MAX_LISTED])}" if files else ""


def _read_header(file: Path) -> list[SafetensorsTensor]:
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
        first, header = _header(file)
        return [
            SafetensorsTensor(
                file,
                name,
                tuple(header[name]["shape"]),
                header[name]["dtype"],
                first + header[name]["data_offsets"][0],
            )
            for name in names
        ]
    except (SafetensorError, OSError) as error:
        problem = f"not a readable safetensors file: {error}"
        if isinstance(error, SafetensorError) and file.open("rb").read(len(_LFS)) == _LFS:
            problem = "a Git LFS pointer, not the weights: fetch them with git lfs pull"
        raise ModelLoadError(f"{file}: {problem}") from error


def _header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where the tensors begin, and what is said of each, in a file that was found sound."""
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        return 8 + length, json.loads(opened.read(length))


def read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"expected a JSON object, got {type(content).__name__}")
    return content
