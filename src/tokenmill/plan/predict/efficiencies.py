"""The stored fits: efficiencies.toml, and what `plan calibrate` wrote."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tokenmill.plan.hardware import Accelerator, PlanError
from tokenmill.plan.predict.step_cost import EFFICIENCIES, Efficiency

TABLE = Path(__file__).parent / "efficiencies.toml"
OWN = "tokenmill"  # the fit to this engine's runs; the others are MLPerf rounds
STAND_INS = {"v6.1": "v6.0"}  # for rounds without published results: the latest one that has some


@dataclass(frozen=True, slots=True)
class Fit:
    """Efficiencies of one kind of software, and how they came about."""

    name: str
    efficiency: Efficiency
    date: str
    source: str
    fitted_on: tuple[str, ...]
    error: float  # log error that 90 % of the rows not fitted on stay within

    def peaks(self, gpu: Accelerator) -> Accelerator:
        """The rates that these are shares of: our own are of those that `bench` measured."""
        return gpu.as_measured() if self.name == OWN else gpu


def load_fits(own: Path | None = None) -> dict[str, Fit]:
    """All fits by name; those of the given file win."""
    fits = dict(_shipped())
    if own is not None:
        fits |= _read(own)
    return fits


def find_fit(name: str, own: Path | None = None) -> Fit:
    """The efficiencies of an engine or round; those of its stand-in, where it has none."""
    fits = load_fits(own)
    if name not in fits and name in STAND_INS:
        return fits[STAND_INS[name]]
    if name not in fits:
        raise PlanError(f"--round {name}: no efficiencies; known are {', '.join(fits)}")
    return fits[name]


@cache
def _shipped() -> dict[str, Fit]:
    return _read(TABLE)


def _read(path: Path) -> dict[str, Fit]:
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PlanError(f"--efficiencies {path}: cannot be read: {error}") from None
    return {name: _fit(name, table, path) for name, table in tables.items()}


def _fit(name: str, table: dict[str, Any], path: Path) -> Fit:
    values = {}
    for key in (*EFFICIENCIES, "error"):
        value = table.get(key.replace("_", "-"))
        if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
            where = f"{path}: {name}.{key.replace('_', '-')}"
            raise PlanError(f"{where}: expected a number of at least 0, got {value!r}")
        values[key] = float(value)
    error = values.pop("error")
    return Fit(
        name,
        Efficiency(**values),
        str(table.get("date", "")),
        str(table.get("source", "")),
        tuple(table.get("fitted-on", ())),
        error,
    )


def write_fits(path: Path, fits: dict[str, Fit], note: str) -> None:
    lines = [f"# {line}" for line in note.splitlines()]
    for fit in fits.values():
        lines += ["", f'["{fit.name}"]']
        for key in EFFICIENCIES:
            lines.append(f"{key.replace('_', '-')} = {getattr(fit.efficiency, key):.4g}")
        lines += [f"error = {fit.error:.4g}", f'date = "{fit.date}"', f'source = "{fit.source}"']
        lines += ["fitted-on = [", *(f'  "{row}",' for row in fit.fitted_on), "]"]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
