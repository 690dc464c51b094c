"""plan simulate as a user runs it: the last line, the ladder, and wrong input."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tokenmill.__main__ import run

SMALL = ["--ep", "8", "--attention-dp", "--max-num-seqs", "16", "--block-size", "1024"]
SHORT = ["--num-requests", "40", "--json"]


@pytest.fixture
def lengths(tmp_path: Path) -> list[str]:
    file = tmp_path / "lengths.csv"
    file.write_text("input_length,output_length\n300,40\n700,25\n", encoding="utf-8")
    return ["--lengths", str(file)]


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert run(["plan", "simulate", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_racks_and_the_ladder(capsys: pytest.CaptureFixture[str], lengths: list[str]) -> None:
    words = ["--gpus", "32", "--racks", "2", *SMALL, *lengths, "--num-requests", "300"]
    assert run(["plan", "simulate", *words, "--ladder"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(printed.splitlines()[-1])
    assert report["num_requests"] >= 300 and report["rate"] is None
    assert {"p50", "p99"} <= report["ttft_ms"].keys() & report["tpot_ms"].keys()
    assert report["scale_out"]["one_rack"]["gpus"] == 16
    names = [rung["technique"] for rung in report["ladder"]["rungs"]]
    expected = ["fusions", "ADP balance", "EPLB", "disaggregation", "WideEP", "MTP", "KV routing"]
    assert names == expected and all(name in printed for name in names)
    gains = {rung["technique"]: rung["gain"] for rung in report["ladder"]["rungs"]}
    assert gains["fusions"] > 1 and gains["MTP"] > 1, "small batches"
    assert "predicted" in printed and report["fitted_on"]


def test_the_recipe_of_attention_dp_shows_what_holding_prompts_brings(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "lengths.csv"
    rows = ["300,200", "900,100", "2000,30"]
    file.write_text("\n".join(["input_length,output_length", *rows]), encoding="utf-8")
    words = ["--config", "recipes/plan-attention-dp-8xgb200.toml", "--lengths", str(file)]
    words += ["--max-num-seqs", "16", "--num-requests", "600", "--json"]

    def figures(*more: str) -> tuple[float, Any]:
        report = report_of(capsys, *words, *more)
        return report["output_tok_s"], report["balance"]

    held, plain = figures(), figures("--no-balance")
    small = figures("--no-balance", "--max-num-batched-tokens", "192")
    assert plain[1]["held_steps"] == 0 < held[1]["held_steps"]
    for even in (held, small):
        assert even[0] > 1.1 * plain[0] and even[1]["tokens"] > plain[1]["tokens"] + 0.1
    assert held == figures(), "the same seed gives the same run"
    assert plain != figures("--no-balance", "--seed", "1")


def test_the_published_result_stands_beside_the_prediction(
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = ["--gpus", "8", "--gpu", "b300", *SMALL, "--num-requests", "10", "--json"]
    report = report_of(capsys, *words)
    assert report["published"]
    for row in report["published"]:
        error = report["output_tok_s"] / row["output_tok_s"] - 1
        assert row["error"] == pytest.approx(error, abs=1e-4)


def test_a_rate_is_searched_for(capsys: pytest.CaptureFixture[str], lengths: list[str]) -> None:
    words = ["--gpus", "8", *SMALL, *lengths, *SHORT, "--scenario", "Interactive"]
    found = report_of(capsys, *words)
    assert found["rate"] > 0 and found["within_limits"] is True


def test_a_trace_and_its_router(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = [
        {
            "timestamp": 40 * n,
            "input_length": 256,
            "output_length": 4,
            "hash_ids": [n % 3, 10 + n % 3, 20 + n % 3, 100 + n],
        }
        for n in range(24)
    ]
    file = tmp_path / "trace.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    words = ["--trace", str(file), "--trace-block-tokens", "64", "--model", "llama3.1-8b"]
    words += ["--gpu", "h200", "--gpus", "4", "--tp", "1", "--block-size", "64", "--json"]
    kv, turns = (report_of(capsys, *words, "--router", name) for name in ("kv", "round-robin"))
    assert kv["num_finished"] == turns["num_finished"] == {"length": 24}
    assert kv["prefix_reuse"] > turns["prefix_reuse"] > 0 and kv["scenario"] == "trace"
    for index, later, message in (
        (5, -3, "line 6: timestamp must be at least 0, got -3; add 3 to all"),
        (7, 200, "line 8: timestamp 200 lies 40 ms before that of the line above"),
    ):
        wrong = [dict(row, timestamp=later) if n == index else row for n, row in enumerate(rows)]
        file.write_text("\n".join(map(json.dumps, wrong)), encoding="utf-8")
        assert run(["plan", "simulate", *words]) != 0
        assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "b100"], "--gpu b100: not known; known are h100"),
        (["--gpus", "10", "--racks", "4"], "10 GPUs leave 2 over; use --racks 5, or --gpus 8"),
        (["--gpus", "144"], "144 GPUs each, but only 72 .* use --racks 2"),
        (
            ["--gpus", "72", "--ep", "16", "--attention-dp"],
            r"--ep 16: does not divide the 72 GPUs of a rack, 8 would be left over; use --ep 12 "
            r"or 18",
        ),
        (["--gpus", "2", "--tp", "1"], r"--tp 1: the weights are \d+ GB a GPU too large .* --tp 2"),
        (["--gpus", "16", "--ep", "8", "--attention-dp", "--fail", "3"], "use --fail 3:worker-0"),
        (
            ["--gpus", "16", "--ep", "8", "--attention-dp", "--fail", "3:worker-9"],
            "no worker 'worker-9'; there are 2, worker-0 to worker-1",
        ),
        (["--gpus", "16", "--ep", "8", "--attention-dp", "--fail", "-1:worker-0"], "at least 0"),
        (["--gpus", "8", "--ep", "8", "--attention-dp", "--start", "1"], "must be there"),
        (
            ["--gpus", "16", "--ep", "8", "--attention-dp", "--prefill", "2", "--decode", "1"],
            "need 24 GPUs, 8 too many; use",
        ),
        (["--gpus", "16", "--ep", "8", "--attention-dp", "--prefill", "1"], "--prefill needs"),
        (["--gpus", "16", "--prefill", "1", "--decode", "1"], "need --tp N, or --ep N"),
        (
            ["--model", "llama3.1-8b", "--lengths", "llama3.1-8b", "--tp", "1", "--mtp", "2"],
            "--mtp 2",
        ),
        (["--model", "llama3.1-8b", "--gpus", "8"], "--lengths is needed"),
    ],
)
def test_wrong_input_says_what_would_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["plan", "simulate", *words]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(message, text), text


def test_no_torch_is_imported() -> None:
    words = ["plan", "simulate", "--gpus", "8", *SMALL, "--num-requests", "2", "--json"]
    code = (
        "import sys\nfrom tokenmill.__main__ import run\n"
        f"assert run({words!r}) == 0\nassert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
