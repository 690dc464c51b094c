"""Placement of experts: invariants on random loads, and brute force on tiny ones."""

import itertools

import numpy as np
import pytest

from tokenmill.routing import eplb

# experts, slots, ranks, groups, nodes
SHAPES = [(8, 8, 4, 1, 1), (16, 20, 4, 4, 2), (64, 72, 8, 8, 2), (256, 288, 32, 8, 4)]


def skewed(num_experts: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).lognormal(0.0, 1.5, num_experts)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_expert_has_a_place_and_ranks_get_more_alike(shape: tuple[int, ...]) -> None:
    num_experts, slots, ranks, groups, nodes = shape
    before = [slot % num_experts for slot in range(slots)]
    for seed in range(5):
        load = skewed(num_experts, seed)
        for placement in (
            eplb.place(load, slots, ranks),
            eplb.place(load, slots, ranks, groups, nodes),
        ):
            assert len(placement) == slots and set(placement) == set(range(num_experts))
            after = eplb.rank_loads(load, placement, ranks)
            assert after.sum() == pytest.approx(load.sum())
            assert eplb.imbalance(after) <= eplb.imbalance(eplb.rank_loads(load, before, ranks))


def test_a_group_stays_on_one_node() -> None:
    num_experts, slots, ranks, groups, nodes = SHAPES[-1]
    placement = eplb.place(skewed(num_experts, 3), slots, ranks, groups, nodes)
    node_of: dict[int, set[int]] = {}
    for slot, expert in enumerate(placement):
        group = expert // (num_experts // groups)
        node_of.setdefault(group, set()).add(slot // (slots // nodes))
    assert len(node_of) == groups and all(len(found) == 1 for found in node_of.values())


def test_nodes_that_do_not_divide_the_groups_are_ignored() -> None:
    load = skewed(16, 1)
    assert eplb.place(load, 24, 6, 4, 3) == eplb.place(load, 24, 6)


def test_copies_have_the_least_possible_peak() -> None:
    rng = np.random.default_rng(0)
    for _ in range(30):
        num_experts, extra = int(rng.integers(2, 5)), int(rng.integers(0, 5))
        load = rng.lognormal(0.0, 1.5, num_experts)
        copies = np.bincount(eplb.replicate(load, num_experts + extra), minlength=num_experts)
        choices = itertools.product(range(1, extra + 2), repeat=num_experts)
        best = min(
            (load / counts).max() for counts in choices if sum(counts) == num_experts + extra
        )
        assert (load / copies).max() == pytest.approx(best)


def test_packing_is_close_to_the_best_there_is() -> None:
    rng = np.random.default_rng(1)
    for _ in range(30):
        weights = rng.lognormal(0.0, 1.0, 6)
        bins = eplb.pack(weights, 2)
        assert sorted(item for items in bins for item in items) == list(range(6))
        assert [len(items) for items in bins] == [3, 3]
        peak = max(weights[items].sum() for items in bins)
        splits = itertools.combinations(range(6), 3)
        best = min(
            max(weights[list(s)].sum(), weights.sum() - weights[list(s)].sum()) for s in splits
        )
        assert best <= peak * (1 + 1e-12) and peak <= 4 / 3 * best


def test_what_can_stay_stays() -> None:
    num_experts, slots, ranks, groups, nodes = SHAPES[-1]
    old = eplb.place(skewed(num_experts, 0), slots, ranks, groups, nodes)
    assert eplb.moves(old, old, ranks) == []
    assert eplb.keep_slots(old, old, ranks, nodes) == old
    load = skewed(num_experts, 0) * np.random.default_rng(2).lognormal(0.0, 0.1, num_experts)
    new = eplb.place(load, slots, ranks, groups, nodes)
    kept = eplb.keep_slots(new, old, ranks, nodes)
    assert len(eplb.moves(old, kept, ranks)) < len(eplb.moves(old, new, ranks))
    assert sorted(eplb.rank_loads(load, kept, ranks)) == pytest.approx(
        sorted(eplb.rank_loads(load, new, ranks))
    )
    for slot, source in eplb.moves(old, kept, ranks):
        assert old[source] == kept[slot] != old[slot]


def test_an_expert_is_copied_within_its_rank_where_it_can() -> None:
    # Two ranks of three slots; rank 0 held 0, rank 1 did not.
    assert eplb.moves([0, 1, 2, 3, 4, 5], [0, 0, 2, 3, 4, 1], 2) == [(1, 0), (5, 1)]


def test_imbalance_by_hand() -> None:
    loads = eplb.rank_loads(np.array([6.0, 2.0, 2.0]), [0, 1, 0, 2], 2)
    assert loads.tolist() == [5.0, 5.0] and eplb.imbalance(loads) == 1.0
    assert eplb.imbalance(eplb.rank_loads(np.array([6.0, 2.0]), [0, 1], 2)) == 1.5
    assert eplb.imbalance(np.zeros(4)) == 1.0
