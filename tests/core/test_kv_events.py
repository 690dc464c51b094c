"""An index fed by a pool's events knows what the pool caches, whatever the scheduler does."""

from __future__ import annotations

import json
import random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from scheduler_cases import make, sampled
from scheduler_integrity import check_pool
from tokenmill.core.kv_events import (
    Cleared,
    Event,
    EventBatch,
    EventPublisher,
    Removed,
    Stored,
    pack_events,
    unpack_events,
)
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.routing.kv_index import KVIndex
from tokenmill.sched.cache.blocks import BlockPool, block_hashes, chain_seed
from tokenmill.workers.messages import BlockEvents, decode_from_worker, encode


def test_events_of_a_pool() -> None:
    pool = BlockPool(2, 1)
    assert pool.cached_hashes() == []
    journal = pool.record_events()
    first, second = pool.allocate(2)
    identity = pool.insert(first, 11, "", (1,), 5)
    pool.insert(second, 12, identity, (2,), 11)
    assert journal.take() == [Stored(5, [11, 12])]
    pool.release([first, second])
    pool.insert(pool.allocate(1)[0], 13, "", (3,), 5)
    assert journal.take() == [Removed([12]), Stored(5, [13])]
    pool.clear()
    assert journal.take() == [Cleared()] and pool.cached_hashes() == [] and journal.take() == []
    check_pool(pool)


def test_stored_events_name_their_parents() -> None:
    scheduler = make()
    journal = scheduler.pool.record_events()
    prompt = list(range(10))
    scheduler.add(Request("a", Generate(prompt, SamplingParams(max_tokens=4))))
    batch = scheduler.schedule(0)
    assert journal.take() == [Stored(chain_seed(), block_hashes(prompt, 4))]
    scheduler.update(batch, sampled(batch))


def check(index: KVIndex, pool: BlockPool, ever: set[int]) -> None:
    cached = set(pool.cached_hashes())
    ever |= cached
    assert {h for h in ever if index.overlaps(np.array([h], np.uint64))} == cached
    assert index.num_blocks("w") == len(cached)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.booleans())
def test_index_equals_pool(seed: int, lossy: bool) -> None:
    """Preemption, eviction, aborts, failed steps and lost batches."""
    rng = random.Random(seed)
    scheduler = make(num_blocks=rng.randint(6, 14), max_num_batched_tokens=rng.randint(3, 16))
    pool = scheduler.pool
    publisher = EventPublisher(pool.record_events())
    index = KVIndex()
    index.add_worker("w")
    ever: set[int] = set()
    for turn in range(40):
        if rng.random() < 0.5:
            prompt = [rng.randint(1, 2)] * rng.randint(1, 9) + [turn] * rng.randint(0, 9)
            sampling = SamplingParams(max_tokens=rng.randint(1, 9), ignore_eos=True)
            scheduler.add(Request(str(turn), Generate(prompt, sampling)))
        if rng.random() < 0.1:
            scheduler.abort(str(rng.randint(0, turn)))
        batch = scheduler.schedule(turn)
        if rng.random() < 0.05:
            scheduler.fail(batch, "it failed")
        else:
            scheduler.update(batch, sampled(batch))
        if rng.random() < 0.02:
            pool.clear()
        taken = publisher.take()
        if lossy and rng.random() < 0.3:
            continue  # lost, or nothing happened
        if taken is not None and not index.apply("w", taken):
            assert index.load("w", publisher.dump(pool.cached_hashes()))
        if taken is not None:
            check(index, pool, ever)
    check_pool(pool)


def test_runs_of_this_test_do_preempt_and_evict() -> None:
    scheduler = make(num_blocks=6, max_num_batched_tokens=16)
    publisher = EventPublisher(scheduler.pool.record_events())
    for name in range(4):
        sampling = SamplingParams(max_tokens=12, ignore_eos=True)
        scheduler.add(Request(str(name), Generate([name] * 8, sampling)))
    removed = 0
    while scheduler.has_work():
        batch = scheduler.schedule(0)
        scheduler.update(batch, sampled(batch))
        taken = publisher.take()
        events = taken.events if taken else []
        removed += sum(len(e.hashes) for e in events if isinstance(e, Removed))
    assert scheduler.stats().num_preemptions > 0 and removed > 0


def test_events_are_the_same_over_both_wires() -> None:
    """Workers pack them as msgpack, ranks as JSON: one packed form, nothing is lost."""
    events: list[Event] = [Stored(2**64 - 1, [1, 2]), Stored(None, [3]), Removed([1]), Cleared()]
    packed = pack_events(events)
    assert unpack_events(json.loads(json.dumps(packed))) == events
    sent = decode_from_worker(encode(BlockEvents.of(EventBatch(7, events))))
    assert isinstance(sent, BlockEvents) and sent.batch() == EventBatch(7, events)
