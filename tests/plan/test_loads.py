"""The KV policy beside all others over all kinds of load, on costs of a GPU and of a CPU.

Everything is in virtual time and drawn from seeds: the figures are the same on every machine.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest

from tokenmill.__main__ import run
from tokenmill.plan.load_table import FIGURES, HIGH, LOW, MACHINES, POLICIES, Cell, compare
from tokenmill.plan.loads import BURST, KINDS, make_load, work_ms

TOLERANCE = 1.05
NUM_REQUESTS, NUM_SEEDS = 96, 3
WORKERS = {LOW: 8, HIGH: 2}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("machine", ["gpu", "cpu"])
def test_kv_is_never_much_worse_than_the_best_other_policy(machine: str, kind: str) -> None:
    cells = [Cell(machine, kind, workers, rate) for rate, workers in WORKERS.items()]
    for row in compare(cells, NUM_REQUESTS, NUM_SEEDS):
        assert row.figures.keys() == set(POLICIES) and row.ratios.keys() == set(FIGURES)
        assert row.worst <= TOLERANCE, (row.cell, row.ratios, row.figures)


@pytest.mark.parametrize("kind", ["chats", "documents", "skewed"])
def test_kv_wins_where_prefixes_are_many(kind: str) -> None:
    (row,) = compare([Cell("gpu", kind, 4, HIGH)], NUM_REQUESTS, 1)
    assert row.ratios["ttft_ms"] < 0.8


def test_a_load_takes_its_share_of_the_workers() -> None:
    config = replace(MACHINES["cpu"], num_workers=2)
    for kind in KINDS:
        load = make_load(kind, 0, 480, 0.5, config)
        assert load == make_load(kind, 0, 480, 0.5, config) != make_load(kind, 1, 480, 0.5, config)
        times = [request.arrival_ms for request in load]
        assert times == sorted(times) and len(load) == 480
        largest = max(times.count(time_ms) for time_ms in set(times))
        assert largest == (BURST if kind == "bursts" else 1)


def test_the_work_of_a_request_by_hand() -> None:
    timing, tokens = MACHINES["cpu"].timing, 65536
    drafts = KINDS["system-short"](random.Random(0), 2)
    own = [16 * draft.num_own_blocks for draft in drafts]
    outputs = [draft.num_output_tokens for draft in drafts]
    prefill = 3 + 96 + own[0] + 3 + own[1]
    decode = sum(n * (2 + 50 * (96 + k) / tokens) for n, k in zip(outputs, own, strict=True))
    assert work_ms(drafts, timing, tokens) == pytest.approx((prefill + decode) / 2)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workers", "2", "--load-requests", "24", "--load-seeds", "1"]
    assert run(["plan", "replay", "--loads", *flags]) == 0
    printed = capsys.readouterr().out.splitlines()
    report = json.loads(printed[-1])
    assert report["plan"] == "replay-loads" and report["worst_ratio"] > 0
    assert {row["load"] for row in report["loads"]} == set(KINDS)
    assert {row["machine"] for row in report["loads"]} == set(MACHINES)
    assert all(set(row["figures"]) == set(POLICIES) for row in report["loads"])
    assert any("kv / best other" in line for line in printed)
    assert run(["plan", "replay", "--loads", "--trace", "x.jsonl"]) == 2
    assert "--trace x.jsonl" in capsys.readouterr().err
