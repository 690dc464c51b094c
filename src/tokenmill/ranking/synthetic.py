"""Requests with labels, and random ones in the lengths of MLPerf's DLRMv3."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.ranking.requests import RankRequest

DEFAULT_SEED = 1001
# Of the benchmark's users at inference, simulated by its rules.
BENCHMARK_HISTORY, BENCHMARK_HISTORY_SD, BENCHMARK_CANDIDATES = 6714, 531, 2048


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRequest:
    """A request, and what the user thought of each candidate."""

    request: RankRequest
    labels: np.ndarray  # float32[candidates], 0 or 1
    timestamp: int


def benchmark_requests(
    spec: HstuSpec, count: int, scale: float = 1.0, seed: int = DEFAULT_SEED
) -> list[RankRequest]:
    """Random ids in the benchmark's lengths, which `scale` makes shorter; they have no labels."""
    rng = np.random.default_rng(seed)
    most = max(1, round(min(BENCHMARK_CANDIDATES, spec.max_candidates) * scale))
    longest = spec.max_seq_len - most - 1
    lengths = rng.normal(BENCHMARK_HISTORY, BENCHMARK_HISTORY_SD, count) * scale
    return [
        _random_request(spec, rng, str(index), min(max(round(length), 1), longest), most)
        for index, length in enumerate(lengths)
    ]


def _random_request(
    spec: HstuSpec, rng: np.random.Generator, name: str, history: int, candidates: int
) -> RankRequest:
    return RankRequest(
        request_id=name,
        user_id=int(rng.integers(spec.num_users)),
        item_ids=rng.integers(0, spec.num_items, history),
        category_ids=rng.integers(0, spec.num_categories, history),
        actions=rng.integers(0, 1 << spec.num_actions, history),
        candidate_ids=rng.integers(0, spec.num_items, candidates),
        candidate_category_ids=rng.integers(0, spec.num_categories, candidates),
    )
