"""A step that needs more memory than the GPU has: smaller steps, and the same answers."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from driver import complete
from scheduler_integrity import check_scheduler
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine

Build = Callable[[str], BuiltEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
SLACK = 24 * 2**20  # bytes: a step of 15,000 tokens takes more, one of 2,000 less


@contextmanager
def little_memory() -> Iterator[None]:
    """In it torch can allocate some megabytes, whatever earlier tests have left."""
    gc.collect()
    torch.cuda.empty_cache()
    total, held = torch.cuda.get_device_properties(0).total_memory, torch.cuda.memory_reserved()
    torch.cuda.set_per_process_memory_fraction(held / total)
    fill = fill_holes()
    torch.cuda.set_per_process_memory_fraction((held + SLACK) / total)
    try:
        yield
    finally:
        fill.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


def fill_holes() -> list[torch.Tensor]:
    """What is free between tensors, in blocks that torch can still give."""
    found, size = [], 2**30
    while size >= 2**20:
        try:
            found.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    return found


def answers(engine: LanguageEngine, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    asked = [[source.randrange(512) for _ in range(1900)] for _ in range(8)]
    found = complete(engine, asked, GREEDY)
    ends = [(answer.terminals[0].finish_reason, answer.terminals[0].error) for answer in found]
    assert ends == [("length", None)] * len(asked)
    return [answer.token_ids for answer in found]


def test_a_step_that_does_not_fit_runs_in_parts(build: Build) -> None:
    one, other = (build("large-steps").engine for _ in range(2))
    assert isinstance(one, LanguageEngine) and isinstance(other, LanguageEngine)
    expected = [answers(one, seed) for seed in (1, 2)]
    with little_memory():
        assert answers(other, 1) == expected[0]
    assert other.stats().num_preemptions > 0, "nothing was too large"
    assert answers(other, 2) == expected[1]
    check_scheduler(other._scheduler)
    assert other._scheduler.pool.num_used == 0
