"""The row cache on a GPU: its kernels, and lookups that never wait for the device."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_embedding_parity

from benchmarks.embeddings import Options, most_keys_s, run
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import TableSpec


@pytest.mark.parametrize("name", triton_embedding_parity.CHECKS)
def test_kernels(name: str) -> None:
    torch.manual_seed(0)
    triton_embedding_parity.CHECKS[name]("cuda")


def test_lookups_read_the_hosts_table_and_never_wait() -> None:
    table = HostTable.create(TableSpec(50_000, 512))
    table.table.copy_(torch.randn(50_000, 512))
    table.pin()
    store = CachedTable(table, 4096, "cuda")
    batches = [(50_000 * torch.rand(20_000, device="cuda") ** 6).long() for _ in range(40)]
    store.lookup(batches[0], check=False)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        found = [store.lookup(ids, check=False) for ids in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for ids, rows in zip(batches, found, strict=True):
        assert torch.equal(rows.cpu(), table.table[ids.cpu()])
    assert store.stats().hit_rate > 0.4
    ids = batches[0].unique()
    store.update(ids, torch.full((len(ids), 512), 7.0, device="cuda", dtype=torch.float16))
    assert (store.lookup(batches[0]) == 7).all()
    store.close()


def test_the_bound_has_the_rows_that_were_read() -> None:
    options = Options(device="cuda", rows=2**18, keys=2**16, seconds=0.2)
    report = run(options)
    share = report["tiers"]["cache_and_host"]["host_rows_share"]
    assert 0 < share < 2 * (1 - options.hit_rate)
    bound = most_keys_s(2 * options.columns, share, report["host_link_gb_s"])
    assert report["cache_and_host_ceiling_keys_s"] == pytest.approx(bound, rel=0.1)  # GB/s: rounded
