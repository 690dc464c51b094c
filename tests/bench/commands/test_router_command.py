"""The router benchmark measures what it says it does."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from tokenmill.__main__ import run
from tokenmill.bench.commands.router import PlainRouter, Shape, measure_decisions, measure_index
from tokenmill.sched.cache.blocks import block_hashes

SHAPE = Shape(num_workers=4, num_blocks=200, query_blocks=20, block_size=4, num_decisions=30)


def hashes(token_ids: Sequence[int]) -> list[int]:
    return block_hashes(token_ids, 4)


def test_queries_leave_what_is_cached() -> None:
    prompts = SHAPE.prompts
    cached, query = hashes(prompts.tokens(3)), hashes(prompts.query(3, 41))
    assert len(cached) == len(query) == 20
    assert [a == b for a, b in zip(cached, query, strict=True)] == [True] * 10 + [False] * 10


def test_the_plain_router_finds_its_blocks() -> None:
    router, index = measure_index(lambda: PlainRouter(4, 4, hashes), hashes, SHAPE)
    assert index["events_per_s"] > 0
    times = measure_decisions(router, SHAPE)
    assert 0 < times["p50"] <= times["p99"]


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--index-blocks", "400", "--query-blocks", "20", "--num-decisions", "50"]
    assert run(["bench", "router", "--router-workers", "4", *flags]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert report["num_blocks"] == 400 and report["block_size"] == 64
    for contestant in (report, report["plain_dict"]):
        assert contestant["decision_us"].keys() >= {"p50", "p99"}
        assert contestant["events_per_s"] > 0 and "bytes_per_block" in contestant
