"""bench kv-transfer: blocks between two processes arrive whole, and the report has its ratio."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from tiny_configs import write_config
from tokenmill.__main__ import run
from tokenmill.kv.cuda_ipc import CudaIpcConnector


def test_every_connector_moves_blocks(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--kv-tokens", "320", "--rounds", "2"]
    assert run(["bench", "kv-transfer", *arguments, "--kv-connector", "shm"]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert report["bytes"] == 320 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, dim, fp32
    assert list(report["connectors"]) == ["shm"]
    shm = report["connectors"]["shm"]
    assert report["ratio"] == shm["ratio"] > 0
    assert all(shm["gb_s"][kind] > 0 for kind in ("contiguous", "scattered", "copy"))
    assert [size["blocks"] for size in shm["by_size"]] == [1, 8, 20]
    assert shm["by_size"][-1]["bytes"] == report["bytes"] == 20 * shm["by_size"][0]["bytes"]


def test_what_is_measured_follows_what_is_installed() -> None:
    from tokenmill.bench.kv_transfer_pair import connectors

    assert connectors("nixl") == ["nixl"]
    assert connectors("none") == (["shm", "nixl"] if find_spec("nixl") else ["shm"])


@pytest.mark.skipif(CudaIpcConnector.installed(), reason="there is a GPU")
def test_without_a_gpu_its_connector_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    asked = ["--model", str(tmp_path), "--kv-connector", "cuda-ipc"]
    assert run(["bench", "kv-transfer", *asked]) != 0
    assert "cuda-ipc moves a GPU's memory: torch sees none here" in capfd.readouterr().err
