"""A ranking request and its scores as bytes, for processes that do not share their libraries.

A header of JSON has the plain fields and the sizes of the binary ones, which follow it. Ids are
int64, scores float32, both little-endian.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass, fields
from typing import Any, TypeVar

_SIZE = struct.Struct("<I")
T = TypeVar("T")


@dataclass(slots=True)
class RankJob:
    """One user's history and the candidates to score."""

    user_id: int
    item_ids: bytes
    category_ids: bytes
    actions: bytes
    candidate_ids: bytes
    candidate_category_ids: bytes
    timestamps: bytes | None = None
    query_time: int = 1
    top_k: int | None = None
    timeout_s: float | None = None  # from when the engine gets it


@dataclass(slots=True)
class RankScores:
    """The scores of one user's candidates, in their order or, of the best, in descending order."""

    scores: bytes  # [n, num_tasks]
    item_ids: bytes | None = None  # of the best
    num_tasks: int = 1
    num_tokens: int = 0  # the contextual token, history and candidates
    scaling_seqlen: int = 0  # what attention was divided by
    depends_on_batch: bool = False
    batch_size: int = 0  # requests of the step
    queue_ms: float = 0.0
    run_ms: float = 0.0


def pack(value: RankJob | RankScores) -> bytes:
    """The bytes that unpack() reads."""
    plain: dict[str, Any] = {}
    parts: dict[str, bytes] = {}
    for field in fields(value):
        content = getattr(value, field.name)
        (parts if isinstance(content, bytes) else plain)[field.name] = content
    sizes = {name: len(part) for name, part in parts.items()}
    header = json.dumps([plain, sizes]).encode()
    return b"".join([_SIZE.pack(len(header)), header, *parts.values()])


def unpack(kind: type[T], data: bytes) -> T:
    """The inverse of pack()."""
    (size,) = _SIZE.unpack_from(data)
    at = _SIZE.size + size
    found, sizes = json.loads(data[_SIZE.size : at])
    for name, length in sizes.items():
        found[name] = data[at : at + length]
        at += length
    return kind(**found)
