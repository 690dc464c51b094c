"""Expert load balancing: from measured load to copies of experts and the ranks that hold them.

An expert with much load is copied until no copy has more than it must; copies are then spread so
that ranks have equal load. Globally, or with the experts of a routing group kept on one machine:
groups go to machines first, and each machine copies and spreads its own.
"""

from __future__ import annotations

import heapq
from typing import NamedTuple

import numpy as np

Placement = list[int]  # the expert of each slot; a rank's slots lie side by side


class Move(NamedTuple):
    """A slot that gets another expert, and a slot that held it before."""

    slot: int
    source: int


def replicate(load: np.ndarray, num_slots: int) -> list[int]:
    """Experts of `num_slots` copies, each expert at least once: the largest load per copy is least.

    Every further copy goes to the expert with the most load per copy.
    """
    num_experts = len(load)
    assert num_slots >= num_experts
    copies = list(range(num_experts))
    heap = [(-float(load[expert]), expert, 1) for expert in copies]
    heapq.heapify(heap)
    for _ in range(num_slots - num_experts):
        _, expert, count = heap[0]
        copies.append(expert)
        heapq.heapreplace(heap, (-float(load[expert]) / (count + 1), expert, count + 1))
    return copies


def pack(weights: np.ndarray, num_bins: int) -> list[list[int]]:
    """Items of each bin, equally many: the heaviest first, each into the lightest that has room."""
    room = len(weights) // num_bins
    assert room * num_bins == len(weights)
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, index) for index in range(num_bins)]
    for item in np.argsort(-weights, kind="stable").tolist():
        total, index = heapq.heappop(heap)
        bins[index].append(item)
        if len(bins[index]) < room:
            heapq.heappush(heap, (total + float(weights[item]), index))
    return bins


def place(
    load: np.ndarray, num_slots: int, num_ranks: int, num_groups: int = 1, num_nodes: int = 1
) -> Placement:
    """The expert of each slot, for load[experts].

    With several nodes that divide the groups, ranks and slots, a group's experts stay on one node.
    """
    counts = (num_groups, num_ranks, num_slots)
    if num_nodes == 1 or any(count % num_nodes for count in counts):
        return _spread(load, np.arange(len(load)), num_slots, num_ranks)
    by_group = np.arange(len(load)).reshape(num_groups, -1)
    placement: Placement = []
    for groups in pack(load[by_group].sum(1), num_nodes):
        experts = by_group[sorted(groups)].ravel()
        placement += _spread(load, experts, num_slots // num_nodes, num_ranks // num_nodes)
    return placement


def _spread(load: np.ndarray, experts: np.ndarray, num_slots: int, num_ranks: int) -> Placement:
    copies = experts[replicate(load[experts], num_slots)]
    counts = np.bincount(copies, minlength=len(load))
    bins = pack(load[copies] / counts[copies], num_ranks)
    return [int(copies[item]) for items in bins for item in items]


def keep_slots(new: Placement, old: Placement, num_ranks: int, num_nodes: int = 1) -> Placement:
    """The same load per rank with fewer moves: ranks of a node and slots of a rank change names.

    Each set of experts goes to the rank that holds most of it already, and an expert that a rank
    keeps stays in its slot.
    """
    per_rank, per_node = len(new) // num_ranks, num_ranks // num_nodes
    wanted = [new[i : i + per_rank] for i in range(0, len(new), per_rank)]
    held = [old[i : i + per_rank] for i in range(0, len(old), per_rank)]
    kept = list(new)
    for first in range(0, num_ranks, per_node):
        ranks = range(first, first + per_node)
        for rank, chosen in _match([wanted[r] for r in ranks], [held[r] for r in ranks]):
            slots = _keep_in_rank(wanted[first + chosen], held[first + rank])
            start = (first + rank) * per_rank
            kept[start : start + per_rank] = slots
    return kept


def _match(wanted: list[Placement], held: list[Placement]) -> list[tuple[int, int]]:
    """(rank, set of experts) pairs, those with most in common first."""
    num_experts = 1 + max(max(experts) for experts in wanted + held)
    has = np.array([np.bincount(experts, minlength=num_experts) for experts in held])
    common = np.array(
        [np.minimum(has, np.bincount(experts, minlength=num_experts)).sum(1) for experts in wanted]
    ).T
    pairs, ranks, sets = [], set(range(len(held))), set(range(len(wanted)))
    for flat in np.argsort(-common, axis=None, kind="stable").tolist():
        rank, chosen = divmod(flat, len(wanted))
        if rank in ranks and chosen in sets:
            pairs.append((rank, chosen))
            ranks.remove(rank)
            sets.remove(chosen)
    return pairs


def _keep_in_rank(wanted: Placement, held: Placement) -> Placement:
    """The wanted experts in the order of slots, those that are held where they are."""
    left = list(wanted)
    slots: list[int | None] = [None] * len(held)
    for slot, expert in enumerate(held):
        if expert in left:
            left.remove(expert)
            slots[slot] = expert
    return [left.pop(0) if expert is None else expert for expert in slots]


def moves(old: Placement, new: Placement, num_ranks: int) -> list[Move]:
    """What must be copied: from the same rank if it held the expert, else from the least busy."""
    per_rank = len(old) // num_ranks
    holders: dict[int, list[int]] = {}
    for slot, expert in enumerate(old):
        holders.setdefault(expert, []).append(slot)
    num_sent = [0] * num_ranks
    found = []
    for slot, expert in enumerate(new):
        if old[slot] == expert:
            continue
        rank = slot // per_rank
        source = min(
            holders[expert],
            key=lambda s: (s // per_rank != rank, num_sent[s // per_rank], s),
        )
        num_sent[source // per_rank] += source // per_rank != rank
        found.append(Move(slot, source))
    return found


def rank_loads(load: np.ndarray, placement: Placement, num_ranks: int) -> np.ndarray:
    """The load of each rank when copies of an expert share its load evenly."""
    slots = np.array(placement)
    share = load / np.bincount(slots, minlength=len(load))
    totals: np.ndarray = share[slots].reshape(num_ranks, -1).sum(1)
    return totals


def imbalance(loads: np.ndarray) -> float:
    """The largest over the mean; 1 is even, and no load at all is even, too."""
    mean = float(loads.mean())
    return float(loads.max()) / mean if mean else 1.0
