"""The flight recorder: a replay chooses every recorded batch again, and says what else would be."""

from __future__ import annotations

import errno
import json
import random
from dataclasses import replace
from pathlib import Path

import pytest

from fake_runner import EOS, VOCAB, FakeRunner, Launched
from tokenmill.core.config import ExecutionConfig, SchedulerConfig
from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, TokenmillError
from tokenmill.plan.recorded import RecordError, Reproducer, read_record, simulate
from tokenmill.routing.step_rates import StepRates
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.recording import RecordedScheduler, RecordFile, make_scheduler
from tokenmill.sched.scheduler import Batch, Scheduler

CONFIG = SchedulerConfig(
    max_num_batched_tokens=24, max_num_seqs=6, max_waiting=1000, max_model_len=64
)
SIZE = 4
WINDOW = Sliding(window=6, num_groups=1)


class Loop:
    """Random requests, aborts, deadlines and lack of memory around a scheduler."""

    def __init__(self, scheduler: Scheduler, seed: int, overlap: bool, max_drafts: int) -> None:
        self.scheduler, self.overlap = scheduler, overlap
        self.random = random.Random(seed)
        pool = scheduler.pool
        self.runner = FakeRunner(
            pool.num_blocks, pool.block_size, 1, max_drafts, pool.sliding, late_share=0.05
        )
        self.flying: tuple[Batch, Launched] | None = None
        self.now_ns = self.num_added = 0
        self.texts: list[list[int]] = [[1, 2, 3, 4, 5, 6, 7, 8]]

    def submit(self) -> None:
        """A request that may go on with what an earlier one had or was answered."""
        prompt = self.random.choice(self.texts)[: self.random.randint(1, 30)]
        prompt = [*prompt, *self.random.choices(range(1, VOCAB), k=self.random.randint(1, 12))]
        self.texts.append(prompt)
        sampling = SamplingParams(
            max_tokens=self.random.randint(3, 12),
            min_tokens=self.random.choice([0, 0, 3]),
            ignore_eos=self.random.random() < 0.3,
        )
        deadline_ns = self.now_ns + 200 if self.random.random() < 0.1 else None
        request = Request(
            f"request-{self.num_added}",
            Generate(prompt[:50], sampling),
            priority=self.random.randint(0, 2),
            arrival_ns=self.now_ns,
            deadline_ns=deadline_ns,
        )
        self.num_added += 1
        self.scheduler.add(request)

    def turn(self) -> None:
        self.now_ns += 10
        if self.random.random() < 0.05 and self.num_added:
            self.scheduler.abort(f"request-{self.random.randrange(self.num_added)}")
        name = f"request-{self.random.randrange(self.num_added + 1)}"
        self.scheduler.hold({name} if self.random.random() < 0.1 else set())
        batch = self.scheduler.schedule(self.now_ns, hold_context=self.random.random() < 0.1)
        self.scheduler.take_finished()
        if self.overlap:
            launched = self.runner.launch(batch) if batch.items else None
            self.land()
            if launched is not None:
                self.scheduler.advance(batch)
                self.flying = batch, launched
        elif batch.items and self.random.random() < 0.05:
            self.runner.launch(batch).lose()
            self.scheduler.preempt(batch, "no memory")
        elif batch.items:
            self.scheduler.update(batch, self.runner.run(batch))

    def land(self) -> None:
        if self.flying is not None:
            (batch, launched), self.flying = self.flying, None
            for output in self.scheduler.update(batch, launched.wait()):
                self.texts.append(output.token_ids)

    def run(self, num_requests: int) -> None:
        while self.num_added < num_requests or self.scheduler.has_work() or self.flying:
            if self.num_added < num_requests and self.random.random() < 0.4:
                self.submit()
            self.turn()


def record(
    path: Path,
    seed: int = 0,
    overlap: bool = False,
    max_drafts: int = 0,
    sliding: Sliding = NONE_SLIDE,
) -> Scheduler:
    file = RecordFile(path, 10**9)
    pool = BlockPool(14 + 15 * sliding.num_groups, SIZE, sliding=sliding)
    scheduler = RecordedScheduler(CONFIG, pool, EOS, file)
    Loop(scheduler, seed, overlap, max_drafts).run(60)
    file.close()
    return scheduler


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("overlap", "max_drafts", "sliding"),
    [(False, 0, NONE_SLIDE), (True, 0, NONE_SLIDE), (False, 3, NONE_SLIDE), (True, 0, WINDOW)],
)
def test_every_batch_is_reproduced(
    tmp_path: Path, overlap: bool, max_drafts: int, sliding: Sliding, seed: int
) -> None:
    scheduler = record(tmp_path / "record.jsonl", seed, overlap, max_drafts, sliding)
    found = Reproducer(read_record(tmp_path / "record.jsonl")).run()
    stats = scheduler.stats()
    assert found.first_difference is None
    assert found.num_equal == found.num_steps == stats.num_steps > 60
    assert stats.prefix_hit_tokens and stats.num_preemptions == found.num_preemptions > 0
    assert len(found.times) == 60 and found.steps


def test_a_record_has_no_token_and_no_id_of_a_request(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record(path)
    assert "request-" not in path.read_text()
    again = tmp_path / "again.jsonl"
    record(again)
    ends = [[line for line in map(json.loads, p.open()) if "end" in line] for p in (path, again)]
    hashes = [{each for line in found for each in line[4]} for found in ends]
    assert hashes[0] and not hashes[0] & hashes[1], "another file has another salt"


def test_another_configuration_differs_and_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    record(path)
    loaded = read_record(path)
    loaded.config = replace(loaded.config, max_num_seqs=2)
    found = Reproducer(loaded).run()
    assert found.num_equal < found.num_steps
    assert found.first_difference is not None and "recorded [[" in found.first_difference


def test_the_formula_of_a_step_is_the_only_error(tmp_path: Path) -> None:
    """Fewer places make requests wait; with steps that take no time nobody does."""
    path = tmp_path / "record.jsonl"
    record(path)
    loaded = read_record(path)
    rates = StepRates(base=1e-5, mixed=0.0, prefill=1e-6, sequence=1e-6, kv=0.0)

    def mean_ttft(config: SchedulerConfig) -> float:
        times = simulate(loaded, rates, config, loaded.num_blocks)
        assert len(times) == len(loaded.requests)
        assert all(
            t.num_tokens == max(r.num_output, 1)
            for t, r in zip(
                (times[r.number] for r in loaded.requests), loaded.requests, strict=True
            )
        )
        return sum(t.ttft_ms or 0.0 for t in times.values()) / len(times)

    assert mean_ttft(replace(loaded.config, max_num_seqs=1)) > 2 * mean_ttft(loaded.config)


def test_a_full_file_is_exchanged_when_nothing_runs(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path, 2000)
    scheduler = RecordedScheduler(CONFIG, BlockPool(14, SIZE), EOS, file)
    loop = Loop(scheduler, 0, False, 0)
    for number in range(12):
        loop.run(2 * number)
    file.close()
    assert path.stat().st_size < 4000 and (tmp_path / "record.jsonl.old").stat().st_size < 4000
    for part in (path, tmp_path / "record.jsonl.old"):
        found = Reproducer(read_record(part)).run()
        assert found.first_difference is None and found.num_equal == found.num_steps > 0


def test_a_full_disk_ends_the_record_and_nothing_else(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = RecordFile(Path("/dev/full"), 10**9)
    scheduler = RecordedScheduler(CONFIG, BlockPool(14, SIZE), EOS, file)
    loop = Loop(scheduler, 0, False, 0)
    for number in range(3):
        loop.run(2 * number)
    assert file.over and not file.full
    file.close()
    warning = "--record /dev/full: No space left on device; recording stops"
    assert [record.message for record in caplog.records] == [warning]


def test_a_disk_that_is_full_at_the_start_ends_the_record_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(self: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    (tmp_path / "r.jsonl").write_text("what was recorded before\n")
    monkeypatch.setattr(Path, "write_bytes", no_room)
    assert RecordFile(tmp_path / "r.jsonl", 100).over
    assert "recording stops" in caplog.text
    assert (tmp_path / "r.jsonl").read_text() == "what was recorded before\n"


def test_two_processes_write_two_files(tmp_path: Path) -> None:
    first = RecordFile(tmp_path / "r.jsonl", 100)
    second = RecordFile(tmp_path / "r.jsonl", 100)
    assert (first.path.name, second.path.name) == ("r.jsonl", "r-2.jsonl")


def test_what_is_no_record_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("{}\n")
    with pytest.raises(RecordError, match="is not a record of serve --record"):
        read_record(path)
    path.write_text('{"version": 9, "scheduler": {}}\n')
    with pytest.raises(RecordError, match="has version 9; this program reads version 1"):
        read_record(path)
    record(path)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines) + '["upd')  # torn: the process was killed
    assert read_record(path).events
    path.write_text("".join([*lines[:3], "{\n", *lines[3:]]))
    with pytest.raises(RecordError, match="line 4: is not JSON"):
        read_record(path)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    execution = ExecutionConfig(record_path=str(tmp_path / "none" / "r.jsonl"))
    with pytest.raises(TokenmillError, match=r"--record .*r\.jsonl: No such file"):
        make_scheduler(CONFIG, BlockPool(4, SIZE), EOS, execution)
    with pytest.raises(TokenmillError, match="--record does not go with a KV connector"):
        make_scheduler(CONFIG, BlockPool(4, SIZE), EOS, execution, moves_kv=True)
