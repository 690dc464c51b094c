"""Fit the planner's efficiencies anew and write src/tokenmill/plan/predict/efficiencies.toml.

    python scripts/fit_efficiencies.py 2026-11-16

It takes some minutes. What it fits on and what it holds to be plausible before stands in
src/tokenmill/plan/fit/fit_sources.py.
"""

from __future__ import annotations

import sys

from tokenmill.plan.fit.fit_sources import PRIORS, refit
from tokenmill.plan.predict.efficiencies import TABLE, write_fits

NOTE = """Written by scripts/fit_efficiencies.py. Shares are of the peaks in hardware.toml, of the
measured ones where the engine is tokenmill. `error` is the log error that 90 % of the rows stay
within that were not fitted on."""


def main(date: str) -> None:
    fits = {}
    for name in PRIORS:
        fits[name] = refit(name, date)
        print(name, fits[name].efficiency, f"error {fits[name].error:.3f}", flush=True)
    write_fits(TABLE, fits, NOTE)


if __name__ == "__main__":
    main(sys.argv[1])
