"""How many drafts: what pays at a load, found by trial, and found again when it changes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

from fake_runner import FakeRunner
from tokenmill.core.config import SchedulerConfig
from tokenmill.engine.drafts.drafting import AdaptiveDrafting, Drafting, FixedDrafting
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
        self.seconds, self.num_tokens = 0.0, 0
        self.prompts = 0.0  # share of the steps that compute one

    def rate(self, num_seqs: int, num_steps: int) -> float:
        """Tokens a second over so many steps."""
        self.seconds, self.num_tokens = 0.0, 0
        self.run(num_seqs, num_steps)
        return self.num_tokens / self.seconds

    def run(self, num_seqs: int, num_steps: int) -> list[int]:
        chosen = []
        for _ in range(num_steps):
            count = self.drafting.choose()
            before = sum(self.accepted)
            for _ in range(num_seqs):
                self._verify(self.last)
            self.num_tokens += num_seqs + sum(self.accepted) - before
            items: list[Any] = [None] * num_seqs
            prompt = 50 * (self.random.random() < self.prompts)
            batch = Batch(items, num_seqs * (1 + self.last) + prompt, num_to_draft=count)
            seconds = self.cost(num_seqs, self.last) * self.random.uniform(0.95, 1.05) + prompt
            self.seconds += seconds
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


def cpu_like(num_seqs: int, count: int) -> float:
    """Rows cost almost as much as steps: drafts pay where hardly any is wrong, if at all."""
    return 0.02 + 0.01 * num_seqs * (1 + 0.95 * count)


def gpu_like(num_seqs: int, count: int) -> float:
    """The weights are read once for all rows."""
    return 1.0 + 0.004 * num_seqs * (1 + count) + 0.08 * count


def host_bound(num_seqs: int, count: int) -> float:
    """Steps with drafts cannot be launched ahead, whatever their number."""
    return 1.0 + 0.25 * bool(count) + 0.08 * count


MACHINES = (memory_bound, compute_bound, cpu_like, gpu_like, host_bound)


def fixed_rates(load: Load, num_seqs: int) -> list[float]:
    """Expected tokens a second of every fixed number of drafts."""
    rates = []
    for count in range(4):
        tokens = load.there * sum(load.right**i for i in range(count + 1)) + 1 - load.there
        drafted, plain = load.cost(num_seqs, count), load.cost(num_seqs, 0)
        rates.append(num_seqs * tokens / (load.there * drafted + (1 - load.there) * plain))
    return rates


@pytest.mark.parametrize("num_seqs", [1, 16])
@pytest.mark.parametrize("cost", MACHINES, ids=lambda cost: cost.__name__)
def test_never_slower_than_without_drafts_and_close_to_the_best_number(
    cost: Cost, num_seqs: int
) -> None:
    for right in (0.02, 0.5, 0.8):
        for drafting, there in (
            (AdaptiveDrafting(3), 1.0),
            (AdaptiveDrafting(3, looks_up=True), 0.5),
        ):
            load = Load(drafting, cost, right, there)
            load.run(num_seqs, 300)
            rates, found = fixed_rates(load, num_seqs), load.rate(num_seqs, 1000)
            assert found > 0.985 * rates[0] and found > 0.95 * max(rates), (right, drafting)


def test_what_trials_lose_stays_below_a_share_of_the_time() -> None:
    """Over many steps, so that chance does not decide: nothing is gained by drafts here."""
    load = Load(AdaptiveDrafting(3), compute_bound, right=0.3)
    load.run(8, 200)
    assert load.rate(8, 4000) > 0.99 * fixed_rates(load, 8)[0]


def test_drafts_are_found_to_pay_where_most_steps_compute_a_prompt() -> None:
    load = Load(AdaptiveDrafting(3), gpu_like, right=0.7)
    load.prompts = 0.6
    load.run(32, 200)
    chosen = load.run(32, 200)
    assert share(chosen, 2) + share(chosen, 3) > 0.8  # two are 2 % behind three


def test_a_new_batch_size_begins_with_what_is_known_of_others() -> None:
    load = Load(AdaptiveDrafting(3), cpu_like, right=0.6)
    load.run(32, 100)
    assert sum(load.run(64, 40)) <= 8  # at most one draft, as long as a trial takes
    load = Load(AdaptiveDrafting(3), memory_bound, right=0.8)
    load.run(32, 100)
    assert share(load.run(64, 40), 3) > 0.8


def test_a_machine_that_slows_down_for_all_numbers_changes_nothing() -> None:
    slow = [1.0]
    load = Load(AdaptiveDrafting(3), lambda n, count: slow[0] * compute_bound(n, count), right=0.3)
    load.run(8, 200)
    for slow[0] in (1.6, 1.0, 3.0, 1.0):
        assert share(load.run(8, 200), 0) > 0.95


def test_the_first_step_after_a_change_tells_nothing() -> None:
    """A step launched ahead seems to take no time, the next one what two take."""
    drafting = AdaptiveDrafting(1)
    last, drafted, accepted = 0, [0], [0]
    for _ in range(300):
        count = drafting.choose()
        drafted[0] += 8 * last
        accepted[0] += 6 * last
        seconds = (0.01 if last and not count else 1.0) + 0.3 * count
        drafting.record(
            Batch([None] * 8, 8 * (1 + last), num_to_draft=count),  # type: ignore[list-item]
            drafted,
            accepted,
            seconds,
        )
        last = count
    assert drafting.choose() == 1


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
    load.run(1, 5000)
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
    assert drafting.choose() == 1  # the first trial


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
        load = Load(AdaptiveDrafting(3, looks_up=True), cost, right, there)
        load.run(4, 1000)
        assert share(load.run(4, 1000), best) > 0.8, (cost, right, there)


def test_what_is_looked_up_adapts_to_a_new_load() -> None:
    load = Load(AdaptiveDrafting(3, looks_up=True), memory_bound, 0.01)
    load.run(1, 1000)
    load.right = 0.8
    assert share(load.run(1, 3000)[1500:], 3) > 0.8
