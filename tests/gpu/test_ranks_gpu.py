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
OUT = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=OUT, ignore_eos=True, logprobs=0)


def run(build: Build, name: str) -> list[Answer]:
    """The answers; ranks replay their parts of steps by graphs where these are switched on."""
    built = build(name)
    try:
        pieces, decode = built.runner.plain.graphs, built.runner.decode.graphs
        if built.group is not None:
            shared = torch.cuda.device_count() < built.group.size
            assert built.group.ranks.staged == shared
            assert (pieces is None) == name.endswith("eager")
            assert (decode is None) == (name.endswith("eager") or name == "moe-dp")
        found = complete(built.engine, prompts(), GREEDY)
        if built.group is not None and pieces is not None:
            decoded = 0 if decode is None else decode.report.steps
            assert pieces.num_replayed + decoded >= OUT
        return found
    finally:
        built.close()


@pytest.mark.parametrize(
    ("two", "one"),
    [("moe-ep", "moe"), ("moe-dp", "moe"), ("tp", "eager"), ("tp-eager", "eager")],
)
def test_two_ranks_give_the_bits_of_one(build: Build, two: str, one: str) -> None:
    """Experts' results are added up at home, divided products in an order that ranks keep."""
    found, expected = run(build, two), run(build, one)
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


def test_what_is_added_up_elsewhere_is_nearly_the_same(build: Build) -> None:
    """The experts of GPT-OSS have parts of sums in fp32, and what travels is rounded to bf16."""
    found, expected = run(build, "gpt-oss-ep"), run(build, "gpt-oss-eager")
    same = [same_so_far(*pair, 0.05) for pair in zip(found, expected, strict=True)]
    print(f"the same tokens at the beginning of each answer: {same}")
    assert min(same) >= 1 and sum(same) >= 4 * len(same)
