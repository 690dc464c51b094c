"""Is one measurement better than another, or is it noise: ratios with their intervals.

A measured value carries the variance of its logarithm, so that a ratio is a difference. The
variance comes from values in the order they occurred (`intervals.py`), from repeated runs, or from
an interval that somebody reported.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.core.intervals import CONFIDENCE, NUM_BATCHES, interval, t_quantile


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
    """A value that stands for several whole runs."""
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
    return ratio * math.exp(-half), ratio * math.exp(half)
