"""Drafts on a GPU: the same answers with and without them, in graphs and out of them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from driver import Answer, complete
from gpu.setups import random_prompts
from tokenmill.core.types import EngineStats, ReasoningMarks, SamplingParams
from tokenmill.engine.build import BuiltEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
# The reasoning ends behind ten tokens, and three are forced.
THINKS = replace(
    GREEDY, thinking_token_budget=10, reasoning=ReasoningMarks(((61, 62, 60),), 0, (63, 61))
)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
Build = Callable[[str], BuiltEngine]


def answers(built: BuiltEngine, sampling: SamplingParams) -> tuple[list[Answer], EngineStats]:
    prompts = random_prompts((1, 9, 64, 100, 33), 64, 2)
    return complete(built.engine, prompts, sampling), built.engine.stats()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, THINKS], ids=["greedy", "drawn", "thinks"])
@pytest.mark.parametrize(
    "way", ["eager-drafts", "graphs-drafts", "eager-eagle3", "graphs-eagle3", "graphs-ngram"]
)
def test_same_tokens_with_drafts(build: Build, way: str, sampling: SamplingParams) -> None:
    """Batch invariance makes logits the same for one row and for four."""
    expected, _ = answers(build(f"llama-{way.split('-')[0]}"), sampling)
    found, stats = answers(build(f"llama-{way}"), sampling)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    if sampling is THINKS:
        assert any(a.token_ids[10:13] == [61, 62, 60] for a in found)
    if sampling is GREEDY or "drafts" in way:
        assert len(stats.num_accepted) == 3 and 0 < stats.num_accepted[0] < stats.num_drafted[0]


def test_one_sequence_has_the_same_logits_with_drafts(build: Build) -> None:
    """Up to four rows of one sequence go through kernels that keep each row's bits."""
    scored = replace(GREEDY, logprobs=1, max_tokens=200)
    found = []
    for depth in (0, 1, 2, 3):
        engine = build(f"llama-depth-{depth}").engine
        answers = [complete(engine, [[3] * n], scored)[0] for n in (5, 70)]
        found.append([(a.token_ids, a.logprobs) for a in answers])
        assert not depth or engine.stats().num_accepted[0] > 0
    assert found[0] == found[1] == found[2] == found[3]


def test_cublas_kernels_nearly_agree(build: Build) -> None:
    expected, _ = answers(build("llama-fast"), GREEDY)
    found, stats = answers(build("llama-fast-drafts"), GREEDY)
    pairs = [
        a == b
        for f, e in zip(found, expected, strict=True)
        for a, b in zip(f.token_ids[:8], e.token_ids[:8], strict=True)
    ]
    assert sum(pairs) > 0.8 * len(pairs) and stats.num_accepted[0] > 0
