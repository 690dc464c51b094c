"""bench kv-tiers: fewer prompt tokens are computed with tiers, and the copies have their rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_configs import write_config
from tokenmill.__main__ import run

TOKENS = ("computed_tokens", "prompt_tokens")


def test_fewer_tokens_are_computed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32"]
    arguments += ["--conversations", "8", "--conversation-turns", "3", "--turn-tokens", "40"]
    arguments += ["--answer-tokens", "8", "--kv-offloading", "host=4MiB"]
    assert run(["bench", "kv-tiers", *arguments]) == 0
    printed = capfd.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    off, on = report["runs"]["off"], report["runs"]["on"]
    assert report["working_set_tokens"] == 8 * 3 * 48 and report["device_tokens"] == 288
    assert off["prompt_tokens"] == on["prompt_tokens"] == 8 * (40 + 88 + 136)
    assert on["computed_tokens"] <= 8 * (40 + 48 + 15 + 48 + 15) < off["computed_tokens"]
    assert on["tiers"]["host_hit_tokens"] > 0 and "tiers" not in off
    assert all(report["copies"][f"{way}_gb_s"] > 0 for way in ("save", "load", "plain"))
    recompute = report["runs"]["recompute"]
    assert recompute["computed_tokens"] == recompute["prompt_tokens"] == off["prompt_tokens"]
    assert report["same_answers"] == report["num_requests"] == 24
    for side in ("recompute", "off", "on"):  # a run that is cut has told what it had
        said = [line for line in printed.err.splitlines() if line.startswith(f"tiers {side}, ")]
        assert [line.split()[2] for line in said] == ["6", "12", "18", "24"]
        computed, asked = (f"{report['runs'][side][key]:,}" for key in TOKENS)
        assert f"{computed} of {asked} prompt tokens computed" in said[-1]


def test_a_limit_of_time_leaves_the_last_requests_out(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """All runs ask the same ones, of which some are asked however little time there is."""
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32"]
    arguments += ["--conversations", "8", "--conversation-turns", "3", "--turn-tokens", "40"]
    arguments += ["--answer-tokens", "2", "--num-users", "3", "--time-limit", "1"]
    assert run(["bench", "kv-tiers", *arguments]) == 0
    printed = capfd.readouterr()
    report = json.loads(printed.out.splitlines()[-1])
    assert report["num_requests"] == report["same_answers"] == 3 and report["left_out"] == 21
    assert {side["prompt_tokens"] for side in report["runs"].values()} == {3 * 40}
    assert "tiers recompute: no time for more than 3 requests" in printed.err


def test_host_memory_has_room_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32", "--json-only"]
    arguments += ["--conversations", "8", "--conversation-turns", "3", "--answer-tokens", "2"]
    assert run(["bench", "kv-tiers", *arguments, "--turn-tokens", "30"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["num_requests"] == 24 and report["runs"]["on"]["tiers"]["dropped"] == 0
    assert report["runs"]["on"]["computed_tokens"] < report["runs"]["off"]["computed_tokens"]


def test_conversations_of_a_trace(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Tiers compute what no earlier prompt had, but for blocks that are not full."""
    write_config(tmp_path, max_position_embeddings=1024)
    trace = write_trace(tmp_path)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32", "--json-only"]
    arguments += ["--trace", str(trace), "--trace-scale", "0.125", "--answer-tokens", "4"]
    assert run(["bench", "kv-tiers", *arguments]) == 0
    report = json.loads(capfd.readouterr().out)
    # Of 64 tokens: the first block of all, and of eight conversations 2, then 2 more in place of 1.
    assert report["working_set_tokens"] == 64 + 8 * (64 + 32 + 64 + 16)
    assert report["num_requests"] == report["same_answers"] == 16
    runs = report["runs"]
    assert {run["prompt_tokens"] for run in runs.values()} == {8 * (160 + 208)}
    assert runs["recompute"]["computed_tokens"] == 8 * (160 + 208)
    assert runs["on"]["computed_tokens"] < runs["off"]["computed_tokens"]
    assert runs["on"]["computed_tokens"] <= 160 + 7 * 160 + 8 * (208 - 128)
    assert run(["bench", "kv-tiers", *arguments, "--turn-tokens", "9"]) == 2
    assert "--turn-tokens: leave it out" in capfd.readouterr().err
    arguments[arguments.index("--trace") + 1] = str(write_trace(tmp_path, turns=1))
    assert run(["bench", "kv-tiers", *arguments]) == 1
    assert "no request continues another" in capfd.readouterr().err


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
