"""Scores against MLPerf's own model, where it can be imported: reference_ranking.py says how."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from reference_ranking import reference_model, reference_scores
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.ranking.metrics import rank_metrics
from tokenmill.ranking.requests import RankRequest

pytest.importorskip("generative_recommenders.modules.dlrm_hstu")
pytest.importorskip("torchrec")

# What the reference's code fixes whatever its config says.
FIXED: dict[str, Any] = {"head_dim": 512, "num_positions": 8192, "num_time_buckets": 2048}
SMALL = replace(TINY, **FIXED)
MIDDLE = replace(
    SMALL, num_items=5000, num_users=100, num_categories=16, embedding_dim=64, hidden_size=64,
    num_layers=5, num_heads=4, qk_dim=16, v_dim=16, preprocessor_dim=32, max_seq_len=2048,
    max_candidates=256,
)  # fmt: skip


def requests_of(spec: HstuSpec) -> list[RankRequest]:
    """Short and long, below and above the length from which a user's row counts, with times."""
    longest = spec.max_seq_len - spec.max_candidates - 1
    timed = tiny_request(longest // 2, 3, spec, user=3)
    ages = np.arange(timed.num_history)[::-1] * 70
    timed = replace(timed, query_time=500_000, timestamps=500_000 - ages)
    shapes = [(1, 1), (10, 5), (longest, spec.max_candidates), (longest // 3, 17)]
    plain = [tiny_request(*shape, spec, user) for user, shape in enumerate(shapes)]
    return [*plain, timed]


@pytest.mark.parametrize("spec", [SMALL, MIDDLE], ids=["tiny", "middle"])
def test_scores_are_the_references(spec: HstuSpec) -> None:
    model = tiny_model(spec)
    requests = requests_of(spec)
    found = reference_scores(reference_model(spec, model), requests)
    ours = np.concatenate(model.score(requests))[:, 0]
    assert np.ptp(ours) > 0.05  # scores differ between candidates
    np.testing.assert_allclose(ours, found, atol=1e-5, rtol=0)


def test_metrics_are_torchrecs() -> None:
    """The three that MLPerf's accuracy script computes, over requests of different lengths."""
    from torchrec.metrics.accuracy import AccuracyMetricComputation
    from torchrec.metrics.gauc import GAUCMetricComputation
    from torchrec.metrics.ne import NEMetricComputation

    rng = np.random.default_rng(0)
    scores = [rng.random(n).astype(np.float32) for n in (5, 64, 17, 3)]
    labels = [(rng.random(len(s)) < s).astype(np.float32) for s in scores]
    labels[3][:] = 1  # no pair: this request has no AUC
    found = []
    for kind in (NEMetricComputation, AccuracyMetricComputation, GAUCMetricComputation):
        metric = kind(my_rank=0, batch_size=1, n_tasks=1, window_size=1000)
        for s, t in zip(scores, labels, strict=True):
            more = {"num_candidates": torch.tensor([len(s)])} if "GAUC" in kind.__name__ else {}
            predictions, truth = torch.from_numpy(s)[None], torch.from_numpy(t)[None]
            metric.update(
                predictions=predictions, labels=truth, weights=torch.ones_like(truth), **more
            )
        [value, *_] = [
            float(m.value) for m in metric.compute() if "lifetime" in str(m.metric_prefix)
        ] or [float(m.value) for m in metric.compute()]
        found.append(100 * value)
    assert rank_metrics(scores, labels) == pytest.approx(found, abs=1e-3)
