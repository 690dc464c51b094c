"""Files of rows: safetensors and NumPy's, read a piece at a time, and safetensors written so."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from tokenmill.ranking.stores.store import EmbeddingError, TableSpec, type_name

TENSOR = "embedding"  # the name in the files that are written here
PIECE_BYTES = 2**26
STORED = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SUFFIXES = (".safetensors", ".npy")


@dataclass(frozen=True, slots=True)
class RowFile:
    """A table in a file; `tensor` names it in a safetensors file."""

    path: Path
    spec: TableSpec
    tensor: str = ""

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        step = max(1, PIECE_BYTES // self.spec.row_bytes)
        starts = range(0, self.spec.num_rows, step)
        if self.path.suffix == ".npy":
            array = np.load(self.path, mmap_mode="r")
            for start in starts:
                yield start, torch.from_numpy(np.array(array[start : start + step]))
            return
        with safe_open(self.path, "pt") as file:
            rows = file.get_slice(self.tensor)
            for start in starts:
                yield start, rows[start : start + step]

    def check(self, spec: TableSpec) -> None:
        """An error where the file holds another table than `spec`."""
        if self.spec != spec:
            raise EmbeddingError(f"{self.path} holds {self.spec}, and the table is {spec}")


def open_rows(path: Path | str, tensor: str | None = None) -> RowFile:
    """The table in a .safetensors or .npy file; nothing but its header is read."""
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise EmbeddingError(f"{path} is not a table: give a .safetensors or a .npy file")
    if not path.is_file():
        raise EmbeddingError(f"there is no file {path}")
    return _open_numpy(path) if path.suffix == ".npy" else _open_safetensors(path, tensor)


def _open_numpy(path: Path) -> RowFile:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise EmbeddingError(f"{path} cannot be read: {error}") from error
    kinds = {"float64": torch.float64, "float32": torch.float32, "float16": torch.float16}
    if array.dtype.name not in kinds or not array.dtype.isnative:
        raise EmbeddingError(
            f"{path} holds {array.dtype.name}: a table is {', '.join(sorted(kinds))}"
        )
    return RowFile(path, _spec(path, array.shape, kinds[array.dtype.name]))


def _open_safetensors(path: Path, tensor: str | None) -> RowFile:
    try:
        with safe_open(path, "pt") as file:
            names = list(file.keys())
            tensor = _choose(path, names, tensor)
            rows = file.get_slice(tensor)
            shape, kind = tuple(rows.get_shape()), rows.get_dtype()
    except (SafetensorError, OSError) as error:
        raise EmbeddingError(f"{path} cannot be read: {error}") from error
    if kind not in STORED:
        raise EmbeddingError(f"{tensor} of {path} is {kind}: a table is {', '.join(STORED)}")
    return RowFile(path, _spec(path, shape, STORED[kind]), tensor)


def _choose(path: Path, names: list[str], tensor: str | None) -> str:
    if tensor is None and len(names) == 1:
        return names[0]
    chosen = TENSOR if tensor is None else tensor
    if chosen not in names:
        raise EmbeddingError(
            f"{path} has no tensor {chosen}: name one of {', '.join(sorted(names)[:8])}"
        )
    return chosen


def _spec(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> TableSpec:
    if len(shape) != 2:
        raise EmbeddingError(f"{path} has the shape {list(shape)}: a table has rows and columns")
    return TableSpec(shape[0], shape[1], dtype)


def write_rows(path: Path, table: torch.Tensor) -> None:
    """A safetensors file of a table [rows, dim] that is on disk when this returns."""
    spec = TableSpec(table.shape[0], table.shape[1], table.dtype)
    kinds = {dtype: name for name, dtype in STORED.items()}
    if spec.dtype not in kinds:
        raise EmbeddingError(f"a table of {type_name(spec.dtype)} has no type in a file")
    shape = [spec.num_rows, spec.dim]
    entry = {"dtype": kinds[spec.dtype], "shape": shape, "data_offsets": [0, spec.num_bytes]}
    header = json.dumps({TENSOR: entry}).encode()
    header += b" " * (-len(header) % 8)
    step = max(1, PIECE_BYTES // spec.row_bytes)
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 + len(header) + spec.num_bytes)
        file.write(len(header).to_bytes(8, "little") + header)
        for start in range(0, spec.num_rows, step):
            file.write(row_bytes(table[start : start + step]))
        file.flush()
        os.fsync(file.fileno())


def row_bytes(rows: torch.Tensor) -> memoryview:
    values: NDArray[np.uint8] = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return values.data
