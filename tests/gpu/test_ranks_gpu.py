"""Two ranks on one GPU, which exchange by gloo through host memory: the answer of one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from driver import Answer, complete
from gpu.setups import prompts
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine

Build = Callable[[str], BuiltEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)


def run(build: Build, name: str) -> list[Answer]:
    built = build(name)
    try:
        if built.group is not None:
            shared = torch.cuda.device_count() < built.group.size
            assert built.group.ranks.staged == shared
            assert built.runner.decode.graphs is None
        return complete(built.engine, prompts(), GREEDY)
    finally:
        built.close()


@pytest.mark.parametrize("name", ["moe-ep", "moe-dp"])
def test_experts_of_two_ranks_give_the_bits_of_one(build: Build, name: str) -> None:
    """Sums run at home, in the order of one rank."""
    found, expected = run(build, name), run(build, "moe")
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert [[x.logprobs for x in a.logprobs] for a in found] == [
        [x.logprobs for x in a.logprobs] for a in expected
    ]


def same_so_far(ours: Answer, theirs: Answer, tolerance: float) -> int:
    """Tokens that are the same before the first other one; log-probabilities are near so far."""
    pairs = list(zip(ours.token_ids, theirs.token_ids, strict=True))
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    for a, b in list(zip(ours.logprobs, theirs.logprobs, strict=True))[:same]:
        assert abs(a.logprobs[0] - b.logprobs[0]) < tolerance
    return same


@pytest.mark.parametrize(("two", "one"), [("tp", "eager"), ("gpt-oss-ep", "gpt-oss-eager")])
def test_what_is_added_up_elsewhere_is_nearly_the_same(build: Build, two: str, one: str) -> None:
    """Sums of divided products run in another order, and what travels is rounded to bf16."""
    found, expected = run(build, two), run(build, one)
    same = [same_so_far(*pair, 0.05) for pair in zip(found, expected, strict=True)]
    print(f"the same tokens at the beginning of each answer: {same}")
    assert min(same) >= 1 and sum(same) >= 4 * len(same)
