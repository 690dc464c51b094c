"""The offline benchmark: rounds, counts and the report of a cell."""

from __future__ import annotations

import pytest

from tokenmill.bench.offline import (
    CellRun,
    OurEngine,
    cell_report,
    measure,
    with_ceiling,
)
from tokenmill.bench.options import BenchConfig
from tokenmill.bench.results.reports import as_json
from tokenmill.bench.roofline import PeakRates, Roofline
from tokenmill.bench.workload import BenchError, Cell, make_cells, make_prompts
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.metrics import RequestTimes
from tokenmill.engine.engine import LanguageEngine
from tokenmill.plan.simulator import SimRunner
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler


def engine(eos: frozenset[int] = frozenset()) -> LanguageEngine:
    limits = SchedulerConfig(max_num_batched_tokens=64, max_model_len=4096)
    return LanguageEngine(Scheduler(limits, BlockPool(1024, 16), eos), SimRunner([5, 6]))


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


def test_every_round_has_prompts_of_its_own_after_a_warm_up() -> None:
    config = BenchConfig(rounds=2, num_prompts=1, output_len=64, cells=("batch", "single"))
    calls: list[tuple[int, int]] = []
    ours = OurEngine(engine())
    seen: list[tuple[str, int, int]] = []

    def run(cell: Cell, prompts: list[list[int]]) -> CellRun:
        seen.append((cell.name, cell.output_lens[0], prompts[0][0]))
        return OurEngine.run(ours, cell, prompts)

    ours.run = run  # type: ignore[method-assign]
    cells = make_cells(config)
    found = measure(ours, cells, config, 1000, lambda done, total: calls.append((done, total)))
    assert [(name, length) for name, length, _ in seen[:3]] == [("batch", n) for n in (8, 64, 64)]
    assert len({first for *_, first in seen[:3]}) == 3
    assert [len(runs) for runs in found.values()] == [2, 2] and calls[-1] == (6, 6)


def test_report_of_a_cell() -> None:
    times = RequestTimes(0, first_ns=10**9, last_ns=4 * 10**9, num_first_tokens=1, num_tokens=4)
    cell = Cell.equal("single", 1, 10, 4)
    found = cell_report(cell, [CellRun(4.0, [times]), CellRun(2.0, [times]), CellRun(8.0, [times])])
    report = as_json(found)
    assert report["tok_s"] == report["output_tok_s"] == 1.0
    assert report["tok_s_runs"] == [1.0, 2.0, 0.5]
    assert report["total_tok_s"] == 3.5
    assert report["ttft_ms"]["p50"] == 1000.0 and report["tpot_ms"]["p99"] == 1000.0
    prefill = as_json(cell_report(Cell.equal("prefill", 1, 2048, 1), [CellRun(2.0)]))
    assert prefill["tok_s"] == 1024.0 and "ttft_ms" not in prefill
    roof = Roofline(flops=8.0, bytes_read=30.0, num_steps=3, serial_s=2.0, overlap_s=1.0)
    full = with_ceiling(found, cell, roof, PeakRates({"int8": 10.0}, 100.0, 1), "int8")
    assert full.ceiling_tok_s == 2.0 and full.overlap_ceiling_tok_s == 4.0
    assert (full.share_of_ceiling, full.mfu, full.mbu) == (0.5, 0.2, 0.075)
