"""Tables on disk: files in, checkpoints, and what a crash leaves."""

import resource
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from ranking.tables import acknowledged_before_the_kill, random_table
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import EmbeddingError, TableSpec
from tokenmill.ranking.stores.table_files import open_rows, write_rows
from tokenmill.ranking.stores.table_folder import HEAD, TableFolder

ROWS, DIM = 50, 8


def opened(path: Path) -> HostTable:
    return HostTable.open(TableFolder.open(path))


def created(path: Path, dtype: torch.dtype = torch.float16) -> tuple[HostTable, torch.Tensor]:
    table = random_table(ROWS, DIM, dtype)
    return HostTable.open(TableFolder.create(path, table)), table


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_files_of_others_are_read_and_ours_by_others(tmp_path: Path, dtype: torch.dtype) -> None:
    table = random_table(ROWS, DIM, dtype)
    save_file({"emb": table, "other": torch.zeros(2)}, tmp_path / "a.safetensors")
    rows = open_rows(tmp_path / "a.safetensors", "emb")
    assert rows.spec == TableSpec(ROWS, DIM, dtype)
    assert torch.equal(torch.cat([piece for _, piece in rows.pieces()]), table)
    write_rows(tmp_path / "b.safetensors", table)
    assert torch.equal(load_file(tmp_path / "b.safetensors")["embedding"], table)
    if dtype != torch.bfloat16:
        np.save(tmp_path / "c.npy", table.numpy())
        pieces = open_rows(tmp_path / "c.npy").pieces()
        assert torch.equal(torch.cat([piece for _, piece in pieces]), table)


def test_wrong_files_are_named(tmp_path: Path) -> None:
    np.save(tmp_path / "flat.npy", np.zeros(9, np.float32))
    np.save(tmp_path / "ids.npy", np.zeros((9, 2), np.int64))
    np.save(tmp_path / "objects.npy", np.array([[{}]]), allow_pickle=True)
    (tmp_path / "cut.safetensors").write_bytes(b"\x99\x00\x00")
    save_file({"a": torch.zeros(2, 2), "b": torch.zeros(2, 2)}, tmp_path / "two.safetensors")
    cases = {
        "flat.npy": r"has the shape \[9\]: a table has rows and columns",
        "ids.npy": "holds int64: a table is float16, float32, float64",
        "objects.npy": "cannot be read: .*Python objects",
        "cut.safetensors": "cannot be read",
        "two.safetensors": "has no tensor embedding: name one of a, b",
        "none.npy": "there is no file",
        "table.bin": r"give a \.safetensors or a \.npy file",
    }
    for name, message in cases.items():
        with pytest.raises(EmbeddingError, match=message):
            open_rows(tmp_path / name)


def test_updates_and_checkpoints_survive_reopening(tmp_path: Path) -> None:
    store, table = created(tmp_path / "t", torch.bfloat16)
    for number in range(6):
        ids = torch.randint(ROWS, (7,))
        rows = random_table(7, DIM, torch.bfloat16) + number
        store.update(ids, rows)
        for place, key in enumerate(ids.tolist()):
            table[key] = rows[place]
        if number % 3 == 1:
            store.checkpoint()
        if number % 2:
            store.close()
            store = opened(tmp_path / "t")
            assert torch.equal(store.table, table)
    assert len(list((tmp_path / "t").iterdir())) == 4  # description, rows, log, owner
    store.close()


def test_updates_during_a_checkpoint_are_kept(tmp_path: Path) -> None:
    store, _ = created(tmp_path / "t")
    stop = threading.Event()

    def checkpoint() -> None:
        while not stop.is_set():
            store.checkpoint()

    thread = threading.Thread(target=checkpoint)
    thread.start()
    for number in range(40):
        store.update(torch.arange(ROWS), torch.full((ROWS, DIM), float(number)).half())
    stop.set()
    thread.join()
    store.update(torch.tensor([3]), torch.zeros(1, DIM).half())
    expected = store.table.clone()
    store.close()
    store = opened(tmp_path / "t")
    assert torch.equal(store.table, expected)
    store.close()


def test_a_cut_off_record_is_dropped_and_a_damaged_one_reported(tmp_path: Path) -> None:
    store, _ = created(tmp_path / "t")
    ids = torch.tensor([1, 2])
    store.update(ids, torch.ones(2, DIM).half())
    acknowledged = store.table.clone()
    log = tmp_path / "t" / "updates-0.log"
    sound = log.stat().st_size
    store.update(ids, torch.zeros(2, DIM).half())
    store.close()
    whole = log.read_bytes()
    for size in range(sound, len(whole), 7):
        log.write_bytes(whole[:size])
        store = opened(tmp_path / "t")
        assert torch.equal(store.table, acknowledged) and log.stat().st_size == sound
        store.close()
    for place in (0, 9, HEAD.itemsize - 1, HEAD.itemsize, sound - 1):
        wrong = bytes([whole[place] ^ 0xFF])
        log.write_bytes(whole[:place] + wrong + whole[place + 1 :])
        with pytest.raises(EmbeddingError, match=r"updates-0\.log is damaged at byte 0"):
            opened(tmp_path / "t")
        assert log.stat().st_size == len(whole)
    log.write_bytes(whole[:sound] + bytes(len(whole) - sound))  # as some disks leave the last one
    store = opened(tmp_path / "t")
    assert torch.equal(store.table, acknowledged) and log.stat().st_size == sound
    store.close()


def test_a_full_disk_refuses_the_update_and_keeps_the_others(tmp_path: Path) -> None:
    store, _ = created(tmp_path / "t")
    ids = torch.arange(20)
    store.update(ids, torch.ones(20, DIM).half())
    before = store.table.clone()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (700, limits[1]))  # in the second record
    try:
        with pytest.raises(EmbeddingError, match=r"cannot be written: .*Make space on that disk"):
            store.update(ids, torch.zeros(20, DIM).half())
        with pytest.raises(EmbeddingError, match="cannot be written"):
            store.checkpoint()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert torch.equal(store.table, before)
    store.update(ids[:1], torch.full((1, DIM), 5.0).half())
    before[0] = 5.0
    store.close()
    store = opened(tmp_path / "t")
    assert torch.equal(store.table, before)
    store.close()


def test_folders_are_checked(tmp_path: Path) -> None:
    store, _ = created(tmp_path / "t")
    with pytest.raises(EmbeddingError, match="already holds a table"):
        TableFolder.create(tmp_path / "t", random_table(2, 2))
    with pytest.raises(EmbeddingError, match="holds a table of 50 x 8 float16, and 50 x 9"):
        TableFolder.open(tmp_path / "t", TableSpec(50, 9))
    with pytest.raises(EmbeddingError, match="another process has the table"):
        TableFolder.open(tmp_path / "t")
    store.close()
    with pytest.raises(EmbeddingError, match=r"it has no table\.json"):
        TableFolder.open(tmp_path)
    write_rows(tmp_path / "t" / "rows-0.safetensors", random_table(ROWS, 9))
    with pytest.raises(EmbeddingError, match="holds 50 x 9 float16, and the table is 50 x 8"):
        TableFolder.open(tmp_path / "t")


def test_a_killed_writer_loses_nothing_that_was_acknowledged(tmp_path: Path) -> None:
    path = tmp_path / "t"
    TableFolder.create(path, torch.zeros(8, 3000)).close()
    for wanted in (3, 25, 48):
        told = acknowledged_before_the_kill(path, wanted)
        store = opened(path)
        [value] = store.table.unique().tolist()  # no rows of two updates
        assert told <= value <= told + 1
        store.close()
