"""KV between processes and in tiers: what is moved, and what no longer needs to be computed."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.harness import Report
from benchmarks.kv_tiers import BENCHMARK as TIERS
from benchmarks.kv_transfer import BENCHMARK as TRANSFER
from benchmarks.kv_transfer import connectors
from tiny_configs import write_config
from tokenmill.core.types import TokenmillError
from tokenmill.kv.cuda_ipc import CudaIpcConnector


@pytest.fixture
def model(tmp_path: Path) -> str:
    return str(write_config(tmp_path, max_position_embeddings=1024))


def tiers(model: str, flags: str) -> Report:
    engine = ["--model", model, "--random-weights", "--dtype", "fp32", "--json"]
    return TIERS.call([*engine, *flags.split()])


def test_every_connector_moves_blocks(model: str) -> None:
    flags = ["--kv-connector", "shm", "--kv-tokens", "320", "--rounds", "2"]
    report = TRANSFER.call(["--model", model, *flags])
    assert report["bytes"] == 320 * 2 * 2 * 2 * 8 * 4  # tokens, layers, K and V, heads, dim, fp32
    shm = report["connectors"]["shm"]
    assert report["ratio"] == shm["ratio"] > 0
    assert all(shm["gb_s"][kind] > 0 for kind in ("contiguous", "scattered", "copy"))
    assert [size["blocks"] for size in shm["by_size"]] == [1, 8, 20]
    assert shm["by_size"][-1]["bytes"] == report["bytes"] == 20 * shm["by_size"][0]["bytes"]


def test_what_is_measured_follows_what_is_installed(model: str) -> None:
    assert connectors("nixl") == ["nixl"]
    if not CudaIpcConnector.installed():
        assert connectors("all") == (["shm", "nixl"] if find_spec("nixl") else ["shm"])
        with pytest.raises(TokenmillError, match="cuda-ipc moves a GPU's memory"):
            TRANSFER.call(["--model", model, "--kv-connector", "cuda-ipc"])


def test_fewer_tokens_are_computed(model: str) -> None:
    sizes = "--conversations 8 --turns 3 --turn-tokens 40 --answer-tokens 8"
    report = tiers(model, f"{sizes} --kv-offloading host=4MiB")
    off, on = report["runs"]["off"], report["runs"]["on"]
    assert report["working_set_tokens"] == 8 * 3 * 48 and report["device_tokens"] == 288
    assert off["prompt_tokens"] == on["prompt_tokens"] == 8 * (40 + 88 + 136)
    assert on["computed_tokens"] <= 8 * (40 + 48 + 15 + 48 + 15) < off["computed_tokens"]
    assert on["tiers"]["host_hit_tokens"] > 0 and not off["tiers"]
    assert all(report["copies"][f"{way}_gb_s"] > 0 for way in ("save", "load", "plain"))
    recompute = report["runs"]["recompute"]
    assert recompute["computed_tokens"] == recompute["prompt_tokens"] == off["prompt_tokens"]
    assert report["same_answers"] == report["num_requests"] == 24


def test_host_memory_has_room_for_all(model: str) -> None:
    """Where --kv-offloading does not say how much there is."""
    report = tiers(model, "--conversations 8 --turns 3 --turn-tokens 30 --answer-tokens 2")
    assert report["num_requests"] == 24 and report["runs"]["on"]["tiers"]["dropped"] == 0
    assert report["runs"]["on"]["computed_tokens"] < report["runs"]["off"]["computed_tokens"]


def test_conversations_of_a_trace(model: str, tmp_path: Path) -> None:
    """Tiers compute what no earlier prompt had, but for blocks that are not full."""
    flags = f"--trace {write_trace(tmp_path)} --trace-scale 0.125 --answer-tokens 4"
    report = tiers(model, flags)
    # Of 64 tokens: the first block of all, and of eight conversations 2, then 2 more in place of 1.
    assert report["working_set_tokens"] == 64 + 8 * (64 + 32 + 64 + 16)
    assert report["num_requests"] == report["same_answers"] == 16
    runs = report["runs"]
    assert {run["prompt_tokens"] for run in runs.values()} == {8 * (160 + 208)}
    assert runs["recompute"]["computed_tokens"] == 8 * (160 + 208)
    assert runs["on"]["computed_tokens"] < runs["off"]["computed_tokens"]
    assert runs["on"]["computed_tokens"] <= 160 + 7 * 160 + 8 * (208 - 128)
    with pytest.raises(TokenmillError, match="--turn-tokens: leave it out"):
        tiers(model, f"{flags} --turn-tokens 9")
    with pytest.raises(TokenmillError, match="no request continues another"):
        tiers(model, f"--trace {write_trace(tmp_path, turns=1)}")


def write_trace(folder: Path, turns: int = 2) -> Path:
    """Eight conversations of 1,280 and then 1,664 tokens, and requests that nobody continues."""
    rows = []
    for turn in range(turns):
        for talk in range(1, 9):
            ids = [0, 10 * talk, 10 * talk + 1] if not turn else [0, 10 * talk, 10 * talk + 2]
            length = 1280 if not turn else 1664
            ids += [10 * talk + 3] * turn
            rows.append({"input_length": length, "output_length": 99, "hash_ids": ids})
        rows.append({"input_length": 700, "output_length": 99, "hash_ids": [0, 1000 + turn]})
    path = folder / "trace.jsonl"
    stamped = [{"timestamp": number} | row for number, row in enumerate(rows)]
    path.write_text("\n".join(map(json.dumps, stamped)))
    return path
