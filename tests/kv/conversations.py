"""Conversations with engines whose device holds few of their blocks."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver import LOGPROB_BOUND, Answer, build
from scheduler_integrity import check_host_tier, check_scheduler
from tokenmill.core.images import ImageSpan
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine

GREEDY = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, logprobs=2)
FEW = 22  # blocks of 16 tokens: two conversations of six
NUM_CONVERSATIONS, NUM_TURNS = 6, 3


def converse(built: BuiltEngine, salts: tuple[str, ...] = ("",), at_once: int = 2) -> list[Answer]:
    """Conversations whose turns begin with all that was said before, `at_once` at a time."""
    source = random.Random(5)
    spoken = [[source.randrange(3, 60) for _ in range(40)] for _ in range(NUM_CONVERSATIONS)]
    answers = []
    for turn in range(NUM_TURNS):
        for first in range(0, NUM_CONVERSATIONS, at_once):
            some = range(first, first + at_once)
            found = ask(
                built, [(spoken[i], salts[i % len(salts)]) for i in some], f"{turn}-{first}"
            )
            answers += found
            for i, answer in zip(some, found, strict=True):
                said = [source.randrange(3, 60) for _ in range(20)]
                spoken[i] = spoken[i] + answer.token_ids + said
    return answers


def ask(
    built: BuiltEngine,
    prompts: list[tuple[list[int], str]],
    name: str = "",
    images: list[tuple[ImageSpan, ...]] | None = None,
    sampling: SamplingParams = GREEDY,
) -> list[Answer]:
    engine = built.engine
    assert isinstance(engine, LanguageEngine)
    answers = {f"{name}-{i}": Answer() for i in range(len(prompts))}
    for i, (prompt, salt) in enumerate(prompts):
        own = images[i] if images else ()
        request: Request = Request(
            f"{name}-{i}", Generate(list(prompt), sampling, cache_salt=salt, images=own)
        )
        engine.submit(request)
    while engine.has_work():
        for output in engine.step():
            answers[output.request_id].add(output)
        check_scheduler(engine._scheduler)
    if engine.tiers is not None:
        check_host_tier(engine.tiers.host)
    return list(answers.values())


def engine(folder: Path, offloading: str | None = None, **options: Any) -> BuiltEngine:
    options = {"num_blocks": FEW, "overlap": False} | options
    return build(folder, "fp32", chunked=True, prefix_cache=True, offloading=offloading, **options)


def hits(built: BuiltEngine, tier: str = "host") -> float:
    return built.engine.stats().tiers[f"{tier}_hit_tokens"]


def grow(built: BuiltEngine) -> list[Answer]:
    """Prompts that grow by texts that nobody generated, as many at once as preempt each other."""
    source = random.Random(7)
    texts = [[source.randrange(3, 60) for _ in range(144)] for _ in range(8)]
    sampling = replace(GREEDY, max_tokens=15)
    answers = []
    for length, salts in ((48, ("",)), (144, ("",)), (48, ("a", "b"))):
        asked = [(text[:length], salts[i % len(salts)]) for i, text in enumerate(texts)]
        answers += ask(built, asked, f"{length}{salts[0]}", sampling=sampling)
    return answers


def assert_same_words(answers: list[Answer], expected: list[Answer]) -> None:
    """The same tokens, and log-probabilities but for their last bits.

    A step that decodes gives KV other last bits than one that computes a prompt, so that tokens
    which are computed again may differ by that from those that were kept.
    """
    assert [a.token_ids for a in answers] == [a.token_ids for a in expected]
    for answer, other in zip(answers, expected, strict=True):
        assert [e.finish_reason for e in answer.terminals] == [FinishReason.LENGTH]
        for mine, theirs in zip(answer.logprobs, other.logprobs, strict=True):
            assert mine.logprobs == pytest.approx(theirs.logprobs, abs=LOGPROB_BOUND["fp32"])
