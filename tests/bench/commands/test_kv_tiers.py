"""bench kv-tiers: fewer prompt tokens are computed with tiers, and the copies have their rates."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tiny_configs import write_config
from tokenmill.__main__ import run


def test_fewer_tokens_are_computed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write_config(tmp_path, max_position_embeddings=1024)
    arguments = ["--model", str(tmp_path), "--random-weights", "--dtype", "fp32"]
    arguments += ["--conversations", "8", "--conversation-turns", "3", "--turn-tokens", "40"]
    arguments += ["--answer-tokens", "8", "--kv-offloading", "host=4MiB"]
    assert run(["bench", "kv-tiers", *arguments]) == 0
    report = json.loads(capfd.readouterr().out.splitlines()[-1])
    off, on = report["runs"]["off"], report["runs"]["on"]
    assert report["conversation_tokens"] == 8 * 3 * 48 and report["device_tokens"] == 288
    assert off["prompt_tokens"] == on["prompt_tokens"] == 8 * (40 + 88 + 136)
    assert on["computed_tokens"] <= 8 * (40 + 48 + 15 + 48 + 15) < off["computed_tokens"]
    assert on["tiers"]["host_hit_tokens"] > 0 and "tiers" not in off
    assert all(report["copies"][f"{way}_gb_s"] > 0 for way in ("save", "load", "plain"))
