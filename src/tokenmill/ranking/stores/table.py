"""A whole table in one memory: the GPU's, or the host's where the model runs there."""

from __future__ import annotations

import threading

import torch

from tokenmill.ranking.stores.store import (
    DEVICE,
    StoreStats,
    TableSpec,
    check_ids,
    check_rows,
    last_of_each,
)


class DeviceTable:
    """table [rows, dim] as it is; torch gathers from it."""

    def __init__(self, table: torch.Tensor) -> None:
        self.spec = TableSpec(table.shape[0], table.shape[1], table.dtype)
        self._table = table
        self._lock = threading.Lock()  # one at a time, so that no lookup sees half a row
        self._num_lookups = self._num_updates = 0

    @property
    def device(self) -> torch.device:
        return self._table.device

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        """table[ids]."""
        check_ids(ids, self.spec.num_rows, check)
        with self._lock:
            self._num_lookups += len(ids)
            return self._table.index_select(0, ids.to(self.device, non_blocking=True))

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """table[ids] = rows, in the order of the device's stream."""
        check_rows(ids, rows, self.spec)
        ids, rows = last_of_each(ids, rows)
        with self._lock:
            self._num_updates += len(ids)
            self._table.index_copy_(0, ids.to(self.device), rows.to(self.device))

    def stats(self) -> StoreStats:
        keys = self._num_lookups
        return StoreStats(
            num_lookups=keys,
            num_hits=keys,
            bytes_by_tier={DEVICE: keys * self.spec.row_bytes},
            keys_by_tier={DEVICE: keys},
            num_updates=self._num_updates,
        )

    def close(self) -> None:
        """There is nothing to release."""
