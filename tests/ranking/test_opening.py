"""Tables by their path: files and folders, by the commands and by open_table."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ranking.tables import random_table
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.__main__ import run
from tokenmill.core.types import ModelLoadError
from tokenmill.ranking.model_files import random_model, save_model, table_paths
from tokenmill.ranking.request_json import write_request
from tokenmill.ranking.stores import opening
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.opening import open_table
from tokenmill.ranking.stores.store import EmbeddingError, TableSpec
from tokenmill.ranking.stores.table import DeviceTable
from tokenmill.ranking.synthetic import LabelledRequest

ROWS, DIM = 90, 6


@pytest.fixture
def tables(tmp_path: Path) -> dict[str, Path]:
    """The same rows as a file, and loaded to a folder."""
    file = tmp_path / "rows.npy"
    np.save(file, random_table(ROWS, DIM, torch.float32).numpy())
    found = {"file": file, "folder": tmp_path / "folder"}
    assert run(["embeddings", "load", str(file), str(found["folder"])]) == 0
    return found


def test_every_way_gives_the_files_rows(tables: dict[str, Path]) -> None:
    table = random_table(ROWS, DIM, torch.float32)
    kinds = {"file": DeviceTable, "folder": HostTable}
    ids = torch.randint(ROWS, (200,))
    for kind, path in tables.items():
        for cache_rows in (0, 20):
            store = open_table(path, "cpu", cache_rows, TableSpec(ROWS, DIM, torch.float32))
            assert type(store) is (CachedTable if cache_rows else kinds[kind])
            assert torch.equal(store.lookup(ids), table[ids])
            store.close()
        with pytest.raises(EmbeddingError, match=r"holds .*90 x 6 float32, and .*90 x 7"):
            open_table(path, "cpu", spec=TableSpec(ROWS, DIM + 1, torch.float32))


def test_processes_that_open_one_folder_share_its_memory(tables: dict[str, Path]) -> None:
    """As the workers of a server do; a lock of the folder is each opener's own, in one process."""
    owner = open_table(tables["folder"], "cpu")
    reader = open_table(tables["folder"], "cpu", cache_rows=16)
    ids, rows = torch.tensor([3, 8]), torch.full((2, DIM), 7.0)
    reader.lookup(ids)
    owner.update(ids, rows)
    assert torch.equal(reader.lookup(ids), rows)
    with pytest.raises(EmbeddingError, match="this process attached to the table"):
        reader.update(ids, rows)
    owner.close()
    assert torch.equal(reader.lookup(ids), rows)
    again = open_table(tables["folder"], "cpu")  # nobody has it now
    again.update(ids, -rows)
    (tables["folder"] / "open.json").write_text('{"pid": 1, "fd": 999999, "inode": 5}')
    with pytest.raises(EmbeddingError, match="the table of process 1 cannot be opened"):
        open_table(tables["folder"], "cpu")
    again.close()
    reader.close()


def test_check_reads_every_row(tables: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    store = open_table(tables["folder"], "cpu")
    store.update(torch.tensor([3, 8]), torch.full((2, DIM), torch.nan))
    store.close()
    assert run(["embeddings", "check", str(tables["folder"]), "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report.pop("disk_bytes") > ROWS * DIM * 4
    shape = {"rows": ROWS, "columns": DIM, "dtype": "float32"}
    assert report == {"kind": "folder", **shape, "rows_not_finite": 2}


def test_new_tables_are_zeros_of_the_type_that_was_asked_for(tmp_path: Path) -> None:
    arguments = ["--table-rows", "40", "--table-columns", "5", "--table-dtype", "bfloat16"]
    assert run(["embeddings", "create", str(tmp_path / "a"), *arguments]) == 0
    store = open_table(tmp_path / "a", "cpu", spec=TableSpec(40, 5, torch.bfloat16))
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


def test_a_model_scores_the_same_with_its_table_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = tiny_model()
    save_model(model, tmp_path / "model")
    np.save(tmp_path / "items.npy", model.stores["item"].lookup(torch.arange(64)).numpy())
    paths = [str(tmp_path / "items.npy"), str(tmp_path / "items")]
    assert run(["embeddings", "load", *paths]) == 0
    requests = tmp_path / "requests.jsonl"
    asked = [LabelledRequest(tiny_request(40, 20, user=u), np.zeros(20), 1) for u in range(5)]
    requests.write_text("\n".join(json.dumps(write_request(request)) for request in asked))
    command = ["rank", str(requests), "--model", str(tmp_path / "model")]
    capsys.readouterr()
    assert run(command) == 0
    expected = scores(capsys.readouterr().out)
    for cache in ([], ["--cache-rows", "16"]):
        assert run([*command, "--table", f"item={tmp_path / 'items'}", *cache]) == 0
        captured = capsys.readouterr()
        assert scores(captured.out) == expected
        assert "table item: 300 keys" in captured.err
    np.save(tmp_path / "short.npy", np.zeros((9, 16), np.float32))
    assert run([*command, "--table", f"item={tmp_path / 'short.npy'}"]) != 0
    message = "short.npy: item: the table has 9 rows, the config 64 (num_items)"
    assert message in " ".join(capsys.readouterr().err.split())
    assert run([*command, "--table", f"things={tmp_path}"]) != 0
    assert "with a name of item, user, category" in " ".join(capsys.readouterr().err.split())


def test_random_models_take_tables_from_elsewhere_and_say_what_memory_they_need(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    np.save(tmp_path / "items.npy", random_table(64, 16, torch.float32).numpy())
    model = random_model(TINY, elsewhere={"item": str(tmp_path / "items.npy")})
    found = model.stores["item"].lookup(torch.arange(64))
    assert torch.equal(found, random_table(64, 16, torch.float32))
    monkeypatch.setattr(opening, "available_bytes", lambda: 2**31)
    large = replace(TINY, num_items=2**27)  # 16 columns of 2 bytes
    with pytest.raises(EmbeddingError, match=r"num_items 134217728, .*4\.0 GiB .*2\.0 GiB are f"):
        random_model(large)
    with pytest.raises(EmbeddingError, match=r"items\.npy .*are needed on cpu"):
        monkeypatch.setattr(opening, "available_bytes", lambda: 0)
        open_table(tmp_path / "items.npy", "cpu")
    with pytest.raises(ModelLoadError, match="--cache-rows 16 needs a table to cache"):
        table_paths((), 16)


def scores(out: str) -> list[list[float]]:
    return [json.loads(line)["scores"] for line in out.splitlines()]
