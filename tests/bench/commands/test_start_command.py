"""bench start: what each process says becomes phases, and a random folder is a whole model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from tiny_configs import write_config
from tokenmill.__main__ import run
from tokenmill.bench.commands import start
from tokenmill.models.checkpoints import weights
from tokenmill.models.checkpoints.random_folder import write_random_folder

S = 10**9


class Children:
    """In place of the processes: the first takes 9 seconds, and the others two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[Sequence[str]] = []
        self.environs: list[Mapping[str, str]] = []
        self.had_weights: list[bool] = []
        self.error = ""
        monkeypatch.setattr(start, "run_benchmark", self.run)
        monkeypatch.setattr(time, "monotonic_ns", lambda: 5 * S)

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> tuple[Any, str]:
        self.commands.append(command)
        self.environs.append(environ)
        (model,) = (flag.removeprefix("--model=") for flag in command if "--model=" in flag)
        self.had_weights.append(any(Path(model).glob("*.safetensors")))
        kernels = 8 if len(self.commands) == 1 else 1
        stamps = [("weights", 5 * S + S // 2), ("warm-up", 5 * S + S // 2 + kernels * S)]
        stamps.append(("first token", 6 * S + kernels * S))
        facts = {"file_bytes": 2 * S, "read_gb_s": 7.5, "copy_gb_s": 50.0, "model": "m"}
        return {"stamps": stamps, **facts}, self.error


@pytest.fixture
def children(monkeypatch: pytest.MonkeyPatch) -> Children:
    return Children(monkeypatch)


def report_of(capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    *table, line = capsys.readouterr().out.splitlines()
    return "\n".join(table), json.loads(line)


def test_a_cold_start_and_warm_ones(
    children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    asked = ["--random-folder", str(tmp_path / "config.json"), "--cold-kernels", "--starts", "2"]
    assert run(["bench", "start", *asked, "--dtype", "fp32"]) == 0
    table, report = report_of(capsys)
    assert [one["kernels"] for one in report["starts"]] == ["cold", "warm", "warm"]
    assert report["first_token_s_cold_kernels"] == 9.0 and report["first_token_s"] == 2.0
    assert report["starts"][0]["phases"] == {"weights": 0.5, "warm-up": 8.0, "first token": 0.5}
    assert report["weights_gb_s"] == 4.0 and report["read_gb_s"] == 7.5
    assert "warm-up" in table and "a plain copy, GB/s" in table and "50.00" in table
    assert all(command[:6][-1] == "start-once" for command in children.commands)
    assert all("--dtype=fp32" in command for command in children.commands)
    assert children.had_weights == [True] * 3
    # All have the same caches, which are new.
    folders = {tuple(sorted(environ)) for environ in children.environs}
    assert folders == {("TOKENMILL_CACHE", "TRITON_CACHE_DIR")}
    assert len({environ["TRITON_CACHE_DIR"] for environ in children.environs}) == 1
    assert not Path(children.environs[0]["TRITON_CACHE_DIR"]).parent.exists()


def test_without_cold_kernels_the_first_start_does_not_count(
    children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    write_random_folder(tmp_path / "config.json", tmp_path)
    assert run(["bench", "start", "--model", str(tmp_path), "--starts", "1", "--json-only"]) == 0
    table, report = report_of(capsys)
    assert table == "" and len(children.commands) == 2 and children.environs == [{}, {}]
    assert [one["seconds"] for one in report["starts"]] == [2.0]
    assert report["first_token_s_cold_kernels"] is None


def test_what_cannot_be_measured_is_said(
    children: Children, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = str(write_config(tmp_path))
    assert run(["bench", "start", "--random-folder", config, "--model", config]) == 2
    assert "leave out --model" in capsys.readouterr().err
    children.error = "no memory"
    assert run(["bench", "start", "--model", str(tmp_path), "--random-weights"]) == 1
    assert "the engine did not start: no memory" in capsys.readouterr().err


def test_the_phases_of_an_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path)
    num_bytes = write_random_folder(tmp_path / "config.json", tmp_path)
    begin = time.monotonic_ns()
    asked = ["--model", str(tmp_path), "--dtype", "fp32", "--num-threads", "1"]
    assert run(["bench", "start-once", *asked]) == 0
    _, report = report_of(capsys)
    phases = start._phases(begin, report["stamps"])
    expected = ["process and imports", "device", "tokenizer", "weights", "KV cache", "warm-up"]
    assert list(phases) == [*expected, "ready", "first token"]
    assert all(seconds >= 0 for seconds in phases.values())
    assert report["file_bytes"] == num_bytes and report["read_gb_s"] > 0
    assert report["copy_gb_s"] is None


@pytest.mark.parametrize("shard_bytes", [1, 3000, 10**9])
def test_a_random_folder_is_the_model_of_its_config(tmp_path: Path, shard_bytes: int) -> None:
    config = tmp_path / "config.json"
    write_config(tmp_path)
    folder = tmp_path / "folder"
    folder.mkdir()
    num_bytes = write_random_folder(config, folder, shard_bytes=shard_bytes)
    drawn = dict(weights.open_checkpoint(config, random_weights=True).tensors())
    checkpoint = weights.open_checkpoint(folder)
    found = dict(checkpoint.tensors())
    assert found.keys() == drawn.keys()
    assert all(torch.equal(tensor, drawn[name].bfloat16()) for name, tensor in found.items())
    files = list(folder.glob("*.safetensors"))
    assert num_bytes == sum(file.stat().st_size for file in files) > checkpoint.num_bytes
    assert len(files) == {1: len(drawn), 10**9: 1}.get(shard_bytes, len(files))
