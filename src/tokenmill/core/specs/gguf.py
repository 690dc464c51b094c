"""The header of a GGUF file: metadata and where the tensors lie.

The gguf package's own reader takes seconds for a large vocabulary and needs numpy, so the header is
read here; the package still names the types and dequantises.
"""

from __future__ import annotations

import functools
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.core.types import ModelLoadError

Metadata = dict[str, Any]

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}


@dataclass(frozen=True, slots=True)
class TensorPlace:
    """One tensor by its own name; `kind` is the number of its GGML type."""

    name: str
    shape: tuple[int, ...]
    kind: int
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """All of a GGUF file but the weights."""

    metadata: Metadata
    tensors: list[TensorPlace]
    file_bytes: int


def read_gguf_header(path: Path) -> GGUFHeader:
    """Parse the header of a GGUF file; a bad one is a ModelLoadError that names the file."""
    try:
        stat = path.stat()
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=2)  # spec, weights and tokenizer each ask for the same header
def _read(path: Path, modified_ns: int, num_bytes: int) -> GGUFHeader:
    try:
        with path.open("rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise ModelLoadError(f"{path}: not a GGUF file (it does not start with 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _parse(path, _Cursor(data))
    except OSError as error:
        raise ModelLoadError(f"{path}: cannot be read: {error.strerror}") from error
    except struct.error as error:
        raise ModelLoadError(f"{path}: the GGUF header is truncated or damaged: {error}") from error


class _Cursor:
    """Reads GGUF primitives in order from a mapped file."""

    __slots__ = ("data", "offset")

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.offset = len(MAGIC)

    def scalars(self, code: str, count: int = 1) -> tuple[Any, ...]:
        layout = f"<{count}{code}"
        values = struct.unpack_from(layout, self.data, self.offset)
        self.offset += struct.calcsize(layout)
        return values

    def string(self) -> str:
        (length,) = self.scalars("Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise struct.error("a string runs past the end of the file")
        return self.data[start : self.offset].decode("utf-8", "replace")

    def value(self) -> Any:
        (kind,) = self.scalars("I")
        return self.array() if kind == _ARRAY else self.values(kind, 1)[0]

    def array(self) -> list[Any]:
        kind, count = self.scalars("I")[0], self.scalars("Q")[0]
        return self.values(kind, count)

    def values(self, kind: int, count: int) -> list[Any]:
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind == _ARRAY:
            return [self.array() for _ in range(count)]
        if kind not in _SCALARS:
            raise struct.error(f"unknown value type {kind}")
        return list(self.scalars(_SCALARS[kind], count))


def _parse(path: Path, cursor: _Cursor) -> GGUFHeader:
    (version,) = cursor.scalars("I")
    if version not in _VERSIONS:
        raise ModelLoadError(
            f"{path}: GGUF version {version:#x} is not supported; use little-endian version 2 or 3"
        )
    num_tensors, num_values = cursor.scalars("Q", 2)
    metadata = {cursor.string(): cursor.value() for _ in range(num_values)}
    places = [_place(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment") or 32
    start = -(-cursor.offset // alignment) * alignment
    moved = [TensorPlace(p.name, p.shape, p.kind, start + p.offset) for p in places]
    return GGUFHeader(metadata, moved, len(cursor.data))


def _place(cursor: _Cursor) -> TensorPlace:
    name = cursor.string()
    (num_dims,) = cursor.scalars("I")
    shape = tuple(reversed(cursor.scalars("Q", num_dims)))
    kind, offset = cursor.scalars("I")[0], cursor.scalars("Q")[0]
    return TensorPlace(name, shape, kind, offset)
