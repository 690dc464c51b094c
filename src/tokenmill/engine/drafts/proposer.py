"""Drafts from an MTP module: what comes next, one guess after the other.

All of it is tensor operations of fixed shapes, so that it runs on a CPU as it is and on a GPU
inside a CUDA graph.
"""

from __future__ import annotations

from typing import Protocol

import torch

from tokenmill.engine.inputs import InputBuilder, Slots
from tokenmill.engine.model import likeliest
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.parallel import ONE, Ranks

Cache = tuple[torch.Tensor, torch.Tensor]


class Drafter(Protocol):
    """An MTP module (models/mtp.py) or an EAGLE-3 head, or this rank's part of it."""

    @property
    def num_bytes(self) -> int: ...
    def forward(
        self, token_ids: torch.Tensor, states: torch.Tensor, cache: Cache, batch: AttentionBatch
    ) -> torch.Tensor: ...
    def logits(self, out: torch.Tensor) -> torch.Tensor: ...
    def target_ids(self, ids: torch.Tensor) -> torch.Tensor: ...
    def states(self, out: torch.Tensor) -> torch.Tensor: ...


class Proposer:
    """Runs the MTP module over its own layer of the KV cache.

    A draft whose place is in no block of its sequence is written to the cache's last block, which
    belongs to nobody.
    """

    def __init__(
        self, module: Drafter, cache: Cache, builder: InputBuilder, ranks: Ranks = ONE
    ) -> None:
        """`ranks` compute the same tokens; rank 0 says which drafts follow."""
        self.module, self.cache, self.builder, self._ranks = module, cache, builder, ranks

    def fill(
        self, next_ids: torch.Tensor, states: torch.Tensor, batch: AttentionBatch
    ) -> torch.Tensor:
        """Put the pairs of a step, states and the tokens after them, into the cache."""
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
        drafts = [self._best(out)]
        for step in range(1, count):
            batch = self._batch(*self.builder.place(positions, slots, capacities, step), slots)
            ids = self.builder.ids(drafts[-1])
            out = self.module.forward(ids, self.module.states(out), self.cache, batch)
            drafts.append(self._best(out))
        return torch.stack(drafts, dim=1)

    def _best(self, out: torch.Tensor) -> torch.Tensor:
        """The likeliest tokens, int32 [rows]; any token where the logits are not finite."""
        return self.module.target_ids(likeliest(self.module.logits(out), self._ranks, least=0))

    def _batch(
        self, positions: torch.Tensor, cache_slots: Slots, slots: torch.Tensor
    ) -> AttentionBatch:
        starts, tiles = self.builder.even(slots.shape[0], 1)
        return self.builder.attention(positions, cache_slots, starts, positions, slots, tiles)
