"""The simulated best on traces by hand, and our cache between LRU and it."""

import itertools

import numpy as np
import pytest

from tokenmill.bench.embedding_rates import TRACE_KEYS, TRACE_ROWS, TRACE_SLOTS, cache_hit_rate
from tokenmill.ranking.stores.cache_policies import (
    belady_hit_rate,
    lfu_hit_rate,
    lru_hit_rate,
    zipf_keys,
    zipf_shares,
)


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
