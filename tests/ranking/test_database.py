"""A table in LMDB: prefetching, back-pressure, and what a crash leaves."""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ranking.tables import acknowledged_before_the_kill, random_table
from tokenmill.ranking.stores.database import FILE, DatabaseTable, disk_bytes
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.store import DISK, HOST, EmbeddingError, TableSpec
from tokenmill.ranking.stores.table_files import open_rows, write_rows

ROWS, DIM = 60, 3
KEYS = st.lists(st.integers(0, ROWS - 1), max_size=40)
STEPS = st.lists(st.tuples(st.sampled_from(["lookup", "update", "prefetch"]), KEYS), max_size=12)


def database(path: Path, table: torch.Tensor, staged_rows: int = 20) -> DatabaseTable:
    write_rows(path / "rows.safetensors", table)
    DatabaseTable.create(
        path / "t", TableSpec(*table.shape, table.dtype), open_rows(path / "rows.safetensors")
    )
    return DatabaseTable(path / "t", staged_rows=staged_rows)


@pytest.mark.parametrize("cached", [False, True])
@settings(max_examples=8, deadline=None)
@given(steps=STEPS)
def test_lookups_equal_the_table(
    cached: bool, steps: list[tuple[str, list[int]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    table = random_table(ROWS, DIM)
    behind = database(tmp_path_factory.mktemp("db"), table)
    store = CachedTable(behind, 16, "cpu") if cached else behind
    for number, (action, keys) in enumerate(steps):
        ids = torch.tensor(keys, dtype=torch.int64)
        if action == "prefetch":
            assert behind.prefetch(ids)
        elif action == "lookup":
            assert torch.equal(store.lookup(ids), table[ids])
        else:
            store.update(ids, torch.full((len(keys), DIM), float(number)).half())
            table[ids] = float(number)
    store.close()


def test_rows_that_were_prefetched_are_not_read_again(tmp_path: Path) -> None:
    store = database(tmp_path, random_table(ROWS, DIM))
    ids = torch.arange(10)
    store.prefetch(ids)
    store.lookup(ids.repeat(2))
    store.lookup(torch.arange(30, 34))
    assert store.stats().keys_by_tier == {HOST: 20, DISK: 4}
    store.close()


def test_prefetching_waits_while_too_much_is_being_read(tmp_path: Path) -> None:
    store = database(tmp_path, random_table(ROWS, DIM), staged_rows=8)
    go, read = threading.Event(), store._read

    def slow(wanted: list[int]) -> list[bytes]:
        go.wait()
        return read(wanted)

    store._read = slow  # type: ignore[method-assign]
    assert store.prefetch(torch.arange(8))
    assert not store.prefetch(torch.arange(8, 9), timeout_s=0.01)
    assert store.prefetch(torch.arange(8), timeout_s=0.01)  # is under way and takes no room
    go.set()
    assert store.prefetch(torch.arange(8, 12), timeout_s=30)
    assert torch.equal(store.lookup(torch.arange(12)), random_table(ROWS, DIM)[:12])
    assert len(store._staged) <= 8
    store.close()


def test_an_update_beats_a_read_that_began_before_it(tmp_path: Path) -> None:
    store = database(tmp_path, random_table(ROWS, DIM))
    read, go, began = store._read, threading.Event(), threading.Event()

    def late(wanted: list[int]) -> list[bytes]:
        found = read(wanted)
        began.set()
        go.wait()
        return found

    store._read = late  # type: ignore[method-assign]
    store.prefetch(torch.tensor([5]))
    began.wait()
    store.update(torch.tensor([5]), torch.full((1, DIM), 9.0).half())
    go.set()
    assert (store.lookup(torch.tensor([5])) == 9).all()
    store.close()


def test_a_new_table_is_zeros_and_a_checkpoint_a_copy(tmp_path: Path) -> None:
    spec = TableSpec(10**9, 512)
    DatabaseTable.create(tmp_path / "t", spec)
    store = DatabaseTable(tmp_path / "t", spec)
    ids = torch.tensor([7, 10**9 - 1])
    store.update(ids[1:], torch.ones(1, 512).half())
    store.checkpoint(tmp_path / "copy")
    store.update(ids, torch.zeros(2, 512).half())
    copy = DatabaseTable(tmp_path / "copy", spec)
    assert copy.lookup(ids).sum(dim=1).tolist() == [0, 512]
    assert store.lookup(ids).sum() == 0
    store.close()
    copy.close()


@pytest.mark.parametrize(("rows", "dim"), [(5000, 8), (2000, 512), (300, 2000)])
def test_the_size_on_disk_is_known_before(tmp_path: Path, rows: int, dim: int) -> None:
    table = torch.zeros(rows, dim).half()
    database(tmp_path, table).close()
    used, said = (tmp_path / "t" / FILE).stat().st_size, disk_bytes(TableSpec(rows, dim))
    assert used <= said * 1.1 + 2**17 and said <= used * 1.1 + 2**17


def test_wrong_folders_are_named(tmp_path: Path) -> None:
    store = database(tmp_path, random_table(ROWS, DIM))
    with pytest.raises(EmbeddingError, match="already holds a table"):
        DatabaseTable.create(tmp_path / "t", store.spec)
    with pytest.raises(EmbeddingError, match="already holds a table"):
        store.checkpoint(tmp_path / "t")
    with pytest.raises(EmbeddingError, match=r"id 60 is not in the table"):
        store.prefetch(torch.tensor([60]))
    store.close()
    with pytest.raises(EmbeddingError, match="holds a table of 60 x 3 float16, and 60 x 4 float16"):
        DatabaseTable(tmp_path / "t", TableSpec(60, 4))
    with pytest.raises(EmbeddingError, match=r"it has no data\.mdb"):
        DatabaseTable(tmp_path)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / FILE).write_bytes(b"no database" * 999)
    with pytest.raises(EmbeddingError, match="cannot be read or written"):
        DatabaseTable(tmp_path / "bad")


def test_a_disk_that_is_too_small_is_found_before_loading(tmp_path: Path) -> None:
    path = tmp_path / "huge.npy"
    np.lib.format.open_memmap(path, "w+", np.float16, (2**32, 512))  # sparse, 4 TiB
    rows = open_rows(path)
    with pytest.raises(EmbeddingError, match="GiB: name a folder on a larger disk"):
        DatabaseTable.create(tmp_path / "t", rows.spec, rows)
    assert not (tmp_path / "t" / FILE).exists()


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "t"
    DatabaseTable.create(path, TableSpec(8, 3000, torch.float32))
    for wanted in (3, 20):
        told = acknowledged_before_the_kill(path, wanted)
        store = DatabaseTable(path)
        [value] = store.lookup(torch.arange(8)).unique().tolist()
        assert told <= value <= told + 1
        store.close()
