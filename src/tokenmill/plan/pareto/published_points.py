"""The best published rows of a benchmark on the GPUs of the curves, and their predictions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenmill.plan.fit.published import Published, best_rows, covered_rows
from tokenmill.plan.pareto.curves import OFFLINE
from tokenmill.plan.predict.efficiencies import Fit
from tokenmill.plan.predict.prediction import interval, predicted_tokens_per_s


@dataclass(frozen=True, slots=True)
class PublishedPoint:
    """A published row where its limits put it, beside the prediction of its own system."""

    row: Published
    fitted: bool
    predicted: float  # output tokens/s of the system
    interval: tuple[float, float]

    @property
    def gpu(self) -> str:
        return self.row.question.gpu.key

    @property
    def per_user(self) -> float:
        """Tokens/s that its limit grants to 99 % of users; Offline has none."""
        limit = self.row.question.limit
        return 1 / limit.tpot_s if limit else OFFLINE

    @property
    def per_gpu(self) -> float:
        return self.row.entry.result / self.row.entry.accelerators

    def report(self) -> dict[str, Any]:
        entry, gpus = self.row.entry, self.row.question.gpus
        return {
            "gpu": self.gpu,
            "gpus": gpus,
            "scenario": entry.scenario,
            "round": entry.round,
            "submitter": entry.submitter,
            "weights": entry.weights,
            "tok_s_per_user": round(self.per_user, 2) or None,
            "tok_s_per_gpu": round(self.per_gpu, 1),
            "predicted_tok_s_per_gpu": round(self.predicted / gpus, 1),
            "predicted_interval": [round(bound / gpus, 1) for bound in self.interval],
            "fitted_on": self.fitted,
        }


def published_points(
    benchmark: str, gpus: Iterable[str], round: str, fit: Fit
) -> list[PublishedPoint]:
    """The best row per GPU of each GPU and scenario in the round whose efficiencies hold."""
    wanted = set(gpus)
    rows = [
        row
        for row in covered_rows()
        if row.question.benchmark.name == benchmark
        and row.question.gpu.key in wanted
        and row.question.round in (round, fit.name)
    ]
    best: dict[tuple[str, str], Published] = {}
    for row in rows:
        key = row.question.gpu.key, row.question.scenario
        if key not in best or _rate(row) > _rate(best[key]):
            best[key] = row
    fitted = {row.name for row in best_rows(covered_rows()) if row.fitted}
    return [_point(row, row.name in fitted, fit) for row in best.values()]


def _rate(row: Published) -> float:
    return row.entry.result / row.entry.accelerators


def _point(row: Published, fitted: bool, fit: Fit) -> PublishedPoint:
    predicted = predicted_tokens_per_s(row.question, fit.efficiency)
    low, high = interval(predicted, fit)
    return PublishedPoint(row, fitted, predicted, (low, high))
