"""Intervals of correlated values: how often they hold, by simulation, and small cases by hand."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from tokenmill.bench.results.intervals import (
    Estimate,
    _indicator_correlation,
    interval_95,
    ratio_interval,
    t_quantile,
)

NUM_RUNS = 200
SIZES, CORRELATIONS, SPREADS = (100, 1000), (0.0, 0.5, 0.8, 0.95), (0.3, 1.0)
PERCENTS = (None, 50.0, 90.0, 99.0)


@pytest.mark.parametrize(
    ("degrees", "table"), [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (29, 2.045)]
)
def test_t_by_its_table(degrees: int, table: float) -> None:
    assert t_quantile(0.975, degrees) == pytest.approx(table, rel=0.01)


def runs_of(rng: np.random.Generator, size: int, correlation: float, spread: float) -> np.ndarray:
    """Log-normal latencies about 100 ms, neighbours correlated: [runs, requests]."""
    noise = rng.normal(size=(NUM_RUNS, size))
    state = np.empty_like(noise)
    state[:, 0] = noise[:, 0]
    for step in range(1, size):
        kept = math.sqrt(1 - correlation**2) * noise[:, step]
        state[:, step] = correlation * state[:, step - 1] + kept
    return 100 * np.exp(spread * state)


def waves_of(rng: np.random.Generator, size: int, slots: int) -> np.ndarray:
    """Latencies of a closed loop whose requests begin and end together."""
    waves = rng.normal(size=(NUM_RUNS, -(-size // slots)))
    shared = np.repeat(waves, slots, axis=1)[:, :size]
    own = rng.normal(size=(NUM_RUNS, size))
    return 100 * np.exp(0.5 * (math.sqrt(0.8) * shared + math.sqrt(0.2) * own))


def truth(percent: float | None, spread: float) -> float:
    if percent is None:
        return 100 * math.exp(spread**2 / 2)
    return 100 * math.exp(spread * NormalDist().inv_cdf(percent / 100))


def shares(
    runs: np.ndarray, percent: float | None, true: float, min_batch: int = 1
) -> tuple[float, float]:
    """Of the runs: how many have an interval, and how many have one that misses the truth."""
    found = [interval_95(run, percent, min_batch) for run in runs]
    given = [bounds for bounds in found if bounds is not None]
    assert all(0 < low <= high for low, high in given)
    missed = sum(not low <= true <= high for low, high in given)
    return len(given) / len(found), missed / len(found)


def error(num_runs: float) -> float:
    """Of a simulated share of 5 %, at most."""
    return 2 * math.sqrt(0.05 * 0.95 / num_runs)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("correlation", CORRELATIONS)
def test_intervals_hold_in_92_to_98_of_100_runs(size: int, correlation: float) -> None:
    """And where most runs are too short for one, hardly any has a wrong one."""
    rng = np.random.default_rng([size, round(100 * correlation)])
    for spread in SPREADS:
        runs = runs_of(rng, size, correlation, spread)
        for percent in PERCENTS:
            given, missed = shares(runs, percent, truth(percent, spread))
            figures = (spread, percent, given, missed)
            assert missed <= 0.08 + error(NUM_RUNS), figures
            if given > 0.1:
                assert missed / given <= 0.08 + error(given * NUM_RUNS), figures
            if given > 0.9:
                assert 1 - missed / given <= 0.98 + error(NUM_RUNS) / 2, figures


@pytest.mark.parametrize("size", [100, 400])
def test_intervals_hold_for_requests_that_come_in_waves(size: int) -> None:
    runs = waves_of(np.random.default_rng(size), size, 16)
    for percent, least in ((None, 0.9), (50.0, 0.4 if size == 100 else 0.9)):  # of six waves
        given, missed = shares(runs, percent, truth(percent, 0.5), min_batch=16)
        assert given > least and missed / given < 0.08 + error(given * NUM_RUNS)


def test_enough_independent_requests_have_an_interval_of_about_its_ideal_width() -> None:
    rng = np.random.default_rng(0)
    runs = runs_of(rng, 1000, 0.0, 0.3)
    for percent, least in ((None, 0.99), (50.0, 0.99), (90.0, 0.99), (99.0, 0.8)):
        assert shares(runs, percent, truth(percent, 0.3))[0] >= least
    ideal = 2 * 1.96 * runs[0].std() / math.sqrt(1000)
    widths = [high - low for low, high in (interval_95(run) or (0.0, 0.0) for run in runs)]
    assert 0.9 * ideal < float(np.median(widths)) < 1.3 * ideal


def test_a_cluster_of_slow_requests_widens_the_tail_s_interval() -> None:
    """Stalls that hit 40 neighbours at once are one event, not 40."""
    rng = np.random.default_rng(1)
    values = 100 * np.exp(0.1 * rng.normal(size=2000))
    spread_out = values.copy()
    spread_out[rng.choice(2000, 160, replace=False)] *= 5
    clustered = values.copy()
    for start in (150, 700, 1150, 1800):
        clustered[start : start + 40] *= 5
    apart, together = interval_95(spread_out, 95.0), interval_95(clustered, 95.0)
    assert apart is not None
    assert together is None or together[1] - together[0] > 1.5 * (apart[1] - apart[0])


def test_too_few_values_have_none() -> None:
    assert interval_95([1.0] * 39) is None
    assert interval_95([1.0] * 40) == (1.0, 1.0)
    assert interval_95([0.0] * 40) == (0.0, 0.0)
    assert interval_95([1.0] * 100, 99.0) is None and interval_95([1.0] * 1000, 99.0) == (1.0, 1.0)
    assert interval_95([1.0] * 1000, 100.0) is None
    assert interval_95([1.0] * 100, None, min_batch=25) is None  # four batches


def test_a_ratio_of_hardly_known_values_has_a_wide_interval() -> None:
    """Student's t of one degree of freedom has 6,366 here, whose exponential is no float."""
    wide = Estimate(1.0, 1.0, 1.0)
    low, high = ratio_interval(wide, wide, 0.9999)
    assert 0 < low < 1e-8 and 1e8 < high < math.inf


def test_correlation_below_a_percentile_by_hand() -> None:
    """At the median it is 2 / pi arcsin(r); at any percentile 0 for 0 and near 1 for near 1."""
    found = _indicator_correlation(0.5, np.array([0.2, 0.5, 0.8]))
    assert found == pytest.approx([2 / math.pi * math.asin(r) for r in (0.2, 0.5, 0.8)], rel=1e-6)
    tail = _indicator_correlation(0.99, np.array([0.0, 0.5, 0.99]))
    assert tail[0] == 0 and 0.05 < tail[1] < 0.2 and 0.6 < tail[2] < 1
