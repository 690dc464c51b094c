"""Runs of this engine on one H200 that were measured: measured_runs.csv."""

from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from pathlib import Path

from tokenmill.bench.options import BenchConfig
from tokenmill.bench.workload import make_cells
from tokenmill.plan.hardware import PlanError, find_gpu
from tokenmill.plan.predict.catalog import find_model, precisions_of
from tokenmill.plan.predict.finite_run import FiniteRun
from tokenmill.plan.predict.step_cost import Efficiency, Replica, StepCost

TABLE = Path(__file__).parent / "measured_runs.csv"
RULE = "the rows in alphabetical order: every second is fitted on"
EVERY = 2
FIELDS = (
    *("name", "model", "precision", "kv", "lengths", "num_prompts", "output_len"),
    *("max_num_seqs", "max_num_batched_tokens", "output_tok_s", "date"),
)
OPTIONAL = ("output_len",)
KV = ("bf16", "fp8")


@dataclass(frozen=True, slots=True)
class OwnRun:
    """One `bench throughput` at defaults, and what it gave."""

    name: str
    model: str
    precision: str
    kv: str  # type of the KV cache
    lengths: tuple[tuple[int, int], ...]
    max_num_seqs: int
    budget: int
    output_tok_s: float
    fitted: bool

    def predict(self, efficiency: Efficiency) -> float:
        """Output tokens per second, from the rates that `bench` measured on this GPU."""
        spec = find_model(self.model)
        replica = Replica(replace(precisions_of(spec, self.precision), kv=self.kv))
        cost = StepCost(spec, find_gpu("h200").as_measured(), replica, efficiency)
        seconds = FiniteRun(cost, self.lengths, self.max_num_seqs, self.budget).run()
        return sum(output for _, output in self.lengths) / seconds


def own_runs(path: Path = TABLE) -> list[OwnRun]:
    """All measured runs, every second of them to fit on."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    for number, row in enumerate(rows, start=2):
        _check(row, f"{path}:{number}")
    rows.sort(key=lambda row: row["name"])
    return [_own_run(row, index % EVERY == EVERY - 1) for index, row in enumerate(rows)]


def _check(row: dict[str, str], where: str) -> None:
    """A line that lacks a field, or has a wrong one, is an error that names it."""
    for field in FIELDS:
        if not row.get(field) and field not in OPTIONAL:
            raise PlanError(f"{where}: {field} is needed; a line has {','.join(FIELDS)}")
    if row["kv"] not in KV:
        raise PlanError(f"{where}: kv {row['kv']}: expected one of {', '.join(KV)}")
    for field in ("num_prompts", "max_num_seqs", "max_num_batched_tokens", "output_tok_s"):
        try:
            wrong = not float(row[field]) > 0
        except ValueError:
            wrong = True
        if wrong:
            raise PlanError(f"{where}: {field} {row[field]}: expected a positive number")


def _own_run(row: dict[str, str], fitted: bool) -> OwnRun:
    config = BenchConfig(
        lengths=row["lengths"],
        num_prompts=int(row["num_prompts"]),
        output_len=int(row["output_len"]) if row["output_len"] else None,
    )
    return OwnRun(
        row["name"],
        row["model"],
        row["precision"],
        row["kv"],
        make_cells(config)[0].lengths,
        int(row["max_num_seqs"]),
        int(row["max_num_batched_tokens"]),
        float(row["output_tok_s"]),
        fitted,
    )
