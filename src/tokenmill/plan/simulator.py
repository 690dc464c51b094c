"""A Runner without a model: the real scheduler's batches, answered by a fixed text.

Frontends and tests use it where a model would only cost time.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from tokenmill.core.types import StepResult, TokenLogprobs
from tokenmill.sched.scheduler import Batch, Sequence

StepTime = Callable[[Batch], float]


class SimRunner:
    """Answers every sequence with `token_ids`, over and over; position i of an answer is fixed.

    `step_s` says how long a step takes; without it a step takes no time.
    """

    def __init__(self, token_ids: list[int], step_s: StepTime | None = None) -> None:
        if not token_ids:
            raise ValueError("token_ids must hold at least one token")
        self._token_ids = token_ids
        self._step_s = step_s
        self._next_s = 0.0

    def run(self, batch: Batch) -> StepResult:
        """Sample one token for every item whose prompt is complete."""
        if self._step_s is not None:
            self._pace(self._step_s(batch))
        result = StepResult(token_ids=[])
        for index, (sequence, num_new) in enumerate(batch.items):
            computed = sequence.num_computed_tokens + num_new
            samples = computed == sequence.num_tokens
            result.token_ids.append([self._sample(sequence)] if samples else [])
            if sequence.prompt_logprobs is not None:
                start = sequence.num_computed_tokens
        return result

    def _sample(self, sequence: Sequence) -> int:
        return self._token_ids[sequence.num_output_tokens % len(self._token_ids)]

    def _pace(self, step_s: float) -> None:
        """Sleep so that steps end `step_s` apart; a late one is not made up for."""
        now_s = time.monotonic()
        self._next_s = max(self._next_s + step_s, now_s)
        time.sleep(self._next_s - now_s)
