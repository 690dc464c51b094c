"""A cache on the device in front of a table that lies in the host's memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from tokenmill.kernels.embedding import (
    WAYS,
    Misses,
    admit_misses,
    cache_bytes,
    fetch_misses,
    lookup_cached,
    make_row_cache,
    write_cached,
)
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import (
    DEVICE,
    HOST,
    EmbeddingError,
    StoreStats,
    TableSpec,
    check_ids,
    check_rows,
    last_of_each,
)

HALF_LIFE_LOOKUPS = 64  # of a counter, in keys for each slot
DECAY = 0.5


class CachedTable:
    """Rows of `backing` by way of a cache of num_slots rows on `device`.

    Where the device can read the table by itself, a lookup neither waits for the device nor learns
    which keys missed. Otherwise the misses are read by `backing.lookup`. Lookups and updates of
    several threads and streams take place one after the other on the device.
    """

    def __init__(self, backing: HostTable, num_slots: int, device: torch.device | str) -> None:
        check_slots(num_slots)
        self.spec, self._backing = backing.spec, backing
        self._device = torch.device(device)
        self.cache = make_row_cache(num_slots, self.spec.dim, self.spec.dtype, self._device)
        self._half_life = HALF_LIFE_LOOKUPS * num_slots
        self._lock = threading.Lock()
        self._last: torch.cuda.Event | None = None  # the device has done all before it
        self._generation = backing.generation
        self._num_lookups = self._num_updates = self._since_decay = 0

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def memory_bytes(self) -> int:
        return self.cache.num_bytes

    def lookup(self, ids: torch.Tensor, check: bool = True) -> torch.Tensor:
        check_ids(ids, self.spec.num_rows, check)
        ids = ids.to(self._device, non_blocking=True).contiguous()
        out = torch.empty(len(ids), self.spec.dim, dtype=self.spec.dtype, device=self._device)
        with self._in_order():
            self._forget_stale()
            misses = lookup_cached(self.cache, ids, out)
            self._fetch(ids, misses, out)
            admit_misses(self.cache, ids, misses, out)
            self._decay(len(ids))
        return out

    def update(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Write rows to the table, then to those of them that are resident."""
        check_rows(ids, rows, self.spec)
        ids, rows = last_of_each(ids, rows)
        with self._in_order():
            if self._last is not None:
                self._last.synchronize()  # lookups under way read the table
            self._forget_stale()
            self._backing.update(ids, rows)
            self._generation = self._backing.generation
            write_cached(self.cache, ids.to(self._device), rows.to(self._device))
            self._num_updates += len(ids)

    def stats(self) -> StoreStats:
        missed, fetched = self.cache.totals.tolist()
        below, hits = self._backing.stats(), self._num_lookups - missed
        far = dict(below.bytes_by_tier), dict(below.keys_by_tier)
        if self._backing.mapped is not None:  # the device read it, and the backing knows nothing
            far = {HOST: fetched * self.spec.row_bytes}, {HOST: fetched}
        return StoreStats(
            num_lookups=self._num_lookups,
            num_hits=hits,
            bytes_by_tier={DEVICE: hits * self.spec.row_bytes, **far[0]},
            keys_by_tier={DEVICE: hits, **far[1]},
            num_updates=self._num_updates,
        )

    def close(self) -> None:
        if self._last is not None:
            self._last.synchronize()
        self._backing.close()

    def _fetch(self, ids: torch.Tensor, misses: Misses, out: torch.Tensor) -> None:
        table = self._backing.mapped
        if table is not None:
            fetch_misses(self.cache, ids, misses, table, out)
        elif count := int(misses.count):
            places = misses.positions[:count].long()
            distinct, inverse = torch.unique(ids[places], return_inverse=True)
            rows = self._backing.lookup(distinct.cpu(), check=False).to(self._device)
            out.index_copy_(0, places, rows.index_select(0, inverse))
            self.cache.totals[1] += len(distinct)

    def _forget_stale(self) -> None:
        """Another process has written rows: none in the cache can be trusted."""
        if self._generation != self._backing.generation:
            self._generation = self._backing.generation
            self.cache.tags.fill_(-1)
            self.cache.counters.fill_(-1.0)

    def _decay(self, num_keys: int) -> None:
        self._num_lookups += num_keys
        self._since_decay += num_keys
        if self._since_decay >= self._half_life:
            self._since_decay = 0
            self.cache.counters.mul_(DECAY)
            self.cache.sketch.mul_(DECAY)

    @contextmanager
    def _in_order(self) -> Iterator[None]:
        """Behind all that was launched before, whatever stream is current."""
        with self._lock:
            if self._device.type != "cuda":
                yield
                return
            stream = torch.cuda.current_stream(self._device)
            if self._last is not None:
                stream.wait_event(self._last)
            yield
            self._last = stream.record_event()


def check_slots(num_slots: int) -> None:
    if num_slots < WAYS or num_slots % WAYS:
        raise EmbeddingError(
            f"a cache has a multiple of {WAYS} slots, got {num_slots}: take "
            f"{max(1, num_slots // WAYS) * WAYS}"
        )


def cache_memory_bytes(spec: TableSpec, num_slots: int) -> int:
    """What a cache will take on its device, known before it is made."""
    return cache_bytes(num_slots, spec.row_bytes)
