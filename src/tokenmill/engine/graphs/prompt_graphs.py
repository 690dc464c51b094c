"""CUDA graphs of steps that compute the rest of one short prompt, so that it starts at once."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass
from typing import Any

import torch

from tokenmill.engine.drafts.proposer import Proposer
from tokenmill.engine.graphs.capture import CaptureJob, jobs_for
from tokenmill.engine.graphs.pieces import Pieces, try_and_record
from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.model import KVCache, Model, likeliest
from tokenmill.engine.staging import ALIGN
from tokenmill.sched.sequence import Item

SIZES = (32, 64, 128, 256)  # tokens; a prompt is padded up to the next one
_FIELDS = 5  # context, slot, last row, tokens that are known, tokens that the blocks hold


@dataclass(frozen=True, slots=True)
class Prompted:
    """What a step knows of its prompt; the same tensors every time."""

    newest: torch.Tensor  # int32 [1]: the prompt's last token
    logits: torch.Tensor  # [1, vocab], after it
    best: torch.Tensor  # int32 [1]
    slot: torch.Tensor  # int32 [1]
    drafts: torch.Tensor | None  # int32 [1, depth], should `best` be taken


class PromptGraphs:
    """Steps of one sequence's last tokens; without capture() they run operation by operation.

    All read one input buffer: token ids, then a few numbers. Rows beyond the prompt are computed
    like others, see what the cache happens to hold, and are written to the cache's last block.
    """

    def __init__(
        self,
        model: Model,
        layers: KVCache,
        builder: InputBuilder,
        proposer: Proposer | None,
        depth: int,
    ) -> None:
        self.model, self.layers, self.builder = model, layers, builder
        self.proposer, self.depth = proposer, depth
        self.sizes = [size for size in SIZES if size < builder.max_len]
        total = SIZES[-1] + _FIELDS * ALIGN
        self.inputs = torch.zeros(total, dtype=torch.int32, device=builder.device)
        self._graphs: dict[int, tuple[Pieces, Prompted]] = {}

    def jobs(self, pool: Any) -> list[CaptureJob]:
        return jobs_for(self.sizes, lambda size: self._capture(size, pool))

    def _capture(self, size: int, pool: Any) -> None:
        ranks = self.model.layout.ranks
        self._graphs[size] = try_and_record(pool, ranks, lambda: self._run(size))

    def takes(self, items: list[Item]) -> bool:
        """True for the last tokens of one prompt, if there are few."""
        (seq, num_new), *others = items
        if others or num_new == 1 or not self.sizes or num_new > self.sizes[-1]:
            return False
        size = self.sizes[bisect_left(self.sizes, num_new)]
        return (
            seq.num_computed_tokens + num_new == len(seq.token_ids)
            and seq.num_computed_tokens + size <= self.builder.max_len
            and seq.num_computed_tokens >= seq.image_end
            and seq.token_ids[-1] >= 0
            and not seq.prompt_logprobs
        )

    def run(self, item: Item) -> Prompted:
        """The step's tensors, valid until the next run."""
        seq, num_new = item
        size = self.sizes[bisect_left(self.sizes, num_new)]
        host = self.builder.staging.buffer(len(self.inputs))
        image = host.numpy()
        image[:num_new] = seq.token_ids[-num_new:]
        image[num_new:size] = 0
        fields = image[SIZES[-1] :].reshape(_FIELDS, ALIGN)
        context = seq.num_computed_tokens
        fields[:, 0] = (context, seq.slot, num_new - 1, context + num_new, seq.capacity)
        self.inputs.copy_(host, non_blocking=True)
        if size not in self._graphs:
            return self._run(size)
        pieces, prompted = self._graphs[size]
        pieces.replay()
        return prompted

    def _run(self, size: int) -> Prompted:
        builder, model = self.builder, self.model
        fields = self.inputs[SIZES[-1] :].view(_FIELDS, ALIGN)
        context, slot, last, known, capacity = (field[:1] for field in fields)
        positions, cache_slots = builder.place(context, slot, known, 0, size)
        starts, tiles = builder.even(1, size)
        turned = builder.turned(positions, slot)
        batch = builder.attention(turned, cache_slots, starts, context, slot, tiles)
        ids = self.inputs[:size]
        hidden = model.forward(builder.ids(ids), self.layers, batch)
        logits = model.logits(hidden.index_select(0, last))
        best, drafts = likeliest(logits, model.layout.token_ranks), None
        builder.last_tokens.index_copy_(0, slot.long(), best)
        if self.proposer is not None:
            next_ids = torch.cat([ids[1:], ids[:1]]).index_copy_(0, last.long(), best)
            out = self.proposer.fill(builder.ids(next_ids), model.draft_states(hidden), batch)
            drafts = self.proposer.propose(
                out.index_select(0, last), context + last, slot, capacity, self.depth
            )
        return Prompted(ids.index_select(0, last), logits, best, slot, drafts)
