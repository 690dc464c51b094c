"""The ladder: one workload again and again, each time with one more optimisation switched on."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.child_process import run_benchmark
from tokenmill.bench.offline import OURS
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import usd_per_million_tokens

Values = dict[str, Any]  # settings by their keys


@dataclass(frozen=True, slots=True)
class Rung:
    """What one step of the ladder changes; it keeps all that the steps before it changed."""

    key: str
    name: str
    settings: Values
    needs: str = ""  # a feature of the device, one of NEEDS


EAGER: Values = {
    "fused-kernels": False,
    "cuda-graphs": False,
    "overlap": False,
    "kv-cache-dtype": "auto",
}
BASE: dict[str, Values] = {"cuda": {"dtype": "bf16"}, "cpu": {"dtype": "fp32"}}
RUNGS = (
    Rung("eager", "eager torch", EAGER),
    Rung("fused", "fused kernels", {"fused-kernels": True}, "compiled"),
    Rung("graphs", "CUDA graphs", {"cuda-graphs": True}, "cuda"),
    Rung("overlap", "overlap", {"overlap": True}),
    Rung("int8", "int8", {"dtype": "int8"}, "cpu"),
    Rung("fp8", "fp8", {"dtype": "fp8"}, "fp8"),
    Rung("fp8-kv", "fp8 KV", {"kv-cache-dtype": "fp8"}, "fp8"),
    Rung("mtp", "multi-token prediction", {"mtp": 3}, "mtp"),
)
NEEDS = {
    "compiled": "there are no compiled kernels for this machine",
    "cuda": "needs a GPU",
    "cpu": "only on a CPU",
    "fp8": "needs a GPU with fp8 arithmetic",
    "mtp": "the model has no MTP module (--draft)",
}
CHANGED = frozenset().union(*BASE.values(), *(rung.settings for rung in RUNGS))


@dataclass(frozen=True, slots=True)
class Attempt:
    """A rung and its figures, or why there are none."""

    rung: Rung
    figures: Values = field(default_factory=dict)  # ours in the only cell
    skipped: str = ""
    error: str = ""


def choose(names: Sequence[str], rungs: Sequence[Rung] = RUNGS) -> list[Rung]:
    """The rungs of these keys or names, in the ladder's order; all where there is none."""
    known = {name: rung for rung in rungs for name in (rung.key, rung.name)}
    unknown = [name for name in names if name not in known]
    if unknown:
        keys = ", ".join(rung.key for rung in rungs)
        raise BenchError(f"--rungs {unknown[0]}: no such rung; there are {keys}")
    wanted = {known[name].key for name in names}
    return [rung for rung in rungs if not names or rung.key in wanted]


def settings_of(
    rung: Rung, device: str, features: Collection[str], rungs: Sequence[Rung] = RUNGS
) -> Values:
    """All that is on at a rung: the changes of the rungs up to it that the device supports."""
    values = dict(BASE[device])
    for earlier in rungs[: rungs.index(rung) + 1]:
        if not missing(earlier, features):
            values |= earlier.settings
    return values


def missing(rung: Rung, features: Collection[str]) -> str:
    """Why a device cannot run a rung; empty where it can."""
    return NEEDS[rung.needs] if rung.needs and rung.needs not in features else ""


def run_rung(rung: Rung, command: Sequence[str]) -> Attempt:
    """Run a throughput benchmark in a process of its own; what it writes to stderr passes on."""
    report, error = run_benchmark(command)
    if error:
        return Attempt(rung, error=error)
    (cell,) = report["cells"].values()
    return Attempt(rung, figures=cell[OURS])


def ladder_rows(attempts: Sequence[Attempt], usd_per_hour: float) -> list[Values]:
    """One dict per rung; speed-ups are over the last and the first rung that ran."""
    rows: list[Values] = []
    rates: list[float] = []
    for attempt in attempts:
        row: Values = {"rung": attempt.rung.key, "name": attempt.rung.name}
        if attempt.figures:
            rates.append(attempt.figures["tok_s"])
            row |= _figures(attempt.figures, rates, usd_per_hour)
        elif attempt.skipped:
            row["skipped"] = attempt.skipped
        else:
            row["error"] = attempt.error
        rows.append(row)
    return rows


def _figures(figures: Mapping[str, Any], rates: Sequence[float], usd_per_hour: float) -> Values:
    return {
        "tok_s": rates[-1],
        "speedup": round(rates[-1] / rates[max(0, len(rates) - 2)], 3),
        "cumulative": round(rates[-1] / rates[0], 3),
        "usd_per_million": round(usd_per_million_tokens(usd_per_hour, rates[-1]), 6),
        "ceiling_tok_s": figures["ceiling_tok_s"],
        "share_of_ceiling": figures["share_of_ceiling"],
        "mfu": figures["mfu"],
        "mbu": figures["mbu"],
    }
