"""Requests to one jagged batch: what a row is, where it stands, and its position and time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.kernels.hstu import jagged
from tokenmill.models.hstu import RankBatch, time_buckets
from tokenmill.ranking.requests import Ids, RankRequest

_NO_IDS = np.zeros(0, np.int64)


def make_batch(
    requests: Sequence[RankRequest], spec: HstuSpec, device: torch.device | str = "cpu"
) -> RankBatch:
    """Checked requests as tensors on the device."""
    lengths = np.array([request.num_history for request in requests])
    counts = np.array([request.num_candidates for request in requests])
    history, candidates = _offsets(lengths + 1), _offsets(counts)
    ages, query_times = _times(requests)

    def put(parts: Sequence[Ids]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(parts)).to(device, non_blocking=True)

    items = [r.item_ids for r in requests] + [r.candidate_ids for r in requests]
    categories = [r.category_ids for r in requests] + [r.candidate_category_ids for r in requests]
    return RankBatch(
        rows=jagged(history, candidates, device),
        normaliser=spec.normaliser(int(lengths.max()), int(counts.max())),
        user_ids=put([np.array([request.user_id for request in requests])]),
        item_ids=put(items),
        category_ids=put(categories),
        actions=put([request.actions for request in requests]),
        query_times=put(query_times),
        order=put(_order(lengths, counts)),
        positions=put(_positions(lengths, counts, spec)),
        time_buckets=time_buckets(put(ages), spec.num_time_buckets),
        known=put([lengths + counts >= spec.min_context_len]),
    )


def _offsets(lengths: Ids) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def _order(lengths: Ids, counts: Ids) -> list[Ids]:
    """Rows among [contextual tokens, history items, candidates]: each user's token and items."""
    users = len(lengths)
    starts = users + np.cumsum(lengths) - lengths
    parts = []
    for user, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        parts += [np.array([user]), np.arange(start, start + length)]
    first = users + int(lengths.sum())
    return [*parts, np.arange(first, first + int(counts.sum()))]


def _positions(lengths: Ids, counts: Ids, spec: HstuSpec) -> list[Ids]:
    """0 for the contextual token, 1 for candidates, 2 for the last item, 3 for the one before."""
    parts: list[Ids] = []
    for length in lengths:
        parts += [np.zeros(1, np.int64), np.arange(length + 1, 1, -1)]
    last = spec.num_positions - 1
    return [np.minimum(part, last) for part in [*parts, np.ones(int(counts.sum()), np.int64)]]


def _times(requests: Sequence[RankRequest]) -> tuple[list[Ids], list[Ids]]:
    """Ages of rows before their query, and the query's time of candidates; a token's time is 0."""
    ages: list[Ids] = []
    for request in requests:
        seen = request.timestamps
        past = (
            np.zeros(request.num_history, np.int64) if seen is None else request.query_time - seen
        )
        ages += [np.array([request.query_time]), past]
    counts = [request.num_candidates for request in requests]
    queries = [np.full(n, r.query_time) for n, r in zip(counts, requests, strict=True)]
    return [*ages, np.zeros(sum(counts), np.int64)], queries
