"""Published rows of video, recommender and caption benchmarks beside their predictions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tokenmill.bench.results.published_results import LATENCY, read_table
from tokenmill.bench.results.reports import PublishedEntry
from tokenmill.plan.fit.fitting import log_error
from tokenmill.plan.fit.published import ACCELERATORS
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.jobs import JOBS, job_rate


@dataclass(frozen=True, slots=True)
class JobRow:
    """The best row of a GPU and scenario, as samples per second; nothing was fitted on it."""

    entry: PublishedEntry
    gpu: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def job_rows(fit: Fit, names: Sequence[str] = tuple(JOBS)) -> list[JobRow]:
    """Of the round whose efficiencies these are, in the order of their names."""
    best: dict[tuple[str, str, str], JobRow] = {}
    for entry in read_table():
        known = entry.division == "closed" and entry.round == fit.name and entry.benchmark in names
        if not known or entry.accelerator not in ACCELERATORS:
            continue
        row = _row(entry, fit)
        key = entry.benchmark, row.gpu, entry.scenario
        if key not in best or _each(row) > _each(best[key]):
            best[key] = row
    return [best[key] for key in sorted(best)]


def _row(entry: PublishedEntry, fit: Fit) -> JobRow:
    gpu = find_gpu(ACCELERATORS[entry.accelerator])
    measured = 1 / entry.result if entry.unit == LATENCY else entry.result
    predicted = job_rate(entry.benchmark, entry.scenario, gpu, entry.accelerators, fit.efficiency)
    return JobRow(entry, gpu.key, measured, predicted)


def _each(row: JobRow) -> float:
    return row.measured / row.entry.accelerators


def with_job_error(name: str, fit: Fit) -> Fit:
    """The fit with the log error that 90 % of this benchmark's rows stay within."""
    rows = job_rows(fit, (name,))
    errors = sorted(abs(log_error(row.predicted, row.measured)) for row in rows)
    if not errors:
        return fit
    return replace(fit, error=errors[math.ceil(0.9 * len(errors)) - 1])


def _amount(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.4g}"


def job_table(rows: Sequence[JobRow]) -> list[list[str]]:
    table = [["benchmark", "system", "scenario", "by", "measured", "predicted", "error"]]
    for row in rows:
        entry = row.entry
        table.append(
            [
                entry.benchmark,
                f"{entry.accelerators} x {row.gpu}",
                entry.scenario,
                entry.submitter,
                _amount(row.measured),
                _amount(row.predicted),
                f"{row.error:+.1%}",
            ]
        )
    return table
