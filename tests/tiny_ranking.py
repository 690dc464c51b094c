"""Tiny ranking models and requests whose numbers are the same with every version of torch."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.models.hstu import HstuModel, dense_tensors
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.requests import RankRequest
from tokenmill.ranking.stores.table import DeviceTable

TINY = HstuSpec(
    num_items=64, num_users=8, num_categories=4, embedding_dim=16, hidden_size=16, num_layers=3,
    num_heads=2, qk_dim=8, v_dim=8, preprocessor_dim=12, head_dim=16, num_positions=32,
    num_time_buckets=16, max_seq_len=96, max_candidates=24,
)  # fmt: skip


def numbers(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    """Normal numbers of a generator whose stream numpy has frozen."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape)).float()


def tiny_tensors(spec: HstuSpec) -> dict[str, torch.Tensor]:
    """Norms near 1, biases and the rest small enough that no score is near 0 or 1."""
    tensors = {}
    for seed, (name, shape) in enumerate(dense_tensors(spec).items()):
        values = numbers(shape, seed)
        is_norm = len(shape) == 1 and name.endswith("weight")
        tensors[name] = 1 + 0.3 * values if is_norm else values * (2 / sum(shape)) ** 0.5
    tensors["actions"] = tensors["actions"] * 3
    return tensors


def tiny_model(spec: HstuSpec = TINY, **levers: bool | int) -> RankingModel:
    dense = HstuModel(spec, tiny_tensors(spec), **levers)  # type: ignore[arg-type]
    counts = {"item": spec.num_items, "user": spec.num_users, "category": spec.num_categories}
    stores = {
        name: DeviceTable(numbers((count, spec.embedding_dim), 1000 + index))
        for index, (name, count) in enumerate(counts.items())
    }
    return RankingModel(dense, stores)


def tiny_request(
    history: int, candidates: int, spec: HstuSpec = TINY, user: int = 1
) -> RankRequest:
    """Items 7, 14, ... of a history, 11, 22, ... of candidates; their category is item % 4."""
    items = np.arange(1, history + 1) * 7 % spec.num_items
    targets = np.arange(1, candidates + 1) * 11 % spec.num_items
    return RankRequest(
        request_id=f"r{user}",
        user_id=user,
        item_ids=items,
        category_ids=items % spec.num_categories,
        actions=np.arange(history) * 5 % (1 << spec.num_actions),
        candidate_ids=targets,
        candidate_category_ids=targets % spec.num_categories,
    )
