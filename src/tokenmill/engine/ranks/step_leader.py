"""The steps of ranks that compute the same tokens: rank 0 tells them, the others run them, too.

A step goes out once: how many tokens each sequence has and which, and the blocks that it got. The
other ranks keep a copy of each sequence by its slot, of which they know what a runner asks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenmill.core.images import ImageInput, ImageSpan
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import RanksLostError, SamplingParams
from tokenmill.engine.launched import LaunchedStep
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.rank_messages import (
    CaptureGraphs,
    GrownRow,
    LateTokens,
    RankMessage,
    ShortPrompts,
    StepBatch,
)
from tokenmill.engine.ranks.rebalance import Rebalancer
from tokenmill.engine.sampling.step_sampler import StepSampler
from tokenmill.sched.sequence import Batch, Item, Sequence

if TYPE_CHECKING:
    from tokenmill.engine.runner import ModelRunner

NUM_FIELDS = 8  # of an item: see _pack_items
_BEST, _OTHER = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)


class StepLeader:
    """Rank 0's side."""

    def __init__(self, group: RankGroup, rebalancer: Rebalancer | None) -> None:
        self._group, self._rebalancer = group, rebalancer

    def tell_batch(self, batch: Batch, sampler: StepSampler) -> None:
        """Have all ranks run a step; what comes between two steps comes first."""
        self._group.tell(pack_batch(batch, sampler))
        if self._rebalancer is not None:
            self._rebalancer.turn()

    def tell_late(self, slots: torch.Tensor, tokens: torch.Tensor) -> None:
        """Send the tokens of rows that were sampled after their step was launched."""
        self._group.tell(LateTokens(len(slots)))
        self._group.ranks.broadcast(torch.stack([slots.int(), tokens]))

    def tell_capture(self) -> None:
        self._group.tell(CaptureGraphs())

    def tell_short_prompts(self, most: dict[int, int]) -> None:
        self._group.tell(ShortPrompts(most))


def pack_batch(batch: Batch, sampler: StepSampler) -> StepBatch:
    seqs = [seq for seq, _ in batch.items]
    all_best = sampler.wants_best([*seqs])
    token_ids: list[int] = []
    fields: list[int] = []
    for seq, num_new in batch.items:
        first, known = seq.num_computed_tokens, len(seq.token_ids)
        drafts = seq.draft_ids[: max(0, first + num_new - known)]
        token_ids += seq.token_ids[first : first + num_new + 1]
        token_ids += drafts
        best = all_best or sampler.wants_best([seq])
        fields += (seq.slot, num_new, first, known, len(drafts), seq.capacity)
        fields += (best, bool(seq.prompt_logprobs))
    grown = [_grown(seq, first) for seq, first in batch.grown if seq.block_ids]
    rows, ids = np.array(fields, np.int32), np.array(token_ids, np.int32)
    return StepBatch(rows.tobytes(), ids.tobytes(), grown, batch.num_tokens, batch.num_to_draft)


def _grown(seq: Sequence, first: int) -> GrownRow:
    images = [(span.offset, span.num_tokens, span.image.grid) for span in seq.request.task.images]
    return GrownRow(
        seq.slot, first, seq.block_ids[first:], seq.window_first, seq.window_ids,
        seq.num_prompt_tokens, [] if first else images,
    )  # fmt: skip


class SequenceCopies:
    """Another rank's copies of rank 0's sequences."""

    def __init__(self) -> None:
        self._by_slot: dict[int, Sequence] = {}
        self._requests: dict[int, tuple[Request, Request]] = {}  # that sample otherwise, and best

    def unpack(self, told: StepBatch) -> Batch:
        """The batch that rank 0 has packed."""
        grown = [self._grow(row) for row in told.grown]
        token_ids = np.frombuffer(told.token_ids, np.int32).tolist()
        items: list[Item] = []
        begin = 0
        for fields in np.frombuffer(told.items, np.int32).reshape(-1, NUM_FIELDS).tolist():
            slot, num_new, first, known, num_drafts, capacity, best, scored = fields
            seq = self._by_slot[slot]
            end = begin + min(num_new + 1, known - first)
            _know(seq.token_ids, first, token_ids[begin:end], known)
            seq.draft_ids = token_ids[end : end + num_drafts]
            seq.num_computed_tokens, seq.capacity = first, capacity
            seq.request = self._requests[slot][best]
            seq.prompt_logprobs = [None] if scored else None
            items.append((seq, num_new))
            begin = end + num_drafts
        return Batch(items, told.num_tokens, grown, num_to_draft=told.num_to_draft)

    def _grow(self, row: GrownRow) -> Item:
        if not row.first:
            images = tuple(
                ImageSpan(offset, count, ImageInput(b"", grid, b""))
                for offset, count, grid in row.images
            )
            request = Request(f"slot {row.slot}", Generate([], _OTHER, images=images))
            self._requests[row.slot] = request, request.with_task(sampling=_BEST)
            self._by_slot[row.slot] = seq = Sequence(request, (0, 0, 0), 0, frozenset())
            seq.slot, seq.num_prompt_tokens = row.slot, row.num_prompt_tokens
        seq = self._by_slot[row.slot]
        seq.block_ids[row.first :] = row.block_ids
        seq.window_first, seq.window_ids = row.window_first, row.window_ids
        return seq, row.first


def _know(known_ids: list[int], first: int, token_ids: list[int], num_known: int) -> None:
    """Put the tokens of a step in their place; what no step reads any more or yet is 0."""
    del known_ids[first:]
    known_ids += [0] * (first - len(known_ids))
    known_ids += token_ids
    known_ids += [0] * (num_known - len(known_ids))


class StepFollower:
    """Another rank's side: does what StepLeader tells, with a runner of its own."""

    def __init__(
        self, runner: ModelRunner, rebalancer: Rebalancer | None, capture: Callable[[], object]
    ) -> None:
        self._runner, self._rebalancer, self._capture = runner, rebalancer, capture
        self._copies = SequenceCopies()
        self._last: LaunchedStep | None = None

    @torch.inference_mode()
    def do(self, message: RankMessage) -> None:
        """Take part in what all ranks do; what comes out of it is rank 0's to use."""
        match message:
            case StepBatch():
                self._run(self._copies.unpack(message))
            case LateTokens(count):
                self._note(count)
            case CaptureGraphs():
                self._capture()
            case ShortPrompts(most):
                self._runner.split.most_prompts = most
            case unknown:
                raise RanksLostError(f"rank 0 asks for {unknown!r}")

    def _run(self, batch: Batch) -> None:
        if self._rebalancer is not None:
            self._rebalancer.turn()
        launched = self._runner.launch(batch)
        if self._last is not None:
            self._last.settle()  # two steps are under way at most, as on rank 0
        self._last = launched

    def _note(self, count: int) -> None:
        newest = self._runner.builder.last_tokens
        late = torch.empty(2, count, dtype=torch.int32, device=newest.device)
        slots, tokens = self._runner.sampler.ranks.broadcast(late)
        newest.index_copy_(0, slots.long(), tokens)
