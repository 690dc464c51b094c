"""Skipped steps end where single ones do: the same batches, outputs, blocks and outlooks."""

from __future__ import annotations

import random

import pytest

from scheduler_integrity import check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler

Chosen = list[tuple[str, int]]


def scheduler(num_blocks: int) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=24, max_num_seqs=6, max_waiting=100, max_model_len=200
    )
    return Scheduler(config, BlockPool(num_blocks, 4, prefix_cache=False), frozenset())


def request(number: int, rng: random.Random) -> Request:
    sampling = SamplingParams(max_tokens=rng.randint(1, 60), ignore_eos=True)
    return Request(f"{number:03}", Generate([0] * rng.randint(1, 30), sampling))


def step(one: Scheduler, hold: bool) -> Chosen:
    """A step as it is run; what was chosen."""
    batch = one.schedule(1, hold)
    chosen = [(seq.request_id, num_new) for seq, num_new in batch.items]
    tokens = [
        [0] if seq.num_computed_tokens + num_new == len(seq.token_ids) else []
        for seq, num_new in batch.items
    ]
    if batch.items:
        one.update(batch, StepResult(tokens))
    one.take_finished()
    return chosen


@pytest.mark.parametrize("num_blocks", [64, 24])  # plenty, and so few that some are preempted
@pytest.mark.parametrize("seed", range(6))
def test_skipped_steps_are_those_that_the_scheduler_chooses(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    plain, skipping = scheduler(num_blocks), scheduler(num_blocks)
    num_skipped, number = 0, 0
    for _ in range(150):
        if number < 30 and rng.random() < 0.2:
            new = request(number, rng)
            number += 1
            plain.add(new)
            skipping.add(new)
        hold = rng.random() < 0.5
        run = skipping.decode_only_run(rng.randint(1, 12))
        starts = skipping.outlook()[0] > 0
        if run is not None and (hold or not starts):
            running = [(seq.request_id, 1) for seq in skipping._queues.running]
            used, before = skipping.pool.num_used, skipping.outlook()
            for count in range(1, run.num_steps + 1):
                assert step(plain, hold) == running
                assert plain.outlook() == before
                assert plain.pool.num_used == used + run.num_blocks(count)
            skipping.skip_decode_steps([0] * run.num_steps)
            num_skipped += run.num_steps
        else:
            assert step(plain, hold) == step(skipping, hold)
        skipping._queues.sweep()
        plain._queues.sweep()
        check_scheduler(skipping)
        assert skipping.stats() == plain.stats() and skipping.load() == plain.load()
    assert num_skipped > 30, "steps were skipped"


def test_what_counts_every_step_has_no_such_run() -> None:
    caching = Scheduler(SchedulerConfig(), BlockPool(64, 4), frozenset())
    assert caching.decode_only_run(8) is None
    one = scheduler(64)
    assert one.decode_only_run(8) is None, "nothing runs"
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    one.add(Request("late", Generate([0] * 3, sampling), deadline_ns=10**9))
    step(one, False)
    assert one.decode_only_run(8) is None, "it may be overdue in any step"
