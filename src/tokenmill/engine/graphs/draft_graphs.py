"""CUDA graphs of steps that verify drafts and make new ones.

A step is two graphs: one from the tokens to the logits of every row, one from what was sampled to
the next drafts. Between them the sampler runs, unless the likeliest tokens are all that is asked.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace
from typing import Any

import torch

from tokenmill.engine.drafts.proposer import Proposer
from tokenmill.engine.graphs.capture import CaptureJob, jobs_for, unowned
from tokenmill.engine.graphs.graph_sizes import graph_for, graph_sizes
from tokenmill.engine.graphs.pieces import Pieces, try_and_record
from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.model import KVCache, Model, likeliest
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.drafts import accept_drafts, advance_drafts
from tokenmill.sched.sequence import Item, Sequence, num_drafts

MAX_SIZE = 64  # sequences of the largest graph: larger batches are better off without drafts


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step knows of its rows, depth + 1 for each sequence; the same tensors every time."""

    logits: torch.Tensor  # [rows, vocab]; of a graph: until the next replay of any other
    token_ids: torch.Tensor  # int32 [rows]: the input
    states: torch.Tensor  # [rows, .]: what drafts are made from
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class CapturedDrafting:
    """The two graphs of a batch size and what they write."""

    verify: Pieces
    verified: Verified
    draft: Pieces | None  # where a module makes drafts
    drafted: torch.Tensor


class DraftGraphs:
    """Steps of `depth` drafts for each sequence; without capture() they run operation by operation.

    All read one input buffer: newest token and drafts of each sequence, then contexts, slots,
    capacities and numbers of drafts; a step leaves there what the next one would need. Sequences
    with fewer drafts, and rows beyond the batch, are padded: what lies outside a sequence's blocks
    is written to the cache's last one. Without a proposer the drafts come from the host.
    """

    def __init__(
        self,
        model: Model,
        layers: KVCache,
        builder: InputBuilder,
        proposer: Proposer | None,
        depth: int,
        max_size: int,
    ) -> None:
        self.model, self.layers, self.proposer, self.depth = model, layers, proposer, depth
        self.builder = builder
        device = self.builder.device
        self.sizes = graph_sizes(min(max_size, MAX_SIZE))
        self.stride = self.sizes[-1] + -self.sizes[-1] % 4
        self.inputs = torch.zeros((depth + 5) * self.stride, dtype=torch.int32, device=device)
        ids = self.inputs[: (depth + 1) * self.stride]
        self.ids, self.columns = ids.view(-1, depth + 1), self.inputs[len(ids) :].view(4, -1)
        self.columns[1] = self.builder.tables.pad_row
        self.tokens = torch.zeros(self.sizes[-1], depth + 1, dtype=torch.int32, device=device)
        self._graphs: dict[int, CapturedDrafting] = {}
        self._captured: list[int] = []

    def jobs(self, pool: Any) -> list[CaptureJob]:
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def _capture(self, size: int, pool: Any) -> None:
        ranks, draft, drafted = self.model.layout.ranks, None, self.tokens
        verify, verified = try_and_record(pool, ranks, lambda: self._verify(size))
        if self.proposer is not None:
            draft, drafted = try_and_record(
                *(pool, ranks, lambda: self._draft(size, verified)),
                trial=lambda: self._draft(size, self._verify(size)),
            )
        verified = replace(verified, logits=unowned(verified.logits))
        self._graphs[size] = CapturedDrafting(verify, verified, draft, drafted)
        self._captured = sorted(self._graphs)

    def _size(self, count: int) -> int:
        """A captured size that suits the batch, else the next one, operation by operation."""
        captured = graph_for(self._captured, count)
        return captured or self.sizes[bisect_left(self.sizes, count)]

    def takes(self, items: list[Item]) -> bool:
        """True for a step of single tokens with at most `depth` drafts each, all before the end."""
        most = self.depth + 1
        return len(items) <= self.sizes[-1] and all(
            n - num_drafts((s, n)) == 1
            and n <= most
            and s.num_computed_tokens + 1 == len(s.token_ids)
            and s.num_computed_tokens + most <= self.builder.max_len
            and s.num_computed_tokens >= s.image_end
            and not s.prompt_logprobs
            for s, n in items
        )

    def verify(self, items: list[Item]) -> Verified:
        """The rows of a step, those of items one after the other; `tokens` gets the likeliest."""
        count, depth = len(items), self.depth
        size = self._size(count)
        host = self.builder.staging.buffer(self.inputs.numel())
        image = host.numpy()
        ids = image[: (depth + 1) * self.stride].reshape(-1, depth + 1)
        columns = image[ids.size :].reshape(4, -1)
        ids[:size] = 0
        columns[:, count:size] = 0
        columns[1, count:size] = self.builder.tables.pad_row
        for row, (seq, num_new) in enumerate(items):
            ids[row, :num_new] = [seq.token_ids[-1], *seq.draft_ids[: num_new - 1]]
            columns[:, row] = (seq.num_computed_tokens, seq.slot, seq.capacity, num_new - 1)
        self.inputs.copy_(host, non_blocking=True)
        return self.verify_next(count)

    def may_go_on(self, seqs: list[Sequence]) -> bool:
        """True if the step after the one under way needs no block and ends nobody by length."""
        most = 2 * (self.depth + 1)
        return all(
            seq.num_computed_tokens + most <= seq.capacity and len(seq.token_ids) + most < seq.limit
            for seq in seqs
        )

    def note_capacities(self, seqs: list[Sequence]) -> None:
        """Sequences have got blocks since the last verify()."""
        host = self.builder.staging.buffer(len(seqs))
        host.numpy()[:] = [seq.capacity for seq in seqs]
        self.columns[2, : len(seqs)].copy_(host, non_blocking=True)

    def verify_next(self, count: int) -> Verified:
        """The rows of the step that the last one has left in the input buffer."""
        size = self._size(count)
        captured = self._graphs.get(size)
        if captured is None:
            return self._verify(size)
        captured.verify.replay()
        return captured.verified

    def draft(self, count: int, verified: Verified) -> torch.Tensor:
        """int32 [count, .]: depth + 1 tokens of every row, and the next drafts, if there are."""
        size = self._size(count)
        captured = self._graphs.get(size)
        if captured is None:
            return self._draft(size, verified)[:count]
        if captured.draft is not None:
            captured.draft.replay()
        return captured.drafted[:count]

    def _verify(self, size: int) -> Verified:
        depth, builder = self.depth, self.builder
        contexts, slots, capacities, _ = self.columns[:, :size]
        positions, cache_slots = builder.place(contexts, slots, capacities, 0, depth + 1)
        starts, tiles = builder.even(size, depth + 1)
        turned = builder.turned(positions, slots)
        batch = builder.attention(turned, cache_slots, starts, contexts, slots, tiles)
        ids = self.ids[:size].view(-1)
        hidden = self.model.forward(builder.ids(ids), self.layers, batch)
        logits = self.model.logits(hidden)
        best = likeliest(logits, self.model.layout.token_ranks)
        self.tokens[:size].copy_(best.view(size, depth + 1))
        return Verified(logits, ids, self.model.draft_states(hidden), batch)

    def _draft(self, size: int, verified: Verified) -> torch.Tensor:
        contexts, slots, capacities, counts = self.columns[:, :size]
        ids, tokens = self.ids[:size], self.tokens[:size]
        if self.proposer is None:
            return tokens
        lasts, positions = accept_drafts(tokens, ids, counts, contexts)
        out = self.proposer.fill(
            self.builder.ids(tokens.view(-1)), verified.states, verified.batch
        ).index_select(0, lasts)
        drafts = self.proposer.propose(out, positions, slots, capacities, self.depth)
        return advance_drafts(
            tokens, drafts, positions, ids, contexts, counts, capacities, self.builder.max_len
        )
