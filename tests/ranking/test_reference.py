"""Scores against MLPerf's own model, where it can be imported: an extra that no install brings.

Put `recommendation/dlrm_v3` of mlcommons/inference on PYTHONPATH, and beside torch 2.13 install
with `pip install --no-deps` these: fbgemm-gpu-cpu==1.8.0, torchrec==1.8.0, tensordict, pyvers,
orjson, iopath, portalocker, pyre-extensions, typing-inspect and torchmetrics==1.0.3.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1]))
from tiny_ranking import TINY, tiny_model, tiny_request
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.models.hstu import dense_tensors, reference_name
from tokenmill.ranking.metrics import rank_metrics
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.requests import RankRequest

modules = pytest.importorskip("generative_recommenders.modules.dlrm_hstu")
torchrec = pytest.importorskip("torchrec")

# What the reference's code fixes whatever its config says.
FIXED: dict[str, Any] = {"head_dim": 512, "num_positions": 8192, "num_time_buckets": 2048}
SMALL = replace(TINY, **FIXED)
MIDDLE = replace(
    SMALL, num_items=5000, num_users=100, num_categories=16, embedding_dim=64, hidden_size=64,
    num_layers=5, num_heads=4, qk_dim=16, v_dim=16, preprocessor_dim=32, max_seq_len=2048,
    max_candidates=256,
)  # fmt: skip


def reference_model(spec: HstuSpec, model: RankingModel) -> Any:
    """MLPerf's model with our tensors in it, in plain PyTorch."""
    from configs import get_embedding_table_config, get_hstu_configs
    from generative_recommenders.common import HammerKernel

    config = get_hstu_configs()
    config.hstu_num_heads, config.hstu_attn_num_layers = spec.num_heads, spec.num_layers
    config.hstu_attn_linear_dim, config.hstu_attn_qk_dim = spec.v_dim, spec.qk_dim
    config.hstu_embedding_table_dim = spec.embedding_dim
    config.hstu_transducer_embedding_dim = spec.hidden_size
    config.hstu_preprocessor_hidden_dim = spec.preprocessor_dim
    tables = get_embedding_table_config()
    counts = {"item_id": "item", "item_category_id": "category", "user_id": "user"}
    for name, ours in counts.items():
        tables[name].num_embeddings = model.stores[ours].spec.num_rows
        tables[name].embedding_dim = spec.embedding_dim
        tables[name].data_type = torchrec.modules.embedding_configs.DataType.FP32
    reference = modules.DlrmHSTU(config, tables, is_inference=True)
    reference._embedding_collection = reference._embedding_collection.to_empty(device="cpu")
    state = reference.state_dict()
    for name in dense_tensors(spec):
        state[reference_name(name)].copy_(model.dense.tensors[name])
    for name, ours in counts.items():
        table = f"_embedding_collection.embeddings.{name}.weight"
        state[table].copy_(
            model.stores[ours].lookup(torch.arange(model.stores[ours].spec.num_rows))
        )
    left = set(state) - {reference_name(name) for name in dense_tensors(spec)}
    buffers = ("action_weights", "period_units", "units_per_period", "embeddings")
    assert all(any(word in name for word in buffers) for name in left), left
    reference.recursive_setattr("_use_triton_cc", False)
    reference.set_hammer_kernel(HammerKernel.PYTORCH)
    return reference.eval()


def features(requests: list[RankRequest]) -> tuple[Any, Any]:
    """The two KeyedJaggedTensors that the reference takes."""
    histories, targets = [r.num_history for r in requests], [r.num_candidates for r in requests]

    def times(request: RankRequest) -> np.ndarray:
        return (
            np.ones(request.num_history, int) if request.timestamps is None else request.timestamps
        )

    uih = {
        "user_id": [np.array([r.user_id]) for r in requests],
        "item_id": [r.item_ids for r in requests],
        "item_rating": [r.actions for r in requests],
        "action_timestamp": [times(r) for r in requests],
        "item_weights": [r.actions for r in requests],
        "dummy_watch_time": [np.zeros(n, int) for n in histories],
        "item_category_id": [r.category_ids for r in requests],
    }
    candidates = {
        "item_candidate_id": [r.candidate_ids for r in requests],
        "item_candidate_rating": [np.zeros(n, int) for n in targets],
        "item_query_time": [np.full(r.num_candidates, r.query_time) for r in requests],
        "item_action_weights": [np.zeros(n, int) for n in targets],
        "item_dummy_watchtime": [np.ones(n, int) for n in targets],
        "item_candidate_category_id": [r.candidate_category_ids for r in requests],
    }
    return tuple(_keyed(part) for part in (uih, candidates))  # type: ignore[return-value]


def _keyed(columns: dict[str, list[np.ndarray]]) -> Any:
    parts = [part for column in columns.values() for part in column]
    lengths = torch.tensor([len(part) for part in parts])
    values = torch.from_numpy(np.concatenate(parts))
    return torchrec.KeyedJaggedTensor(keys=list(columns), values=values, lengths=lengths)


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
    with torch.inference_mode():
        *_, found, _, _ = reference_model(spec, model)(*features(requests))
    ours = np.concatenate(model.score(requests))[:, 0]
    assert np.ptp(ours) > 0.05  # scores differ between candidates
    np.testing.assert_allclose(ours, found[0].numpy(), atol=1e-5, rtol=0)


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
