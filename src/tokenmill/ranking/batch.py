"""Requests to one jagged batch: what a row is, where it stands, and its position and time.

The host copies the requests' ids into one buffer of pinned memory, which a stream of its own brings
to the GPU while the batch before it runs; the device computes the rest. Nothing here waits for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch

from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.kernels.hstu import Jagged, batch_tiles
from tokenmill.models.hstu import RankBatch, time_buckets
from tokenmill.ranking.requests import Ids, RankRequest

_NOTHING = np.zeros(1, np.int64)


def make_batch(
    requests: Sequence[RankRequest], spec: HstuSpec, device: torch.device | str = "cpu"
) -> RankBatch:
    lengths = np.array([request.num_history for request in requests])
    counts = np.array([request.num_candidates for request in requests])
    history, candidates = _offsets(lengths + 1), _offsets(counts)
    tiles, num_target_tiles = batch_tiles(history, candidates, device)
    sent = to_device([*_columns(requests, lengths, counts), [_as_ids(tiles)]], device)
    users, times, n, m, item_ids, category_ids, actions, seen, tile_ids = sent
    rows = _Rows(n, history[-1] + candidates[-1], history[-1])
    return RankBatch(
        rows=Jagged(history, candidates, _as_tiles(tile_ids, tiles), num_target_tiles),
        normaliser=spec.normaliser(int(lengths.max()), int(counts.max())),
        user_ids=users,
        item_ids=item_ids,
        category_ids=category_ids,
        actions=actions,
        query_times=torch.repeat_interleave(times, m, output_size=candidates[-1]),
        order=rows.order,
        positions=rows.positions.clamp(max=spec.num_positions - 1),
        time_buckets=time_buckets(rows.ages(times, seen), spec.num_time_buckets),
        known=n + m >= spec.min_context_len,
    )


def _offsets(lengths: Ids) -> list[int]:
    return [0, *np.cumsum(lengths).tolist()]


def _columns(requests: Sequence[RankRequest], lengths: Ids, counts: Ids) -> list[list[Ids]]:
    """What the device is told of the requests; times of items only where one of them has any."""
    seen: list[Ids] = []
    if any(request.timestamps is not None for request in requests):
        seen = [_item_times(request) for request in requests]
    return [
        [np.array([request.user_id for request in requests])],
        [np.array([request.query_time for request in requests])],
        [lengths],
        [counts],
        [r.item_ids for r in requests] + [r.candidate_ids for r in requests],
        [r.category_ids for r in requests] + [r.candidate_category_ids for r in requests],
        [request.actions for request in requests],
        seen,
    ]


def _item_times(request: RankRequest) -> Ids:
    if request.timestamps is not None:
        return request.timestamps
    return np.full(request.num_history, request.query_time)


def _as_ids(tiles: Ids) -> Ids:
    """int32[n] in whole int64, as one buffer holds them."""
    flat = tiles.reshape(-1)
    return np.concatenate([flat, np.zeros(len(flat) % 2, np.int32)]).view(np.int64)


def _as_tiles(sent: torch.Tensor, tiles: Ids) -> torch.Tensor:
    return sent.view(torch.int32)[: tiles.size].view(tiles.shape)


class _Rows:
    """History rows and candidates by user: each history's first row is its contextual token."""

    def __init__(self, lengths: torch.Tensor, num_rows: int, num_history: int) -> None:
        users, device = len(lengths), lengths.device
        self._row = torch.arange(num_rows, device=device)
        self._num_history, self._num_users = num_history, users
        each = torch.arange(users, device=device)
        self._user = torch.repeat_interleave(each, lengths + 1, output_size=num_history)
        first = torch.cumsum(lengths + 1, 0) - lengths - 1
        self._place = self._row[:num_history] - first[self._user]  # in the user's history
        self._length = lengths[self._user]

    @property
    def order(self) -> torch.Tensor:
        """Rows among [contextual tokens, history items, candidates]."""
        items = self._row[: self._num_history] + self._num_users - 1 - self._user
        history = torch.where(self._place == 0, self._user, items)
        return torch.cat([history, self._row[self._num_history :]])

    @property
    def positions(self) -> torch.Tensor:
        """0 for the contextual token, 1 for candidates, 2 for the last item, 3 for that before."""
        history = torch.where(self._place == 0, 0, self._length + 2 - self._place)
        return torch.cat([history, torch.ones_like(self._row[self._num_history :])])

    def ages(self, times: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        """Of rows before their query; a token's time is 0, and without times all else is new."""
        query = times[self._user]
        if len(seen):
            item = self._row[: self._num_history] - 1 - self._user
            past = query - seen[item.clamp(min=0)]
        else:
            past = torch.zeros_like(query)
        history = torch.where(self._place == 0, query, past)
        return torch.cat([history, torch.zeros_like(self._row[self._num_history :])])


def to_device(columns: Sequence[list[Ids]], device: torch.device | str) -> list[torch.Tensor]:
    """int64 columns, each of some parts, by one copy that waits for nothing on the device.

    Each begins at a multiple of 16 bytes: Triton compiles a kernel again for a pointer that is not.
    """
    sizes = [sum(map(len, parts)) for parts in columns]
    filled = [[*parts, _NOTHING[: size % 2]] for parts, size in zip(columns, sizes, strict=True)]
    on_gpu = torch.device(device).type == "cuda"
    places = [size + size % 2 for size in sizes]
    buffer = torch.empty(sum(places), dtype=torch.int64, pin_memory=on_gpu)
    np.concatenate([part for parts in filled for part in parts], out=buffer.numpy())
    if on_gpu:
        buffer = _copied(buffer, torch.device(device))
    return [part[:size] for part, size in zip(buffer.split(places), sizes, strict=True)]


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def _copied(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy beside what the current stream has yet to compute; what follows waits for it."""
    current, side = torch.cuda.current_stream(device), _copy_stream(device)
    with torch.cuda.stream(side):
        found = buffer.to(device, non_blocking=True)
    current.wait_stream(side)
    found.record_stream(current)
    return found
