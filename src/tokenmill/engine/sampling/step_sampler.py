"""From the logits of a step to its tokens, which are sent to the host without a wait."""

from __future__ import annotations

import numpy as np
import torch

from tokenmill.engine.inputs import InputBuilder
from tokenmill.engine.launched import LateRows, LaunchedStep
from tokenmill.engine.sampling.device_sampler import DeviceSampler, Sampled, upload
from tokenmill.engine.sampling.sampler import (
    SampledRow,
    Sampler,
    grammar_masks,
)
from tokenmill.parallel import ONE, Ranks
from tokenmill.sched.sequence import Batch


class StepSampler:
    """What all executors do after the forward pass.

    Of ranks that compute the same tokens rank 0 samples, and the others are sent its choice.
    """

    def __init__(self, builder: InputBuilder, ranks: Ranks = ONE) -> None:
        self.ranks = ranks
        self._staging, self._device = builder.staging, builder.device
        self.on_gpu = self._device.type == "cuda"
        self.host, self.device = Sampler(), DeviceSampler()
        self._late, self._last_tokens = DeviceSampler(), builder.last_tokens

    def wants_best(self, rows: list[SampledRow]) -> bool:
        """True where the likeliest tokens are all that is asked."""
        return self.device.wants_best(rows)

    def choose(
        self,
        launched: LaunchedStep,
        batch: Batch,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
        slots: torch.Tensor | None,
    ) -> torch.Tensor:
        """Sample all rows, int32 [rows], and note the newest tokens of sequences at their slots.

        Constrained rows whose masks follow are sampled again, by sample_late().
        """
        tokens = self.ranks.broadcast(self._chosen(launched, rows, logits, newest))
        if slots is not None:
            self._last_tokens.index_copy_(0, slots.long(), tokens)
            if batch.masks_follow and not self.ranks.rank:
                launched.late = self._put_off(rows, logits, newest, slots, tokens)
        return tokens

    def _chosen(
        self,
        launched: LaunchedStep,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
    ) -> torch.Tensor:
        """The tokens of all rows on rank 0, int32 [rows]; room for them on others.

        What fails with several ranks does so once all have done their part of the step.
        """
        if not self.ranks.rank:
            try:
                launched.sampled = self._sample(self.device, rows, logits, newest)
                return launched.sampled.token_ids
            except Exception as error:
                if self.ranks.size == 1:
                    raise
                launched.failure = error
        return torch.zeros(len(rows), dtype=torch.int32, device=self._device)

    def _sample(
        self,
        sampler: DeviceSampler,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
    ) -> Sampled:
        """On a GPU there. On CPU by numpy: a neighbour must not change a row's bits."""
        if self.on_gpu:
            return sampler.launch(logits, rows, newest)
        tokens, known = self.host(logits.float(), rows, grammar_masks(rows), newest.tolist())
        return Sampled(torch.tensor(tokens, dtype=torch.int32), known=known)

    def _put_off(
        self,
        rows: list[SampledRow],
        logits: torch.Tensor,
        newest: torch.Tensor,
        slots: torch.Tensor,
        tokens: torch.Tensor,
    ) -> LateRows | None:
        """Keep what the constrained rows are sampled from; None where a step has none of them."""
        places = [
            i for i, row in enumerate(rows) if row.request.task.sampling.structured is not None
        ]
        if not places:
            return None
        index = upload(np.array(places), self._device)
        own, fed, kept = (part.index_select(0, index) for part in (slots, newest, logits))
        return LateRows([rows[i] for i in places], places, index, own.long(), fed, kept, tokens)

    def sample_late(self, launched: LaunchedStep) -> None:
        """Sample the constrained rows of a step, whose masks are set by now."""
        late = launched.late
        if late is None:
            return
        assert launched.tokens is not None
        late.sampled = self._sample(self._late, late.rows, late.logits, late.newest)
        late.logits = late.logits[:0]
        late.tokens.index_copy_(0, late.index, late.sampled.token_ids)
        self._last_tokens.index_copy_(0, late.slots, late.sampled.token_ids)
        launched.tokens.copy_(late.tokens, non_blocking=True)
        launched.done = self.mark()

    def send(
        self,
        launched: LaunchedStep,
        tokens: torch.Tensor | None,
        proposed: torch.Tensor | None = None,
    ) -> LaunchedStep:
        """Send tokens and drafts to the host without waiting for them."""
        if self.ranks.rank:
            launched.done = self.mark()
            return launched
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
