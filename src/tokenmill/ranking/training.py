"""Trains a small ranking model on synthetic users, so that its scores mean something."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.models.hstu import Embedded, HstuModel, dense_tensors
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.model import RankingModel, limit_threads
from tokenmill.ranking.stores.table import DeviceTable
from tokenmill.ranking.synthetic import LabelledRequest, SyntheticSpec

_RATE, _TABLE_STD = 4e-3, 0.3
Report = Callable[[int, float], None]  # step, loss
Tensors = dict[str, torch.Tensor]


def small_spec(data: SyntheticSpec) -> HstuSpec:
    """A model for a data set, small enough to train in a minute; its scores are of no batch."""
    longest = 2 * data.events_per_timestamp * (data.num_timestamps + 1)
    return HstuSpec(
        num_items=data.num_items, num_users=data.num_users, num_categories=data.num_categories,
        embedding_dim=32, hidden_size=32, num_layers=2, num_heads=2, qk_dim=16, v_dim=16,
        preprocessor_dim=32, head_dim=32, num_positions=512, num_time_buckets=8,
        max_seq_len=longest + data.num_candidates + 1, max_candidates=data.num_candidates,
        scaling_seqlen=longest,
    )  # fmt: skip


def random_tensors(spec: HstuSpec, generator: torch.Generator) -> Tensors:
    """The dense part at the start: norms of one, biases of zero, products that keep variance."""
    tensors: Tensors = {}
    for name, shape in dense_tensors(spec).items():
        if len(shape) == 1:
            start = torch.ones if name.endswith("weight") else torch.zeros
            tensors[name] = start(shape)
        else:
            scale = (2 / (shape[-1] + shape[-2])) ** 0.5
            tensors[name] = torch.randn(shape, generator=generator) * scale
    tensors["actions"] = torch.randn(tensors["actions"].shape, generator=generator)
    return tensors


def random_tables(spec: HstuSpec, generator: torch.Generator) -> Tensors:
    counts = {"item": spec.num_items, "user": spec.num_users, "category": spec.num_categories}
    return {
        name: torch.randn(count, spec.embedding_dim, generator=generator) * _TABLE_STD
        for name, count in counts.items()
    }


def train(
    spec: HstuSpec,
    requests: Sequence[LabelledRequest],
    steps: int = 300,
    batch_size: int = 16,
    seed: int = 0,
    report: Report | None = None,
) -> RankingModel:
    """A model that has seen `steps` batches of these requests."""
    limit_threads(spec)
    generator, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    dense, tables = random_tensors(spec, generator), random_tables(spec, generator)
    parameters = [tensor.requires_grad_() for tensor in (*dense.values(), *tables.values())]
    optimiser = torch.optim.Adam(parameters, lr=_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, steps)
    for step in range(steps):
        chosen = [requests[i] for i in rng.integers(0, len(requests), batch_size)]
        loss = _loss(spec, dense, tables, chosen)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        schedule.step()
        if report is not None:
            report(step, loss.item())
    for tensor in parameters:
        tensor.requires_grad_(False)
    stores = {name: DeviceTable(table) for name, table in tables.items()}
    return RankingModel(HstuModel(spec, dense), stores)


def _loss(
    spec: HstuSpec, dense: Tensors, tables: Tensors, chosen: Sequence[LabelledRequest]
) -> torch.Tensor:
    batch = make_batch([labelled.request for labelled in chosen], spec)
    users, items = tables["user"][batch.user_ids], tables["item"][batch.item_ids]
    logits = HstuModel(spec, dense).logits(batch, Embedded(users, items, tables["category"]))
    labels = torch.from_numpy(np.concatenate([labelled.labels for labelled in chosen]))
    return binary_cross_entropy_with_logits(logits[:, 0], labels)
