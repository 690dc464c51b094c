"""Is one measurement better than another, or is it noise: ratios with their intervals.

A measured value carries the variance of its logarithm, so that a ratio is a difference. The
variance comes from a block bootstrap of values in the order they occurred (neighbours may be
correlated within a block), from repeated runs, or from an interval that somebody reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from tokenmill.core.metrics import NUM_BATCHES

CONFIDENCE = 0.95
NUM_RESAMPLES, MIN_RESAMPLES = 400, 60
MOST_DRAWS = 40_000_000  # values drawn for one figure; long runs are resampled less often
CHUNK_DRAWS = 4_000_000
NUM_BLOCKS, MIN_BLOCKS = 10, 5
MIN_BEYOND = 10  # values beyond a percentile, below which it has no interval


@dataclass(frozen=True, slots=True)
class Estimate:
    """A positive value and how well its logarithm is known."""

    value: float
    log_variance: float
    degrees: float  # of freedom


def t_quantile(probability: float, degrees: float) -> float:
    """Student's t by its expansion around the normal; exact to 1 % from four degrees on."""
    if degrees < 3:  # the expansion fails; these two are closed
        one = degrees < 2
        p = 2 * probability - 1
        return math.tan(math.pi * p / 2) if one else p * math.sqrt(2 / (1 - p * p))
    z = NormalDist().inv_cdf(probability)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / degrees**power for power, term in enumerate(terms))


def from_samples(
    values: Sequence[float], percent: float | None = None, min_block: int = 1
) -> Estimate | None:
    """The mean, or a percentile, of values in the order they occurred; None where too few.

    Blocks are a tenth of the run, but hold sqrt(n) values and `min_block` of them at least:
    requests that are under way together are alike.
    """
    size = len(values)
    block = max(math.isqrt(size), size // NUM_BLOCKS, min_block, 1)
    num_blocks = size // block
    beyond = round(size * (100 - (percent or 0.0)) / 100, 6)
    if num_blocks < MIN_BLOCKS or beyond < MIN_BEYOND:
        return None
    array = np.asarray(values, dtype=np.float64)
    whole = _statistic(array[None, :], percent)[0]
    resampled = _resampled(array, percent, block)
    if whole <= 0 or resampled.min() <= 0:
        return None
    degrees = num_blocks - 1
    variance = float(np.log(resampled).var(ddof=1)) * num_blocks / degrees
    return Estimate(float(whole), variance, degrees)


def from_runs(value: float, runs: Sequence[float]) -> Estimate | None:
    """A value that stands for several whole runs."""
    if len(runs) < 2 or value <= 0 or min(runs) <= 0:
        return None
    variance = float(np.log(np.asarray(runs)).var(ddof=1)) / len(runs)
    return Estimate(value, variance, len(runs) - 1)


def from_interval(value: float, low: float, high: float) -> Estimate | None:
    """A value with its 95 % interval by batch means."""
    if value <= 0 or high < low:
        return None
    degrees = NUM_BATCHES - 1
    relative = (high - low) / 2 / value / t_quantile((1 + CONFIDENCE) / 2, degrees)
    return Estimate(value, relative**2, degrees)


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
    return ratio * math.exp(-half), ratio * math.exp(half)


def _statistic(rows: np.ndarray, percent: float | None) -> np.ndarray:
    if percent is None:
        return np.asarray(rows.mean(axis=1))
    return np.asarray(np.percentile(rows, percent, axis=1))


def _resampled(array: np.ndarray, percent: float | None, block: int) -> np.ndarray:
    """The statistic of resamples of whole blocks; the end of the run is followed by its start."""
    size = len(array)
    rng = np.random.default_rng(0)
    left = min(NUM_RESAMPLES, max(MIN_RESAMPLES, MOST_DRAWS // size))
    found = []
    while left > 0:
        count = min(left, max(1, CHUNK_DRAWS // size))
        starts = rng.integers(0, size, (count, -(-size // block), 1))
        picked = (starts + np.arange(block)).reshape(count, -1)[:, :size] % size
        found.append(_statistic(array[picked], percent))
        left -= count
    return np.concatenate(found)
