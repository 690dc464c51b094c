"""Ratios with intervals: how often an interval holds."""

from __future__ import annotations

import math
import random

import pytest

from tokenmill.bench.results.intervals import (
    Estimate,
    from_interval,
    from_runs,
    from_samples,
    ratio_interval,
)


def correlated(seed: int, scale: float, size: int = 300) -> list[float]:
    """Synthetic latencies, each much like the one before."""
    rng = random.Random(seed)
    state, found = rng.gauss(0, 1), []
    for _ in range(size):
        state = 0.6 * state + 0.8 * rng.gauss(0, 1)
        found.append(scale * math.exp(0.3 * state))
    return found


@pytest.mark.parametrize("percent", [None, 50.0])
def test_intervals_of_correlated_noise_hold(percent: float | None) -> None:
    hits = 0
    for seed in range(0, 80, 2):
        one, two = (from_samples(correlated(seed + side, 100), percent) for side in (0, 1))
        assert one and two
        low, high = ratio_interval(two, one)
        hits += low <= 1 <= high
    assert 34 <= hits <= 40  # of 40 at 95 %


def test_a_true_difference_is_found() -> None:
    one, two = from_samples(correlated(1, 100)), from_samples(correlated(2, 150))
    assert one and two
    low, high = ratio_interval(two, one)
    assert 1 < low < 1.5 < high


def test_too_few_values_have_no_interval() -> None:
    assert from_samples([1.0] * 8) is None
    assert from_samples([1.0] * 400, 99.0) is None  # four values beyond it
    assert from_samples([0.0] * 400) is None  # no logarithm
    assert from_samples(list(range(1, 101)), None, min_batch=64) is None  # one block
    assert from_runs(10.0, [10.0]) is None and from_interval(0.0, 0.0, 0.0) is None


def test_runs_and_intervals_by_hand() -> None:
    runs = from_runs(100.0, [90.0, 100.0, 110.0])
    assert runs and runs.degrees == 2
    logs = [math.log(value) for value in (90, 100, 110)]
    mean = sum(logs) / 3
    assert runs.log_variance == pytest.approx(sum((x - mean) ** 2 for x in logs) / 2 / 3)
    # A half-width of 2.262 standard errors at nine degrees.
    bounds = from_interval(100.0, 100 - 2.262, 100 + 2.262)
    assert bounds and bounds.log_variance == pytest.approx(1e-4, rel=0.01)
    exact = Estimate(2.0, 0.0, 9)
    assert ratio_interval(exact, Estimate(1.0, 0.0, 9)) == (2.0, 2.0)
    low, high = ratio_interval(bounds, Estimate(100.0, 0.0, 9))
    assert (low, high) == pytest.approx((math.exp(-0.02262), math.exp(0.02262)), rel=1e-3)
