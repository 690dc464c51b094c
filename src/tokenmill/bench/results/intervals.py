"""How well a mean or a percentile of correlated values is known: 95 % intervals.

Requests that run together have similar latencies, so n of them carry less than n independent
ones. How much less is estimated twice, and the wider answer counts:
- from the correlation of neighbours, measured on normal scores, which no single slow request can
  dominate; a percentile's own correlation follows from it (Gaussian copula);
- from the means of ten batches, which also see what comes in waves or clusters.
The interval of a percentile lies between two of the values, that of a mean is one of its
logarithm: neither can fall below zero. Where the run is too short there is no interval.

An `Estimate` carries the variance of its logarithm, so that a ratio of two is a difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import NormalDist
from typing import Any

import numpy as np

from tokenmill.core.metrics import summarize

CONFIDENCE = 0.95
MIN_VALUES = 40
NUM_BATCHES, MIN_BATCHES = 10, 5
MIN_EFFECTIVE = 2.0  # independent values that a mean must rest on at least
# A short run of slow waves looks less correlated than it is: with so many independent values or
# fewer, the interval of a percentile is twice as wide or wider, and soon does not fit the values.
FEW_EFFECTIVE = 12.5
LAGS = (2, 4, 8, 16)
MOST_CORRELATION = 0.995
CAUTION = 0.7  # standard errors that are added to a measured correlation
EXCESS = 1.5  # batches are only believed where they vary by so much more: ten vary by chance
FADED = 1e-4  # correlations below it are not summed
WIDEST = 20.0  # half an interval of a logarithm, which says nothing: values differ by no factor 5e8

_NORMAL = NormalDist()
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(16)
_SHARES = np.linspace(1e-4, 1 - 1e-4, 2001)
_SCORES = np.array([_NORMAL.inv_cdf(float(share)) for share in _SHARES])


@dataclass(frozen=True, slots=True)
class Interval:
    """A 95 % interval and the degrees of freedom of its width."""

    low: float
    high: float
    degrees: float


def t_quantile(probability: float, degrees: float) -> float:
    """Student's t by its expansion around the normal; exact to 1 % from four degrees on."""
    if degrees < 3:  # the expansion fails; these two are closed
        one = degrees < 2
        p = 2 * probability - 1
        return math.tan(math.pi * p / 2) if one else p * math.sqrt(2 / (1 - p * p))
    z = _NORMAL.inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def interval(
    values: Sequence[float], percent: float | None = None, min_batch: int = 1
) -> Interval | None:
    """Of the mean, or of a percentile, of values in the order they occurred; None: too few.

    `min_batch`: the requests that are under way together, which one batch must hold.
    """
    array = np.asarray(values, dtype=np.float64)
    num_batches = min(NUM_BATCHES, len(array) // max(min_batch, 1))
    if len(array) < MIN_VALUES or num_batches < MIN_BATCHES:
        return None
    if percent is None:
        return _of_mean(array, num_batches)
    return _of_percentile(array, percent / 100, num_batches) if 0 < percent < 100 else None


def interval_95(
    values: Sequence[float], percent: float | None = None, min_batch: int = 1
) -> tuple[float, float] | None:
    found = interval(values, percent, min_batch)
    return (found.low, found.high) if found else None


def _of_mean(array: np.ndarray, num_batches: int) -> Interval | None:
    size, mean = len(array), float(array.mean())
    correlation = max(_correlation(_normal_scores(array)), _correlation(array))
    inflation = (1 + correlation) / (1 - correlation)
    if size / inflation < MIN_EFFECTIVE:
        return None
    variance = float(array.var(ddof=1)) * inflation / size / _unseen(inflation, size)
    half, degrees = _half_width(
        variance, _degrees(size, correlation, inflation), _batch_variance(array, num_batches)
    )
    if half == 0:
        return Interval(mean, mean, degrees)
    if mean <= 0 or half / mean > WIDEST:
        return None
    return Interval(mean * math.exp(-half / mean), mean * math.exp(half / mean), degrees)


def _of_percentile(array: np.ndarray, share: float, num_batches: int) -> Interval | None:
    """Between the values whose ranks bound the share of values below (Woodruff's method)."""
    size = len(array)
    correlation = _correlation(_normal_scores(array))
    inflation = _inflation_at(share, correlation, size)
    variance = share * (1 - share) * inflation / size / _unseen(inflation, size)
    below = (array <= np.percentile(array, 100 * share)).astype(np.float64)
    half, degrees = _half_width(
        variance, _degrees(size, correlation, inflation), _batch_variance(below, num_batches)
    )
    half *= 1 + (FEW_EFFECTIVE * inflation / size) ** 3
    low, high = size * (share - half) - 0.5, size * (share + half) - 0.5
    if low < 0 or high > size - 1:
        return None
    bounds = np.interp([low, high], np.arange(size), np.sort(array))
    return Interval(float(bounds[0]), float(bounds[1]), degrees)


def _half_width(
    variance: float, degrees: float, batches: tuple[float, float]
) -> tuple[float, float]:
    quantile = (1 + CONFIDENCE) / 2
    found = t_quantile(quantile, degrees) * math.sqrt(variance), degrees
    by_batches = t_quantile(quantile, batches[1]) * math.sqrt(batches[0]), batches[1]
    return max(found, by_batches) if batches[0] > EXCESS * variance else found


def _degrees(size: int, correlation: float, inflation: float) -> float:
    """How well the variance is known: by the error of the correlation, and the values left."""
    return max(1.0, min(size * (1 - correlation**2) / 2, size / inflation / 2))


def _unseen(inflation: float, size: int) -> float:
    """The share of the variance that a run shows: its mean follows slow waves."""
    return max(1 - inflation / size, 0.3)


def _batch_variance(array: np.ndarray, num_batches: int) -> tuple[float, float]:
    """The variance of the mean by whole batches in order of time, and its degrees of freedom."""
    edges = np.round(np.linspace(0, len(array), num_batches + 1)).astype(int)
    means = np.array([array[a:b].mean() for a, b in pairwise(edges)])
    squares = float(((means - array.mean()) ** 2).sum())
    return squares / (num_batches - 1) / num_batches, num_batches - 1


def _normal_scores(array: np.ndarray) -> np.ndarray:
    """Ranks as values of a normal distribution; equal values have equal ones."""
    _, index, counts = np.unique(array, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts + 1) / 2
    return np.asarray(np.interp((ranks[index] + 0.5) / len(array), _SHARES, _SCORES))


def _correlation(array: np.ndarray) -> float:
    """Of neighbours, as a process with memory of one step would have it; on the safe side.

    Farther neighbours count where they are more alike than such a process would make them.
    """
    size, centred = len(array), array - array.mean()
    total = float(centred @ centred)
    if total <= 0:
        return 0.0
    first = (size * _at_lag(centred, total, 1) + 1) / (size - 3)  # Kendall's bias
    memory = min(max(first, 0.0), MOST_CORRELATION)
    found = memory
    for lag in (lag for lag in LAGS if lag <= size // 6):
        spread = 1 + 2 * sum(memory ** (2 * step) for step in range(1, lag))
        error = math.sqrt(spread / size)
        alike = min(_at_lag(centred, total, near) for near in (lag - 1, lag))  # not by turns
        least = alike + lag / size * memory - 1.5 * error
        found = max(found, max(least, 0.0) ** (1 / lag))
    caution = CAUTION * math.sqrt(found * (1 - found**2) / size)
    return min(found + caution, MOST_CORRELATION)


def _at_lag(centred: np.ndarray, total: float, lag: int) -> float:
    return float(centred[lag:] @ centred[:-lag]) / total


def _inflation_at(share: float, correlation: float, size: int) -> float:
    """By how much correlated values know less of the share below a percentile."""
    if correlation <= 0:
        return 1.0
    last = min(size - 1, math.ceil(math.log(FADED) / math.log(correlation)))
    lags = np.arange(1, last + 1)
    found = _indicator_correlation(share, correlation**lags)
    return 1 + 2 * float(((1 - lags / size) * found).sum())


def _indicator_correlation(share: float, correlations: np.ndarray) -> np.ndarray:
    """Of being below a percentile, for pairs of normal values (the tetrachoric integral)."""
    z = _NORMAL.inv_cdf(share)
    s = correlations[:, None] * (_NODES + 1) / 2
    density = np.exp(-z * z / (1 + s)) / (2 * math.pi * np.sqrt(1 - s * s))
    return np.asarray((density @ _WEIGHTS) * correlations / 2 / (share * (1 - share)))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A positive value and how well its logarithm is known."""

    value: float
    log_variance: float
    degrees: float  # of freedom


def from_samples(
    values: Sequence[float], percent: float | None = None, min_batch: int = 1
) -> Estimate | None:
    """The mean, or a percentile, of values in the order they occurred; None where too few."""
    found = interval(values, percent, min_batch)
    if found is None or found.low <= 0:
        return None
    array = np.asarray(values, dtype=np.float64)
    whole = array.mean() if percent is None else np.percentile(array, percent)
    half = math.log(found.high / found.low) / 2 / t_quantile((1 + CONFIDENCE) / 2, found.degrees)
    return Estimate(float(whole), half**2, found.degrees)


def from_runs(value: float, runs: Sequence[float]) -> Estimate | None:
    if len(runs) < 2 or value <= 0 or min(runs) <= 0:
        return None
    variance = float(np.log(np.asarray(runs)).var(ddof=1)) / len(runs)
    return Estimate(value, variance, len(runs) - 1)


def from_interval(value: float, low: float, high: float) -> Estimate | None:
    """A value with a 95 % interval that was reported, as if ten batches had given it."""
    if value <= 0 or high < low:
        return None
    degrees = NUM_BATCHES - 1
    half = math.log(high / low) / 2 if low > 0 else (high - low) / 2 / value
    return Estimate(value, (half / t_quantile((1 + CONFIDENCE) / 2, degrees)) ** 2, degrees)


def ratio_interval(
    over: Estimate, under: Estimate, confidence: float = CONFIDENCE
) -> tuple[float, float]:
    """The interval of over / under for two independent runs (Welch's degrees of freedom)."""
    variance = over.log_variance + under.log_variance
    ratio = over.value / under.value
    if variance == 0:
        return ratio, ratio
    shares = sum(e.log_variance**2 / e.degrees for e in (over, under))
    half = t_quantile((1 + confidence) / 2, variance**2 / shares) * math.sqrt(variance)
    half = min(half, WIDEST)
    return ratio * math.exp(-half), ratio * math.exp(half)


def summarize_with_intervals(values: Iterable[float | None], min_batch: int = 1) -> dict[str, Any]:
    """`summarize`, and the 95 % intervals of mean and percentiles where there are any."""
    present = [v for v in values if v is not None]
    intervals = {
        name: interval_95(present, percent, min_batch)
        for name, percent in (("mean", None), ("p50", 50.0), ("p90", 90.0), ("p99", 99.0))
    }
    known = {name: list(bounds) for name, bounds in intervals.items() if bounds}
    return summarize(present) | ({"ci95": known} if known else {})
