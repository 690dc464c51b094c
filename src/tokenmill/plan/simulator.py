"""A Runner without a model: the real scheduler's batches, answered by a fixed text.

Frontends and tests use it where a model would only cost time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.sched.sequence import Batch, Sequence

MAX_LATE_STEPS = 16
StepTime = Callable[[Batch], float]


class SimRunner:
    """Answers every sequence with `token_ids`, over and over.

    The token at a position has probability 1/2, the next alternatives 1/4, 1/8 and so on.
    `step_s` says how long a step takes; without it a step takes no time.
    """

    def __init__(self, token_ids: list[int], step_s: StepTime | None = None) -> None:
        if not token_ids:
            raise ValueError("token_ids must hold at least one token")
        self._token_ids = token_ids
        self._alternatives = list(dict.fromkeys(token_ids))
        self._step_s = step_s
        self._next_s = 0.0

    def run(self, batch: Batch) -> StepResult:
        """Sample one token for every item whose known tokens are all computed after this step."""
        if self._step_s is not None:
            self._pace(self._step_s(batch))
        sampled = [self.sample(sequence, num_new) for sequence, num_new in batch.items]
        result = StepResult(sampled)
        if any(sequence.request.task.sampling.logprobs is not None for sequence, _ in batch.items):
            result.logprobs = [
                self._logprobs(tokens, sequence.request.task.sampling.logprobs)
                for tokens, (sequence, _) in zip(sampled, batch.items, strict=True)
            ]
        for index, (sequence, num_new) in enumerate(batch.items):
            if sequence.prompt_logprobs is not None:
                start = sequence.num_computed_tokens + 1
                targets = sequence.request.task.prompt_token_ids[start : start + num_new]
                num_best = sequence.request.task.sampling.prompt_logprobs
                result.prompt_logprobs[index] = self._logprobs(targets, num_best) or []
        return result

    def sample(self, sequence: Sequence, num_new: int) -> list[int]:
        """The next token, [] while a prompt is still being computed."""
        if sequence.num_computed_tokens + num_new < sequence.num_tokens:
            return []
        return [self._token_ids[sequence.num_output_tokens % len(self._token_ids)]]

    def _logprobs(self, token_ids: list[int], num_best: int | None) -> list[TokenLogprobs] | None:
        if num_best is None:
            return None
        return [self._position(token, num_best) for token in token_ids]

    def _position(self, token: int, num_best: int) -> TokenLogprobs:
        others = (other for other in self._alternatives if other != token)
        best = [token, *(other for other, _ in zip(others, range(num_best - 1), strict=False))]
        best = best[:num_best]
        logprobs = [-math.log(2) * (rank + 1) for rank in range(len(best))]
        return TokenLogprobs([token, *best], [-math.log(2), *logprobs], rank=1)

    def _pace(self, step_s: float) -> None:
        """Sleep so that steps end `step_s` apart; a few late ones are made up for."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s, now_s - MAX_LATE_STEPS * step_s) + step_s
        time.sleep(max(self._next_s - now_s, 0.0))
