"""Fit the planner's efficiencies anew and write src/tokenmill/plan/predict/efficiencies.toml.

    python scripts/fit_efficiencies.py 2026-11-16             # all of them: some minutes
    python scripts/fit_efficiencies.py 2026-11-16 tokenmill   # only those of our own runs: seconds

What it fits on and what it holds to be plausible before stands in
src/tokenmill/plan/fit/calibration.py.
"""

from __future__ import annotations

import sys

from tokenmill.plan.fit.calibration import PRIORS, refit
from tokenmill.plan.predict.efficiencies import TABLE, load_fits, write_fits

NOTE = """Written by scripts/fit_efficiencies.py. Shares are of the peaks in hardware.toml, of the
measured ones where the engine is tokenmill. `error` is the log error that 90 % of the rows stay
within that were not fitted on."""


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
