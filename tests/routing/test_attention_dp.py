"""Ranks that step together: who gets a request, when prompts wait, what a held step computes."""

from __future__ import annotations

import heapq
import random
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_integrity import check_scheduler
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.kv_events import Cleared, Dump, EventBatch, EventPublisher, Removed, Stored
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams, StepResult
from tokenmill.routing.attention_dp import (
    ContextBalancer,
    Outlook,
    RankCaches,
    RankLoad,
    assign,
)
from tokenmill.sched.cache.blocks import BlockPool, block_hashes
from tokenmill.sched.scheduler import Batch, Scheduler

loads = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 5000)), min_size=1, max_size=9)
prompts = st.lists(st.integers(1, 3000), max_size=30)


def by_heap(loads: Sequence[RankLoad], prompt_lens: Sequence[int]) -> list[int]:
    """The rule as TensorRT-LLM writes it."""
    total = sum(n for n, _ in loads) + len(prompt_lens)
    expected = max(-(-total // len(loads)), max(n for n, _ in loads))
    heap = [(tokens, n, rank) for rank, (n, tokens) in enumerate(loads) if n < expected]
    heapq.heapify(heap)
    chosen = {}
    for index, length in sorted(enumerate(prompt_lens), key=lambda pair: pair[1], reverse=True):
        tokens, n, rank = heapq.heappop(heap)
        chosen[index] = rank
        if n + 1 < expected:
            heapq.heappush(heap, (tokens + length, n + 1, rank))
    return [chosen[index] for index in range(len(prompt_lens))]


@settings(max_examples=80, deadline=None)
@given(loads, prompts)
def test_requests_are_spread(loads: list[RankLoad], prompt_lens: list[int]) -> None:
    chosen = assign(loads, prompt_lens)
    assert chosen == by_heap(loads, prompt_lens) == assign(loads, prompt_lens, [{}] * len(chosen))
    counts = [n + chosen.count(rank) for rank, (n, _) in enumerate(loads)]
    share = -(-sum(counts) // len(loads))
    assert max(counts) <= max(share, *(n for n, _ in loads))
    assert len(chosen) == len(prompt_lens)


def test_tokens_decide_and_cached_ones_count_less() -> None:
    assert assign([(1, 500), (1, 100), (1, 300)], [50, 900, 60]) == [0, 1, 2]
    assert assign([(3, 0), (1, 900)], [10]) == [1], "rank 0 has more requests than its share"
    assert assign([(1, 500), (1, 400)], [300]) == [1]
    assert assign([(1, 500), (1, 400)], [300], [{0: 256}]) == [0]
    assert assign([(0, 0), (0, 0)], [300, 300], [{1: 256}, {1: 256}]) == [1, 0], "its share is one"
    assert assign([(9, 9000), (9, 9900)], [300], [{1: 256}]) == [1], "a tenth more is no reason"
    assert assign([(9, 1000), (9, 9900)], [300], [{1: 128}]) == [0], "it has most of the load"


def test_who_holds_a_prompt_may_have_some_more() -> None:
    loads, cached = [(8, 900), (7, 800), (7, 800), (7, 800)], [{0: 256}]
    assert assign(loads, [300], cached, max_num_seqs=16) == [0], "9 where an even share is 8"
    assert assign(loads, [300], cached, max_num_seqs=8) == [1], "it has no place for it"
    assert assign(loads, [300], [{0: 64}], max_num_seqs=16) == [1], "what it holds is little"
    fuller = [(10, 1100), (7, 800), (7, 800), (7, 800)]
    assert assign(fuller, [300], cached, max_num_seqs=16) == [1], "it has a quarter more already"
    both = assign([(0, 0), (0, 0)], [300, 300], [{1: 256}, {1: 256}], max_num_seqs=4)
    assert both == [1, 1], "two are no load"


@settings(max_examples=80, deadline=None)
@given(loads, prompts, st.randoms(use_true_random=False), st.integers(1, 12))
def test_cached_prompts_never_overload_a_rank(
    loads: list[RankLoad], prompt_lens: list[int], source: random.Random, places: int
) -> None:
    ranks = range(len(loads))
    cached = [{source.choice(ranks): source.randrange(n + 1)} for n in prompt_lens]
    chosen = assign(loads, prompt_lens, cached, places)
    counts = [n + chosen.count(rank) for rank, (n, _) in enumerate(loads)]
    share, fullest = -(-sum(counts) // len(loads)), max(n for n, _ in loads)
    slack = max(1, share // 4)
    assert max(counts) <= max(share, fullest, min(share + slack, places))


def test_caches_of_ranks_are_one_to_others() -> None:
    tokens = list(range(50))
    one, two = block_hashes(tokens, 16)[:2]
    caches = RankCaches(2, 16)
    assert caches.cached_tokens(tokens) == {} and caches.cached_hashes() == []
    caches.apply(0, [Stored(7, [one])])
    publisher = EventPublisher(caches.record_events())
    assert publisher.dump(caches.cached_hashes()) == Dump(0, [one])
    caches.apply(1, [Stored(7, [one, two])])
    assert publisher.take() == EventBatch(1, [Stored(one, [two])]), "one is known already"
    assert caches.cached_tokens(tokens) == {0: 16, 1: 32}
    assert caches.cached_tokens(tokens[:32]) == {0: 16, 1: 16}, "a token is always computed"
    assert caches.cached_tokens(tokens, salt="other") == {}
    caches.apply(1, [Removed([two]), Removed([one])])
    assert publisher.take() == EventBatch(2, [Removed([two])]) and publisher.take() is None
    assert caches.cached_tokens(tokens) == {0: 16}
    caches.apply(0, [Cleared()])
    assert publisher.take() == EventBatch(3, [Removed([one])]) and caches.cached_hashes() == []


def test_what_a_rank_keeps_behind_its_device_counts_for_it() -> None:
    tokens = list(range(50))
    one, two = block_hashes(tokens, 16)[:2]
    caches = RankCaches(2, 16)
    publisher = EventPublisher(caches.record_events())
    caches.apply(0, [Stored(7, [one, two]), Stored(None, [one], "host"), Removed([one])])
    assert caches.cached_tokens(tokens) == {0: 32} and caches.cached_hashes() == [two]
    assert caches.tier_hashes() == {"host": [one]}
    caches.apply(1, [Stored(None, [one], "host")])
    caches.apply(0, [Cleared(), Removed([one], "host")])
    assert caches.cached_tokens(tokens) == {1: 16}
    caches.apply(1, [Removed([one], "host")])
    assert caches.cached_tokens(tokens) == {} and caches.tier_hashes() == {"host": []}
    told = publisher.take()
    assert told is not None and told.events == [
        Stored(7, [one, two]),
        Stored(None, [one], "host"),
        Removed([one, two]),
        Removed([one], "host"),
    ]


# (each rank's outlook, held?): places for 4, timeout 3, batching wait 2.
TABLE: list[tuple[list[Outlook], bool]] = [
    ([(1, 3), (0, 4)], True),  # a rank has no prompt: wait 1
    ([(1, 3), (0, 4)], True),  # wait 2
    ([(1, 3), (0, 4)], False),  # wait 3: timeout
    ([(0, 4), (1, 3)], True),  # counted anew
    ([(1, 3), (1, 3)], True),  # both have one: gather 1
    ([(1, 3), (1, 3)], True),  # gather 2
    ([(2, 2), (1, 3)], False),  # released
    ([(0, 4), (0, 4)], True),  # nobody has one: wait 1
    ([(0, 4), (0, 4)], True),  # wait 2
    ([(1, 3), (1, 3)], True),  # the wait is over, gather 1
    ([(1, 3), (0, 4)], True),  # wait 1: what was gathered stays counted
    ([(1, 3), (1, 3)], True),  # gather 2
    ([(1, 3), (1, 4)], True),  # a rank is full: wait 1
    ([(1, 3), (1, 3)], False),  # released
    ([(1, 0), (0, 4)], False),  # a rank has nothing to decode
    ([(1, 0), (1, 3)], False),  # the same with a prompt everywhere
    ([(1, 3), (1, 3)], True),  # gather 1
]


def test_the_balancer_by_its_table() -> None:
    of_each_rank = [ContextBalancer(4, timeout_iters=3, batching_wait_iters=2) for _ in range(2)]
    for row, (ranks, held) in enumerate(TABLE):
        assert [balancer.hold(ranks) for balancer in of_each_rank] == [held, held], f"row {row}"


outlooks = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 4)), min_size=3, max_size=3), max_size=60
)


@settings(max_examples=80, deadline=None)
@given(outlooks, st.integers(0, 5), st.integers(0, 4))
def test_the_balancer_as_tensorrt_llm_writes_it(
    steps: list[list[Outlook]], timeout: int, batching: int
) -> None:
    balancer = ContextBalancer(4, timeout, batching)
    waiting = gathered = 0
    for ranks in steps:
        free_slots = all(gen < 4 for _, gen in ranks)
        all_context = all(context > 0 for context, _ in ranks)
        all_generate = all(gen > 0 for _, gen in ranks)
        held = False
        if free_slots and all_context:
            waiting = 0
            if all_generate:
                if gathered < batching:
                    gathered += 1
                    held = True
                else:
                    gathered = 0
        else:
            waiting += 1
            held = True
            if waiting >= timeout or not all_generate:
                waiting = 0
                held = False
        assert balancer.hold(ranks) is held


def make(num_blocks: int = 16, chunked: bool = True) -> Scheduler:
    config = SchedulerConfig(
        max_num_batched_tokens=8, max_num_seqs=3, max_model_len=64, chunked_prefill=chunked
    )
    return Scheduler(config, BlockPool(num_blocks, 4), frozenset())


def add(scheduler: Scheduler, name: str, length: int, kv_from: str | None = None) -> None:
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    prompt = [sum(name.encode()) + i for i in range(length)]
    scheduler.add(Request(name, Generate(prompt, sampling, kv_from=kv_from)))


def step(scheduler: Scheduler, hold: bool = False) -> dict[str, int]:
    """A whole step; who computed how many tokens."""
    batch: Batch = scheduler.schedule(0, hold)
    sampled = [
        [0] if seq.num_computed_tokens + num_new == seq.num_tokens else []
        for seq, num_new in batch.items
    ]
    items = {seq.request_id: num_new for seq, num_new in batch.items}
    scheduler.update(batch, StepResult(sampled))
    check_scheduler(scheduler)
    return items


def test_a_held_step_only_decodes() -> None:
    scheduler = make()
    add(scheduler, "a", 4)
    assert scheduler.outlook() == (1, 0) and scheduler.load() == (1, 4)
    assert step(scheduler, hold=True) == {}, "nothing decodes, so nothing runs"
    assert step(scheduler) == {"a": 4}
    add(scheduler, "long", 12)
    add(scheduler, "c", 2)
    assert scheduler.outlook() == (2, 1)
    assert step(scheduler, hold=True) == {"a": 1}
    assert step(scheduler) == {"a": 1, "long": 7}
    assert scheduler.outlook() == (2, 1), "a begun prompt is context, too"
    assert step(scheduler, hold=True) == {"a": 1}
    assert step(scheduler) == {"a": 1, "long": 5, "c": 2}
    assert scheduler.outlook() == (0, 3)
    assert step(scheduler, hold=True) == {"a": 1, "long": 1, "c": 1} == step(scheduler)
    add(scheduler, "d", 3)
    assert scheduler.outlook() == (0, 3), "there is no place"
    blocks = sum(-(-n // 4) for n in (4 + 6, 12 + 2, 2 + 2))
    assert scheduler.load() == (4, 4 * blocks + 3)


def test_prompts_that_find_no_blocks_are_no_context() -> None:
    scheduler = make(num_blocks=4)
    add(scheduler, "a", 7)
    step(scheduler)
    add(scheduler, "b", 12)
    assert scheduler.outlook() == (0, 1)


def test_a_held_step_does_not_give_itself_to_one_prompt() -> None:
    scheduler = make(chunked=False)
    add(scheduler, "a", 4)
    step(scheduler)
    add(scheduler, "whole", 8)
    assert step(scheduler, hold=True) == {"a": 1}
    assert step(scheduler) == {"whole": 8}


def test_kv_from_elsewhere_gets_its_blocks_in_a_held_step() -> None:
    scheduler = make()
    add(scheduler, "a", 20)
    step(scheduler)  # 8 of 20: the rest is reserved
    add(scheduler, "remote", 4, kv_from="other")
    assert scheduler.outlook() == (1, 0), "it needs no context"
    assert step(scheduler, hold=True) == {}
    (seq,) = scheduler.admission.take_to_receive()
    scheduler.receive(seq, 0)
    assert step(scheduler, hold=True) == {"remote": 1}
    crowded = make(num_blocks=6)
    add(crowded, "a", 20)
    step(crowded)
    add(crowded, "remote", 8, kv_from="other")
    assert step(crowded, hold=True) == {} and crowded.admission.take_to_receive() == []
