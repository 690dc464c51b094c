"""Tables by their path: files, folders and databases, by the commands and by open_store."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from ranking.tables import random_table
from tokenmill.__main__ import run
from tokenmill.ranking.stores.database import DatabaseTable
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.opening import open_store, planned_bytes
from tokenmill.ranking.stores.store import EmbeddingError, EmbeddingStore, TableSpec
from tokenmill.ranking.stores.table import DeviceTable

ROWS, DIM = 90, 6


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    """The same rows as a file, and loaded to a folder and to a database."""
    file = tmp_path / "rows.npy"
    np.save(file, random_table(ROWS, DIM, torch.float32).numpy())
    found = {"file": file, "folder": tmp_path / "folder", "database": tmp_path / "database"}
    assert run(["embeddings", "load", str(file), str(found["folder"])]) == 0
    assert run(["embeddings", "load", str(file), str(found["database"]), "--database"]) == 0
    return found


def test_every_way_gives_the_files_rows(tables: dict[str, Path]) -> None:
    table = random_table(ROWS, DIM, torch.float32)
    kinds = {"file": DeviceTable, "folder": HostTable, "database": DatabaseTable}
    ids = torch.randint(ROWS, (200,))
    for kind, path in tables.items():
        for cache_rows in (0, 20):
            store = open_store(path, "cpu", cache_rows, TableSpec(ROWS, DIM, torch.float32))
            assert type(store) is (CachedTable if cache_rows else kinds[kind])
            assert torch.equal(store.lookup(ids), table[ids])
            _check_memory(store, planned_bytes(kind, store.spec, "cpu", cache_rows))
            store.close()
        with pytest.raises(EmbeddingError, match=r"holds .*90 x 6 float32, and .*90 x 7"):
            open_store(path, "cpu", spec=TableSpec(ROWS, DIM + 1, torch.float32))


def _check_memory(store: EmbeddingStore, planned: dict[str, int]) -> None:
    if isinstance(store, CachedTable):
        assert store.memory_bytes == planned["device"]
    assert ROWS * DIM * 4 in planned.values()


def test_check_reads_every_row(tables: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    for kind in ("folder", "database"):
        store = open_store(tables[kind], "cpu")
        store.update(torch.tensor([3, 8]), torch.full((2, DIM), torch.nan))
        store.close()
        assert run(["embeddings", "check", str(tables[kind]), "--json"]) == 0
        report = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert report.pop("disk_bytes") > ROWS * DIM * 4
        shape = {"rows": ROWS, "columns": DIM, "dtype": "float32"}
        assert report == {"kind": kind, **shape, "rows_not_finite": 2}


def test_new_tables_are_zeros_of_the_type_that_was_asked_for(tmp_path: Path) -> None:
    arguments = ["--table-rows", "40", "--table-columns", "5", "--table-dtype", "bfloat16"]
    for path, extra in ((tmp_path / "a", []), (tmp_path / "b", ["--database"])):
        assert run(["embeddings", "create", str(path), *arguments, *extra]) == 0
        store = open_store(path, "cpu", spec=TableSpec(40, 5, torch.bfloat16))
        assert not store.lookup(torch.arange(40)).any()
        store.close()


def test_wrong_input_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "wide.npy", np.zeros((3, 2)))
    cases = {
        ("create", "t"): "a new table needs --table-rows, such as --table-rows 1000000",
        ("load", "wide.npy", "t"): "holds float64, which tables do not: convert it by --table-dt",
        ("check", "nothing"): "nothing is not a table: give a .safetensors or .npy file, or a fol",
    }
    for (action, *paths), message in cases.items():
        code = run(["embeddings", action, *(str(tmp_path / path) for path in paths)])
        assert code != 0 and message in " ".join(capsys.readouterr().err.split())
    paths = [str(tmp_path / "wide.npy"), str(tmp_path / "t")]
    assert run(["embeddings", "load", *paths, "--table-dtype", "float16"]) == 0
