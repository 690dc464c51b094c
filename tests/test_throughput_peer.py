"""The script that runs vLLM on the requests of bench throughput; a stand-in takes vLLM's place."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import throughput_peer
from throughput_peer import ROWS, Workload, compare

STAND_IN = """
from types import SimpleNamespace as Some

__version__ = "0"
TokensPrompt = SamplingParams = Some


class LLM:
    def __init__(self, **settings):
        assert settings["quantization"] == settings["kv_cache_dtype"] == "fp8"
        assert settings["enable_prefix_caching"] is False

    def generate(self, prompts, params, use_tqdm):
        assert max(map(max, (p.prompt_token_ids for p in prompts))) < 128256
        return [Some(outputs=[Some(token_ids=[0] * p.max_tokens)]) for p in params]
"""


def test_vllm_gets_every_workload_of_a_row(tmp_path: Path) -> None:
    (tmp_path / "vllm.py").write_text(STAND_IN)
    path = f"{tmp_path}:{throughput_peer.SOURCE}"
    command = [sys.executable, throughput_peer.__file__, "--peer", "8b-fp8"]
    lines = throughput_peer.Process(command, {"PYTHONPATH": path}).output(120)
    imported, start, *rows = [json.loads(line) for line in lines]
    assert imported == {"peer": "vllm", "version": "0"} and start["start_s"] >= 0
    assert [row["work"] for row in rows] == [work.name for work in ROWS["8b-fp8"].workloads]


def test_a_process_that_fails_is_named_and_leaves_no_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fails = throughput_peer.Process([sys.executable, "-c", "print('out'); exit(3)"], {})
    assert fails.output(60) == ["out"]
    said = json.loads(capsys.readouterr().out)
    assert said["why"] == "ended with status 3" and said["end"] == "out"
    hangs = throughput_peer.Process([sys.executable, "-c", "import time; time.sleep(99)"], {})
    assert hangs.output(0.1) == []
    assert json.loads(capsys.readouterr().out)["why"] == "took more than 0.1 s"
    assert compare(None, 10.0)["ratio"] is None
    assert compare({"tok_s": 21.0, "ceiling_tok_s": 30.0}, 20.0) == {
        "tokenmill_tok_s": 21.0, "of_ceiling": 0.7, "vllm_tok_s": 20.0, "ratio": 1.05,
    }  # fmt: skip


def test_requests_are_those_of_the_command() -> None:
    work = Workload("uniform:5-9", 3, 4)
    cell = work.cell()
    assert cell.num_prompts == 3 and set(cell.output_lens) == {4}
    assert work.flags == ["--lengths", "uniform:5-9", "--num-prompts", "3", "--output-len", "4"]
