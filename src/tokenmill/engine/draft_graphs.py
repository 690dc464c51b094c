"""CUDA graphs of steps that verify drafts and make new ones.

A step is two graphs: one from the tokens to the logits of every row, one from what was sampled to
the next drafts. Between them the sampler runs, unless the likeliest tokens are all that is asked.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from tokenmill.engine.graphs import ladder
from tokenmill.engine.mtp import Proposer, count_accepted
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.sampling import argmax
from tokenmill.sched.sequence import Item, num_drafts

if TYPE_CHECKING:
    from tokenmill.engine.runner import KVCache, Model

MAX_SIZE = 64  # sequences of the largest graph: larger batches are better off without drafts


@dataclass(frozen=True, slots=True)
class Verified:
    """What a step knows of its rows, depth + 1 for each sequence; the same tensors every time."""

    logits: torch.Tensor  # [rows, vocab]
    token_ids: torch.Tensor  # int32 [rows]: the input
    states: torch.Tensor  # [rows, hidden], normed
    batch: AttentionBatch


@dataclass(frozen=True, slots=True)
class Captured:
    """The two graphs of a batch size and what they write."""

    verify: torch.cuda.CUDAGraph
    verified: Verified
    draft: torch.cuda.CUDAGraph
    drafted: torch.Tensor


class DraftGraphs:
    """Steps of `depth` drafts for each sequence; without capture() they run operation by operation.

    All read one input buffer, a row each for the newest token, every draft, context, slot, capacity
    and number of drafts. Sequences with fewer drafts, and rows beyond the batch, are padded: what
    lies outside a sequence's blocks is written to the cache's last one.
    """

    def __init__(
        self, model: Model, layers: KVCache, proposer: Proposer, depth: int, max_size: int
    ) -> None:
        self.model, self.layers, self.proposer, self.depth = model, layers, proposer, depth
        self.builder = proposer.builder
        device = self.builder.device
        self.sizes = ladder(min(max_size, MAX_SIZE))
        self.stride = self.sizes[-1] + -self.sizes[-1] % 4
        self.inputs = torch.zeros(depth + 5, self.stride, dtype=torch.int32, device=device)
        self.inputs[depth + 2] = self.builder.tables.pad_row
        self.places = torch.arange(depth + 1, dtype=torch.int32, device=device)
        self.tokens = torch.zeros(self.sizes[-1], depth + 1, dtype=torch.int32, device=device)
        self._tiles: dict[int, tuple[QueryTiles, ...]] = {}
        self._graphs: dict[int, Captured] = {}

    def capture(self, pool: Any) -> None:
        """Capture every size, the largest first: the others fit in its memory."""
        for size in reversed(self.sizes):
            self._draft(size, self._verify(size))  # compiles kernels, which capture must not
            torch.cuda.synchronize()
            verify, draft = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(verify, pool=pool):
                verified = self._verify(size)
            with torch.cuda.graph(draft, pool=pool):
                drafted = self._draft(size, verified)
            self._graphs[size] = Captured(verify, verified, draft, drafted)

    def takes(self, items: list[Item]) -> bool:
        """True for a step of single tokens with at most `depth` drafts each."""
        return len(items) <= self.sizes[-1] and all(
            n - num_drafts((s, n)) == 1
            and n <= self.depth + 1
            and s.num_computed_tokens + 1 == len(s.token_ids)
            and not s.prompt_logprobs
            for s, n in items
        )

    def verify(self, items: list[Item]) -> Verified:
        """The rows of a step, those of items one after the other; `tokens` gets the likeliest."""
        count, depth = len(items), self.depth
        size = self.sizes[bisect_left(self.sizes, count)]
        host = self.builder.staging.buffer((depth + 5) * self.stride)
        image = host.numpy().reshape(depth + 5, self.stride)
        image[:, :size] = 0
        image[depth + 2, count:size] = self.builder.tables.pad_row
        for column, (seq, num_new) in enumerate(items):
            drafts = seq.draft_ids[: num_new - 1]
            image[:num_new, column] = [seq.token_ids[-1], *drafts]
            image[depth + 1 :, column] = (
                seq.num_computed_tokens, seq.slot, seq.capacity, num_new - 1,
            )  # fmt: skip
        self.inputs.view(-1).copy_(host, non_blocking=True)
        captured = self._graphs.get(size)
        if captured is None:
            return self._verify(size)
        captured.verify.replay()
        return captured.verified

    def draft(self, count: int, verified: Verified) -> torch.Tensor:
        """int32 [count, 2 depth + 1]: the tokens of every row, and the next drafts."""
        size = self.sizes[bisect_left(self.sizes, count)]
        captured = self._graphs.get(size)
        if captured is None:
            return self._draft(size, verified)[:count]
        captured.draft.replay()
        return captured.drafted[:count]

    def _verify(self, size: int) -> Verified:
        depth, builder = self.depth, self.builder
        rows = self.inputs[:, :size]
        contexts, slots, capacities = rows[depth + 1 : depth + 4]
        ids = rows[: depth + 1].t().reshape(-1)
        positions = contexts[:, None] + self.places
        positions = positions.clamp(max=builder.max_len - 1)
        cache_slots = builder.cache_slots(positions, slots[:, None], capacities[:, None])
        starts = torch.arange(size + 1, dtype=torch.int32, device=ids.device) * (depth + 1)
        batch = builder.attention(
            positions.reshape(-1), cache_slots.reshape(-1), starts, contexts, slots,
            self._query_tiles(size),
        )  # fmt: skip
        hidden = self.model.forward(builder.ids(ids), self.layers, batch)
        logits = self.model.logits(hidden)
        self.tokens[:size].copy_(argmax(logits).view(size, depth + 1))
        return Verified(logits, ids, self.model.normed(hidden), batch)

    def _draft(self, size: int, verified: Verified) -> torch.Tensor:
        depth = self.depth
        rows, tokens = self.inputs[:, :size], self.tokens[:size]
        contexts, slots, capacities, counts = rows[depth + 1 :]
        accepted = count_accepted(tokens, rows[1 : depth + 1].t(), counts)
        next_ids = self.builder.ids(tokens.clamp(min=0).reshape(-1))
        out = self.proposer.fill(next_ids, verified.states, verified.batch)
        lasts = torch.arange(size, device=tokens.device) * (depth + 1) + accepted
        drafts = self.proposer.propose(
            out.index_select(0, lasts), (contexts + accepted).int(), slots, capacities, depth
        )
        return torch.cat([tokens, drafts], dim=1)

    def _query_tiles(self, size: int) -> tuple[QueryTiles, ...]:
        if size not in self._tiles:
            builder, device = self.builder, self.builder.device
            lens = np.full(size, self.depth + 1, np.int64)
            plans = plan_tiles(lens, builder.group, builder.kv_heads, device.type == "cuda")
            self._tiles[size] = tuple(QueryTiles.of(plan, device) for plan in plans)
        return self._tiles[size]
