"""Predictions beside what was published and what we measured, and how wrong they are."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.plan.fit.job_rows import job_rows, job_table
from tokenmill.plan.fit.own_runs import RULE as OWN_RULE
from tokenmill.plan.fit.own_runs import own_runs
from tokenmill.plan.fit.published import RULE, Published, best_rows, covered_rows
from tokenmill.plan.predict.efficiencies import OWN, find_fit, load_fits
from tokenmill.plan.predict.prediction import predicted_tokens_per_s
from tokenmill.plan.predict.step_cost import Efficiency

BEST, OTHER, OURS = "best published", "other published", "our own"


@dataclass(frozen=True, slots=True)
class Checked:
    kind: str
    set: str  # the efficiencies
    model: str
    gpu: str
    gpus: int
    scenario: str
    source: str
    measured: float
    predicted: float
    fitted: bool

    @property
    def error(self) -> float:
        """Relative: positive is too high."""
        return self.predicted / self.measured - 1


def validate(efficiencies: Path | None = None) -> list[Checked]:
    """Every row that a prediction covers, ours first."""
    fits = load_fits(efficiencies)
    checked = _own(fits[OWN].efficiency)
    rows = covered_rows()
    best = best_rows(rows)
    chosen = {_entry_key(row) for row in best}
    known: dict[str, float] = {}
    others = [r for r in rows if _entry_key(r) not in chosen]
    for kind, group in ((BEST, best), (OTHER, others)):
        for row in group:
            efficiency = fits[row.question.round].efficiency
            checked.append(_published(row, kind, efficiency, known))
    return checked


def _entry_key(row: Published) -> tuple[str, str, str]:
    return row.entry.id, row.entry.benchmark, row.entry.scenario


def _own(efficiency: Efficiency) -> list[Checked]:
    return [
        Checked(
            OURS,
            OWN,
            run.name,
            "h200",
            1,
            "Offline",
            "bench throughput",
            run.output_tok_s,
            run.predict(efficiency),
            run.fitted,
        )
        for run in own_runs()
    ]


def _published(
    row: Published, kind: str, efficiency: Efficiency, known: dict[str, float]
) -> Checked:
    question = row.question
    key = " ".join((*row.key, str(question.gpus)))
    if key not in known:
        known[key] = predicted_tokens_per_s(question, efficiency)
    return Checked(
        kind,
        question.round,
        question.benchmark.name,
        question.gpu.key,
        question.gpus,
        question.scenario,
        row.entry.submitter,
        row.entry.result,
        known[key],
        row.fitted,
    )


def summary(checked: Sequence[Checked]) -> dict[str, Any]:
    """Errors by group; `ordered` says whether scenarios come out in their order."""
    groups = {}
    for kind in (OURS, BEST, OTHER):
        for set in dict.fromkeys(row.set for row in checked):
            for fitted in (True, False):
                rows = [r for r in checked if (r.kind, r.set, r.fitted) == (kind, set, fitted)]
                if rows:
                    name = f"{kind}, {set}, {'fitted on' if fitted else 'never fitted on'}"
                    groups[name] = figures(rows)
    unseen = [row for row in checked if row.kind == BEST and not row.fitted]
    return {
        "plan": "validate",
        "groups": groups,
        "by_gpu": _by(unseen, lambda row: row.gpu),
        "by_model": _by(unseen, lambda row: row.model),
        "disordered": disordered(checked),
        "rules": [OWN_RULE, RULE],
    }


def _by(rows: Iterable[Checked], key: Callable[[Checked], str]) -> dict[str, Any]:
    groups: dict[str, list[Checked]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return {name: figures(groups[name]) for name in sorted(groups)}


def figures(rows: Sequence[Checked]) -> dict[str, Any]:
    """How many, and the absolute errors' median, 90th percentile and worst."""
    errors = sorted(abs(row.error) for row in rows)
    return {
        "rows": len(rows),
        "median": round(statistics.median(errors), 4),
        "p90": round(errors[math.ceil(0.9 * len(errors)) - 1], 4),
        "worst": round(errors[-1], 4),
        "within_30": round(sum(error <= 0.3 for error in errors) / len(errors), 4),
    }


def disordered(checked: Iterable[Checked]) -> list[str]:
    """Systems whose Interactive comes out above Server, or Server 5 % above Offline."""
    rates: dict[tuple[str, str, str, int], dict[str, float]] = {}
    for row in checked:
        if row.kind != OURS:
            key = row.set, row.model, row.gpu, row.gpus
            rates.setdefault(key, {})[row.scenario] = row.predicted
    wrong = []
    for key, found in sorted(rates.items()):
        server = found.get("Server")
        if server is None:
            continue
        above = server > 1.05 * found.get("Offline", math.inf)
        if above or found.get("Interactive", 0.0) > server:
            wrong.append(" ".join(map(str, key)))
    return wrong


def summary_table(report: dict[str, Any]) -> list[list[str]]:
    """The groups, then GPUs and models of rows that nothing was fitted on."""
    table = [["rows", "count", "median", "p90", "worst", "within 30 %"]]
    groups = report["groups"] | report["by_gpu"] | report["by_model"]
    for name, one in groups.items():
        shares = (one["median"], one["p90"], one["worst"], one["within_30"])
        table.append([name, str(one["rows"]), *(f"{share:.1%}" for share in shares)])
    return table


def row_table(checked: Sequence[Checked]) -> list[list[str]]:
    """Our own runs and the best published row of each kind."""
    table = [["set", "model", "system", "scenario", "by", "measured", "predicted", "error", "fit"]]
    for row in checked:
        if row.kind == OTHER:
            continue
        table.append(
            [
                row.set,
                row.model,
                f"{row.gpus} x {row.gpu}",
                row.scenario,
                row.source,
                f"{row.measured:,.0f}",
                f"{row.predicted:,.0f}",
                f"{row.error:+.1%}",
                "yes" if row.fitted else "",
            ]
        )
    return table


def markdown(checked: Sequence[Checked]) -> str:
    """docs/validation.md."""
    report = summary(checked)
    bad = report["disordered"]
    order = (
        f"Interactive comes out above Server, or Server above 1.05 times Offline, in: {bad}."
        if bad
        else "Interactive comes out below Server everywhere, and Server at most 5 % above Offline."
    )
    return "\n".join(
        (
            "# How wrong the planner is",
            "",
            "<!-- not run: make docs writes this page, and tests/plan compares it -->",
            "```sh",
            "tokenmill plan validate --rows",
            "```",
            "",
            "These are output tokens/s of whole systems. Published rows are those of MLPerf",
            "Inference's closed division ([source](../src/tokenmill/bench/results/README.md)); a",
            "prediction searches for the configuration itself. Our own runs are the README's.",
            "",
            f"Which rows efficiencies are fitted on was decided before: of our own, {OWN_RULE};",
            f"of the published, {RULE}.",
            "",
            order,
            "",
            "## Summary",
            "",
            *_markdown_table(summary_table(report)),
            "",
            "GPUs and models are those of best published rows that nothing was fitted on.",
            "",
            "## Rows",
            "",
            *_markdown_table(row_table(checked)),
            "",
            "## Video, recommender and captions",
            "",
            "These are samples/s. Nothing was fitted on them: they are predicted by the",
            "efficiencies of language models, and intervals are those of the rows below.",
            "",
            *_markdown_table(job_table(job_rows(find_fit("v6.0")))),
            "",
        )
    )


def _markdown_table(rows: Sequence[Sequence[str]]) -> list[str]:
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return [head, "|" + "---|" * len(rows[0]), *body]
