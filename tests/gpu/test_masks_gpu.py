"""Structured output on a GPU: answers of every way to run, and what goes to the host."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from cycle_grammar import ANY, HostBytes, add_cycle, follows
from driver import Answer, complete
from gpu.setups import prompts
from scheduler_integrity import check_scheduler
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.sched.sequence import PENDING, Batch

Build = Callable[[str], BuiltEngine]
FREE = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=1)
BOUND = replace(FREE, ignore_eos=False, structured=ANY)


def engine_of(built: BuiltEngine) -> LanguageEngine:
    engine = built.engine
    assert isinstance(engine, LanguageEngine)
    add_cycle(engine, built.runner.model.spec.vocab_size)
    return engine


def mixed(usual: SamplingParams = FREE, bound: SamplingParams = BOUND) -> list[SamplingParams]:
    """Two constrained rows, one of which draws with all that changes logits."""
    changed = replace(
        bound, temperature=0.8, seed=3, top_p=0.95, top_k=40, repetition_penalty=1.2,
        logit_bias={9: 2.0},
    )  # fmt: skip
    return [usual, bound, usual, changed, usual, usual]


def check(answers: list[Answer]) -> list[list[int]]:
    for index in (1, 3):
        assert follows(prompts()[index], answers[index].token_ids)
        assert len(answers[index].token_ids) > 4
    return [answer.token_ids for answer in answers]


def test_every_way_gives_the_answers_of_the_plain_loop(build: Build) -> None:
    for plain, *others in (
        ("invariant-plain", "invariant"),
        ("plain", "overlap", "graphs-overlap"),
    ):
        expected = check(complete(engine_of(build(plain)), prompts(), mixed()))
        for name in others:
            engine = engine_of(build(name))
            for _ in range(2):
                assert check(complete(engine, prompts(), mixed())) == expected
            check_scheduler(engine._scheduler)


def test_free_rows_are_answered_as_without_neighbours_that_are_constrained(build: Build) -> None:
    engine = engine_of(build("invariant"))
    alone = complete(engine, prompts(), FREE)
    beside = check(complete(engine, prompts(), mixed()))
    assert [beside[i] for i in (0, 2, 4, 5)] == [alone[i].token_ids for i in (0, 2, 4, 5)]


def test_drafts_are_verified_under_their_masks(build: Build) -> None:
    usual, bound = (replace(params, logprobs=None) for params in (FREE, BOUND))
    expected = check(complete(engine_of(build("no-drafts")), prompts(), mixed(usual, bound)))
    for name in ("drafts-graphs", "drafts-adaptive"):
        engine = engine_of(build(name))
        assert check(complete(engine, prompts(), mixed(usual, bound))) == expected


def test_logits_stay_on_the_device_and_steps_overlap(build: Build) -> None:
    """What goes to the host is a few numbers a row, and all rows run ahead of their tokens."""
    built = build("default")
    engine, vocab_size = engine_of(built), built.runner.model.spec.vocab_size
    complete(engine, prompts(), mixed())  # kernels are loaded
    launch, num_ahead = built.runner.launch, [0, 0]

    def counted(batch: Batch) -> object:
        for seq, _ in batch.items:
            bound = seq.request.task.sampling.structured is not None
            num_ahead[bound] += seq.token_ids[-1] == PENDING
        return launch(batch)

    built.runner.launch = counted  # type: ignore[method-assign, assignment]
    steps = engine.stats().num_steps
    with HostBytes() as sent:
        check(complete(engine, prompts(), mixed()))
    steps = engine.stats().num_steps - steps
    assert 0 < sent.num_bytes < steps * 6 * 100 < steps * vocab_size * 4
    assert num_ahead[False] == 4 * 19 and num_ahead[True] > 2 * 10


def test_a_launch_and_its_late_rows_never_wait(build: Build) -> None:
    """The host waits for the tokens of the step before, and for nothing else."""
    built = build("default")
    engine, runner = engine_of(built), built.runner
    complete(engine, prompts(), mixed())
    sample_late, launch = runner.sample_late, runner.launch

    def checked(call: Callable) -> Callable:
        def run(given: object) -> object:
            decodes = not isinstance(given, Batch) or given.num_tokens == len(given.items)
            torch.cuda.set_sync_debug_mode("error" if decodes else "default")
            try:
                return call(given)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        return run

    runner.sample_late = checked(sample_late)  # type: ignore[method-assign]
    runner.launch = checked(launch)  # type: ignore[method-assign]
    check(complete(engine, prompts(), mixed()))


@pytest.mark.parametrize("name", ["mixed-qwen3"])
def test_prompts_come_beside_rows_whose_masks_follow(build: Build, name: str) -> None:
    """Several graphs in a step write their logits to one place."""
    expected = check(complete(engine_of(build(f"{name}-eager")), prompts(), mixed()))
    engine, found = engine_of(build(name)), []
    for _ in range(2):
        found = check(complete(engine, prompts(), mixed()))
        assert found == expected
