"""From the logits of a step to its tokens, which are sent to the host without a wait."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.drafts.relaxed import Relaxed
from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.launched import Launched
from tokenmill.engine.sampling.device_sampler import DeviceSampler
from tokenmill.engine.sampling.sampler import SampledRow, Sampler, grammar_masks, is_penalised
from tokenmill.sched.sequence import PENDING, Batch


def _counts_pending(seq: SampledRow) -> bool:
    """True where a penalty asks for a token that the host does not know yet."""
    return is_penalised(seq.request.sampling) and seq.token_ids[-1] == PENDING


class StepSampler:
    """What all executors do after the forward pass."""

    def __init__(self, builder: InputBuilder, relaxed: Relaxed | None) -> None:
        self._staging, self._device = builder.staging, builder.device
        self.on_gpu = self._device.type == "cuda"
        self.host, self.device, self.relaxed = Sampler(), DeviceSampler(), relaxed

    def wants_best(self, rows: list[SampledRow]) -> bool:
        """True where the likeliest tokens are all that is asked."""
        return self.device.wants_best(rows)

    def choose(
        self,
        launched: Launched,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
    ) -> torch.Tensor:
        """Sample all rows, int32 [rows]: on a GPU there, unless a grammar has to be asked.

        On CPU all rows of all steps are sampled alike: a neighbour must not change a row's bits.
        """
        masks = grammar_masks(rows)
        constrained = any(mask is not None for mask in masks)
        if self.on_gpu and (not constrained or any(map(_counts_pending, rows))):
            launched.sampled = self.device.launch(logits, rows, newest)
            return launched.sampled.token_ids
        fed = None if self.on_gpu else newest.tolist()
        tokens, launched.logprobs = self.host(logits.float(), rows, masks, fed)
        return torch.tensor(tokens, dtype=torch.int32).to(self._device)

    def relax(
        self, launched: Launched, batch: Batch, logits: torch.Tensor, tokens: torch.Tensor
    ) -> None:
        """Put likely drafts in the place of what was drawn, where that is asked for."""
        if self.relaxed is None:
            return
        rows: list[int] = []
        drafts: list[int] = []
        first = 0
        for index, own in zip(launched.ready, launched.drafts, strict=True):
            if self.relaxed.covers(batch.items[index][0]):
                rows += range(first, first + len(own))
                drafts += own
            first += launched.stride or len(own) + 1
        if not rows:
            return
        places, ids = self._staging.send([np.array(rows), np.array(drafts)])
        places, drawn = places.long(), tokens[places.long()]
        taken = torch.where(self.relaxed.right(logits[places], ids), ids, drawn)
        tokens.index_copy_(0, places, taken)
        launched.relaxed = {row: i for i, row in enumerate(rows)}
        launched.changed = self.to_host((taken != drawn).int())

    def send(
        self,
        launched: Launched,
        tokens: torch.Tensor | None,
        proposed: torch.Tensor | None = None,
    ) -> Launched:
        """Send tokens and drafts to the host without waiting for them."""
        launched.tokens = None if tokens is None else self.to_host(tokens)
        launched.proposed = None if proposed is None else self.to_host(proposed)
        launched.done = self.mark()
        return launched

    def to_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on the host, complete once an event after it has happened."""
        host = self._staging.buffer(tensor.numel()).view(tensor.shape)
        host.copy_(tensor, non_blocking=True)
        return host

    def mark(self) -> torch.cuda.Event | None:
        """An event after all that was launched, on a GPU."""
        if not self.on_gpu:
            return None
        done = torch.cuda.Event()
        done.record()
        return done
