"""What balancing experts brings on synthetic loads: chosen by one window, judged by the next."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Literal

import numpy as np

from tokenmill.routing import eplb

Skew = Literal["lognormal", "zipf"]
SKEWS: tuple[Skew, ...] = ("lognormal", "zipf")


@dataclass(frozen=True, slots=True)
class ExpertShape:
    """The experts of a model and the ranks that hold them; DeepSeek-R1's by default."""

    num_ranks: int
    num_redundant: int = 32
    num_experts: int = 256
    num_layers: int = 58
    num_groups: int = 8
    ranks_per_node: int = 8
    tokens: int = 65536  # of a window; each chooses top_k experts in every layer
    top_k: int = 8

    def slots(self, num_redundant: int) -> int:
        """Places for experts, equally many on each rank."""
        return -(-(self.num_experts + num_redundant) // self.num_ranks) * self.num_ranks

    @property
    def num_nodes(self) -> int:
        return max(1, self.num_ranks // self.ranks_per_node)


def popularity(skew: Skew, shape: ExpertShape, seed: int) -> np.ndarray:
    """Synthetic chances of experts, [layers, experts]: lognormal(0, 1), or Zipf's 1 / rank."""
    rng = np.random.default_rng(seed)
    size = (shape.num_layers, shape.num_experts)
    if skew == "lognormal":
        weights = rng.lognormal(0.0, 1.0, size)
    else:
        weights = rng.permuted(1.0 / np.tile(np.arange(1, size[1] + 1), (size[0], 1)), axis=1)
    chances: np.ndarray = weights / weights.sum(1, keepdims=True)
    return chances


def study(skew: Skew, shape: ExpertShape, seed: int = 0) -> dict[str, object]:
    """Imbalance (busiest rank over mean, mean over layers) by way of placing, and its time."""
    chances = popularity(skew, shape, seed)
    rng = np.random.default_rng(seed + 1)
    seen, next_ = (rng.multinomial(shape.tokens * shape.top_k, chances) for _ in range(2))
    few, many = shape.slots(0), shape.slots(shape.num_redundant)
    first = [[slot % shape.num_experts for slot in range(few)]] * shape.num_layers
    ranks, groups, nodes = shape.num_ranks, shape.num_groups, shape.num_nodes
    start = time.perf_counter()
    balanced = [eplb.place(load, many, ranks) for load in seen.astype(float)]
    seconds = time.perf_counter() - start
    report: dict[str, object] = {
        "load": skew,
        "ranks": ranks,
        "slots": many,
        "before": _imbalance(next_, first, ranks),
        "placed": _imbalance(next_, [eplb.place(x, few, ranks) for x in seen.astype(float)], ranks),
        "balanced": _imbalance(next_, balanced, ranks),
        "place_ms": round(1e3 * seconds, 1),
    }
    if nodes > 1 and groups % nodes == 0:
        by_node = [eplb.place(x, many, ranks, groups, nodes) for x in seen.astype(float)]
        report["by_node"] = _imbalance(next_, by_node, ranks)
    again = [eplb.place(load, many, ranks) for load in next_.astype(float)]
    kept = [eplb.keep_slots(new, old, ranks) for new, old in zip(again, balanced, strict=True)]
    report["moved_again"] = _moved(balanced, again, ranks)
    report["moved_again_kept"] = _moved(balanced, kept, ranks)
    return report


def _imbalance(counts: np.ndarray, placements: list[eplb.Placement], num_ranks: int) -> float:
    loads = zip(counts.astype(float), placements, strict=True)
    ratios = [eplb.imbalance(eplb.rank_loads(load, p, num_ranks)) for load, p in loads]
    return round(float(np.mean(ratios)), 4)


def _moved(old: list[eplb.Placement], new: list[eplb.Placement], num_ranks: int) -> float:
    """The share of slots whose expert has to be copied."""
    moved = sum(len(eplb.moves(a, b, num_ranks)) for a, b in zip(old, new, strict=True))
    return round(moved / (len(old) * len(old[0])), 4)
