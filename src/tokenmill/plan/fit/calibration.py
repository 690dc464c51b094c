"""Fitting efficiencies to results of the user's own."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tokenmill.bench.results.reading import read_round
from tokenmill.bench.results.result import ResultPoint, ToolResult
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.fit.fitting import FitRow, Prior, fit, log_error
from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.catalog import precisions_of
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.search import SearchSpace, System, best_precision, fitting, replicas_of
from tokenmill.plan.predict.step_cost import Efficiency


def unseen_error(efficiency: Efficiency, rows: Iterable[FitRow]) -> float:
    """The log error that 90 % of the rows stay within."""
    errors = sorted(abs(log_error(row.predict(efficiency), row.measured)) for row in rows)
    return errors[math.ceil(0.9 * len(errors)) - 1]


# What a few loads of one system can tell: arithmetic, memory, and what a step costs in any case.
SIGMAS = {"products": 0.5, "memory": 0.3, "layer_us": 0.7}
ROW_SIGMA = 0.05


@dataclass(frozen=True, slots=True)
class CalibrationTarget:
    spec: ModelSpec
    gpu: Accelerator
    gpus: int
    choice: SearchSpace
    lengths: Lengths | None  # None: those of the result


@dataclass(frozen=True, slots=True)
class Calibration:
    fit: Fit
    rows: tuple[FitRow, ...]

    def table(self) -> list[list[str]]:
        table = [["load", "measured tok/s", "fitted tok/s", "error"]]
        for row in self.rows:
            value = row.predict(self.fit.efficiency)
            error = f"{value / row.measured - 1:+.1%}"
            table.append([row.name, f"{row.measured:,.1f}", f"{value:,.1f}", error])
        return table

    def report(self) -> dict[str, Any]:
        return {
            "plan": "calibrate",
            "efficiencies": {k: round(v, 5) for k, v in asdict(self.fit.efficiency).items()},
            "fitted_on": list(self.fit.fitted_on),
            "error": round(self.fit.error, 4),
            "rows": [
                {
                    "load": row.name,
                    "measured": row.measured,
                    "predicted": round(row.predict(self.fit.efficiency), 2),
                }
                for row in self.rows
            ],
        }


def calibrate(
    paths: Iterable[Path], target: CalibrationTarget, base: Fit, date: str
) -> Calibration:
    """Fit on every load at a fixed concurrency; `error` is that of each load left out in turn."""
    rounds = [read_round(path) for path in paths]
    rows = [row for one in rounds for row in _rows(one, target)]
    if not rows:
        sources = ", ".join(one.source for one in rounds)
        raise PlanError(
            f"{sources}: no load at a fixed concurrency with output tokens/s; measure with "
            "tokenmill bench endpoint --concurrency 1,8,64"
        )
    prior = Prior(base.efficiency, SIGMAS, ROW_SIGMA)
    found = fit(rows, prior)
    if len(rows) > 2:
        errors = [
            unseen_error(fit([r for r in rows if r is not row], prior), [row]) for row in rows
        ]
        error = sorted(errors)[-1]
    else:
        error = max(base.error, unseen_error(found, rows))
    source = ", ".join(f"{one.tool}: {one.source}" for one in rounds).replace('"', "'")
    names = tuple(row.name for row in rows)
    return Calibration(Fit(base.name, found, date, source, names, error), tuple(rows))


def _rows(one: ToolResult, target: CalibrationTarget) -> list[FitRow]:
    rows = []
    for point in one.points:
        kind, concurrency = point.key
        measured = point.values.get("output_tok_s")
        if kind != "concurrency" or not measured:
            continue
        lengths = target.lengths or _lengths(point, one)
        predict = partial(closed_loop_tok_s, target, lengths, float(concurrency))
        rows.append(FitRow(f"{Path(one.source).name}: {point.load}", measured, predict))
    return rows


def _lengths(point: ResultPoint, one: ToolResult) -> Lengths:
    """The mean request of a result, where no distribution is given."""
    means = [point.facts.get(name) for name in ("input_tokens", "output_tokens")]
    if None in means:
        raise PlanError(f"{one.source}: does not say how long its requests were: give --lengths")
    pair = (max(1, round(means[0] or 1)), max(1, round(means[1] or 1)))
    return Lengths("mean of the result", (pair,))


def closed_loop_tok_s(
    target: CalibrationTarget, lengths: Lengths, concurrency: float, efficiency: Efficiency
) -> float:
    """Output tokens per second of so many users who ask again as soon as they have an answer."""
    system = System(target.spec, target.gpu, target.gpus, lengths, efficiency)
    choice = target.choice
    name = choice.precision or best_precision(target.spec, target.gpu)
    types = precisions_of(target.spec, name)
    best = 0.0
    for depth in choice.mtp_depths:
        for cost in fitting(system, replicas_of(system, types, depth, choice)):
            count = target.gpus // cost.replica.gpus
            station = system.station(cost, choice)
            operation = station.offline(concurrency / count)
            best = max(best, operation.requests_per_s * count * lengths.mean_output)
    return best
