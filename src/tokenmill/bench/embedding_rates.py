"""Rates of embedding lookups by tier, beside a plain gather, a copy, and the best hit rates."""

from __future__ import annotations

import importlib.util
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tokenmill.bench.results.manifest import cpu_name
from tokenmill.core.types import TokenmillError
from tokenmill.kernels.embedding import WAYS, lookup_cached
from tokenmill.ranking.stores.cache_policies import (
    Keys,
    belady_hit_rate,
    lfu_hit_rate,
    lru_hit_rate,
    zipf_keys,
    zipf_shares,
)
from tokenmill.ranking.stores.database import DatabaseTable
from tokenmill.ranking.stores.device_cache import CachedTable, cache_memory_bytes
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.opening import check_memory
from tokenmill.ranking.stores.store import HOST, EmbeddingStore, TableSpec
from tokenmill.ranking.stores.table import DeviceTable

BATCHES = 4  # of distinct keys, in turn
WARM_LOOKUPS = 4 * WAYS  # of a set's rows one at most is admitted in each
SETS_LOSS = 0.015  # of the hit rate, because a row may lie in one set alone
DATABASE_ROWS = 20_000
TRACE_KEYS, TRACE_ROWS, TRACE_SLOTS, TRACE_BATCH = 100_000, 10_000, 992, 500
EXPONENTS = (0.8, 1.0, 1.2)
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
PRIME = 251  # below it float16 holds eighths exactly

Report = dict[str, Any]


class WrongRowError(TokenmillError):
    """A lookup gave other rows than the table has."""


@dataclass(frozen=True, slots=True)
class Workload:
    """A table, the keys that are looked up in it, and the share of them that the cache holds."""

    spec: TableSpec
    num_keys: int  # of a lookup
    exponent: float
    hit_rate: float
    device: str
    budget_s: float = 1.0  # of each measurement

    def num_slots(self) -> int:
        """The fewest slots whose rows, were they the most frequent ones, give the hit rate."""
        shares = zipf_shares(self.spec.num_rows, self.exponent)
        rows = int(np.searchsorted(shares, min(self.hit_rate + SETS_LOSS, shares[-1]))) + 1
        return -(-rows // WAYS) * WAYS


class ZipfKeys:
    """Draws keys on the device; which rows are frequent is random, and stays."""

    def __init__(self, load: Workload) -> None:
        shares = zipf_shares(load.spec.num_rows, load.exponent)
        self._shares = torch.from_numpy(shares).to(load.device)
        self._source = torch.Generator(load.device).manual_seed(0)
        self._order = torch.randperm(load.spec.num_rows, generator=self._source, device=load.device)
        self._count = load.num_keys

    def draw(self) -> torch.Tensor:
        drawn = torch.rand(
            self._count, generator=self._source, device=self._order.device, dtype=torch.float64
        )
        ranks = torch.searchsorted(self._shares, drawn)
        return self._order[ranks.clamp(max=len(self._order) - 1)]


def measure(load: Workload) -> Report:
    """All tiers, each beside its ceiling; an error where a lookup gives a wrong row."""
    shares = 16 * load.spec.num_rows  # of the distribution, and its sums
    what = f"a table of {load.spec} and the distribution of its keys"
    check_memory(load.spec.num_bytes + shares, "cpu", what, "lower --table-rows")
    num_slots = load.num_slots()
    memory = {
        "cache": cache_memory_bytes(load.spec, num_slots), "table": load.spec.num_bytes,
    }  # fmt: skip
    table = _host_table(load)
    try:
        copy_gb_s, link_gb_s = _copy_rate(load), _link_rate(load, table)
        store, keys = CachedTable(table, num_slots, load.device), ZipfKeys(load)
        hits, tiers = _near_tiers(load, table, store, keys)
        host_share = tiers["cache_and_host"]["host_rows_share"]
        memory["cache_taken"] = store.memory_bytes
    finally:
        table.close()
    tiers |= _database(load)
    for tier in tiers.values():
        tier["of_copy"] = round(tier["gb_s"] / copy_gb_s, 3)
    on_gpu = load.device == "cuda"  # else the rows cross no link
    bound = most_keys_s(load.spec.row_bytes, host_share, link_gb_s) if on_gpu else None
    return {
        "benchmark": "embeddings",
        "device": cpu_name() if load.device == "cpu" else torch.cuda.get_device_name(),
        "rows": load.spec.num_rows, "columns": load.spec.dim, "cache_rows": num_slots,
        "keys_per_lookup": load.num_keys, "zipf": load.exponent, "hit_rate": round(hits, 4),
        "memory_bytes": memory,
        "copy_gb_s": round(copy_gb_s, 1), "host_link_gb_s": round(link_gb_s, 1),
        "cache_and_host_ceiling_keys_s": round(bound) if bound else None,
        "tiers": tiers,
        "of_copy": tiers["device_cache"]["of_copy"],
        "hit_rates": hit_rates(),
    }  # fmt: skip


def most_keys_s(row_bytes: int, host_share: float, link_gb_s: float) -> float | None:
    """Keys/s that no lookup exceeds, since the rows read from the host cross the link.

    Nothing else is sure to bound it: rows that are read again may come from a cache of the chip.
    """
    return 1e9 * link_gb_s / (row_bytes * host_share) if host_share else None


def hit_rates() -> list[dict[str, float]]:
    """Our cache on traces, beside what LRU, LFU with hindsight and Belady reach."""
    found = []
    for exponent in EXPONENTS:
        keys, skip = zipf_keys(TRACE_ROWS, exponent, TRACE_KEYS, 1), TRACE_KEYS // 4
        rates = {"zipf": exponent, "ours": cache_hit_rate(keys, skip)}
        for name, policy in (
            ("lru", lru_hit_rate), ("lfu", lfu_hit_rate), ("belady", belady_hit_rate)
        ):  # fmt: skip
            rates[name] = policy(keys, TRACE_SLOTS, skip)
        found.append({name: round(rate, 4) for name, rate in rates.items()})
    return found


def cache_hit_rate(keys: Keys, skip: int) -> float:
    """Of a cache of TRACE_SLOTS rows on the host, after the first `skip` keys."""
    store = CachedTable(HostTable.create(TableSpec(TRACE_ROWS, 1)), TRACE_SLOTS, "cpu")
    before = 0
    for start in range(0, len(keys), TRACE_BATCH):
        if start == skip:
            before = store.stats().num_hits
        store.lookup(torch.from_numpy(keys[start : start + TRACE_BATCH]))
    rate = (store.stats().num_hits - before) / (len(keys) - skip)
    store.close()
    return rate


def _near_tiers(
    load: Workload, table: HostTable, store: CachedTable, keys: ZipfKeys
) -> tuple[float, dict[str, Report]]:
    """The hit rate of the warm cache, and the tiers from the device to the host."""
    for _ in range(WARM_LOOKUPS):
        store.lookup(keys.draw(), check=False)
    batches = [keys.draw() for _ in range(BATCHES)]
    before = store.stats()
    for ids in batches:
        _check(load, store, ids)
    after = store.stats()
    hits = (after.num_hits - before.num_hits) / (after.num_lookups - before.num_lookups)
    out = torch.empty(load.num_keys, load.spec.dim, dtype=load.spec.dtype, device=load.device)
    tiers = {
        "device_cache": _rate(
            load, batches, lambda ids: lookup_cached(store.cache, ids, out), hits
        ),
        "cache_and_host": _cache_and_host(load, store, keys),
    }
    on_host = [ids.cpu() for ids in batches]
    tiers["host_table"] = _rate(load, on_host, lambda ids: table.lookup(ids).to(load.device))
    whole = DeviceTable(table.table.to(load.device))
    tiers["torch_gather"] = _rate(load, batches, lambda ids: whole.lookup(ids, check=False))
    return hits, tiers


def _cache_and_host(load: Workload, store: CachedTable, keys: ZipfKeys) -> Report:
    """The fastest round, each of new keys: the cache would soon hold the misses of old ones.

    Keys that miss together share one read of their row, hence the share of rows that were read.
    """
    rounds: list[tuple[float, float]] = []
    deadline = 0.0
    while not rounds or time.perf_counter() < deadline:
        batches = [keys.draw() for _ in range(BATCHES)]
        before = store.stats().keys_by_tier[HOST]
        seconds = _round_s(load, [partial(store.lookup, ids, check=False) for ids in batches])
        share = (store.stats().keys_by_tier[HOST] - before) / (BATCHES * load.num_keys)
        if deadline:
            rounds.append((seconds, share))
        else:  # the first round compiles
            deadline = time.perf_counter() + load.budget_s
    seconds, share = min(rounds)
    return _tier(load, seconds) | {"host_rows_share": round(share, 6)}


def _database(load: Workload) -> dict[str, Report]:
    """Rows from an LMDB file, whose pages are in the system's memory, and rows read ahead."""
    if importlib.util.find_spec("lmdb") is None:
        return {}
    count = min(DATABASE_ROWS, load.spec.num_rows)
    spec = TableSpec(count, load.spec.dim, load.spec.dtype)
    with tempfile.TemporaryDirectory() as folder:
        DatabaseTable.create(Path(folder) / "t", spec)
        store = DatabaseTable(Path(folder) / "t", staged_rows=count)
        ids = torch.arange(count)
        store.update(ids, _rows(load, ids))
        batch = torch.randperm(count)[: min(load.num_keys, count)]
        _check(load, store, batch)
        from_disk = _rate(load, [batch], store.lookup)
        store.prefetch(ids)
        _check(load, store, batch)
        staged = _rate(load, [batch], store.lookup)
        store.close()
    return {"database": from_disk, "database_prefetched": staged}


def _rows(load: Workload, ids: torch.Tensor) -> torch.Tensor:
    """What the rows of the table hold: numbers of their own, so that a wrong row is found."""
    columns = torch.arange(load.spec.dim, device=ids.device)
    values = (ids % PRIME)[:, None] + ((ids // PRIME)[:, None] * (columns + 1) + columns) % 8 / 8
    return values.to(load.spec.dtype)


def _host_table(load: Workload) -> HostTable:
    table = HostTable.create(load.spec)
    step = max(1, 2**26 // load.spec.row_bytes)
    for start in range(0, load.spec.num_rows, step):
        ids = torch.arange(start, min(start + step, load.spec.num_rows), device=load.device)
        table.table[start : start + step] = _rows(load, ids)
    if load.device == "cuda":
        table.pin()
    return table


def _check(load: Workload, store: EmbeddingStore, ids: torch.Tensor) -> None:
    wrong = (store.lookup(ids) != _rows(load, ids)).any(dim=1)
    if bool(wrong.any()):
        raise WrongRowError(
            f"{int(wrong.sum())} of {len(ids)} rows are wrong, the first that of {ids[wrong][0]}"
        )


def _rate(
    load: Workload,
    batches: list[torch.Tensor],
    lookup: Callable[[torch.Tensor], object],
    share: float = 1.0,
) -> Report:
    """Keys/s, and bytes read and written for the share of them that is answered."""
    seconds = _seconds(load, [partial(lookup, ids) for ids in batches])
    return _tier(load, seconds, share, len(batches[0]))


def _tier(
    load: Workload, seconds: float, share: float = 1.0, num_keys: int | None = None
) -> Report:
    keys_s = (num_keys or load.num_keys) / seconds
    gb_s = 2 * share * keys_s * load.spec.row_bytes / 1e9
    return {"keys_s": round(keys_s), "ms": round(1e3 * seconds, 3), "gb_s": round(gb_s, 2)}


def _copy_rate(load: Workload) -> float:
    """GB/s that a plain copy on the device reads and writes."""
    source = torch.zeros(COPY_BYTES[load.device], dtype=torch.uint8, device=load.device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / _seconds(load, [lambda: target.copy_(source)]) / 1e9


def _link_rate(load: Workload, table: HostTable) -> float:
    """GB/s from the host's memory to the device's."""
    source = table.table[: max(1, COPY_BYTES["cpu"] // load.spec.row_bytes)]
    target = torch.empty_like(source, device=load.device)
    copy = _seconds(load, [lambda: target.copy_(source, non_blocking=True)])
    return source.nbytes / copy / 1e9


def _seconds(load: Workload, runs: list[Callable[[], object]]) -> float:
    """Of one run: the shortest time over rounds, each of which makes all runs before one wait."""
    _round_s(load, runs)  # compiles
    deadline, best = time.perf_counter() + load.budget_s, _round_s(load, runs)
    while time.perf_counter() < deadline:
        best = min(best, _round_s(load, runs))
    return best


def _round_s(load: Workload, runs: list[Callable[[], object]]) -> float:
    """Seconds of one run, the mean of all."""
    if load.device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for run in runs:
        run()
    if load.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(runs)
