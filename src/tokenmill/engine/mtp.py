"""Drafts from an MTP module: which of the last ones were right, and what comes next.

All of it is tensor operations of fixed shapes, so that it runs on a CPU as it is and on a GPU
inside a CUDA graph.
"""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.inputs import InputBuilder
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.sampling import argmax
from tokenmill.models.mtp import MTPModule

Cache = tuple[torch.Tensor, torch.Tensor]


def count_accepted(
    sampled: torch.Tensor, drafts: torch.Tensor, num_drafts: torch.Tensor
) -> torch.Tensor:
    """How many drafts of each sequence are what was sampled in their place, int64 [seqs].

    sampled is [seqs, k + 1], drafts [seqs, k], of which the first num_drafts [seqs] count.
    """
    places = torch.arange(drafts.shape[1], device=drafts.device)
    right = (sampled[:, :-1] == drafts) & (places < num_drafts[:, None])
    return right.long().cumprod(dim=1).sum(dim=1)


class Proposer:
    """Runs the MTP module over its own layer of the KV cache.

    A draft whose place is in no block of its sequence is written to the cache's last block, which
    belongs to nobody.
    """

    def __init__(self, module: MTPModule, cache: Cache, builder: InputBuilder) -> None:
        self.module, self.cache, self.builder = module, cache, builder
        self._tiles: dict[int, tuple[QueryTiles, ...]] = {}

    def fill(
        self, next_ids: torch.Tensor, states: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Put the pairs of a step, normed states and the tokens after them, into the cache."""
        return self.module.forward(next_ids, states, self.cache, batch)

    def propose(
        self,
        out: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        capacities: torch.Tensor,
        count: int,
    ) -> torch.Tensor:
        """The next `count` tokens of each sequence by the module alone, int32 [seqs, count].

        out [seqs, hidden] is what fill() made of each sequence's newest pair, positions [seqs]
        where that stands, capacities [seqs] how many tokens its blocks hold.
        """
        drafts = [_best(self.module.logits(out))]
        for step in range(1, count):
            batch = self._batch(positions + step, slots, capacities)
            ids = self.builder.ids(drafts[-1])
            out = self.module.forward(ids, self.module.states(out), self.cache, batch)
            drafts.append(_best(self.module.logits(out)))
        return torch.stack(drafts, dim=1)

    def _batch(
        self, positions: torch.Tensor, slots: torch.Tensor, capacities: torch.Tensor
    ) -> AttentionBatch:
        """One query of each sequence."""
        count, builder = slots.shape[0], self.builder
        places = positions.clamp(max=builder.max_len - 1).int()
        return builder.attention(
            places,
            builder.cache_slots(places, slots, capacities),
            torch.arange(count + 1, dtype=torch.int32, device=slots.device),
            places,
            slots,
            self._single_tiles(count),
        )

    def _single_tiles(self, count: int) -> tuple[QueryTiles, ...]:
        if count not in self._tiles:
            builder, device = self.builder, self.builder.device
            plans = plan_tiles(
                np.ones(count, np.int64), builder.group, builder.kv_heads, device.type == "cuda"
            )
            self._tiles[count] = tuple(QueryTiles.of(plan, device) for plan in plans)
        return self._tiles[count]


def _best(logits: torch.Tensor) -> torch.Tensor:
    """The likeliest tokens, int32 [rows]; any token where the logits are not finite."""
    return argmax(logits).clamp_(min=0)
