"""The index of cached blocks: gaps and dumps, overlaps, predictions."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from tokenmill.sched.kv_events import Cleared, Dump, Event, EventBatch, Removed, Stored
from tokenmill.sched.kv_index import MAX_RETIRED, KVIndex

CHAIN = list(range(100, 120))


def index_of(*names: str, **options: float) -> KVIndex:
    index = KVIndex(**options)  # type: ignore[arg-type]
    for name in names:
        index.add_worker(name)
    return index


def stored(sequence: int, hashes: list[int]) -> EventBatch:
    return EventBatch(sequence, [Stored(None, hashes)])


def test_events_in_order() -> None:
    index = index_of("a", "b")
    assert index.apply("a", stored(1, CHAIN[:8])) and index.apply("b", stored(1, CHAIN[:3]))
    assert index.overlaps(CHAIN) == {"a": 8, "b": 3}
    assert index.apply("a", EventBatch(2, [Removed(CHAIN[5:8]), Stored(CHAIN[4], CHAIN[5:6])]))
    assert index.overlaps(CHAIN) == {"a": 6, "b": 3}
    assert index.apply("a", stored(2, CHAIN)), "a batch seen before is ignored"
    assert index.num_blocks("a") == 6 and len(index) == 6
    assert index.apply("b", EventBatch(2, [Cleared()]))
    assert index.overlaps(CHAIN) == {"a": 6} and index.num_blocks("b") == 0


def test_a_gap_asks_for_a_dump_and_keeps_what_comes_meanwhile() -> None:
    index = index_of("a")
    assert index.apply("a", stored(1, CHAIN[:2]))
    assert not index.apply("a", stored(3, CHAIN[4:6]))
    assert not index.apply("a", stored(4, CHAIN[6:7]))
    assert index.overlaps(CHAIN) == {"a": 2}
    assert index.load("a", Dump(3, CHAIN[:6])), "batch 4 joins the dump, batch 3 is in it"
    assert index.overlaps(CHAIN) == {"a": 7}
    assert not index.apply("a", stored(6, []))
    assert not index.apply("a", stored(8, []))
    assert not index.load("a", Dump(6, CHAIN[:1])), "batch 7 is missing still"
    assert index.load("a", Dump(8, CHAIN[:4])) and index.overlaps(CHAIN) == {"a": 4}


def test_a_worker_that_runs_already_shows_a_gap() -> None:
    index = index_of("late")
    assert not index.apply("late", stored(57, CHAIN[:1]))


def test_workers_leave_and_their_bits_come_back_clean() -> None:
    index = index_of("stays", predict_s=100.0)
    index.apply("stays", stored(1, CHAIN[:4]))
    for turn in range(3 * MAX_RETIRED):
        index.add_worker("guest")
        assert index.overlaps(CHAIN) == {"stays": 4}, turn
        index.apply("guest", stored(1, CHAIN[: turn % 20 + 1]))
        index.predict("guest", CHAIN[: turn % 20 + 1], 0.0, 2)
        assert index.overlaps(CHAIN)["guest"] == turn % 20 + 1
        index.remove_worker("guest")
    assert index.apply("guest", stored(2, CHAIN)) and index.load("guest", Dump(9, CHAIN))
    assert index.overlaps(CHAIN) == {"stays": 4}, "late events change nothing"
    assert len(index) <= 20


@given(st.lists(st.integers(0, 20), min_size=1, max_size=70), st.randoms(use_true_random=False))
def test_overlaps_equal_a_walk_block_by_block(depths: list[int], rng: random.Random) -> None:
    names = [f"w{i}" for i in range(len(depths))]
    index = index_of(*names, predict_s=10.0, capacity_blocks=1000)
    for name, depth in zip(names, depths, strict=True):
        told = rng.randint(0, depth)
        index.apply(name, stored(1, CHAIN[:told]))
        index.predict(name, CHAIN[:depth], rng.choice([0.0, 6.0]), told)
    held = {name: depth for name, depth in zip(names, depths, strict=True) if depth}
    assert index.overlaps(CHAIN, 7.0) == held
    assert index.overlaps([]) == {} and index.overlaps([1, 2, 3], 7.0) == {}


def test_predictions_expire() -> None:
    index = index_of("a", "b", predict_s=4.0)
    index.predict("a", CHAIN[:9], 10.0)
    index.predict("b", CHAIN[:15], 12.5, start=3)
    assert index.overlaps(CHAIN, 13.9) == {"a": 8, "b": 12}, "in groups of four"
    assert index.overlaps(CHAIN, 14.1) == {"b": 12}
    assert index.overlaps(CHAIN, 17.0) == {}


def test_predictions_are_bound_by_a_workers_memory() -> None:
    index = index_of("small", "other", predict_s=1000.0, capacity_blocks=64)
    index.predict("other", CHAIN, 0.0)
    for turn in range(40):
        index.predict("small", [1000 * turn + i for i in range(8)], float(turn))
    newest = [turn for turn in range(40) if index.overlaps([1000 * turn], 40.0)]
    assert newest == list(range(newest[0], 40)) and 6 <= len(newest) <= 8
    assert index.overlaps(CHAIN, 40.0).get("other") == 20, "others keep theirs"


def test_the_order_within_a_batch_decides() -> None:
    index = index_of("a")
    events: list[Event] = [Stored(None, CHAIN[:3]), Cleared(), Stored(None, CHAIN[:1])]
    index.apply("a", EventBatch(1, events))
    assert index.overlaps(CHAIN) == {"a": 1} and index.num_blocks("a") == 1
