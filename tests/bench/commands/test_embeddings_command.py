"""bench embeddings: every tier is there, and the memory is what was said before."""

import json

import pytest

from tokenmill.__main__ import run

SMALL = ["--device", "cpu", "--table-rows", "512", "--table-columns", "8", "--lookup-keys", "300"]


def test_every_tier_is_measured(capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "embeddings", *SMALL, "--tier-seconds", "0.01"]) == 0
    out = capfd.readouterr().out
    report = json.loads(out.splitlines()[-1])
    near = ["device_cache", "cache_and_host", "host_table", "torch_gather"]
    assert list(report["tiers"]) == [*near, "database", "database_prefetched"]
    assert all(tier["keys_s"] > 0 and tier["ms"] > 0 for tier in report["tiers"].values())
    memory = report["memory_bytes"]
    assert memory["cache"] == memory["cache_taken"] and memory["table"] == 512 * 8 * 2
    assert report["of_copy"] == report["tiers"]["device_cache"]["of_copy"]
    assert 0.8 < report["hit_rate"] <= 1
    assert [line["zipf"] for line in report["hit_rates"]] == [0.8, 1.0, 1.2]
    assert "plain copy" in out and "Belady" in out
