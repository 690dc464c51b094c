"""Receipts of an engine: the costs of all requests and the idle time are the time that passed."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fake_runner import EOS, VOCAB, FakeRunner, Launched
from tokenmill.cli.app import app
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.cost import Cost
from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.engine.drafts.drafting import FixedDrafting
from tokenmill.engine.engine import LanguageEngine
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.meter import StepMeter, WorkWeights
from tokenmill.sched.recording import RecordedScheduler, RecordFile
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch

WEIGHTS = WorkWeights(prefill=0.01, decode=0.05)
BLOCK = 4


class TimedRunner(FakeRunner):
    """A FakeRunner whose steps take time, and who remembers what they computed."""

    def __init__(self, num_blocks: int, max_drafts: int = 0) -> None:
        super().__init__(num_blocks, BLOCK, max_drafts=max_drafts)
        self.now_ns = 0
        self.source = random.Random(7)
        self.broken: set[int] = set()
        self.steps: list[tuple[int, list[tuple[str, int, int]]]] = []  # end, (id, first, num_new)

    def clock(self) -> int:
        return self.now_ns

    def run(self, batch: Batch) -> StepResult:
        items = [(seq.request_id, seq.num_computed_tokens, new) for seq, new in batch.items]
        result = super().run(batch)
        self.steps.append((self.now_ns, items))
        if len(self.steps) in self.broken:
            raise RuntimeError("broken")
        return result

    def launch(self, batch: Batch) -> Launched:
        self.now_ns += self.source.randrange(10**6, 10**8)
        return super().launch(batch)


def engine_of(
    runner: TimedRunner, num_blocks: int, overlap: bool = False, num_gpus: int = 1, drafts: int = 0
) -> LanguageEngine:
    config = SchedulerConfig(
        max_num_batched_tokens=24, max_num_seqs=8, max_model_len=60, chunked_prefill=True
    )
    meter = StepMeter(WEIGHTS, num_gpus)
    scheduler = Scheduler(config, BlockPool(num_blocks, BLOCK), EOS, meter)
    return LanguageEngine(
        scheduler,
        runner,
        clock=runner.clock,
        launcher=runner if overlap else None,
        drafting=FixedDrafting(drafts) if drafts else None,
    )


def requests(num: int, seed: int) -> list[Request]:
    """Some share the beginning of their prompt."""
    source = random.Random(seed)
    shared = [source.randrange(1, VOCAB) for _ in range(12)]
    out = []
    for i in range(num):
        own = [source.randrange(1, VOCAB) for _ in range(source.randrange(1, 20))]
        prompt = shared + own if source.random() < 0.5 else own
        sampling = SamplingParams(max_tokens=source.randrange(1, 30), ignore_eos=bool(i % 2))
        out.append(Request(f"r{i}", Generate(prompt, sampling), arrival_ns=i))
    return out


def run(engine: LanguageEngine, runner: TimedRunner, todo: list[Request], aborts: float) -> Cost:
    """Submit over time, abort some, leave pauses; returns the sum of all costs."""
    source, total, todo = random.Random(3), Cost(), list(todo)
    open_ids: set[str] = set()

    def take(outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                open_ids.remove(output.request_id)
                assert output.cost is not None
                total.add(output.cost)

    while todo or engine.has_work():
        if todo and source.random() < 0.5:
            open_ids.add(todo[-1].request_id)
            engine.submit(todo.pop())
        if open_ids and source.random() < aborts:
            engine.abort(source.choice(sorted(open_ids)))
        if source.random() < 0.1:
            engine.stats()
            engine.costs()
        runner.now_ns += source.randrange(10**6)
        take(engine.step())
        if not engine.has_work():
            runner.now_ns += 10**8
    assert not open_ids
    return total


@pytest.mark.parametrize("num_gpus", [1, 8])
@pytest.mark.parametrize("mode", ["plain", "overlap", "drafts"])
def test_costs_and_idle_time_add_up_to_the_time_that_passed(mode: str, num_gpus: int) -> None:
    drafts = 3 if mode == "drafts" else 0
    runner = TimedRunner(24, max_drafts=drafts)
    runner.broken = {9}
    engine = engine_of(runner, 24, mode == "overlap", num_gpus, drafts)
    total = run(engine, runner, requests(80, seed=1), aborts=0.05)
    stats = engine.stats()
    assert stats.gpu_s == pytest.approx(runner.now_ns / 1e9 * num_gpus)
    assert total.spent_s + stats.gpu_idle_s == pytest.approx(stats.gpu_s)
    assert 0 < stats.gpu_idle_s < stats.gpu_s / 2
    assert stats.num_preemptions and stats.prefix_hit_tokens and stats.num_finished["abort"]
    assert total.prefill_s and total.decode_s and total.saved_s
    assert bool(total.drafts_s) == bool(drafts)


def test_each_request_pays_for_its_work_in_every_step() -> None:
    """The sums that make a step cheap give what adding up step by step gives."""
    runner = TimedRunner(256)
    engine = engine_of(runner, 256)
    todo = [replace(r, arrival_ns=i) for i, r in enumerate(requests(40, seed=2))]
    found = {}
    for request in todo:
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            if output.finish_reason is not None:
                found[output.request_id] = output.cost
    expected: dict[str, list[float]] = {request.request_id: [0.0, 0.0] for request in todo}
    began_ns = 0
    for end_ns, items in runner.steps:
        works = [
            1 + WEIGHTS.decode * first
            if new == 1
            else new + WEIGHTS.prefill * (new * first + new * (new + 1) / 2)
            for _, first, new in items
        ]
        for (name, _, new), work in zip(items, works, strict=True):
            expected[name][new == 1] += (end_ns - began_ns) / 1e9 * work / sum(works)
        began_ns = end_ns
    for name, (prefill_s, decode_s) in expected.items():
        cost = found[name]
        assert cost is not None
        assert cost.prefill_s == pytest.approx(prefill_s)
        assert cost.decode_s == pytest.approx(decode_s)
    assert len({round(sum(parts), 6) for parts in expected.values()}) > 30


def test_costs_of_running_requests_are_known_before_they_end() -> None:
    runner = TimedRunner(64)
    engine = engine_of(runner, 64)
    for request in requests(4, seed=5):
        engine.submit(request.with_task(sampling=SamplingParams(max_tokens=20, ignore_eos=True)))
    for _ in range(6):
        engine.step()
    known = engine.costs()
    assert len(known) == 4
    stats = engine.stats()
    spent_s = sum(cost.spent_s for cost in known.values())
    assert spent_s + stats.gpu_idle_s == pytest.approx(stats.gpu_s)


def test_cached_tokens_are_priced_like_computed_ones() -> None:
    """Twice the same prompt: what was saved is what the cached part took the first time."""
    runner = TimedRunner(64)
    engine = engine_of(runner, 64)
    prompt = [1 + i % (VOCAB - 1) for i in range(17)]
    costs = []
    for name in ("first", "again"):
        engine.submit(Request(name, Generate(prompt, SamplingParams(max_tokens=1))))
        (output,) = [o for _ in range(3) for o in engine.step()]
        assert output.cost is not None
        costs.append(output.cost)
    assert output.num_cached_tokens == 16
    first, again = costs
    share = (16 + 0.01 * 16 * 17 / 2) / (17 + 0.01 * 17 * 18 / 2)
    assert again.saved_s == pytest.approx(first.prefill_s * share)
    assert first.saved_s == 0.0


def test_a_record_has_the_receipts_of_its_requests(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path, 10**9)
    config = SchedulerConfig(max_num_batched_tokens=24, max_num_seqs=8, max_model_len=60)
    scheduler = RecordedScheduler(config, BlockPool(64, BLOCK), EOS, file, StepMeter(WEIGHTS))
    engine = LanguageEngine(scheduler, FakeRunner(64, BLOCK))
    for request in requests(12, seed=4):
        engine.submit(request)
    while engine.has_work():
        engine.step()
    file.close()
    flags = ["receipts", "--record", str(path), "--price-per-gpu-hour", "3600", "--latest", "99"]
    found = CliRunner().invoke(app, flags)
    assert found.exit_code == 0, found.stderr
    view = json.loads(found.stdout.splitlines()[-1])
    (key,) = view["keys"]
    spent_s = key["receipt"]["gpu_seconds"]
    assert key["num_requests"] == len(view["requests"]) == 12
    each = [request["receipt"]["gpu_seconds"] for request in view["requests"]]
    assert sum(each) == pytest.approx(spent_s) and min(each) > 0
    assert 0 < spent_s <= view["gpu_seconds"] == pytest.approx(view["usd"])
    free = CliRunner().invoke(app, flags[:3])
    assert "GPU-seconds only" in free.stderr and "$" not in free.stdout
    both = CliRunner().invoke(app, [*flags, "--url", "http://127.0.0.1:1"])
    assert "leave out --url" in str(both.exception)
