"""Every store gives table[ids], whatever was asked and written before."""

import threading
from collections.abc import Callable
from multiprocessing.connection import Connection

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from light_processes import light_processes
from ranking.tables import cached_table, host_table, random_table, read_shared
from tokenmill.kernels.embedding import WAYS
from tokenmill.ranking.stores.device_cache import CachedTable, cache_memory_bytes
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import HOST, EmbeddingError, EmbeddingStore, TableSpec
from tokenmill.ranking.stores.table import DeviceTable

ROWS, DIM = 60, 3
MAKERS: dict[str, Callable[[torch.Tensor], EmbeddingStore]] = {
    "device": lambda table: DeviceTable(table.clone()),
    "host": host_table,
    "cached": cached_table,
}
KEYS = st.lists(st.integers(0, ROWS - 1), max_size=90)
STEPS = st.lists(st.tuples(st.booleans(), KEYS), max_size=12)


@pytest.mark.parametrize("name", MAKERS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_lookups_equal_the_table_after_any_updates(
    name: str, steps: list[tuple[bool, list[int]]]
) -> None:
    table = random_table(ROWS, DIM)
    store = MAKERS[name](table)
    num_lookups = 0
    for number, (is_update, keys) in enumerate(steps):
        ids = torch.tensor(keys, dtype=torch.int64)
        if is_update:
            rows = torch.full((len(keys), DIM), float(number)).half()
            rows += torch.arange(len(keys))[:, None] / 128
            store.update(ids, rows)
            for place, key in enumerate(keys):  # the last of equal ones wins
                table[key] = rows[place]
        else:
            num_lookups += len(keys)
            assert torch.equal(store.lookup(ids), table[ids])
    stats = store.stats()
    assert stats.num_lookups == num_lookups >= stats.num_hits
    store.close()


def test_a_lookup_is_the_callers_own() -> None:
    for make in MAKERS.values():
        store, ids = make(random_table(ROWS, DIM)), torch.arange(4)
        before = store.lookup(ids)
        store.lookup(ids).zero_()
        assert torch.equal(store.lookup(ids), before)


@pytest.mark.parametrize("name", MAKERS)
def test_wrong_keys_and_rows_are_named(name: str) -> None:
    store = MAKERS[name](random_table(ROWS, DIM))
    row = torch.zeros(1, DIM).half()
    with pytest.raises(EmbeddingError, match="id -1 is not in the table: it has 60 rows"):
        store.lookup(torch.tensor([3, -1, 99]))
    with pytest.raises(EmbeddingError, match="id 60 is not in the table"):
        store.update(torch.tensor([60]), row)
    with pytest.raises(EmbeddingError, match=r"ids must be int64 \[n\], got int32"):
        store.lookup(torch.tensor([3], dtype=torch.int32))
    with pytest.raises(EmbeddingError, match=r"rows must be \[1, 3\], .* got \[1, 4\]"):
        store.update(torch.tensor([0]), torch.zeros(1, 4).half())
    with pytest.raises(EmbeddingError, match="rows must be float16 as the table is, got float32"):
        store.update(torch.tensor([0]), row.float())
    assert store.lookup(torch.tensor([], dtype=torch.int64)).shape == (0, DIM)


@pytest.mark.parametrize("name", MAKERS)
def test_no_lookup_sees_half_an_update_of_a_row(name: str) -> None:
    """A writer fills rows with one number each time; a row of two numbers is torn."""
    dim = 4096
    store = MAKERS[name](torch.zeros(64, dim))
    ids, stop, torn = torch.arange(64), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            rows = store.lookup(ids.repeat(2))
            torn.extend(rows[(rows != rows[:, :1]).any(dim=1)].tolist())

    readers = [threading.Thread(target=read) for _ in range(2)]
    for thread in readers:
        thread.start()
    for number in range(60):
        store.update(ids, torch.full((64, dim), float(number)))
        assert (store.lookup(ids) == number).all()
    stop.set()
    for thread in readers:
        thread.join()
    assert not torn


def test_the_cache_takes_what_was_said_before_its_start() -> None:
    for num_slots, dim in ((16, 3), (160, 40), (4096, 512)):
        spec = TableSpec(100, dim)
        store = CachedTable(HostTable.create(spec), num_slots, "cpu")
        assert store.memory_bytes == cache_memory_bytes(spec, num_slots)
        store.close()


def test_slots_come_in_sets() -> None:
    for num_slots in (0, WAYS - 1, WAYS + 1):
        with pytest.raises(EmbeddingError, match=f"a multiple of {WAYS} slots, got {num_slots}"):
            cached_table(random_table(ROWS, DIM), num_slots)


def test_a_table_beyond_the_hosts_memory_is_refused() -> None:
    with pytest.raises(EmbeddingError, match="GiB are available: take fewer rows"):
        HostTable.create(TableSpec(10**9, 4096))


def test_frequent_rows_stay_where_others_pass() -> None:
    """16 rows are asked for in every lookup; of the scan in between none comes twice."""
    store = cached_table(random_table(20_000, DIM), num_slots=64)
    often = torch.arange(16)
    for number in range(60):
        store.lookup(often)
        store.lookup(torch.arange(100 + 300 * number, 400 + 300 * number))
    before = store.stats().num_hits
    store.lookup(often)
    assert store.stats().num_hits - before == 16


def test_another_processs_table_is_read_and_its_updates_seen() -> None:
    table = random_table(ROWS, DIM)
    store = host_table(table)
    context = light_processes()
    ours, theirs = context.Pipe()
    reader = context.Process(target=read_shared, args=(store.shared, theirs))
    reader.start()
    ids = torch.arange(0, ROWS, 7)
    assert torch.equal(_ask(ours, ids), table[ids])
    store.update(ids[:2], torch.ones(2, DIM).half())
    assert torch.equal(_ask(ours, ids), store.table[ids])
    ours.send(None)
    assert "may only read it" in ours.recv()
    reader.join(30)
    assert reader.exitcode == 0


def _ask(connection: Connection, ids: torch.Tensor) -> torch.Tensor:
    connection.send(ids.tolist())
    assert connection.poll(60)
    return torch.tensor(connection.recv(), dtype=torch.float16)


def test_keys_that_miss_together_are_one_row_of_the_host() -> None:
    store = CachedTable(HostTable.create(TableSpec(64, 4)), 16, "cpu")
    store.lookup(torch.tensor([5, 5, 5, 9]))
    assert store.stats().keys_by_tier[HOST] == 2 and store.stats().num_hits == 0
    store.close()
