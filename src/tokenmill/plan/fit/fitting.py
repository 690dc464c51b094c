"""Fitting efficiencies to measured rates: few numbers, each held near what is plausible."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from tokenmill.plan.predict.step_cost import Efficiency

TIMES = ("layer_us", "exchange_us")  # the other efficiencies are shares
STEPS = (0.5, 0.25, 0.12, 0.06, 0.03)  # of a logarithm

Predict = Callable[[Efficiency], float]


@dataclass(frozen=True, slots=True)
class FitRow:
    name: str
    measured: float
    predict: Predict


@dataclass(frozen=True, slots=True)
class Prior:
    """Where the fit begins, and the log deviation of each number that is fitted."""

    center: Efficiency
    sigmas: Mapping[str, float]
    row_sigma: float = 0.15  # a row's log error that is no surprise


def log_error(predicted: float, measured: float) -> float:
    """Positive where the prediction is too high; a prediction of nothing is as wrong as can be."""
    return math.log(max(predicted, measured / 100) / measured)


def _loss(sigmas: float) -> float:
    """Squares that turn into logarithms, since a row may be a submission that was not tuned."""
    return 2 * math.log1p(sigmas**2 / 2)


def objective(rows: Sequence[FitRow], prior: Prior, efficiency: Efficiency) -> float:
    errors = (log_error(row.predict(efficiency), row.measured) for row in rows)
    total = sum(_loss(error / prior.row_sigma) for error in errors)
    for name, sigma in prior.sigmas.items():
        moved = math.log(getattr(efficiency, name) / getattr(prior.center, name))
        total += (moved / sigma) ** 2
    return total


def fit(rows: Sequence[FitRow], prior: Prior) -> Efficiency:
    """Coordinate descent in logarithms with smaller and smaller steps: the same every time."""
    best = prior.center
    least = objective(rows, prior, best)
    for step in STEPS:
        moved = True
        while moved:
            moved = False
            for name in prior.sigmas:
                for factor in (math.exp(step), math.exp(-step)):
                    tried = replace(best, **{name: _bounded(name, getattr(best, name) * factor)})
                    value = objective(rows, prior, tried)
                    if value < least - 1e-9:
                        best, least, moved = tried, value, True
                        break
    return best


def _bounded(name: str, value: float) -> float:
    return value if name in TIMES else min(value, 1.0)
