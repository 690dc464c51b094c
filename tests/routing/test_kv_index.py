"""The index of cached blocks: gaps and dumps, overlaps, predictions."""

from __future__ import annotations

import random

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tokenmill.core.kv_events import Cleared, Dump, Event, EventBatch, Removed, Stored
from tokenmill.routing.kv_index import MAX_RETIRED, STRIDE, KVIndex
from tokenmill.sched.cache.blocks import U64

CHAIN = list(range(100, 120))


def chain(hashes: list[int]) -> U64:
    return np.array(hashes, np.uint64)


def index_of(*names: str) -> KVIndex:
    index = KVIndex()
    for name in names:
        index.add_worker(name)
    return index


def stored(sequence: int, hashes: list[int]) -> EventBatch:
    return EventBatch(sequence, [Stored(None, hashes)])


def test_events_in_order() -> None:
    index = index_of("a", "b")
    assert index.apply("a", stored(1, CHAIN[:8])) and index.apply("b", stored(1, CHAIN[:3]))
    assert index.overlaps(chain(CHAIN)) == {"a": 8, "b": 3}
    assert index.apply("a", EventBatch(2, [Removed(CHAIN[5:8]), Stored(CHAIN[4], CHAIN[5:6])]))
    assert index.overlaps(chain(CHAIN)) == {"a": 6, "b": 3}
    assert index.apply("a", stored(2, CHAIN)), "a batch seen before is ignored"
    assert index.num_blocks("a") == 6 and len(index) == 6
    assert index.apply("b", EventBatch(2, [Cleared()]))
    assert index.overlaps(chain(CHAIN)) == {"a": 6} and index.num_blocks("b") == 0


def test_a_gap_asks_for_a_dump_and_keeps_what_comes_meanwhile() -> None:
    index = index_of("a")
    assert index.apply("a", stored(1, CHAIN[:2]))
    assert not index.apply("a", stored(3, CHAIN[4:6]))
    assert not index.apply("a", stored(4, CHAIN[6:7]))
    assert index.overlaps(chain(CHAIN)) == {"a": 2}
    assert index.load("a", Dump(3, CHAIN[:6])), "batch 4 joins the dump, batch 3 is in it"
    assert index.overlaps(chain(CHAIN)) == {"a": 7}
    assert not index.apply("a", stored(6, []))
    assert not index.apply("a", stored(8, []))
    assert not index.load("a", Dump(6, CHAIN[:1])), "batch 7 is missing still"
    assert index.load("a", Dump(8, CHAIN[:4])) and index.overlaps(chain(CHAIN)) == {"a": 4}


def test_a_worker_that_runs_already_shows_a_gap() -> None:
    index = index_of("late")
    assert not index.apply("late", stored(57, CHAIN[:1]))


def test_workers_leave_and_their_bits_come_back_clean() -> None:
    index = index_of("stays")
    index.apply("stays", stored(1, CHAIN[:4]))
    for turn in range(3 * MAX_RETIRED):
        index.add_worker("guest")
        assert index.overlaps(chain(CHAIN)) == {"stays": 4}, turn
        index.apply("guest", stored(1, CHAIN[: turn % 20 + 1]))
        index.predict("guest", chain(CHAIN[: turn % 20 + 1]), 2, float(turn))
        assert index.overlaps(chain(CHAIN))["guest"] == turn % 20 + 1
        index.remove_worker("guest")
    assert index.apply("guest", stored(2, CHAIN)) and index.load("guest", Dump(9, CHAIN))
    assert index.overlaps(chain(CHAIN)) == {"stays": 4}, "late events change nothing"
    assert len(index) <= 20


@given(st.lists(st.integers(0, 20), min_size=1, max_size=70), st.randoms(use_true_random=False))
def test_overlaps_equal_a_walk_block_by_block(depths: list[int], rng: random.Random) -> None:
    names = [f"w{i}" for i in range(len(depths))]
    index = index_of(*names)
    held = {}
    for name, depth in zip(names, depths, strict=True):
        told = rng.randint(0, depth)
        index.apply(name, stored(1, CHAIN[:told]))
        index.predict(name, chain(CHAIN[:depth]), told, 1.0)
        marked = depth if depth < STRIDE else depth // STRIDE * STRIDE
        if known := max(told, marked):
            held[name] = known
    assert index.overlaps(chain(CHAIN)) == held
    assert index.overlaps(chain([])) == {} and index.overlaps(chain([1, 2, 3])) == {}


def test_predictions_expire() -> None:
    index = index_of("a", "b", "c")
    index.predict("a", chain(CHAIN[:9]), 0, until_s=14.0)
    index.predict("c", chain(CHAIN[:5]), 0, until_s=15.0)
    index.predict("b", chain(CHAIN[:19]), 3, until_s=16.5)
    assert index.overlaps(chain(CHAIN)) == {"a": 8, "b": 16, "c": 5}, "in groups of eight"
    index.expire(14.0)
    assert index.overlaps(chain(CHAIN)) == {"b": 16, "c": 5}
    index.expire(17.0)
    assert index.overlaps(chain(CHAIN)) == {}


def test_assumed_blocks_are_the_latest_that_fit() -> None:
    index = index_of("small", "other")
    index.assume("other", chain(CHAIN), 0.0, capacity=64)
    for turn in range(40):
        index.assume("small", chain([1000 * turn + i for i in range(8)]), float(turn), capacity=60)
    newest = [turn for turn in range(40) if index.overlaps(chain([1000 * turn]))]
    assert newest == list(range(32, 40)) and index.num_blocks("small") == 60
    assert index.overlaps(chain([32_000 + i for i in range(8)])) == {"small": 4}, (
        "its tail went first"
    )
    assert index.overlaps(chain(CHAIN)) == {"other": 20}, "others keep theirs"
    index.assume("small", chain([35_000 + i for i in range(8)]), 50.0, capacity=60)
    index.forget(38.0)
    kept = [turn for turn in range(40) if index.overlaps(chain([1000 * turn]))]
    assert kept == [35, 39] and index.overlaps(chain(CHAIN)) == {}


def test_the_order_within_a_batch_decides() -> None:
    index = index_of("a")
    events: list[Event] = [Stored(None, CHAIN[:3]), Cleared(), Stored(None, CHAIN[:1])]
    index.apply("a", EventBatch(1, events))
    assert index.overlaps(chain(CHAIN)) == {"a": 1} and index.num_blocks("a") == 1
