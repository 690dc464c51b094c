"""Who gets a request, why, and what the router remembers of it."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from dataclasses import replace
from typing import Any, get_args

import pytest

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.core.kv_events import Dump, EventBatch, Stored
from tokenmill.routing.policies import POLICIES
from tokenmill.routing.prices import OPENING
from tokenmill.routing.router import OUTPUT_TOKENS, NoWorkerError, Router
from tokenmill.routing.step_rates import StepRates
from tokenmill.sched.cache.blocks import block_hashes, byte_tokens

SIZE = 4


def router(*names: str, **options: Any) -> Router:
    made = Router(RouterConfig(block_size=SIZE, **options))
    for name in names:
        made.add_worker(name)
    return made


def prompt(start: int, length: int = 40) -> list[int]:
    return list(range(start, start + length))


def hold(target: Router, name: str, tokens: list[int]) -> None:
    target.apply(name, EventBatch(1, [Stored(None, block_hashes(tokens, SIZE))]))


def others(target: Router, count: int) -> None:
    """Requests that share nothing came and went."""
    for number in range(count):
        target.route(f"other-{number}", prompt(10_000 * (number + 1), 8), 0.0)
        target.free(f"other-{number}")


RATES = StepRates(base=10.0, mixed=2.0, prefill=1.0, sequence=0.5, kv=0.01)


def test_the_cached_prefix_wins_and_the_terms_say_so() -> None:
    target = router("a", "b", "c", prefill_weight=2.0, decode_weight=0.5)
    target.learn_rates(RATES)
    others(target, 20)
    hold(target, "b", prompt(0)[:20])
    decision = target.route("r", prompt(0), 0.0)
    each = 2.0 * decision.num_waiting  # ms of a token: few have waited so far
    assert 1.0 < decision.num_waiting < 1.5
    assert decision.worker == "b" and decision.num_cached_tokens == 20
    terms = decision.terms()
    idle = dict.fromkeys(("wait_ms", "queue_ms", "stall_ms", "decode_ms"), 0.0)
    assert terms["b"] == idle | {
        "uncached_tokens": 20,
        "num_requests": 0,
        "prefill_ms": pytest.approx(20 * each, abs=1e-3),
        "cost_ms": pytest.approx(20 * each, abs=1e-3),
    }
    assert terms["a"]["cost_ms"] == terms["c"]["cost_ms"] == pytest.approx(40 * each, abs=1e-3)
    second = target.route("s", prompt(500), 0.003)
    after, prefill_ms = second.terms()["b"], 40 * 2.0 * second.num_waiting
    step_ms = 10 + 2 + 20 * 1.0 + 0.5 + 40 * 0.01
    decode_ms = 0.5 * (OUTPUT_TOKENS / 2) * (2 * 0.5 + 0.01 * (40 + 40))
    stall_ms = 0.5 * (40 * 1.0 + OPENING * 0.5 * 2.0)  # half of the prompts are alone, at first
    assert after == {
        "uncached_tokens": 40,
        "num_requests": 1,
        "wait_ms": pytest.approx(step_ms - 3),
        "queue_ms": 0.0,
        "prefill_ms": pytest.approx(prefill_ms, abs=1e-3),
        "stall_ms": pytest.approx(stall_ms, abs=1e-3),
        "decode_ms": pytest.approx(decode_ms),
        "cost_ms": pytest.approx(step_ms - 3 + prefill_ms + stall_ms + decode_ms, abs=1e-3),
    }


def test_the_choice_is_by_the_terms() -> None:
    source = random.Random(1)
    target = router(*"abcd")
    target.learn_rates(RATES)
    now_s = 0.0
    for number in range(200):
        now_s += source.expovariate(20.0)
        tokens = [*prompt(1000 * source.randrange(3), 4 * source.randrange(30)), number]
        decision = target.route(str(number), tokens, now_s)
        costs = {name: terms["cost_ms"] for name, terms in decision.terms().items()}
        assert costs[decision.worker] <= min(costs.values()) + 2e-3, "terms are rounded"
        if source.random() < 0.7:
            target.prefill_done(str(source.randrange(number + 1)))
            target.stepped(source.choice("abcd"), now_s)
            target.free(str(source.randrange(number + 1)), 10)


def test_a_token_costs_as_many_as_wait_for_it() -> None:
    """Prompts of 8 tokens: of three, all wait for the first and two for the second, ..."""
    at_once, by_turns = router("a"), router("a")
    for number in range(3000):
        tokens = prompt(100 * number, 8)
        crowded = at_once.route(str(number), tokens, 0.1 * number)
        alone = by_turns.route(str(number), tokens, 0.1 * number)
        by_turns.prefill_done(str(number))
        if number % 3 == 2:
            for done in range(number - 2, number + 1):
                at_once.prefill_done(str(done))
    assert alone.num_waiting == pytest.approx(1.0, abs=0.01), "none has waited"
    assert crowded.num_waiting == pytest.approx((1 + 2 + 3) / 3, abs=0.01)


def test_a_busy_worker_is_not_worth_a_prefix_that_nobody_waits_for() -> None:
    """The same choice where each prompt found none ahead, and where every other one found one."""

    def chosen(crowded: bool) -> str:
        target = router("a", "b", decode_weight=0.5)
        target.learn_rates(replace(RATES, sequence=0.0, kv=0.0))
        for number in range(1, 601):
            target.route(str(number), prompt(100 * number), 0.0, without="a")
            if not crowded or number % 2 == 0:
                target.free(str(number - 1))
                target.free(str(number))
        hold(target, "a", prompt(0))
        target.route("there", prompt(90_000), 0.0, without="b")
        target.prefill_done("there")
        target.stepped("a", 0.0)
        return target.route("r", prompt(0, 110), 0.0).worker

    assert chosen(crowded=False) == "b" and chosen(crowded=True) == "a"


@pytest.mark.parametrize("at_once", [1, 3])
def test_prompts_share_a_step_unless_others_come_at_once_anyway(at_once: int) -> None:
    """Four requests decode on each worker, and a prompt waits for the next step on one of them."""
    target = router("a", "b")
    for number in range(0, 600, at_once):
        for part in range(at_once):
            target.route(f"{number}-{part}", prompt(100 * number + 10 * part, 4), 0.0, without="b")
        target.stepped("a", 0.0)
        for part in range(at_once):
            target.free(f"{number}-{part}")
    rates = StepRates(base=10.0, mixed=50.0, prefill=1.0, sequence=0.0, kv=0.0)
    target.learn_rates(rates)
    for name, other in ("ab", "ba"):
        for number in range(4):
            request_id = f"{name}{number}"
            target.route(request_id, prompt(70_000 + 100 * number, 4), 0.0, without=other)
            target.prefill_done(request_id)
        target.stepped(name, 0.0)
    target.route("waits", prompt(80_000, 4), 0.0, without="b")
    decision = target.route("r", prompt(90_000, 4), 0.0)
    assert decision.worker == ("a" if at_once == 1 else "b"), decision.terms()


@pytest.mark.parametrize(("num_requests", "num_shared"), [(24, 800), (8, 110)])
def test_a_burst_with_one_prefix_is_spread_over_idle_workers(
    num_requests: int, num_shared: int
) -> None:
    """Before any report; one worker holds the prefix already."""
    target = router("a", "b")
    hold(target, "a", prompt(0, num_shared))
    burst = [[*prompt(0, num_shared), number] for number in range(num_requests)]
    chosen = Counter(target.route(str(i), p, 0.1).worker for i, p in enumerate(burst))
    assert max(chosen.values()) <= 2 / 3 * num_requests, chosen


def test_an_expensive_prefix_attracts_the_few_that_ask_for_it() -> None:
    target = router("a", "b")
    target.learn_rates(replace(RATES, kv=0.0005))
    hold(target, "a", prompt(0, 4000))
    others(target, 20)
    chosen = [target.route(str(i), [*prompt(0, 4000), i], 0.1).worker for i in range(4)]
    assert chosen == ["a"] * 4, "four seconds of prefill for a second copy"


def test_a_prefix_that_all_ask_for_is_copied_while_others_wait_for_it() -> None:
    target = router("a", "b")
    target.learn_rates(replace(RATES, kv=0.0005))
    chosen = [target.route(str(i), [*prompt(0, 4000), i], 0.1 * i).worker for i in range(4)]
    assert len(set(chosen)) == 2, "nobody would wait less than the time of a copy"


def test_a_prefix_has_as_many_workers_as_its_share_of_the_requests() -> None:
    source = random.Random(2)
    target = router(*"abcdefgh", predict_s=1e9)
    target.learn_rates(replace(RATES, kv=0.0005))
    used: dict[int, set[str]] = {0: set(), 1: set()}
    for number in range(400):
        which = 0 if number % 2 else 1 + source.randrange(40)
        tokens = [*prompt(10_000 * which, 2000), number]
        worker = target.route(str(number), tokens, 0.1 * number).worker
        used.setdefault(which, set()).add(worker)
        target.prefill_done(str(number))
        for name in "abcdefgh":
            target.stepped(name, 0.1 * number)
        target.free(str(number - 32))
    rare = [len(names) for which, names in used.items() if which and names]
    assert 1 < len(used[0]) <= 5 and sum(rare) / len(rare) < 1.5, used


def test_a_long_queue_outweighs_a_cached_prefix() -> None:
    target = router("a", "b")
    hold(target, "b", prompt(0))
    for number in range(3):
        target.route(f"long-{number}", prompt(0) + prompt(1000 * (number + 1), 200), 0.0)
    assert target.route("r", prompt(0), 0.0).worker == "a"


def test_one_token_is_always_computed() -> None:
    target = router("a")
    hold(target, "a", prompt(0))
    assert target.route("r", prompt(0), 0.0).num_cached_tokens == 36


def test_what_was_routed_counts_as_cached_before_the_first_event() -> None:
    target = router("a", "b", predict_s=1.0)
    others(target, 3)
    first = target.route("x", prompt(0, 4000), 0.0).worker
    second = target.route("y", prompt(0, 4000), 0.1)
    assert second.worker == first and second.num_cached_tokens > 3900
    for request_id in "xy":
        target.free(request_id)
    assert target.route("z", prompt(0, 4000), 9.0).num_cached_tokens == 0, "a prediction ends"


def test_ties_are_random_and_repeatable() -> None:
    def picks(seed: int) -> list[str]:
        target = router("a", "b", "c", seed=seed)
        chosen = []
        for number in range(60):
            chosen.append(target.route(str(number), prompt(1000 * number), 0.0).worker)
            target.free(str(number))
        return chosen

    assert picks(1) == picks(1) != picks(2)
    assert all(count > 5 for count in Counter(picks(1)).values()) and len(set(picks(1))) == 3


def test_policies() -> None:
    turns = router("a", "b", "c", policy="round-robin")
    assert len({turns.route(str(i), prompt(0), 0.0).worker for i in range(3)}) == 3
    least = router("a", "b", policy="least-loaded")
    first = least.route("1", prompt(0), 0.0).worker
    second = least.route("2", prompt(0), 0.0).worker
    least.free("1")
    assert {first, second} == {"a", "b"} and least.route("3", prompt(0), 0.0).worker == first
    chance = router("a", "b", policy="random")
    assert {chance.route(str(i), prompt(0), 0.0).worker for i in range(30)} == {"a", "b"}


def test_every_policy_has_a_name_and_says_why() -> None:
    assert tuple(POLICIES) == get_args(RouterPolicy)
    for name, policy in POLICIES.items():
        decision = router("a", "b", policy=name).route("1", prompt(0), 0.0)
        assert policy.reason or policy.term in decision.terms()["a"], name


@pytest.mark.parametrize("policy", POLICIES)
def test_who_was_tried_is_left_out(policy: Any) -> None:
    target = router("a", "b", "c", policy=policy)
    hold(target, "a", prompt(0))
    chosen = [target.route("1", prompt(0), 0.0, without={"a"}).worker for _ in range(20)]
    assert "a" not in chosen
    assert target.route("1", prompt(0), 0.0, without={"a", "b"}).worker == "c"
    with pytest.raises(NoWorkerError):
        target.route("1", prompt(0), 0.0, without={"a", "b", "c"})
    assert sum(load.num_requests for load in target.loads()) == 1


def test_the_account_is_empty_when_all_has_ended() -> None:
    target = router("a", "b")
    for number in range(20):
        target.route(str(number), prompt(100 * number, 10 + number), 0.0)
    target.route("3", prompt(0), 0.0)  # again: it counts once
    for number in range(20):
        target.prefill_progress(str(number), 7)
        if number % 2:
            target.prefill_done(str(number))
        target.free(str(number))
        target.free(str(number))
    target.prefill_done("unknown")
    for terms in target.route("last", prompt(9000), 0.0).terms().values():
        assert terms["num_requests"] == terms["wait_ms"] == terms["queue_ms"] == 0
        assert terms["cost_ms"] == terms["prefill_ms"] > 0


def test_workers_leave_with_their_requests() -> None:
    target = router("a", "b", "c")
    placed = {str(i): target.route(str(i), prompt(100 * i), 0.0).worker for i in range(9)}
    lost = target.remove_worker("b")
    assert sorted(lost) == sorted(key for key, name in placed.items() if name == "b")
    assert target.workers == ["a", "c"] and target.remove_worker("b") == []
    for request_id in placed:
        target.free(request_id)
    assert target.route("x", prompt(1), 0.0).worker in ("a", "c")
    for name in ("a", "c"):
        target.remove_worker(name)
    with pytest.raises(NoWorkerError, match="no worker is ready"):
        target.route("y", prompt(1), 0.0)


def test_without_events_the_router_remembers_what_it_routed() -> None:
    target = router("a", "b", events=False)
    first = target.route("1", prompt(0), 0.0).worker
    target.free("1")
    again = target.route("2", prompt(0), 60.0)
    target.free("2")
    assert again.worker == first and again.num_cached_tokens == 36
    assert target.route("3", prompt(0), 170.0).num_cached_tokens == 36, "use renews it"
    assert target.route("4", prompt(0), 900.0).num_cached_tokens == 0


def test_a_gap_and_a_dump_pass_through() -> None:
    target = router("a")
    hashes = block_hashes(prompt(0), SIZE)
    assert not target.apply("a", EventBatch(5, []))
    assert target.load("a", Dump(5, hashes))
    assert target.route("r", [*prompt(0), 1], 0.0).num_cached_tokens == 40


def test_bytes_are_tokens_where_none_are_known() -> None:
    assert byte_tokens(b"") == byte_tokens(b"abc") == array("q")
    assert byte_tokens(b"\x01\0\0\0\xff\xff\xff\xff\0") == array("q", [1, 2**32 - 1])


def test_tokens_in_an_array_hash_as_in_a_list() -> None:
    tokens = prompt(7, 43)
    assert block_hashes(array("q", tokens), SIZE) == block_hashes(tokens, SIZE)
    assert block_hashes(array("i", tokens), SIZE) == block_hashes(tuple(tokens), SIZE)
