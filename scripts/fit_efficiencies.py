"""Fit the planner's efficiencies anew and write src/tokenmill/plan/predict/efficiencies.toml.

    python scripts/fit_efficiencies.py 2026-11-16             # all of them: some minutes
    python scripts/fit_efficiencies.py 2026-11-16 tokenmill   # only those of our own runs: seconds

PRIORS is what is plausible before, and rows_of what is fitted on.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import partial

from tokenmill.plan.fit.calibration import unseen_error
from tokenmill.plan.fit.fitting import FitRow, Prior, fit
from tokenmill.plan.fit.own_runs import own_runs
from tokenmill.plan.fit.published import best_rows, covered_rows
from tokenmill.plan.predict.efficiencies import OWN, TABLE, Fit, load_fits, write_fits
from tokenmill.plan.predict.prediction import predicted_tokens_per_s
from tokenmill.plan.predict.step_cost import Efficiency

# Where a fit begins. Of our own engine it is what its kernels reach alone (docs/log.md): products
# 93 % of the measured peak under load, attention of short prompts a fifth, KV 95 % of a copy. Of
# MLPerf's rounds it is what large products reach, TensorRT-LLM's balance of ranks with and without
# its balancer (54 %, 88 %) and its 49 us to experts and back.
_OWN = Efficiency(
    products=0.92,
    fp4_products=0.5,
    experts=0.95,
    attention=0.2,
    memory=0.95,
    overlap=0.65,
    layer_us=30.0,
    exchange_us=50.0,
    balance=0.88,
    load=0.9,
)
_ROUND = Efficiency(
    products=0.75,
    fp4_products=0.5,
    experts=0.7,
    attention=0.6,
    memory=0.85,
    overlap=0.3,
    layer_us=35.0,
    exchange_us=50.0,
    balance=0.88,
    load=0.95,
)
_OLD_ROUND = _ROUND.scaled(balance=0.54 / 0.88)
_ROUND_SIGMAS: Mapping[str, float] = {
    "products": 0.1,
    "fp4_products": 0.25,
    "experts": 0.3,
    "attention": 0.4,
    "overlap": 0.5,
    "balance": 0.25,
    "layer_us": 0.3,
    "exchange_us": 0.3,
    "load": 0.15,
}
PRIORS = {
    OWN: Prior(
        _OWN,
        {"products": 0.15, "experts": 0.2, "attention": 0.3, "overlap": 0.2},
        row_sigma=0.05,
    ),
    "v5.1": Prior(_OLD_ROUND, _ROUND_SIGMAS),
    "v6.0": Prior(_ROUND, _ROUND_SIGMAS),
}
SOURCES = {
    OWN: "bench throughput on one H200, at defaults",
    "v5.1": "MLPerf Inference v5.1, closed",
    "v6.0": "MLPerf Inference v6.0, closed",
}

NOTE = """Written by scripts/fit_efficiencies.py. Shares are of the peaks in hardware.toml, of the
measured ones where the engine is tokenmill. `error` is the log error that 90 % of the rows stay
within that were not fitted on."""


def rows_of(name: str) -> tuple[list[FitRow], list[FitRow]]:
    """Rows that are fitted on, and those that never are."""
    used: tuple[list[FitRow], list[FitRow]] = ([], [])
    if name == OWN:
        for run in own_runs():
            used[not run.fitted].append(FitRow(run.name, run.output_tok_s, run.predict))
        return used
    for row in best_rows(covered_rows()):
        if row.question.round == name:
            one = partial(predicted_tokens_per_s, row.question)
            used[not row.fitted].append(FitRow(row.name, row.entry.result, one))
    return used


def refit(name: str, date: str) -> Fit:
    """Fit one set of efficiencies anew, and measure it on the rows it has not seen."""
    used, unseen = rows_of(name)
    found = fit(used, PRIORS[name])
    error = unseen_error(found, unseen)
    return Fit(name, found, date, SOURCES[name], tuple(row.name for row in used), error)


def main(date: str, *names: str) -> None:
    if unknown := set(names) - set(PRIORS):
        sys.exit(f"{', '.join(sorted(unknown))}: expected some of {', '.join(PRIORS)}")
    fits = load_fits()
    for name in names or PRIORS:
        fits[name] = refit(name, date)
        print(name, fits[name].efficiency, f"error {fits[name].error:.3f}", flush=True)
    write_fits(TABLE, {name: fits[name] for name in PRIORS}, NOTE)


if __name__ == "__main__":
    main(*sys.argv[1:])
