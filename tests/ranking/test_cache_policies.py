"""The simulated best on traces by hand, and our cache between LRU and it."""

import itertools

import numpy as np
import pytest
import torch

from benchmarks.embeddings import zipf_shares
from ranking.cache_policies import Keys, belady_hit_rate, lfu_hit_rate, lru_hit_rate, zipf_keys
from tokenmill.ranking.stores.device_cache import CachedTable
from tokenmill.ranking.stores.host_table import HostTable
from tokenmill.ranking.stores.store import TableSpec

TRACE_KEYS, TRACE_ROWS, TRACE_SLOTS, TRACE_BATCH = 100_000, 10_000, 992, 500


def cache_hit_rate(keys: Keys, skip: int) -> float:
    """Of a cache of TRACE_SLOTS rows on the host, after the first `skip` keys."""
    store = CachedTable(HostTable.create(TableSpec(TRACE_ROWS, 1)), TRACE_SLOTS, "cpu")
    before = 0
    for start in range(0, len(keys), TRACE_BATCH):
        if start == skip:
            before = store.stats().num_hits
        store.lookup(torch.from_numpy(keys[start : start + TRACE_BATCH]))
    rate = (store.stats().num_hits - before) / (len(keys) - skip)
    store.close()
    return rate


def test_rates_by_hand() -> None:
    keys = np.array([1, 2, 1, 3, 2, 1])
    assert lru_hit_rate(keys, 2) == 1 / 6  # 3 drives 2 away, then 2 drives 1 away
    assert belady_hit_rate(keys, 2) == 3 / 6  # 3 is not taken
    assert lfu_hit_rate(keys, 2) == 5 / 6
    assert lru_hit_rate(keys, 3) == belady_hit_rate(keys, 3) == 3 / 6
    assert belady_hit_rate(keys, 2, skip=3) == 2 / 3


def test_belady_is_the_best_of_all_choices() -> None:
    source = np.random.default_rng(0)
    for _ in range(20):
        keys = source.integers(0, 4, 9)
        assert belady_hit_rate(keys, 2) * 9 == pytest.approx(_best(keys.tolist(), frozenset()))


def _best(keys: list[int], resident: frozenset[int]) -> int:
    """Hits of the best choice at every key, with two places."""
    if not keys:
        return 0
    there = resident | {keys[0]}
    choices = [frozenset(rows) for rows in itertools.combinations(there, min(2, len(there)))]
    return (keys[0] in resident) + max(_best(keys[1:], choice) for choice in choices)


def test_zipf_shares() -> None:
    assert zipf_shares(3, 1.0) == pytest.approx(np.array([6, 9, 11]) / 11)
    keys = zipf_keys(50, 1.0, 20_000, seed=3)
    counts = np.sort(np.bincount(keys, minlength=50))[::-1] / len(keys)
    assert counts[:3] == pytest.approx(np.diff(zipf_shares(50, 1.0), prepend=0)[:3], rel=0.1)


@pytest.mark.parametrize("exponent", [0.8, 1.0, 1.2])
def test_our_cache_is_near_the_best_that_knows_the_frequencies(exponent: float) -> None:
    keys, skip = zipf_keys(TRACE_ROWS, exponent, TRACE_KEYS, 1), TRACE_KEYS // 4
    ours, lfu = cache_hit_rate(keys, skip), lfu_hit_rate(keys, TRACE_SLOTS, skip)
    assert lru_hit_rate(keys, TRACE_SLOTS, skip) < ours <= belady_hit_rate(keys, TRACE_SLOTS, skip)
    assert ours > lfu - 0.05
