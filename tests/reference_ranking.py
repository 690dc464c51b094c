"""MLPerf's own DLRMv3 beside ours: the same tensors and the same requests; no install brings it.

Put `recommendation/dlrm_v3` of mlcommons/inference on PYTHONPATH, and beside torch 2.13 install
with `pip install --no-deps` these: fbgemm-gpu-cpu==1.8.0, torchrec==1.8.0, tensordict, pyvers,
orjson, iopath, portalocker, pyre-extensions, typing-inspect, torchmetrics==1.0.3 and
lightning-utilities.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.models.hstu import dense_tensors, reference_name
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.requests import RankRequest


def reference_model(spec: HstuSpec, model: RankingModel) -> Any:
    """MLPerf's model with our tensors in it, in plain PyTorch."""
    import torchrec
    from configs import get_embedding_table_config, get_hstu_configs
    from generative_recommenders.common import HammerKernel
    from generative_recommenders.modules import dlrm_hstu

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
    reference = dlrm_hstu.DlrmHSTU(config, tables, is_inference=True)
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
    import torchrec

    parts = [part for column in columns.values() for part in column]
    lengths = torch.tensor([len(part) for part in parts])
    values = torch.from_numpy(np.concatenate(parts))
    return torchrec.KeyedJaggedTensor(keys=list(columns), values=values, lengths=lengths)


def reference_scores(reference: Any, requests: list[RankRequest]) -> np.ndarray:
    """float32[candidates of all requests]."""
    with torch.inference_mode():
        *_, found, _, _ = reference(*features(requests))
    scores: np.ndarray = found[0].numpy()
    return scores
