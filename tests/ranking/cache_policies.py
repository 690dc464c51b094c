"""Hit rates that caches could have on a trace of keys: LRU, LFU, and Belady's best."""

from __future__ import annotations

import heapq
from collections import OrderedDict

import numpy as np
from numpy.typing import NDArray

from benchmarks.embeddings import zipf_shares

Keys = NDArray[np.int64]


def zipf_keys(num_rows: int, exponent: float, count: int, seed: int) -> Keys:
    """Keys whose k-th most frequent has the chance k ** -exponent; which they are is random."""
    source = np.random.default_rng(seed)
    order = source.permutation(num_rows)
    ranks = np.searchsorted(zipf_shares(num_rows, exponent), source.random(count))
    found: Keys = order[np.minimum(ranks, num_rows - 1)]
    return found


def lru_hit_rate(keys: Keys, capacity: int, skip: int = 0) -> float:
    """The least recently used row leaves; the first `skip` keys are not counted."""
    resident: OrderedDict[int, None] = OrderedDict()
    hits = 0
    for place, key in enumerate(keys.tolist()):
        if key in resident:
            resident.move_to_end(key)
            hits += place >= skip
        else:
            resident[key] = None
            if len(resident) > capacity:
                resident.popitem(last=False)
    return hits / (len(keys) - skip)


def lfu_hit_rate(keys: Keys, capacity: int, skip: int = 0) -> float:
    """The rows that are most frequent over the whole trace stay from its beginning on."""
    distinct, counts = np.unique(keys, return_counts=True)
    resident = distinct[np.argsort(-counts, kind="stable")[:capacity]]
    return float(np.isin(keys[skip:], resident).mean())


def belady_hit_rate(keys: Keys, capacity: int, skip: int = 0) -> float:
    """The row leaves, or is not taken, whose next use is farthest: no cache does better."""
    following = _next_uses(keys)
    next_use: dict[int, int] = {}  # of the resident rows
    farthest: list[tuple[int, int]] = []  # (-next use, row); entries of the past are skipped
    hits = 0
    for place, (key, use) in enumerate(zip(keys.tolist(), following.tolist(), strict=True)):
        hits += key in next_use and place >= skip
        next_use[key] = use
        heapq.heappush(farthest, (-use, key))
        while len(next_use) > capacity:
            use, row = heapq.heappop(farthest)
            if next_use.get(row) == -use:
                del next_use[row]
    return hits / (len(keys) - skip)


def _next_uses(keys: Keys) -> Keys:
    """Where each key comes again; beyond the end where it does not."""
    order = np.argsort(keys, kind="stable")
    following = np.full(len(keys), len(keys))
    same = keys[order[1:]] == keys[order[:-1]]
    following[order[:-1][same]] = order[1:][same]
    return following
