"""A step under way: what its result is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.engine.sampling.device_sampler import Sampled
from tokenmill.engine.sampling.sampler import NOT_FINITE, SampledRow


@dataclass(slots=True)
class LateRows:
    """The constrained rows of a step whose masks come after its launch, as copies of their own.

    What a graph has written is written over by the next one.
    """

    rows: list[SampledRow]
    places: list[int]  # in the step's rows
    index: torch.Tensor  # int64 [rows], the same on the device
    slots: torch.Tensor  # int64 [rows]
    newest: torch.Tensor  # int32 [rows]
    logits: torch.Tensor  # [rows, vocab]
    tokens: torch.Tensor  # int32 [all rows of the step]
    sampled: Sampled | None = None

    def put_into(self, logprobs: list[TokenLogprobs | None], tokens: list[int]) -> None:
        """Put these rows' log-probabilities in the place of those without masks."""
        assert self.sampled is not None
        own = self.sampled.finish([tokens[place] for place in self.places])
        for place, entry in zip(self.places, own, strict=True):
            logprobs[place] = entry


@dataclass(slots=True)
class LaunchedStep:
    """A step under way; wait() returns its result when all it writes is written."""

    result: StepResult
    ready: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)  # of the ready items, verified here
    stride: int | None = None  # tokens of each ready item, where there are more than it verifies
    tokens: torch.Tensor | None = None  # on the host once `done` has happened
    done: torch.cuda.Event | None = None
    sampled: Sampled | None = None  # what else the sampler computed
    late: LateRows | None = None  # that are sampled again, with their masks
    proposed: torch.Tensor | None = None  # [ready, k]: drafts for the next step, like tokens
    failure: Exception | None = None  # of the sampler, where other ranks go on
    others: list[LaunchedStep] = field(
        default_factory=list
    )  # of the items that follow, launched later

    def runs(self) -> bool:
        """Whether the device still computes what was launched."""
        done = (self, *self.others)[-1].done
        return done is not None and not done.query()

    def wait(self) -> StepResult:
        """The tokens of the items that sampled, and their log-probabilities."""
        result = self._wait()
        for other in self.others:
            _join(result, other._wait())
        return result

    def settle(self) -> None:
        done = (self, *self.others)[-1].done
        if done is not None:
            done.synchronize()

    def _wait(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        if self.tokens is not None:
            tokens = self.tokens.flatten().tolist()
            logprobs = None if self.sampled is None else self.sampled.finish(tokens)
            if logprobs is not None and self.late is not None:
                self.late.put_into(logprobs, tokens)
            self._fill(tokens, logprobs)
        return self.result

    def _fill(self, tokens: list[int], logprobs: list[TokenLogprobs | None] | None) -> None:
        """Put the accepted drafts of the ready items and one token more into the result."""
        result, first = self.result, 0
        if logprobs is not None and any(entry is not None for entry in logprobs):
            result.logprobs = [None] * len(result.token_ids)
        for index, drafts in zip(self.ready, self.drafts, strict=True):
            last = first
            for draft in drafts:
                if tokens[last] != draft:
                    break
                last += 1
            result.token_ids[index] = own = tokens[first : last + 1]
            if min(own) < 0:
                result.errors[index] = NOT_FINITE
            if result.logprobs is not None and logprobs is not None:
                entries = [entry for entry in logprobs[first : last + 1] if entry is not None]
                result.logprobs[index] = entries or None
            first += self.stride or len(drafts) + 1
        if self.proposed is not None:
            result.draft_ids = [[] for _ in result.token_ids]
            for index, proposed in zip(self.ready, self.proposed.tolist(), strict=True):
                result.draft_ids[index] = proposed


def _join(result: StepResult, other: StepResult) -> None:
    count, num_others = len(result.token_ids), len(other.token_ids)
    if result.logprobs is not None or other.logprobs is not None:
        result.logprobs = [
            *(result.logprobs or [None] * count),
            *(other.logprobs or [None] * num_others),
        ]
    if result.draft_ids is not None or other.draft_ids is not None:
        result.draft_ids = [
            *(result.draft_ids or [[] for _ in range(count)]),
            *(other.draft_ids or [[] for _ in range(num_others)]),
        ]
    result.token_ids += other.token_ids
    result.errors |= {count + i: error for i, error in other.errors.items()}
    result.prompt_logprobs |= {count + i: own for i, own in other.prompt_logprobs.items()}
