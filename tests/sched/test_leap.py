"""Leaps end where single steps do: the same batches, outputs, blocks and outlooks."""

from __future__ import annotations

import random

import pytest

from tokenmill.core.config import SchedulerConfig
from tokenmill.core.types import Request, SamplingParams, StepResult
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
    return Request(f"{number:03}", [0] * rng.randint(1, 30), sampling)


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
def test_leaps_are_the_steps_that_the_scheduler_chooses(seed: int, num_blocks: int) -> None:
    rng = random.Random(seed)
    plain, leaping = scheduler(num_blocks), scheduler(num_blocks)
    num_leapt, number = 0, 0
    for _ in range(150):
        if number < 30 and rng.random() < 0.2:
            new = request(number, rng)
            number += 1
            plain.add(new)
            leaping.add(new)
        hold = rng.random() < 0.5
        quiet = leaping.quiet_steps(rng.randint(1, 12))
        starts = leaping.outlook()[0] > 0
        if quiet is not None and (hold or not starts):
            running = [(seq.request_id, 1) for seq in leaping._queues.running]
            used, before = leaping.pool.num_used, leaping.outlook()
            for count in range(1, quiet.num_steps + 1):
                assert step(plain, hold) == running
                assert plain.outlook() == before
                assert plain.pool.num_used == used + quiet.num_blocks(count)
            leaping.leap([0] * quiet.num_steps)
            num_leapt += quiet.num_steps
        else:
            assert step(plain, hold) == step(leaping, hold)
        leaping._queues.sweep()
        plain._queues.sweep()
        leaping.check_integrity()
        assert leaping.stats() == plain.stats() and leaping.load() == plain.load()
    assert num_leapt > 30, "leaps were taken"


def test_what_counts_every_step_is_never_quiet() -> None:
    caching = Scheduler(SchedulerConfig(), BlockPool(64, 4), frozenset())
    assert caching.quiet_steps(8) is None
    one = scheduler(64)
    assert one.quiet_steps(8) is None, "nothing runs"
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    one.add(Request("late", [0] * 3, sampling, deadline_ns=10**9))
    step(one, False)
    assert one.quiet_steps(8) is None, "it may be overdue in any step"
