"""How many tokens a step has that prompts share with requests that decode."""

from __future__ import annotations

from typing import Any

import pytest

from scheduler_cases import distinct, make, step
from tokenmill.sched.scheduler import Scheduler

LIMITS: dict[str, Any] = {"num_blocks": 400, "max_num_batched_tokens": 256, "max_num_seqs": 16}
LEAST = 80


def busy(num_decoding: int, prompts: list[int], **config: Any) -> Scheduler:
    """So many requests that decode, then prompts of these lengths."""
    scheduler = make(**(LIMITS | config))
    for number in range(num_decoding):
        scheduler.add(distinct(f"decode {number}", 2))
    if num_decoding:
        step(scheduler)
    for number, length in enumerate(prompts):
        scheduler.add(distinct(f"prompt {number}", length))
    return scheduler


def test_alone_prompts_have_the_whole_budget() -> None:
    assert step(busy(0, [200, 100], least_shared_tokens=LEAST)) == {"prompt 0": 200, "prompt 1": 56}


def test_a_few_that_decode_get_short_steps() -> None:
    """Two requests are less than the least; the rest of the first prompt comes before the next."""
    scheduler = busy(1, [100, 9], least_shared_tokens=LEAST)
    assert step(scheduler) == {"decode 0": 1, "prompt 0": 96 - 1}
    assert step(scheduler) == {"decode 0": 1, "prompt 0": 5, "prompt 1": 9}
    assert step(busy(1, [100], least_shared_tokens=LEAST)) == {"decode 0": 1, "prompt 0": 79}


def test_the_more_are_here_the_more_tokens_a_step_has() -> None:
    """32 for each, waiting ones as well, up to the budget."""
    five = step(busy(4, [300], least_shared_tokens=LEAST))
    assert sum(five.values()) == 5 * 32
    nine = step(busy(4, [300, 1, 1, 1, 1], least_shared_tokens=LEAST))
    assert sum(nine.values()) == 256


@pytest.mark.parametrize("config", [{}, {"least_shared_tokens": LEAST, "chunked_prefill": False}])
def test_otherwise_a_step_has_the_budget(config: dict[str, Any]) -> None:
    assert step(busy(1, [200], **config)) == {"decode 0": 1, "prompt 0": 200}


def test_lack_of_memory_bounds_short_steps_too() -> None:
    scheduler = busy(1, [200], least_shared_tokens=LEAST)
    scheduler.resume(16, 1)
    assert step(scheduler) == {"decode 0": 1, "prompt 0": 15}
