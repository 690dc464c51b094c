"""The protocol of an embedding store, its counters, and the checks of ids and rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

import torch

from tokenmill.core.types import TokenmillError

DEVICE, HOST = "device", "host"  # the tiers, nearest first


class EmbeddingError(TokenmillError, ValueError):
    """An id, a row or a table that cannot be taken; the message names it."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The shape of a table, and the type of its values."""

    num_rows: int
    dim: int
    dtype: torch.dtype = torch.float16

    def __post_init__(self) -> None:
        if self.num_rows < 1 or self.dim < 1:
            raise EmbeddingError(
                f"a table needs at least one row and one column, got {self.num_rows} x {self.dim}"
            )

    @property
    def row_bytes(self) -> int:
        return self.dim * self.dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self.num_rows * self.row_bytes

    def __str__(self) -> str:
        return f"{self.num_rows} x {self.dim} {type_name(self.dtype)}"


@dataclass(frozen=True, slots=True)
class StoreStats:
    """What a store has done since it was made."""

    num_lookups: int  # keys asked for
    num_hits: int  # keys found in the nearest tier
    bytes_by_tier: Mapping[str, int]  # of the rows read there
    keys_by_tier: Mapping[str, int] = field(default_factory=dict)  # keys answered from there
    num_updates: int = 0  # rows written

    @property
    def hit_rate(self) -> float:
        return self.num_hits / self.num_lookups if self.num_lookups else 0.0

    def __str__(self) -> str:
        """Shares of the keys that were answered from each tier."""
        keys, total = self.keys_by_tier, max(sum(self.keys_by_tier.values()), 1)
        shares = [f"{count / total:.1%} from {tier}" for tier, count in keys.items()]
        return f"{self.num_lookups:,} keys, {', '.join(shares)}"


class EmbeddingStore(Protocol):
    """A table of rows, wherever they lie."""

    @property
    def spec(self) -> TableSpec: ...
    @property
    def device(self) -> torch.device:
        """Where the rows of a lookup lie."""

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        """The rows of ids int64 [n], a new tensor [n, dim]; ids lie on the host or on `device`.

        An id outside the table is an EmbeddingError. With check=False the caller has checked
        them, which spares a wait for the device.
        """

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows [n, dim]; the last of equal ids wins. Every later lookup sees them."""

    def stats(self) -> StoreStats: ...
    def close(self) -> None: ...


def type_name(dtype: torch.dtype) -> str:
    """float16 for torch.float16."""
    return str(dtype).removeprefix("torch.")


def check_ids(ids: torch.Tensor, num_rows: int, values: bool = True) -> None:
    """An error that names the first id outside the table; values on a device are waited for."""
    if ids.dim() != 1 or ids.dtype != torch.int64:
        shape = "x".join(str(size) for size in ids.shape) or "one number"
        raise EmbeddingError(f"ids must be int64 [n], got {type_name(ids.dtype)} ({shape})")
    if not values or not len(ids):
        return
    low, high = torch.aminmax(ids)
    if int(low) < 0 or int(high) >= num_rows:
        wrong = ids[(ids < 0) | (ids >= num_rows)][0]
        raise EmbeddingError(
            f"id {int(wrong)} is not in the table: it has {num_rows} rows, ids 0 to {num_rows - 1}"
        )


def check_rows(ids: torch.Tensor, rows: torch.Tensor, spec: TableSpec) -> None:
    """An error where ids and rows do not fit each other or the table."""
    check_ids(ids, spec.num_rows)
    if rows.shape != (len(ids), spec.dim):
        raise EmbeddingError(
            f"rows must be [{len(ids)}, {spec.dim}], one of the table's width for each id, "
            f"got {list(rows.shape)}"
        )
    if rows.dtype != spec.dtype:
        raise EmbeddingError(
            f"rows must be {type_name(spec.dtype)} as the table is, got {type_name(rows.dtype)}"
        )


def last_of_each(ids: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Distinct ids in ascending order, each with its last row; on the host."""
    ids, rows = ids.cpu(), rows.cpu()
    distinct, inverse = torch.unique(ids, return_inverse=True)
    lasts = torch.zeros_like(distinct)
    lasts.scatter_reduce_(0, inverse, torch.arange(len(ids)), "amax", include_self=False)
    return distinct, rows[lasts]
