"""The offline benchmark: engines, turns, counts and the report of a cell."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tokenmill.bench import peers
from tokenmill.bench.offline import (
    CellRun,
    OurEngine,
    cell_report,
    measure,
    ratios,
    with_ceiling,
)
from tokenmill.bench.roofline import Machine, Roofline
from tokenmill.bench.workload import BenchError, Cell, make_cells, make_prompts
from tokenmill.core.bench_config import BenchConfig
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.metrics import RequestTimes
from tokenmill.engine.engine import LanguageEngine
from tokenmill.plan.simulator import SimRunner
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler


def engine(eos: frozenset[int] = frozenset()) -> LanguageEngine:
    limits = SchedulerConfig(max_num_batched_tokens=64, max_model_len=4096)
    return LanguageEngine(Scheduler(limits, BlockPool(1024, 16), eos), SimRunner([5, 6]))


class Fixed:
    """An engine that notes its turns and takes a second for each."""

    def __init__(self, name: str, turns: list[str], fails_at: str = "") -> None:
        self.name = name
        self._turns = turns
        self._fails_at = fails_at

    def run(self, cell: Cell, prompts: list[list[int]]) -> CellRun:
        self._turns.append(f"{self.name} {cell.name} {cell.output_lens[0]} {prompts[0][0]}")
        if cell.name == self._fails_at:
            raise BenchError("too few tokens")
        return CellRun(float(len(self._turns)))


def test_our_engine_generates_every_token_despite_eos() -> None:
    ours = OurEngine(engine(eos=frozenset({5, 6})))
    cell = Cell.equal("batch", 4, 40, 7)
    run = ours.run(cell, make_prompts(cell, 0, 0, 1000))
    assert [t.num_tokens for t in run.times] == [7] * 4
    assert all(0 < (t.ttft_ms or 0) <= run.seconds * 1e3 for t in run.times)


def test_our_engine_gives_each_request_its_own_length() -> None:
    cell = Cell("mixed", ((40, 3), (5, 9), (17, 1)))
    run = OurEngine(engine()).run(cell, make_prompts(cell, 0, 0, 1000))
    assert [t.num_tokens for t in run.times] == [3, 9, 1]


def test_our_engine_must_not_answer_from_its_cache() -> None:
    ours = OurEngine(engine())
    cell = Cell.equal("batch", 1, 64, 2)
    prompts = make_prompts(cell, 0, 0, 1000)
    ours.run(cell, prompts)
    with pytest.raises(BenchError, match="answered from the prefix cache"):
        ours.run(cell, prompts)


def test_a_request_that_cannot_run_is_an_error() -> None:
    cell = Cell.equal("single", 1, 5000, 1)
    with pytest.raises(BenchError, match="single-1-0 did not run: "):
        OurEngine(engine()).run(cell, make_prompts(cell, 0, 0, 1000))


def test_engines_take_turns_on_the_same_prompts() -> None:
    turns: list[str] = []
    config = BenchConfig(rounds=2, num_prompts=1, output_len=64, cells=("batch", "single"))
    rivals = [Fixed("tokenmill", turns), Fixed("good", turns), Fixed("bad", turns, "single")]
    calls: list[tuple[int, int]] = []
    measured = measure(
        rivals, make_cells(config), config, 1000, lambda done, total: calls.append((done, total))
    )
    assert [turn.split()[0] for turn in turns[:9]] == ["tokenmill", "good", "bad"] * 3
    assert [turn.split()[2] for turn in turns[:9]] == ["8"] * 3 + ["64"] * 6
    for first in range(0, 9, 3):
        assert len({turn.split()[3] for turn in turns[first : first + 3]}) == 1
    assert measured.failures == {"bad": "too few tokens"}
    assert sorted(measured.runs["batch"]) == ["bad", "good", "tokenmill"]
    assert sorted(measured.runs["single"]) == ["good", "tokenmill"]
    assert [len(runs) for runs in measured.runs["batch"].values()] == [2, 2, 2]
    assert calls[-1] == (18, 18)


def test_our_own_failure_is_not_swallowed() -> None:
    config = BenchConfig(cells=("single",))
    with pytest.raises(BenchError, match="too few tokens"):
        measure([Fixed("tokenmill", [], "single")], make_cells(config), config, 1000)


def test_report_of_a_cell() -> None:
    times = RequestTimes(0, first_ns=10**9, last_ns=4 * 10**9, num_first_tokens=1, num_tokens=4)
    cell = Cell.equal("single", 1, 10, 4)
    report = cell_report(
        cell, [CellRun(4.0, [times]), CellRun(2.0, [times]), CellRun(8.0, [times])]
    )
    assert report["tok_s"] == report["output_tok_s"] == 1.0
    assert report["tok_s_runs"] == [1.0, 2.0, 0.5]
    assert report["total_tok_s"] == 3.5
    assert report["ttft_ms"]["p50"] == 1000.0 and report["tpot_ms"]["p99"] == 1000.0
    prefill = cell_report(Cell.equal("prefill", 1, 2048, 1), [CellRun(2.0)])
    assert prefill["tok_s"] == 1024.0 and "ttft_ms" not in prefill
    roof = Roofline(flops=8.0, bytes_read=30.0, num_steps=3, serial_s=2.0, overlap_s=1.0)
    full = with_ceiling(report, cell, roof, Machine({"int8": 10.0}, 100.0, 1), "int8")
    assert full["ceiling_tok_s"] == 2.0 and full["overlap_ceiling_tok_s"] == 4.0
    assert (full["share_of_ceiling"], full["mfu"], full["mbu"]) == (0.5, 0.2, 0.075)


def test_ratios_are_ours_over_the_best_peer() -> None:
    figures = {"tokenmill": {"tok_s": 30.0}, "a": {"tok_s": 10.0}, "b": {"tok_s": 20.0}}
    alone = {"tokenmill": {"tok_s": 1.0}}
    assert ratios({"batch": figures, "single": alone}) == {"batch": 1.5, "single": None}


def test_peers_that_do_not_run_are_listed_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    known = [
        peers.Peer("llama.cpp", "json", "pytest"),  # installed, but not what it says
        peers.Peer("openvino", "no_such_module", "some-package"),
        peers.Peer("transformers", "json", "pytest"),
    ]
    monkeypatch.setattr(peers, "PEERS", known)
    lineup = peers.start_peers(tmp_path, 1, skip=["transformers"])
    assert lineup.running == []
    assert lineup.absent["openvino"] == "not installed (pip install some-package)"
    assert lineup.absent["transformers"] == "left out by --skip-peer"
    assert lineup.absent["llama.cpp"].startswith("does not run: ValueError: this peer needs a")
    with pytest.raises(BenchError, match="--skip-peer vlm: no such peer"):
        peers.start_peers(tmp_path, 1, skip=["vlm"])


FAKE_PEER = """
import json, sys
print(json.dumps({"ready": True}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    if len(task["prompts"]) == 3:
        sys.exit("out of paper")
    counts = [task["output_len"] - (len(task["prompts"]) == 2)] * len(task["prompts"])
    print(json.dumps({"seconds": 2.0, "num_tokens": counts, "peak_rss_mib": 1.0}), flush=True)
"""


def test_a_peer_process_is_held_to_its_tokens(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\n{FAKE_PEER}")
    script.chmod(0o755)
    monkeypatch.setattr(peers.sys, "executable", str(script))
    process = peers.PeerProcess("fake", tmp_path, 1)
    try:
        assert process.run(Cell.equal("single", 1, 1, 4), [[1]]).seconds == 2.0
        with pytest.raises(BenchError, match=r"batch: generated \[3, 3\] tokens"):
            process.run(Cell.equal("batch", 2, 1, 4), [[1], [2]])
        with pytest.raises(BenchError, match="exit status 1: out of paper"):
            process.run(Cell.equal("batch", 3, 1, 4), [[1], [2], [3]])
    finally:
        process.close()
