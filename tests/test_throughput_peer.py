"""The script that runs vLLM on the requests of bench throughput; a stand-in takes vLLM's place."""

from __future__ import annotations

import json
import subprocess
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
    done = subprocess.run(
        command, env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    start, *rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert start["peer"] == "vllm" and start["version"] == "0"
    assert [row["work"] for row in rows] == [work.name for work in ROWS["8b-fp8"].workloads]


def test_a_process_that_fails_is_named_and_leaves_no_figure(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = throughput_peer._output([sys.executable, "-c", "print('out'); exit(3)"], {}, 60)
    assert lines == ["out"]
    said = json.loads(capsys.readouterr().out)
    assert said["why"] == "ended with status 3" and said["end"] == "out"
    assert compare(None, 10.0)["ratio"] is None
    assert compare({"tok_s": 21.0, "ceiling_tok_s": 30.0}, 20.0) == {
        "tokenmill_tok_s": 21.0, "of_ceiling": 0.7, "vllm_tok_s": 20.0, "ratio": 1.05,
    }  # fmt: skip


def test_requests_are_those_of_the_command() -> None:
    work = Workload("uniform:5-9", 3, 4)
    cell = work.cell()
    assert cell.num_prompts == 3 and set(cell.output_lens) == {4}
    assert work.flags == ["--lengths", "uniform:5-9", "--num-prompts", "3", "--output-len", "4"]
