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
    assert report["conversation_tokens"] == 8 * 3 * 48 and report["device_tokens"] == 288
    assert off["prompt_tokens"] == on["prompt_tokens"] == 8 * (40 + 88 + 136)
    assert on["computed_tokens"] <= 8 * (40 + 48 + 15 + 48 + 15) < off["computed_tokens"]
    assert on["tiers"]["host_hit_tokens"] > 0 and "tiers" not in off
    assert all(report["copies"][f"{way}_gb_s"] > 0 for way in ("save", "load", "plain"))
    for side in ("off", "on"):  # a run that is cut has told what it had
        said = [line for line in printed.err.splitlines() if line.startswith(f"tiers {side}, turn")]
        assert [line.split(":")[0][-6:] for line in said] == ["1 of 3", "2 of 3", "3 of 3"]
        computed, asked = (f"{report['runs'][side][key]:,}" for key in TOKENS)
        assert f"{computed} of {asked} prompt tokens computed" in said[-1]


def test_host_memory_has_room_for_all(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32", "--json-only"]
    arguments += ["--conversations", "8", "--conversation-turns", "3", "--answer-tokens", "2"]
    assert run(["bench", "kv-tiers", *arguments, "--turn-tokens", "30"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["num_requests"] == 24 and report["runs"]["on"]["tiers"]["dropped"] == 0
    assert report["runs"]["on"]["computed_tokens"] < report["runs"]["off"]["computed_tokens"]
