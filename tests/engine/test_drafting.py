"""How many drafts: what pays at a load, found by trial, and found again when it changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from fake_runner import FakeRunner
from tokenmill.core.config import SchedulerConfig
from tokenmill.engine.drafts.drafting import (
    PROBE_EVERY,
    AdaptiveDrafting,
    Drafting,
    FixedDrafting,
    LookupDrafting,
)
from tokenmill.engine.engine import LanguageEngine
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch

Cost = Callable[[int, int], float]  # of (sequences, drafts), in seconds


class Load:
    """Steps of a made-up machine whose drafts are right by chance, and there in some steps."""

    def __init__(self, drafting: Drafting, cost: Cost, right: float, there: float = 1.0) -> None:
        self.drafting, self.cost, self.right, self.there = drafting, cost, right, there
        self.random = random.Random(1)
        self.drafted, self.accepted = [0] * 3, [0] * 3
        self.last = 0

    def run(self, num_seqs: int, num_steps: int) -> list[int]:
        chosen = []
        for _ in range(num_steps):
            count = self.drafting.choose()
            for _ in range(num_seqs):
                self._verify(self.last)
            items: list[Any] = [None] * num_seqs
            batch = Batch(items, num_seqs * (1 + self.last), num_to_draft=count)
            seconds = self.cost(num_seqs, self.last) * self.random.uniform(0.95, 1.05)
            self.drafting.record(batch, self.drafted, self.accepted, seconds)
            self.last = count if self.random.random() < self.there else 0
            chosen.append(count)
        return chosen

    def _verify(self, count: int) -> None:
        right = True
        for position in range(count):
            right = right and self.random.random() < self.right
            self.drafted[position] += 1
            self.accepted[position] += right


def memory_bound(num_seqs: int, count: int) -> float:
    return 1.0 + 0.05 * count


def compute_bound(num_seqs: int, count: int) -> float:
    return 0.2 * num_seqs * (1 + count)


def share(chosen: list[int], count: int) -> float:
    return chosen.count(count) / len(chosen)


def test_drafts_that_cost_little_are_made() -> None:
    load = Load(AdaptiveDrafting(3), memory_bound, right=0.8)
    load.run(1, 100)
    assert share(load.run(1, 1000), 3) > 0.9


def test_drafts_that_cost_more_than_they_give_are_not_made() -> None:
    load = Load(AdaptiveDrafting(3), compute_bound, right=0.5)
    load.run(32, 100)
    assert share(load.run(32, 1000), 0) > 0.9


def test_poor_drafts_are_not_made_however_cheap() -> None:
    load = Load(AdaptiveDrafting(3), memory_bound, right=0.02)
    load.run(1, 300)
    assert share(load.run(1, 1000), 0) > 0.9


def test_a_middle_number_wins_where_later_drafts_are_wrong() -> None:
    load = Load(AdaptiveDrafting(3), lambda _, count: 1.0 + 0.3 * count, right=0.5)
    load.run(1, 100)
    assert share(load.run(1, 1000), 1) > 0.7


def test_each_batch_size_has_its_own_answer() -> None:
    def cost(num_seqs: int, count: int) -> float:
        return max(1.0, 0.1 * num_seqs * (1 + count)) + 0.02 * count

    load = Load(AdaptiveDrafting(3), cost, right=0.6)
    for _ in range(2):
        load.run(1, 100), load.run(40, 100)
    assert share(load.run(1, 500)[10:], 3) > 0.9
    assert share(load.run(40, 500)[10:], 0) > 0.9


def test_better_drafts_are_noticed_by_probing() -> None:
    load = Load(AdaptiveDrafting(3), memory_bound, right=0.0)
    load.run(1, 400)
    assert load.run(1, 50).count(0) > 40
    load.right = 0.9
    load.run(1, 20 * PROBE_EVERY)
    assert share(load.run(1, 500), 3) > 0.8


def test_nothing_is_drafted_while_prompts_hide_the_costs() -> None:
    drafting = AdaptiveDrafting(2)
    for _ in range(400):
        count = drafting.choose()
        drafting.record(Batch([None] * 4, 100, num_to_draft=count), [], [], 1.0)  # type: ignore[list-item]
    assert drafting.choose() == 0


def test_steps_without_work_teach_nothing() -> None:
    """As on an engine that polls for KV of another."""
    pool = BlockPool(8, 4)
    drafting = AdaptiveDrafting(2)
    engine = LanguageEngine(
        Scheduler(SchedulerConfig(), pool, frozenset()), FakeRunner(8, 4), drafting=drafting
    )
    for _ in range(400):
        assert engine.step() == []
    assert drafting.choose() == 2  # the first trial


def test_a_fixed_number_stays() -> None:
    drafting = FixedDrafting(2)
    drafting.record(Batch(), [100], [0], 1.0)
    assert drafting.choose() == 2


def test_drafts_that_are_looked_up_are_verified_where_that_pays() -> None:
    for cost, right, there, best in (
        (memory_bound, 0.7, 0.5, 3),
        (memory_bound, 0.7, 1.0, 3),  # no step is plain by itself
        (memory_bound, 0.01, 0.5, 0),
        (compute_bound, 0.7, 0.5, 0),
        (lambda _, count: 1.0 + 0.35 * count, 0.6, 0.7, 1),
    ):
        load = Load(LookupDrafting(3), cost, right, there)
        load.run(4, 1000)
        assert share(load.run(4, 1000), best) > 0.8, (cost, right, there)


def test_what_is_looked_up_adapts_to_a_new_load() -> None:
    load = Load(LookupDrafting(3), memory_bound, 0.01)
    load.run(1, 1000)
    load.right = 0.8
    assert share(load.run(1, 3000)[1500:], 3) > 0.8
