"""Make synthetic users as MLPerf's DLRMv3 has them, and train a small ranking model on them.

    python examples/rank_train.py demo
    tokenmill rank demo/requests.jsonl --model demo/model

It takes about half a minute on a CPU. The requests of the last timestamps, which the model has not
seen, go to requests.jsonl with their labels.

A user likes four categories in falling order, and an item has a rating of its own; a rating is the
mean of both, and a candidate's label is whether it is at least 3.5. At each timestamp a user is
active with some probability and rates some items; later timestamps open new items. The defaults
are small: the benchmark has 5,000,000 users, 1,000,000,000 items and 100 timestamps.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import binary_cross_entropy_with_logits

from tokenmill import console
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import InvalidRequestError
from tokenmill.models.hstu import Embedded, HstuModel, dense_tensors
from tokenmill.ranking.batch import make_batch
from tokenmill.ranking.model import RankingModel, limit_threads
from tokenmill.ranking.model_files import save_model
from tokenmill.ranking.request_json import write_request
from tokenmill.ranking.requests import Ids, RankRequest
from tokenmill.ranking.stores.table import DeviceTable
from tokenmill.ranking.synthetic import DEFAULT_SEED, LabelledRequest

LIKED = 3.5  # from this rating on a candidate's label is 1
_ITEM_RATINGS = (5.0, 4.0, 3.0, 2.0, 1.0), (0.2, 0.25, 0.25, 0.2, 0.1)  # values and their shares
_TOP, _OTHERS = (0.8, 0.2, 0.0), (0.1, 0.8, 0.1)
# A quarter of the user's categories each: three ratings half a point apart, and their shares.
_TIERS = ((4.5, _TOP), (4.5, _OTHERS), (3.5, _OTHERS), (2.5, _OTHERS))
_ALPHA = 1, 500  # how evenly a user spreads over the categories, drawn at each timestamp
_RATE, _TABLE_STD = 4e-3, 0.3
Report = Callable[[int, float], None]  # step, loss
Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True)
class SyntheticSpec:
    """The size of a data set; the last timestamps are for inference."""

    num_users: int = 200
    num_items: int = 2048
    num_categories: int = 16
    categories_per_user: int = 4
    num_timestamps: int = 10
    num_train_timestamps: int = 8
    events_per_timestamp: int = 30
    active_share: float = 0.7
    num_train_candidates: int = 16
    num_candidates: int = 64  # of an inference request
    seed: int = DEFAULT_SEED

    def __post_init__(self) -> None:
        if self.categories_per_user % 4:
            raise InvalidRequestError(
                f"categories_per_user: expected a multiple of 4, got {self.categories_per_user}"
            )
        if self.num_items % self.num_categories:
            raise InvalidRequestError(
                f"num_items: expected a multiple of {self.num_categories} categories, "
                f"got {self.num_items}"
            )

    @property
    def items_per_category(self) -> int:
        return self.num_items // self.num_categories


@dataclass(slots=True)
class _Events:
    items: Ids
    ratings: np.ndarray


def synthetic_requests(spec: SyntheticSpec, training: bool) -> list[LabelledRequest]:
    """Requests of the training timestamps or of those for inference, in order of time."""
    found = [request for user in range(spec.num_users) for request in _of_user(spec, user)]
    split = spec.num_train_timestamps
    chosen = [request for request in found if (request.timestamp < split) == training]
    return sorted(chosen, key=lambda request: request.timestamp)


def _of_user(spec: SyntheticSpec, user: int) -> Iterator[LabelledRequest]:
    rng = np.random.default_rng((spec.seed, user))
    item_ratings = _item_ratings(spec)
    categories = rng.choice(spec.num_categories, spec.categories_per_user, replace=False)
    counts = np.zeros(spec.categories_per_user)
    past = _events(spec, rng, item_ratings, categories, counts, -1, _length(spec, rng))
    for t in range(spec.num_timestamps):
        if rng.random() >= spec.active_share:
            continue
        training = t < spec.num_train_timestamps
        length = _length(spec, rng)
        drawn = length if training else max(length, spec.num_candidates)
        events = _events(spec, rng, item_ratings, categories, counts, t, drawn)
        asked = spec.num_train_candidates if training else spec.num_candidates
        candidates = rng.permutation(drawn)[:asked]
        yield _request(spec, user, t, past, events, candidates)
        kept = np.sort(rng.permutation(drawn)[:length])
        past = _Events(
            np.concatenate([past.items, events.items[kept]]),
            np.concatenate([past.ratings, events.ratings[kept]]),
        )


def _item_ratings(spec: SyntheticSpec) -> np.ndarray:
    values, shares = _ITEM_RATINGS
    found: np.ndarray = np.random.default_rng(spec.seed).choice(values, spec.num_items, p=shares)
    return found


def _length(spec: SyntheticSpec, rng: np.random.Generator) -> int:
    drawn = round(rng.normal(spec.events_per_timestamp, spec.events_per_timestamp // 4))
    return max(drawn, spec.num_train_candidates + 1)


def _events(
    spec: SyntheticSpec,
    rng: np.random.Generator,
    item_ratings: np.ndarray,
    categories: Ids,
    counts: np.ndarray,
    t: int,
    length: int,
) -> _Events:
    """Items that the user rates at t; `counts` of past ones draw more of the same category."""
    alpha = int(rng.integers(_ALPHA[0], _ALPHA[1] + 1))
    shares = (alpha / len(categories) + counts) / (alpha + counts.sum())
    chosen = rng.choice(len(categories), length, p=shares)
    counts += np.bincount(chosen, minlength=len(categories))
    opened = max(1, int(spec.items_per_category * max(t + 1, 1) / spec.num_timestamps))
    items = rng.integers(0, opened, length) + categories[chosen] * spec.items_per_category
    waves = [0.5 * math.cos((t + shift) * math.pi / 4) for shift in (0, 2, 4)]
    liking = np.empty(length)
    for index in range(len(categories)):
        top, odds = _TIERS[index * 4 // len(categories)]
        levels = [top - 0.5 * step + wave for step, wave in enumerate(waves)]
        drawn = rng.choice(levels, length, p=odds)
        liking = np.where(chosen == index, drawn, liking)
    return _Events(items, (liking + item_ratings[items]) / 2)


def _request(
    spec: SyntheticSpec, user: int, t: int, past: _Events, events: _Events, candidates: Ids
) -> LabelledRequest:
    targets = events.items[candidates]
    actions = 1 << (np.clip(past.ratings.astype(np.int64), 1, 5) - 1)
    request = RankRequest(
        request_id=f"user-{user}-t-{t}",
        user_id=user,
        item_ids=past.items,
        category_ids=past.items // spec.items_per_category,
        actions=actions,
        candidate_ids=targets,
        candidate_category_ids=targets // spec.items_per_category,
    )
    labels = (events.ratings[candidates] >= LIKED).astype(np.float32)
    return LabelledRequest(request, labels, t)


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


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="Where model/ and requests.jsonl go.")
    parser.add_argument("--users", type=int, default=200)
    parser.add_argument("--items", type=int, default=2048, help="A multiple of 16.")
    parser.add_argument("--candidates", type=int, default=64, help="Of a request.")
    parser.add_argument("--steps", type=int, default=300, help="Batches of 16 requests.")
    parser.add_argument("--seed", type=int, default=DEFAULT_SEED, help="Of data and model.")
    args = parser.parse_args(words)
    data = SyntheticSpec(args.users, args.items, num_candidates=args.candidates, seed=args.seed)
    seen, unseen = synthetic_requests(data, training=True), synthetic_requests(data, training=False)
    console.note(f"{len(seen)} requests to train on, {len(unseen)} to score")
    start = time.perf_counter()
    with console.progress("Training") as update:
        model = train(
            small_spec(data), seen, args.steps, seed=data.seed,
            report=lambda step, loss: update(step + 1, args.steps),
        )  # fmt: skip
    save_model(model, args.folder / "model")
    lines = [json.dumps(write_request(request)) + "\n" for request in unseen]
    file = args.folder / "requests.jsonl"
    file.write_text("".join(lines), encoding="utf-8")
    console.note(f"trained in {time.perf_counter() - start:.1f} s")
    console.out.print(f"tokenmill rank {file} --model {args.folder / 'model'}", markup=False)


if __name__ == "__main__":
    main()
