"""bench embeddings: every tier is there, and the memory is what was said before."""

import json

import pytest
import torch

from tokenmill.__main__ import run
from tokenmill.bench.embedding_rates import most_keys_s
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import HOST, TableSpec

SMALL = ["--device", "cpu", "--table-rows", "512", "--table-columns", "8", "--lookup-keys", "300"]


def test_every_tier_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "embeddings", *SMALL, "--tier-seconds", "0.01"]) == 0
    out = capfd.readouterr().out
    report = json.loads(out.splitlines()[-1])
    near = ["device_cache", "cache_and_host", "host_table", "torch_gather"]
    assert list(report["tiers"]) == [*near, "database", "database_prefetched"]
    assert all(tier["keys_s"] > 0 and tier["ms"] > 0 for tier in report["tiers"].values())
    memory = report["memory_bytes"]
    assert memory["cache"] == memory["cache_taken"] and memory["table"] == 512 * 8 * 2
    assert report["of_copy"] == report["tiers"]["device_cache"]["of_copy"]
    assert 0.8 < report["hit_rate"] <= 1
    assert [line["zipf"] for line in report["hit_rates"]] == [0.8, 1.0, 1.2]
    assert report["cache_and_host_ceiling_keys_s"] is None  # a CPU has no link
    share = report["tiers"]["cache_and_host"]["host_rows_share"]
    assert 0 < share < 0.2  # of new keys, of which some have their row read with others
    assert "plain copy" in out and "Belady" in out


def test_the_bound_of_the_link() -> None:
    """A tenth of the keys bring rows of 1 KiB over 51.2 GB/s: 102.4 bytes a key."""
    assert most_keys_s(1024, 0.1, 51.2) == pytest.approx(5e8)
    assert most_keys_s(1024, 0.0, 51.2) is None


def test_keys_that_miss_together_are_one_row_of_the_host() -> None:
    store = CachedTable(HostTable.create(TableSpec(64, 4)), 16, "cpu")
    store.lookup(torch.tensor([5, 5, 5, 9]))
    assert store.stats().keys_by_tier[HOST] == 2 and store.stats().num_hits == 0
    store.close()
