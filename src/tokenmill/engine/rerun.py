"""Runs a failed batch again in parts: who fails alone is at fault, and the others get their tokens.

Parts are halved as long as they fail, so that one culprit costs two steps for each halving. An item
that reads what another one writes in the same batch runs after it, or fails with it.
"""

from __future__ import annotations

from collections.abc import Callable
from graphlib import TopologicalSorter

from tokenmill.core.types import OutOfMemory, RanksLostError, StepResult
from tokenmill.sched.sequence import Batch, Sequence

_RUNS_PER_HALVING = 4  # what is left after so many fails


def run_in_parts(
    run: Callable[[Batch], StepResult], batch: Batch, block_size: int, error: Exception
) -> StepResult:
    """The result of a batch that failed with `error`; its `errors` name the items at fault."""
    parts = _Parts(run, batch, block_size)
    parts.split(parts.order, error)
    return parts.result


class _Parts:
    def __init__(self, run: Callable[[Batch], StepResult], batch: Batch, block_size: int) -> None:
        self._run, self._batch = run, batch
        self._runs_left = _RUNS_PER_HALVING * len(batch.items).bit_length()
        self._needs = _needs(batch, block_size)
        order = TopologicalSorter(self._needs).static_order()
        self.order = [index for index in order if not batch.items[index][0].finished]
        self.result = StepResult([[] for _ in batch.items])

    def split(self, part: list[int], error: Exception) -> None:
        """Find who is at fault in a part that does not run as a whole."""
        if len(part) == 1:
            self.result.errors[part[0]] = f"the step failed: {type(error).__name__}: {error}"
            return
        first, second = part[: len(part) // 2], part[len(part) // 2 :]
        problem = self._try(first)
        if problem is None and len(second) > 1:
            return self.split(second, error)
        if problem is not None:
            self.split(first, problem)
        problem = self._try(second)
        if problem is not None:
            self.split(second, problem)

    def _try(self, part: list[int]) -> Exception | None:
        """Run some items; what is wrong with them, or None where that is known of each."""
        errors = self.result.errors
        for index in part:
            if at_fault := self._needs[index] & errors.keys():
                errors[index] = errors[min(at_fault)]
        part = [index for index in part if index not in errors]
        if not part:
            return None
        if not self._runs_left:
            return RuntimeError("too many requests of a step failed")
        self._runs_left -= 1
        part.sort(key=lambda index: self._batch.items[index][1] > 1)  # one new token comes first
        try:
            self._take(part, self._run(self._batch.part([self._batch.items[i] for i in part])))
        except (RanksLostError, OutOfMemory):
            raise
        except Exception as error:
            return error
        return None

    def _take(self, part: list[int], found: StepResult) -> None:
        result, count = self.result, len(self._batch.items)
        if found.logprobs is not None:
            result.logprobs = result.logprobs or [None] * count
        if found.draft_ids is not None:
            result.draft_ids = result.draft_ids or [[] for _ in range(count)]
        for place, index in enumerate(part):
            result.token_ids[index] = found.token_ids[place]
            if found.logprobs is not None and result.logprobs is not None:
                result.logprobs[index] = found.logprobs[place]
            if found.draft_ids is not None and result.draft_ids is not None:
                result.draft_ids[index] = found.draft_ids[place]
            if place in found.prompt_logprobs:
                result.prompt_logprobs[index] = found.prompt_logprobs[place]
            if place in found.errors:
                result.errors[index] = found.errors[place]


def _needs(batch: Batch, block_size: int) -> dict[int, set[int]]:
    """Which items write blocks that an item reads, by item."""
    blocks = [_read_and_written(seq, block_size) for seq, _ in batch.items]
    writers = {b: index for index, (_, written) in enumerate(blocks) for b in written}
    return {
        index: {writers[b] for b in read if b in writers} for index, (read, _) in enumerate(blocks)
    }


def _read_and_written(seq: Sequence, block_size: int) -> tuple[list[int], list[int]]:
    """The blocks that a step reads alone, and those that it writes, of all layers."""
    first = seq.num_computed_tokens // block_size
    groups = len(seq.window_ids) // (len(seq.block_ids) - seq.window_first)
    first_window = (first - seq.window_first) * groups
    return (
        seq.block_ids[:first] + seq.window_ids[:first_window],
        seq.block_ids[first:] + seq.window_ids[first_window:],
    )
