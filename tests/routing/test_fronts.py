"""Routers of several fronts: what a worker reports, and what a front makes of it."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from tokenmill.core.config import RouterConfig
from tokenmill.routing.load_report import (
    REPORT_MS,
    Announcement,
    FrontLoad,
    LoadAccount,
    LoadReport,
)
from tokenmill.routing.policies import POLICIES
from tokenmill.routing.router import Router
from tokenmill.routing.step_rates import StepRates

RATES = StepRates(base=10.0, mixed=2.0, prefill=1.0, sequence=0.5, kv=0.01)


def router(*names: str, front: str = "front-0", **options: Any) -> Router:
    made = Router(RouterConfig(block_size=4, **options), front)
    made.learn_rates(RATES)
    for name in names:
        made.add_worker(name)
    return made


def prompt(start: int, length: int = 40) -> list[int]:
    return list(range(start, start + length))


def totals(target: Router) -> list[tuple[int, ...]]:
    return [tuple(load[:4]) for load in target.loads()]


def test_an_account_by_front_from_what_was_sent_and_put_out() -> None:
    account = LoadAccount(4)
    account.front_joined("b")
    account.sent("a", "a1", 30, 40)
    account.sent("a", "a2", 0, 12)
    account.sent("b", "b1", 8, 8)
    a, b = FrontLoad(30, 52, 2, 1, 2, 30, 52), FrontLoad(8, 8, 1, 1, 1, 8, 8)
    assert account.report() == LoadReport({"b": b, "a": a})
    account.progress("a1", 10)
    account.first_token("b1")
    account.first_token("b1")
    assert account.report().fronts["a"] == a._replace(queued_tokens=20)
    assert account.report().fronts["b"] == b._replace(queued_tokens=0, num_pending=0)
    for request_id in ("a1", "a1", "a2", "unknown"):
        account.ended(request_id)
    assert account.report().fronts["a"] == FrontLoad(0, 0, 0, 0, 2, 30, 52)
    account.front_gone("b")
    account.ended("b1")
    assert account.report().fronts.keys() == {"a"}


def test_reports_are_sparse_but_for_the_first_and_last_of_a_busy_time() -> None:
    account = LoadAccount(4)
    assert account.is_due(0.0, at_once=False)
    assert not account.is_due(REPORT_MS / 2, at_once=False)
    assert account.is_due(REPORT_MS / 2, at_once=True)
    assert not account.is_due(REPORT_MS, at_once=False)
    assert account.is_due(1.5 * REPORT_MS, at_once=False)


def test_a_report_adds_what_others_have_and_not_ones_own() -> None:
    target = router("a", "b")
    account = LoadAccount(4)
    for front in ("front-0", "front-1", "front-2"):
        account.front_joined(front)
    own = target.route("mine", prompt(0), 0.0).worker
    account.sent("front-0", "mine", 40, 40)
    account.sent("front-1", "x", 30, 32)
    account.sent("front-2", "y", 10, 12)
    target.report(own, account.report(), 0.0, 0.0)
    slot = target.workers.index(own)
    assert totals(target)[slot] == (80, 84, 3, 3) and totals(target)[1 - slot] == (0, 0, 0, 0)
    account.first_token("x")
    account.ended("y")
    target.report(own, account.report(), 0.05, 0.05)
    assert totals(target)[slot] == (40, 72, 2, 1)
    target.report("unknown", account.report(), 0.05, 0.05)
    account.ended("x")
    target.free("mine")
    target.report(own, account.report(), 0.1, 0.1)
    assert totals(target) == [(0, 0, 0, 0)] * 2


def test_prompts_are_computed_while_a_report_is_on_its_way() -> None:
    target = router("a")
    account = LoadAccount(4)
    account.sent("front-1", "x", 100, 100)
    target.report("a", account.report(), 0.0, 0.06)
    assert totals(target) == [(40, 100, 1, 1)], "a token takes a millisecond"
    target.report("a", account.report(), 0.0, 0.2)
    assert totals(target) == [(0, 100, 1, 0)]


def test_a_prefix_that_fronts_sent_at_once_is_counted_once_by_the_worker() -> None:
    account = LoadAccount(4)
    prefix = [1, 2, 3, 4, 5]
    account.sent("a", "a1", 28, 28, [*prefix, 60, 70])
    account.sent("b", "b1", 26, 28, [*prefix, 61])
    assert account.report().shared_tokens == 20
    account.sent("b", "b2", 8, 28, [*prefix, 62])  # b knew of five blocks
    assert account.report().shared_tokens == 20
    account.sent("c", "c1", 20, 20, prefix)
    assert account.report().shared_tokens == 39, "one token is always computed"
    account.first_token("a1")
    assert account.report().shared_tokens == 39, "it has not come to the others yet"
    account.progress("b1", 20)
    assert account.report().shared_tokens == 25, "b1 has computed what it was to find"
    account.ended("b1")
    account.front_gone("c")
    assert account.report().shared_tokens == 0
    account.ended("b2")
    account.sent("c", "c2", 20, 20, prefix)
    assert account.report().shared_tokens == 0, "nobody is pending any more"


@pytest.mark.parametrize("reported", [False, True])
def test_a_new_prefix_at_all_fronts_at_once_counts_once_at_each_of_them(reported: bool) -> None:
    """Each counts it whole, for it cannot know of the others; all have what one router has."""
    num_fronts, shared = 4, prompt(0, 64)
    pool = Pool(num_fronts, 1)
    pool.tell(pool.reports(), 0.0, 0.0)
    told = [pool.send(front, 0.01, [*shared, *prompt(100 * front, 8)]) for front in (0, 1, 2, 3)]
    one = router(*pool.names)
    for number in range(num_fronts):
        one.route(str(number), [*shared, *prompt(100 * number, 8)], 0.01)
    assert one.loads()[0].queued_tokens == 64 + 4 * 8
    if reported:
        pool.tell(pool.reports(), 0.011, 0.011)
    for target in pool.routers:
        for each in () if reported else told:
            assert each is not None
            target.heard(each, 0.01, 0.011)
        assert target.loads()[0].queued_tokens == pytest.approx(64 + 4 * 8, abs=1)


class Pool:
    """Fronts over workers whose reports come as late as one likes; nothing ever ends there."""

    def __init__(self, num_fronts: int, num_workers: int, **options: Any) -> None:
        self.names = [f"worker-{i}" for i in range(num_workers)]
        self.accounts = {name: LoadAccount(4) for name in self.names}
        fronts = [f"front-{i}" for i in range(num_fronts)]
        self.routers = [
            router(*self.names, front=front, seed=i, **options) for i, front in enumerate(fronts)
        ]
        for account in self.accounts.values():
            for front in fronts:
                account.front_joined(front)
        self.num_sent: Counter[str] = Counter()

    def send(
        self, front: int, now_s: float, tokens: list[int] | None = None
    ) -> Announcement | None:
        number = self.num_sent.total()
        tokens = tokens or prompt(100 * number)
        decision = self.routers[front].route(str(number), tokens, now_s)
        told = decision.announcement
        hashes = told.hashes if told is not None else []
        size = len(tokens)
        self.accounts[decision.worker].sent(f"front-{front}", str(number), size, size, hashes)
        self.num_sent[decision.worker] += 1
        return decision.announcement

    def reports(self) -> dict[str, LoadReport]:
        return {name: account.report() for name, account in self.accounts.items()}

    def tell(self, reports: dict[str, LoadReport], made_s: float, now_s: float) -> None:
        for target in self.routers:
            for name, report in reports.items():
                target.report(name, report, made_s, now_s)


@pytest.mark.parametrize("at_once", [1, 16])
@pytest.mark.parametrize("late_s", [0.1, 1.0])
def test_late_reports_make_no_herd(at_once: int, late_s: float) -> None:
    """Requests pile up on four workers, one of which looks best in each report."""
    pool, source = Pool(8, 4), random.Random(3)
    pool.tell(pool.reports(), 0.0, 0.0)
    now_s, most = 0.0, 0
    for _ in range(40):
        made, made_s = pool.reports(), now_s
        before = pool.num_sent.copy()
        for _ in range(64 // at_once):
            now_s += late_s * at_once / 64
            for _ in range(at_once):
                pool.send(source.randrange(8), now_s)
        pool.tell(made, made_s, now_s)
        most = max(most, *(pool.num_sent - before).values())
    assert max(pool.num_sent.values()) - min(pool.num_sent.values()) < 64, pool.num_sent
    assert most <= 40, "of 64 that come between two reports, 16 to each is even"


def test_a_burst_at_all_fronts_makes_no_herd_on_an_idle_worker() -> None:
    """24 requests come at one instant; the idle worker reports the first one that it gets."""
    pool, source, most = Pool(8, 4), random.Random(7), []
    for name in pool.names[1:]:
        for i in range(4):
            pool.accounts[name].sent("front-9", f"{name}.{i}", 40, 40)
            pool.accounts[name].first_token(f"{name}.{i}")
    for burst in range(40):
        now_s = 1.0 * burst
        pool.tell(pool.reports(), now_s - 0.1, now_s - 0.1)
        told, before = [], pool.num_sent.copy()
        for _ in range(24):
            front = source.randrange(8)
            told.append(pool.send(front, now_s))
            if pool.num_sent - before == {pool.names[0]: 1}:
                first = {pool.names[0]: pool.accounts[pool.names[0]].report()}
                pool.tell(first, now_s, now_s)
        for target in pool.routers:
            for decision in filter(None, told):
                target.heard(decision, now_s, now_s + 0.001)
        for number in range(24 * burst, 24 * burst + 24):
            for target in pool.routers:
                target.free(str(number))
            for account in pool.accounts.values():
                account.ended(str(number))
        most.append((pool.num_sent - before)[pool.names[0]])
    assert sum(most[10:]) / 30 < 12, "9 fill it up to what the others have"


def test_an_announcement_counts_until_a_report_replaces_it() -> None:
    first, second = Pool(2, 3).routers
    told = FrontLoad(0, 0, 0, 0, 0, 0, 0)
    for target in (first, second):
        for name in target.workers:
            target.report(name, LoadReport({"front-0": told, "front-1": told}), 0.0, 0.0)
    shared = prompt(0, 4000)
    decision = first.route("x", shared, 0.01)
    name, news = decision.worker, decision.announcement
    assert news is not None and news.queued_tokens == 4000
    first.heard(news, 0.01, 0.01)
    assert sum(load.num_requests for load in first.loads()) == 1, "its own is known"
    second.heard(news, 0.01, 0.011)
    slot = second.workers.index(name)
    assert totals(second)[slot] == (4000, 4000, 1, 1)
    again = second.route("y", shared, 0.02)
    assert again.cached_tokens[name] > 3900, "the worker will have cached it"
    account = LoadAccount(4)
    account.front_joined("front-1")
    account.sent("front-0", "x", 4000, 4000)
    second.free("y")
    second.report(name, account.report(), 0.05, 0.05)
    assert totals(second)[slot] == (4000, 4000, 1, 1), "not twice"
    second.heard(news, 0.01, 0.06)
    assert totals(second)[slot] == (4000, 4000, 1, 1), "late: it is in the report"


def test_an_idle_worker_that_says_nothing_got_nothing() -> None:
    pool = Pool(2, 3)
    for number in range(60):
        now_s = 0.1 * number
        pool.tell(pool.reports(), now_s, now_s)
        pool.send(1, now_s + 0.05)
    mine = pool.routers[0]
    for account in pool.accounts.values():
        account.front_gone("front-1")
        account.front_joined("front-1")
    pool.tell(pool.reports(), 7.0, 7.0)
    assert totals(mine) == [(0, 0, 0, 0)] * 3
    mine.route("r", prompt(0), 7.06)
    assert sum(load.num_requests for load in mine.loads()) >= 1
    mine.free("r")
    mine.route("s", prompt(0), 9.0, without={"worker-0", "worker-1"})
    assert [load.num_requests for load in mine.loads()][:2] == [0, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_without_other_fronts_reports_change_no_decision(policy: Any) -> None:
    alone, told = (router(*"abc", policy=policy) for _ in range(2))
    account, source, now_s = LoadAccount(4), random.Random(5), 0.0
    for number in range(100):
        now_s += source.expovariate(20.0)
        tokens = prompt(1000 * source.randrange(3), 4 * source.randrange(1, 30))
        chosen = [target.route(str(number), tokens, now_s).worker for target in (alone, told)]
        assert chosen[0] == chosen[1]
        account.sent("front-0", str(number), 1, 1)
        alone.stepped(chosen[0], now_s)
        told.report(chosen[0], account.report(), now_s, now_s)


def test_a_report_counts_where_prompts_are_fitted_to_take_no_time() -> None:
    router = Router(RouterConfig(policy="kv"), "a")
    router.add_worker("w0")
    router.learn_rates(StepRates(prefill=0.0))
    router.report("w0", LoadReport({"b": FrontLoad(64, 64, 1, 1, 1, 64, 64)}), 1.0, 1.1)
    assert router.loads()[0].num_requests == 1


def test_fronts_learn_from_each_other_how_long_answers_are() -> None:
    teller, hearer = (Router(RouterConfig(policy="kv"), name) for name in "ab")
    for target in (teller, hearer):
        target.add_worker("w0")
        target.report("w0", LoadReport({"a": FrontLoad(), "b": FrontLoad()}), 0.0, 0.0)
    before = hearer.route("h1", prompt(0), 1.0).prices
    for number in range(32):
        teller.route(str(number), prompt(0), 1.0)
        teller.free(str(number), num_output_tokens=8)
    last = teller.route("last", prompt(0), 1.0).announcement
    assert last is not None and last.answers == [8], "each answer is told once"
    for _ in range(32):
        hearer.heard(last, 1.0, 1.0)
    after = hearer.route("h2", prompt(0), 2.0).prices
    assert after.request < before.request / 2, "requests share fewer steps"
