"""Keys/s of embedding lookups by tier, beside torch's gather and a plain copy."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.harness import Benchmark, Report
from tokenmill import console
from tokenmill.bench.results.manifest import cpu_name
from tokenmill.core.flags import count, number, setting
from tokenmill.core.types import TokenmillError
from tokenmill.kernels.embedding import WAYS, lookup_cached
from tokenmill.ranking.model_files import choose_device
from tokenmill.ranking.stores.device_cache import CachedTable, cache_memory_bytes
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.opening import check_memory
from tokenmill.ranking.stores.store import HOST, EmbeddingStore, TableSpec
from tokenmill.ranking.stores.table import DeviceTable

BATCHES = 4  # of distinct keys, in turn
WARM_LOOKUPS = 4 * WAYS  # of a set's rows one at most is admitted in each
SETS_LOSS = 0.015  # of the hit rate, because a row may lie in one set alone
COPY_BYTES = {"cuda": 2**30, "cpu": 2**26}
PRIME = 251  # below it float16 holds eighths exactly

SIZES = {"cuda": (2**22, 2**20), "cpu": (2**16, 2**13)}  # rows, and keys of a lookup


class WrongRowError(TokenmillError):
    """A lookup gave other rows than the table has."""


@dataclass(frozen=True)
class Options:
    device: Literal["auto", "cuda", "cpu"] = setting("auto", "Where the cache is.")
    rows: int | None = setting(None, "Rows of the table (65,536; on a GPU 4,194,304).", count(16))
    columns: int = setting(512, "Columns of the table, float16.", count(1))
    keys: int | None = setting(None, "Keys of one lookup (8,192; on a GPU 1,048,576).", count(1))
    zipf: float = setting(1.05, "Exponent of the keys' Zipf distribution.", number(0, 4))
    hit_rate: float = setting(0.9, "Share of the keys that the cache should hold.", number(0.01, 1))
    seconds: float = setting(1.0, "Time that each tier is measured for.", number(0.001, 60))


class Load:
    """A table, and the keys that are looked up in it; which rows are frequent is random."""

    def __init__(self, options: Options) -> None:
        self.device = choose_device(options.device)
        rows, keys = SIZES[self.device]
        self.spec = TableSpec(options.rows or rows, options.columns)
        self.num_keys, self.budget_s = options.keys or keys, options.seconds
        shares = zipf_shares(self.spec.num_rows, options.zipf)
        # The fewest slots whose rows, were they the most frequent ones, give the hit rate.
        held = int(np.searchsorted(shares, min(options.hit_rate + SETS_LOSS, shares[-1]))) + 1
        self.num_slots = -(-held // WAYS) * WAYS
        self._shares = torch.from_numpy(shares).to(self.device)
        self._source = torch.Generator(self.device).manual_seed(0)
        self._order = torch.randperm(len(shares), generator=self._source, device=self.device)

    def draw(self) -> torch.Tensor:
        drawn = torch.rand(
            self.num_keys, generator=self._source, device=self.device, dtype=torch.float64
        )
        ranks = torch.searchsorted(self._shares, drawn)
        return self._order[ranks.clamp(max=len(self._order) - 1)]


def run(options: Options) -> Report:
    """Keys/s of embedding lookups by tier, beside torch's gather and a plain copy.

    The keys follow a Zipf distribution, and the device's cache has as many rows as the hit rate
    asks for. Every tier is first compared with the table. device_cache is the cache's own lookup,
    whose rate counts the hits alone; cache_and_host also reads the misses from the host's memory.

    python -m benchmarks.embeddings --device cuda --zipf 1.05 --hit-rate 0.9
    """
    rows = options.rows or SIZES[choose_device(options.device)][0]
    shares = 16 * rows  # of the distribution, and its sums
    spec = TableSpec(rows, options.columns)
    what = f"a table of {spec} and the distribution of its keys"
    check_memory(spec.num_bytes + shares, "cpu", what, "lower --rows")
    load = Load(options)
    memory = {"cache": cache_memory_bytes(spec, load.num_slots), "table": spec.num_bytes}
    table = _host_table(load)
    try:
        copy_gb_s, link_gb_s = _copy_rate(load), _link_rate(load, table)
        store = CachedTable(table, load.num_slots, load.device)
        hits, tiers = _tiers(load, table, store)
        host_share = tiers["cache_and_host"]["host_rows_share"]
        memory["cache_taken"] = store.memory_bytes
    finally:
        table.close()
    for tier in tiers.values():
        tier["of_copy"] = round(tier["gb_s"] / copy_gb_s, 3)
    on_gpu = load.device == "cuda"  # else the rows cross no link
    bound = most_keys_s(spec.row_bytes, host_share, link_gb_s) if on_gpu else None
    return {
        "device": torch.cuda.get_device_name() if on_gpu else cpu_name(),
        "rows": rows,
        "columns": spec.dim,
        "cache_rows": load.num_slots,
        "keys_per_lookup": load.num_keys,
        "zipf": options.zipf,
        "hit_rate": round(hits, 4),
        "memory_bytes": memory,
        "copy_gb_s": round(copy_gb_s, 1),
        "host_link_gb_s": round(link_gb_s, 1),
        "cache_and_host_ceiling_keys_s": round(bound) if bound else None,
        "tiers": tiers,
        "of_copy": tiers["device_cache"]["of_copy"],
    }


def show(report: Report) -> None:
    rows = [["tier", "keys/s", "read and written", "of a copy"]]
    for name, tier in report["tiers"].items():
        cells = [f"{tier['keys_s']:,}", f"{tier['gb_s']:,.1f} GB/s", f"{tier['of_copy']:.1%}"]
        rows.append([name.replace("_", " "), *cells])
    rows.append(["plain copy", "", f"{report['copy_gb_s']:,.1f} GB/s", "100.0%"])
    console.print_table(rows)
    memory = report["memory_bytes"]
    console.out.print(
        f"{report['device']}: {report['rows']:,} rows of {report['columns']} columns, cache of "
        f"{report['cache_rows']:,} ({memory['cache'] / 1e6:,.1f} MB said and "
        f"{memory['cache_taken'] / 1e6:,.1f} MB taken), hit rate {report['hit_rate']:.1%}"
    )
    if bound := report["cache_and_host_ceiling_keys_s"]:
        share = report["tiers"]["cache_and_host"]["host_rows_share"]
        console.out.print(
            f"cache and host: {share:.1%} of the keys had their row read from the host; its link "
            f"of {report['host_link_gb_s']:,.1f} GB/s allows for {bound:,} keys/s at most"
        )


def most_keys_s(row_bytes: int, host_share: float, link_gb_s: float) -> float | None:
    """Keys/s that no lookup exceeds, since the rows read from the host cross the link.

    Nothing else is sure to bound it: rows that are read again may come from a cache of the chip.
    """
    return 1e9 * link_gb_s / (row_bytes * host_share) if host_share else None


def zipf_shares(num_rows: int, exponent: float) -> NDArray[np.float64]:
    """The share of all keys that the first 1, 2, ... rows have."""
    sums = np.cumsum(np.arange(1, num_rows + 1, dtype=np.float64) ** -exponent)
    shares: NDArray[np.float64] = sums / sums[-1]
    return shares


def _tiers(load: Load, table: HostTable, store: CachedTable) -> tuple[float, dict[str, Report]]:
    """The hit rate of the warm cache, and the tiers from the device to the host."""
    for _ in range(WARM_LOOKUPS):
        store.lookup(load.draw(), check=False)
    batches = [load.draw() for _ in range(BATCHES)]
    before = store.stats()
    for ids in batches:
        _check(load, store, ids)
    after = store.stats()
    hits = (after.num_hits - before.num_hits) / (after.num_lookups - before.num_lookups)
    out = torch.empty(load.num_keys, load.spec.dim, dtype=load.spec.dtype, device=load.device)
    cached = _seconds(load, [partial(lookup_cached, store.cache, ids, out) for ids in batches])
    seconds, share = _cache_and_host(load, store)
    on_host = [ids.cpu() for ids in batches]
    host = _seconds(load, [partial(_looked_up, table, ids, load.device) for ids in on_host])
    whole = DeviceTable(table.table.to(load.device))
    gather = _seconds(load, [partial(whole.lookup, ids, check=False) for ids in batches])
    return hits, {
        "device_cache": _tier(load, cached, hits),
        "cache_and_host": _tier(load, seconds) | {"host_rows_share": round(share, 6)},
        "host_table": _tier(load, host),
        "torch_gather": _tier(load, gather),
    }


def _looked_up(table: HostTable, ids: torch.Tensor, device: str) -> torch.Tensor:
    return table.lookup(ids).to(device)


def _cache_and_host(load: Load, store: CachedTable) -> tuple[float, float]:
    """The fastest round, each of new keys: the cache would soon hold the misses of old ones.

    Keys that miss together share one read of their row, hence the share of rows that were read.
    """
    rounds: list[tuple[float, float]] = []
    deadline = 0.0
    while not rounds or time.perf_counter() < deadline:
        batches = [load.draw() for _ in range(BATCHES)]
        before = store.stats().keys_by_tier[HOST]
        seconds = _round_s(load, [partial(store.lookup, ids, check=False) for ids in batches])
        share = (store.stats().keys_by_tier[HOST] - before) / (BATCHES * load.num_keys)
        if deadline:
            rounds.append((seconds, share))
        else:  # the first round compiles
            deadline = time.perf_counter() + load.budget_s
    return min(rounds)


def _tier(load: Load, seconds: float, share: float = 1.0) -> Report:
    """Keys/s of a lookup, and bytes read and written for the share that is answered."""
    keys_s = load.num_keys / seconds
    gb_s = 2 * share * keys_s * load.spec.row_bytes / 1e9
    return {"keys_s": round(keys_s), "ms": round(1e3 * seconds, 3), "gb_s": round(gb_s, 2)}


def _rows(load: Load, ids: torch.Tensor) -> torch.Tensor:
    """What the rows of the table hold: numbers of their own, so that a wrong row is found."""
    columns = torch.arange(load.spec.dim, device=ids.device)
    values = (ids % PRIME)[:, None] + ((ids // PRIME)[:, None] * (columns + 1) + columns) % 8 / 8
    return values.to(load.spec.dtype)


def _host_table(load: Load) -> HostTable:
    table = HostTable.create(load.spec)
    step = max(1, 2**26 // load.spec.row_bytes)
    for start in range(0, load.spec.num_rows, step):
        ids = torch.arange(start, min(start + step, load.spec.num_rows), device=load.device)
        table.table[start : start + step] = _rows(load, ids)
    if load.device == "cuda":
        table.pin()
    return table


def _check(load: Load, store: EmbeddingStore, ids: torch.Tensor) -> None:
    wrong = (store.lookup(ids) != _rows(load, ids)).any(dim=1)
    if bool(wrong.any()):
        raise WrongRowError(
            f"{int(wrong.sum())} of {len(ids)} rows are wrong, the first that of {ids[wrong][0]}"
        )


def _copy_rate(load: Load) -> float:
    """GB/s that a plain copy on the device reads and writes."""
    source = torch.zeros(COPY_BYTES[load.device], dtype=torch.uint8, device=load.device)
    target = torch.ones_like(source)
    return 2 * source.nbytes / _seconds(load, [lambda: target.copy_(source)]) / 1e9


def _link_rate(load: Load, table: HostTable) -> float:
    """GB/s from the host's memory to the device's."""
    source = table.table[: max(1, COPY_BYTES["cpu"] // load.spec.row_bytes)]
    target = torch.empty_like(source, device=load.device)
    copy = _seconds(load, [lambda: target.copy_(source, non_blocking=True)])
    return source.nbytes / copy / 1e9


def _seconds(load: Load, runs: list[Callable[[], object]]) -> float:
    """Of one run: the shortest time over rounds, each of which makes all runs before one wait."""
    _round_s(load, runs)  # compiles
    deadline, best = time.perf_counter() + load.budget_s, _round_s(load, runs)
    while time.perf_counter() < deadline:
        best = min(best, _round_s(load, runs))
    return best


def _round_s(load: Load, runs: list[Callable[[], object]]) -> float:
    """Seconds of one run, the mean of all."""
    if load.device == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for run in runs:
        run()
    if load.device == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / len(runs)


BENCHMARK = Benchmark("embeddings", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
