"""Peers in processes of their own: held to their tokens, named where they fail."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import peers
from benchmarks.harness import parse
from benchmarks.peers import BENCHMARK, ENGINE, ROWS, Options, Peer
from tiny_configs import write_config
from tokenmill.bench.options import BenchConfig
from tokenmill.bench.workload import BenchError, Cell, make_cells
from tokenmill.core.config import ModelConfig

VLLM = """
from types import SimpleNamespace as Some

__version__ = "0"
TokensPrompt = SamplingParams = Some


class LLM:
    def __init__(self, folder, **settings):
        assert settings["load_format"] == "dummy" and settings["enable_prefix_caching"] is False
        assert settings["quantization"] == settings["kv_cache_dtype"] == "fp8"

    def generate(self, prompts, params, use_tqdm):
        if len(prompts) == 3:
            raise SystemExit("out of paper")
        wrong = len(prompts) == 2
        return [Some(outputs=[Some(token_ids=[0] * (p.max_tokens - wrong))]) for p in params]
"""


@pytest.fixture
def site(tmp_path: Path) -> str:
    (tmp_path / "vllm.py").write_text(VLLM)
    return str(tmp_path)


def test_a_peer_is_held_to_its_tokens(site: str, tmp_path: Path) -> None:
    """A stand-in takes vLLM's place."""
    path = write_config(tmp_path) / "config.json"
    model = ModelConfig(str(path), "fp8", "cpu", random_weights=True)  # type: ignore[arg-type]
    peer = Peer("vllm", model, Options(site=site))
    try:
        assert peer.run(Cell.equal("single", 1, 1, 4), 0, 64) > 0
        with pytest.raises(BenchError, match=r"batch: generated \[3, 3\] tokens"):
            peer.run(Cell.equal("batch", 2, 1, 4), 0, 64)
        with pytest.raises(BenchError, match="exit status 1: out of paper"):
            peer.run(Cell.equal("batch", 3, 1, 4), 0, 64)
    finally:
        peer.close()


def test_figures_stand_beside_those_of_the_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A peer that is not what it says, one that is left out, and those that are not installed."""
    known = {"llama.cpp": ("json", "pytest"), "transformers": ("json", "x"), "no": ("none", "some")}
    monkeypatch.setattr(peers, "PEERS", known)
    model = ["--model", str(write_config(tmp_path, max_position_embeddings=512))]
    model += [
        "--random-weights",
        "--dtype",
        "fp32",
        "--num-threads",
        "1",
        "--cell",
        "batch",
        "--num-prompts",
        "2",
    ]
    report = BENCHMARK.call([*model, "--rounds", "1", "--skip", "transformers"])
    figures = report["cells"]["batch"]
    assert figures["tok_s"]["tokenmill"] > 0 and figures["ratio"] is None
    assert 0 < figures["of_ceiling"] < 1
    assert figures["absent"]["no"] == "not installed (pip install some)"
    assert figures["absent"]["transformers"] == "left out by --skip"
    assert figures["absent"]["llama.cpp"].startswith("ValueError: this peer needs a GGUF file")
    json.dumps(report)


@pytest.mark.parametrize("name", ROWS)
def test_rows_are_workloads_of_bench_throughput(name: str) -> None:
    settings = parse(ENGINE, ROWS[name].split())
    (cell,) = make_cells(settings.build(BenchConfig))
    assert cell.num_prompts >= 256 and settings.build(ModelConfig).random_weights


def test_ours_over_the_best_peer() -> None:
    found = peers._figures({"tokenmill": [30.0, 10.0, 33.0], "vllm": [20.0]}, 60.0, {})
    assert found["tok_s"] == {"tokenmill": 30.0, "vllm": 20.0}
    assert (found["ratio"], found["of_ceiling"]) == (1.5, 0.5)
    assert sys.modules.get("vllm") is None
