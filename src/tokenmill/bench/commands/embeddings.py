"""tokenmill bench embeddings."""

from __future__ import annotations

from typing import Any

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.settings import SETTINGS, Settings

PANELS = {
    "Benchmark": tuple(
        SETTINGS[key]
        for key in (
            *("device", "table-rows", "table-columns", "lookup-keys", "zipf", "hit-rate"),
            *("tier-seconds", "json-only"),
        )
    )
}
SIZES = {"cuda": (2**22, 2**20), "cpu": (2**16, 2**13)}  # rows, and keys of a lookup


def embeddings(settings: Settings) -> None:
    """Keys/s of embedding lookups by tier, beside torch's gather and a plain copy.

    The keys follow a Zipf distribution, and the device's cache has as many
    rows as the hit rate asks for. Every tier is first compared with the
    table. device_cache is the cache's own lookup, whose rate counts the hits
    alone; cache_and_host also reads the misses from the host's memory. The
    hit rates of short traces stand beside those of LRU, of LFU with
    hindsight, and of Belady's rule, which no cache exceeds.

    tokenmill bench embeddings
    tokenmill bench embeddings --device cuda --zipf 1.05 --hit-rate 0.9
    """
    from tokenmill.bench.embedding_rates import Workload, measure
    from tokenmill.ranking.model_files import choose_device
    from tokenmill.ranking.stores.store import TableSpec

    device = choose_device(settings.get("device"))
    rows, keys = SIZES[device]
    load = Workload(
        spec=TableSpec(settings.get("table-rows") or rows, settings.get("table-columns")),
        num_keys=settings.get("lookup-keys") or keys,
        exponent=settings.get("zipf"),
        hit_rate=settings.get("hit-rate"),
        device=device,
        budget_s=settings.get("tier-seconds"),
    )
    report = measure(load)
    if not settings.get("json-only"):
        _print(report)
    console.print_json(report)


def _print(report: dict[str, Any]) -> None:
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
    if report["cache_and_host_ceiling_keys_s"]:
        console.out.print(_bound(report))
    rates = [["hit rate at Zipf", "ours", "LRU", "LFU", "Belady"]]
    for zipf, *shares in (line.values() for line in report["hit_rates"]):
        rates += [[str(zipf), *(f"{share:.1%}" for share in shares)]]
    console.print_table(rates)


def _bound(report: dict[str, Any]) -> str:
    share = report["tiers"]["cache_and_host"]["host_rows_share"]
    return (
        f"cache and host: {share:.1%} of the keys had their row read from the host; its link of "
        f"{report['host_link_gb_s']:,.1f} GB/s allows for "
        f"{report['cache_and_host_ceiling_keys_s']:,} keys/s at most"
    )


COMMANDS = (BenchCommand("embeddings", embeddings, PANELS),)
