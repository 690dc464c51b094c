"""Relaxed acceptance: a draft that is likely enough is taken though another token was drawn.

Outputs are then not those of the model alone. It is off unless asked for, and counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.engine.sampling.sampler import is_penalised
from tokenmill.sched.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Relaxed:
    """Accepts a draft among the `top` likeliest, at most `delta` in probability behind the best."""

    top: int
    delta: float

    @classmethod
    def parse(cls, text: str) -> Relaxed:
        """Read TOP:DELTA, such as "10:0.6"."""
        top, _, delta = text.partition(":")
        return cls(int(top), float(delta))

    def covers(self, seq: Sequence) -> bool:
        """Return False for requests that must be answered exactly.

        What changes the logits must not be passed by: a token may be banned by its bias.
        """
        sampling = seq.request.sampling
        changed = sampling.structured or sampling.logit_bias or is_penalised(sampling)
        return not changed and sampling.logprobs is None

    def right(self, logits: torch.Tensor, drafts: torch.Tensor) -> torch.Tensor:
        """Which drafts [rows] the logits [rows, vocab] in their place allow, bool [rows]."""
        probs = logits.float().softmax(dim=-1)
        own = probs.gather(1, drafts.long()[:, None])
        rank = (probs > own).sum(dim=1)
        return (rank < self.top) & (own[:, 0] >= probs.amax(dim=1) - self.delta)
