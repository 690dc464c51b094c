"""Synthetic users as MLPerf's DLRMv3 data has them: items of a few categories, rated over time.

A user likes four categories in falling order, and an item has a rating of its own; a rating is the
mean of both, and a candidate's label is whether it is at least 3.5. At each timestamp a user is
active with some probability and rates some items; later timestamps open new items. The defaults
are small: the benchmark has 5,000,000 users, 1,000,000,000 items and 100 timestamps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.types import InvalidRequestError
from tokenmill.ranking.requests import Ids, RankRequest

DEFAULT_SEED = 1001
# Of the benchmark's users at inference, simulated by its rules.
BENCHMARK_HISTORY, BENCHMARK_HISTORY_SD, BENCHMARK_CANDIDATES = 6714, 531, 2048
LIKED = 3.5  # from this rating on a candidate's label is 1
_ITEM_RATINGS = (5.0, 4.0, 3.0, 2.0, 1.0), (0.2, 0.25, 0.25, 0.2, 0.1)  # values and their shares
_TOP, _OTHERS = (0.8, 0.2, 0.0), (0.1, 0.8, 0.1)
# A quarter of the user's categories each: three ratings half a point apart, and their shares.
_TIERS = ((4.5, _TOP), (4.5, _OTHERS), (3.5, _OTHERS), (2.5, _OTHERS))
_ALPHA = 1, 500  # how evenly a user spreads over the categories, drawn at each timestamp


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


@dataclass(frozen=True, slots=True, eq=False)
class LabelledRequest:
    """A request, and what the user thought of each candidate."""

    request: RankRequest
    labels: np.ndarray  # float32[candidates], 0 or 1
    timestamp: int


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
