"""Router policies side by side over kinds of load, costs of machines and numbers of workers.

A cell is one load at one rate. Its requests of all seeds are pooled for each policy: a p99 over the
few hundred requests of one seed is the luck of three of them. Caches are empty at first, and all
requests count. All policies get the same loads, so that seeds drawn again and again, the same for
each policy, tell how far a ratio is luck. Several fronts are compared with one, by the same policy.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.core.metrics import percentile
from tokenmill.plan.loads import BLOCK_TOKENS, make_load
from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
ONE_FRONT: tuple[RouterPolicy, int, float] = ("kv", 1, 0.0)
FIGURES = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "duration_s")
NUM_DRAWS = 100  # of seeds, for the interval of a ratio
LOW, HIGH = 0.3, 0.7  # share of the workers' time
_BLOCKS = ReplayConfig(block_size=BLOCK_TOKENS, trace_block_tokens=BLOCK_TOKENS)
MACHINES = {
    "gpu": replace(
        _BLOCKS,
        num_blocks=32768,
        timing=StepTiming(prefill=(0.0, 0.03, 2.0), decode=(0.0, 40.0, 8.0), sequence=0.03),
    ),
    "cpu": replace(
        _BLOCKS,
        num_blocks=4096,
        max_num_batched_tokens=512,
        max_num_seqs=64,
        timing=StepTiming(prefill=(0.0, 1.0, 3.0), decode=(0.0, 50.0, 10.0), sequence=2.0),
    ),
    "dynamo": replace(_BLOCKS, num_blocks=65536),
}


@dataclass(frozen=True, slots=True)
class Cell:
    """One load on one set of workers."""

    machine: str
    kind: str
    num_workers: int
    utilization: float


@dataclass(frozen=True, slots=True)
class Run:
    """One load under one policy."""

    ttft_ms: list[float]
    tpot_ms: list[float]
    duration_s: float


@dataclass(frozen=True, slots=True)
class Row:
    """A cell's figures by policy, and the first one's over the best of the others'."""

    cell: Cell
    runs: dict[str, list[Run]]  # by policy, one for each seed
    figures: dict[str, dict[str, float]]  # of all seeds together

    @property
    def ratios(self) -> dict[str, float]:
        """1.05: kv is 5 % worse than the best other policy in that figure."""
        ours = self.figures[self._ours]
        return {name: ours[name] / self.figures[self._best(name)][name] for name in FIGURES}

    @property
    def worst(self) -> float:
        return max(self.ratios.values())

    @property
    def _ours(self) -> str:
        return next(iter(self.figures))

    def intervals(self) -> dict[str, tuple[float, float]]:
        """Where 90 % of the ratios lie if as many seeds are drawn from these."""
        rng = random.Random(0)
        ours = self._ours
        num_seeds = len(self.runs[ours])
        best = {name: self._best(name) for name in FIGURES}
        drawn: dict[str, list[float]] = {name: [] for name in FIGURES}
        for _ in range(NUM_DRAWS):
            seeds = rng.choices(range(num_seeds), k=num_seeds)
            figures = {
                policy: _figures([self.runs[policy][seed] for seed in seeds])
                for policy in {ours, *best.values()}
            }
            for name in FIGURES:
                drawn[name].append(figures[ours][name] / figures[best[name]][name])
        return {name: (percentile(r, 5), percentile(r, 95)) for name, r in drawn.items()}

    def _best(self, figure: str) -> str:
        others = [policy for policy in self.figures if policy != self._ours]
        return min(others, key=lambda policy: self.figures[policy][figure])


def compare(
    cells: Sequence[Cell],
    num_requests: int,
    num_seeds: int,
    num_fronts: int = 1,
    report_delay_ms: float = 0.0,
) -> Iterator[Row]:
    """A row for each cell, as they are done: all policies, or kv with several fronts and one."""
    ways: dict[str, tuple[RouterPolicy, int, float]]
    if num_fronts > 1:
        ways = {f"{num_fronts} fronts": ("kv", num_fronts, report_delay_ms), "1 front": ONE_FRONT}
    else:
        ways = {policy: (policy, 1, report_delay_ms) for policy in POLICIES}
    for cell in cells:
        runs: dict[str, list[Run]] = {
            name: [_run(cell, *way, num_requests, seed) for seed in range(num_seeds)]
            for name, way in ways.items()
        }
        yield Row(cell, runs, {name: _figures(made) for name, made in runs.items()})


def _run(
    cell: Cell,
    policy: RouterPolicy,
    num_fronts: int,
    report_delay_ms: float,
    num_requests: int,
    seed: int,
) -> Run:
    config = replace(
        MACHINES[cell.machine],
        num_workers=cell.num_workers,
        num_fronts=num_fronts,
        report_delay_ms=report_delay_ms,
    )
    load = make_load(cell.kind, seed, num_requests, cell.utilization, config)
    router = RouterConfig(policy=policy, block_size=config.block_size, seed=seed)
    replay = Replay(load, config, router)
    duration_s = replay.run()["duration_s"]
    ttft_ms = [t.ttft_ms for t in replay.times if t.ttft_ms is not None]
    tpot_ms = [t.tpot_ms for t in replay.times if t.tpot_ms is not None]
    return Run(ttft_ms, tpot_ms, duration_s)


def _figures(runs: Sequence[Run]) -> dict[str, float]:
    ttft = [value for run in runs for value in run.ttft_ms]
    tpot = [value for run in runs for value in run.tpot_ms]
    return {
        "ttft_ms": sum(ttft) / len(ttft),
        "ttft_p99_ms": percentile(ttft, 99),
        "tpot_ms": sum(tpot) / len(tpot),
        "duration_s": sum(run.duration_s for run in runs) / len(runs),
    }


def as_json(row: Row) -> dict[str, Any]:
    """A row as data."""
    cell, policies = row.cell, list(row.figures)
    over = f"{policies[0]}_over_{policies[1]}" if len(policies) == 2 else "kv_over_best_other"
    return {
        "machine": cell.machine,
        "load": cell.kind,
        "workers": cell.num_workers,
        "utilization": cell.utilization,
        "figures": {
            policy: {name: round(value, 3) for name, value in figures.items()}
            for policy, figures in row.figures.items()
        },
        over.replace(" ", "_"): {name: round(ratio, 3) for name, ratio in row.ratios.items()},
        "interval_90": {name: [round(x, 3) for x in i] for name, i in row.intervals().items()},
    }
