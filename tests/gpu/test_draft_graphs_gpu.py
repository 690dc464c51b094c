"""Drafts on a GPU: captured graphs, steps launched ahead, and the answers without them."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from driver import Answer, complete
from gpu.setups import prompts
from scheduler_integrity import check_scheduler
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=60, frequency_penalty=0.4)
Build = Callable[[str], BuiltEngine]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(GREEDY, logprobs=1)])
def test_answers_are_those_without_drafts(build: Build, sampling: SamplingParams) -> None:
    expected = tokens(complete(build("no-drafts").engine, prompts(), sampling))
    for name in ("drafts-graphs", "drafts-eager", "drafts-preempted"):
        engine = build(name).engine
        assert isinstance(engine, LanguageEngine)
        assert tokens(complete(engine, prompts(), sampling)) == expected
        stats = engine.stats()
        assert sum(stats.num_drafted) > 0 and (sampling is DRAWN or sum(stats.num_accepted) > 0)
        for prompt, answer in list(zip(prompts(), expected, strict=True))[:2]:  # alone: run ahead
            assert tokens(complete(engine, [prompt], sampling)) == [answer]
        check_scheduler(engine._scheduler)


def test_adaptive_drafts_come_and_go(build: Build) -> None:
    expected = tokens(complete(build("no-drafts").engine, prompts(), GREEDY))
    engine = build("drafts-adaptive").engine
    for _ in range(3):
        assert tokens(complete(engine, prompts(), GREEDY)) == expected
    assert sum(engine.stats().num_drafted) > 0
