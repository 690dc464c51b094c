"""Router policies side by side over kinds of load, costs of machines and numbers of workers.

A cell is one load at one rate. Its requests of all seeds are pooled for each policy: a p99 over the
few hundred requests of one seed is the luck of three of them. Caches are empty at first, and all
requests count.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

from tokenmill.core.config import RouterConfig, RouterPolicy
from tokenmill.core.metrics import RequestTimes, summarize
from tokenmill.plan.loads import BLOCK_TOKENS, make_load
from tokenmill.plan.replay import Replay, ReplayConfig, StepTiming

POLICIES: tuple[RouterPolicy, ...] = get_args(RouterPolicy)
FIGURES = ("ttft_ms", "ttft_p99_ms", "tpot_ms", "duration_s")
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
class Row:
    """A cell's figures by policy, and kv's over the best of the others'."""

    cell: Cell
    figures: dict[str, dict[str, float]]

    @property
    def ratios(self) -> dict[str, float]:
        """1.05: kv is 5 % worse than the best other policy in that figure."""
        others = [self.figures[policy] for policy in POLICIES if policy != "kv"]
        ours = self.figures["kv"]
        return {name: ours[name] / min(other[name] for other in others) for name in FIGURES}

    @property
    def worst(self) -> float:
        return max(self.ratios.values())


def compare(cells: Sequence[Cell], num_requests: int, num_seeds: int) -> Iterator[Row]:
    """A row for each cell, as they are done."""
    for cell in cells:
        yield Row(
            cell, {policy: _pooled(cell, policy, num_requests, num_seeds) for policy in POLICIES}
        )


def _pooled(
    cell: Cell, policy: RouterPolicy, num_requests: int, num_seeds: int
) -> dict[str, float]:
    times: list[RequestTimes] = []
    duration_s = 0.0
    config = replace(MACHINES[cell.machine], num_workers=cell.num_workers)
    for seed in range(num_seeds):
        load = make_load(cell.kind, seed, num_requests, cell.utilization, config)
        router = RouterConfig(policy=policy, block_size=config.block_size, seed=seed)
        replay = Replay(load, config, router)
        duration_s += replay.run()["duration_s"]
        times += replay.times
    ttft = summarize(t.ttft_ms for t in times)
    tpot = summarize(t.tpot_ms for t in times)
    return {
        "ttft_ms": round(ttft["mean"], 2),
        "ttft_p99_ms": round(ttft["p99"], 2),
        "tpot_ms": round(tpot["mean"], 3),
        "duration_s": round(duration_s / num_seeds, 3),
    }


def as_json(row: Row) -> dict[str, Any]:
    """A row as data."""
    cell = row.cell
    return {
        "machine": cell.machine,
        "load": cell.kind,
        "workers": cell.num_workers,
        "utilization": cell.utilization,
        "figures": row.figures,
        "kv_over_best_other": {name: round(ratio, 3) for name, ratio in row.ratios.items()},
    }
