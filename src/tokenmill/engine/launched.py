"""A step under way: what its result is made of."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.engine.sampling.device_sampler import Sampled


@dataclass(slots=True)
class Launched:
    """A step under way; wait() returns its result when all it writes is written."""

    result: StepResult
    ready: list[int] = field(default_factory=list)
    drafts: list[list[int]] = field(default_factory=list)  # of the ready items, verified here
    stride: int | None = None  # tokens of each ready item, where there are more than it verifies
    tokens: torch.Tensor | None = None  # on the host once `done` has happened
    done: torch.cuda.Event | None = None
    sampled: Sampled | None = None  # what else the sampler computed
    logprobs: list[TokenLogprobs | None] | None = None  # those of the host's sampler
    proposed: torch.Tensor | None = None  # [ready, k]: drafts for the next step, like tokens
    relaxed: dict[int, int] = field(default_factory=dict)  # by row of tokens: row of `changed`
    changed: torch.Tensor | None = None  # 1 where relaxed acceptance took a draft instead
    others: list[Launched] = field(default_factory=list)  # of the items that follow, launched later

    def wait(self) -> StepResult:
        """The tokens of the items that sampled, and their log-probabilities."""
        result = self._wait()
        for other in self.others:
            _join(result, other._wait())
        return result

    def _wait(self) -> StepResult:
        if self.done is not None:
            self.done.synchronize()
        if self.tokens is not None:
            tokens = self.tokens.flatten().tolist()
            if min(tokens) < 0:
                raise FloatingPointError("the largest logit of a row is not finite")
            logprobs = self.sampled.finish(tokens) if self.sampled is not None else self.logprobs
            self._fill(tokens, logprobs)
        return self.result

    def _fill(self, tokens: list[int], logprobs: list[TokenLogprobs | None] | None) -> None:
        """Put the accepted drafts of the ready items and one token more into the result."""
        result, first = self.result, 0
        changed = [] if self.changed is None else self.changed.tolist()
        if logprobs is not None and any(entry is not None for entry in logprobs):
            result.logprobs = [None] * len(result.token_ids)
        for index, drafts in zip(self.ready, self.drafts, strict=True):
            last = first
            for draft in drafts:
                if tokens[last] != draft:
                    break
                result.num_relaxed += changed[self.relaxed[last]] if last in self.relaxed else 0
                last += 1
            result.token_ids[index] = tokens[first : last + 1]
            if result.logprobs is not None and logprobs is not None:
                entries = [entry for entry in logprobs[first : last + 1] if entry is not None]
                result.logprobs[index] = entries or None
            first += self.stride or len(drafts) + 1
        if self.proposed is not None:
            result.draft_ids = [[] for _ in result.token_ids]
            for index, proposed in zip(self.ready, self.proposed.tolist(), strict=True):
                result.draft_ids[index] = proposed


def _join(result: StepResult, other: StepResult) -> None:
    """Add what was made of the items that follow."""
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
    result.prompt_logprobs |= {count + i: own for i, own in other.prompt_logprobs.items()}
    result.num_relaxed += other.num_relaxed
