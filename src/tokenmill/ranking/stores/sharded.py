"""A table over the memories of several ranks, which exchange ids and rows all to all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from tokenmill.parallel import Ranks, as_bytes
from tokenmill.ranking.stores.store import (
    RANK,
    EmbeddingError,
    EmbeddingStore,
    StoreStats,
    TableSpec,
    check_ids,
    check_rows,
    last_of_each,
)

REFUSED = -1  # in place of a count: the sender's call was wrong, and nobody goes on


def shard_rows(num_rows: int, ranks: Ranks) -> int:
    """How many rows this rank has of the table: row i lies on rank i modulo their number."""
    return (num_rows - ranks.rank + ranks.size - 1) // ranks.size


@dataclass(frozen=True, slots=True)
class _Route:
    """Which distinct ids go to which rank, and how many come from each."""

    order: torch.Tensor  # of the distinct ids, by owner
    sends: list[int]
    receives: list[int]
    local_ids: torch.Tensor  # that this rank is asked for, as rows of its shard


class ShardedTable:
    """Rows of all ranks' shards; row i is row i // ranks of the shard of rank i % ranks.

    A lookup or an update is one call on every rank, each with ids of its own, or with none. A wrong
    id on one rank is an error on all of them. Where ranks update one row at once, the last of them
    wins.
    """

    def __init__(self, ranks: Ranks, shard: EmbeddingStore, num_rows: int) -> None:
        own = shard_rows(num_rows, ranks)
        if shard.spec.num_rows != own:
            raise EmbeddingError(
                f"rank {ranks.rank} of {ranks.size} has {own} rows of a table of {num_rows}, and "
                f"its shard has {shard.spec.num_rows}"
            )
        self.spec = TableSpec(num_rows, shard.spec.dim, shard.spec.dtype)
        self._ranks, self._shard = ranks, shard
        self._num_lookups = self._num_own = self._num_received = self._num_updates = 0

    @property
    def device(self) -> torch.device:
        return self._shard.device

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        """The rows of this rank's ids, each distinct one fetched once."""
        refused = self._refusal(lambda: check_ids(ids, self.spec.num_rows, check))
        ids = ids.to(self.device)
        distinct, inverse = torch.unique(ids, return_inverse=True)
        route = self._route(distinct, refused)
        found = self._shard.lookup(route.local_ids, check=False)
        back = self._exchange_rows(found, route.receives, route.sends)
        rows = torch.empty_like(back)
        rows[route.order] = back
        self._num_lookups += len(ids)
        self._num_own += int((ids % self._ranks.size == self._ranks.rank).sum())
        self._num_received += sum(route.sends) - route.sends[self._ranks.rank]
        return rows[inverse]

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows of any rank; when this returns, every rank's are where they belong."""
        refused = self._refusal(lambda: check_rows(ids, rows, self.spec))
        if refused is None:
            ids, rows = last_of_each(ids, rows)
        route = self._route(ids.to(self.device), refused)
        own_rows = self._exchange_rows(
            rows.to(self.device)[route.order], route.sends, route.receives
        )
        failed = self._refusal(lambda: self._shard.update(route.local_ids, own_rows))
        flags = self._ranks.gather(torch.tensor([failed is not None], device=self.device).int())
        if failed is not None:
            raise failed
        if bool(flags.any()):
            rank = int(flags.view(-1).argmax())
            raise EmbeddingError(f"rank {rank} could not write its rows; see its own error")
        self._num_updates += len(ids)

    def stats(self) -> StoreStats:
        """Keys asked for here, and rows read from this rank's shard for any rank."""
        below, received = self._shard.stats(), self._num_received
        return StoreStats(
            num_lookups=self._num_lookups,
            num_hits=self._num_own,
            bytes_by_tier={**below.bytes_by_tier, RANK: received * self.spec.row_bytes},
            keys_by_tier={**below.keys_by_tier, RANK: received},
            num_updates=self._num_updates,
        )

    def close(self) -> None:
        self._shard.close()

    @staticmethod
    def _refusal(call: Callable[[], None]) -> EmbeddingError | None:
        try:
            call()
        except EmbeddingError as error:
            return error
        return None

    def _route(self, distinct: torch.Tensor, refused: EmbeddingError | None) -> _Route:
        """Tell all ranks how many ids they will get, then send them."""
        size = self._ranks.size
        if refused is not None:
            self._exchange_counts([REFUSED] * size)
            raise refused
        owners = distinct % size
        order = torch.argsort(owners, stable=True)
        sends = torch.bincount(owners, minlength=size).tolist()
        receives = self._exchange_counts(sends)
        if REFUSED in receives:
            raise EmbeddingError(
                f"rank {receives.index(REFUSED)} was called with wrong ids or rows; see its own "
                "error. No rank has looked up or written anything"
            )
        local = self._ranks.exchange((distinct // size)[order], sends, receives).wait()
        return _Route(order, sends, receives, local)

    def _exchange_counts(self, sends: list[int]) -> list[int]:
        if self._ranks.size == 1:
            return sends
        ones = [1] * self._ranks.size
        counts = torch.tensor(sends, device=self.device)
        received: list[int] = self._ranks.exchange(counts, ones, ones).wait().tolist()
        return received

    def _exchange_rows(
        self, rows: torch.Tensor, sends: list[int], receives: list[int]
    ) -> torch.Tensor:
        """As bytes: not every backend knows every type."""
        flat = as_bytes(rows.contiguous()).view(len(rows), self.spec.row_bytes)
        got = self._ranks.exchange(flat, sends, receives).wait()
        return got.view(-1).view(self.spec.dtype).view(sum(receives), self.spec.dim)
