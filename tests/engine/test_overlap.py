"""Overlapped steps: launches that fail, memory that runs out, requests that need the host."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from driver import Answer, complete
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig, Setup
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, OutOfMemory, SamplingParams, StepResult
from tokenmill.engine.build import build_engine
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.engine import LanguageEngine, PendingStep
from tokenmill.sched.sequence import PENDING, Batch

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(make_model("llama", max_position_embeddings=512), tmp_path_factory.mktemp("tiny"))


def build(folder: Path, overlap: bool = True, ngrams: int = 0) -> LanguageEngine:
    return build_engine(
        resolve_setup(
            Setup(
                ModelConfig(
                    str(folder), dtype="fp32", device="cpu", draft="ngram" if ngrams else None
                ),
                CacheConfig(num_blocks=64),
                SchedulerConfig(max_num_batched_tokens=32, max_num_seqs=8),
                ExecutionConfig(overlap=overlap, mtp=ngrams, mtp_adaptive=False),
            )
        )
    ).engine


def prompts() -> list[list[int]]:
    source = random.Random(1)
    return [[source.randrange(64) for _ in range(n)] for n in (3, 20, 45, 7, 30)]


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


class Faulty:
    """A launcher whose launches, or waits for them, raise by turn."""

    def __init__(self, inner: Any, launches: dict[int, Exception], waits: dict[int, Exception]):
        self.inner, self.launches, self.waits = inner, launches, waits
        self.turn = 0
        self.pending = 0  # items launched before their newest token was known

    def launch(self, batch: Batch) -> PendingStep:
        self.turn += 1
        self.pending += sum(seq.token_ids[-1] == PENDING for seq, _ in batch.items)
        if self.turn in self.launches:
            raise self.launches[self.turn]
        launched = self.inner.launch(batch)
        return FaultyWait(self.waits[self.turn]) if self.turn in self.waits else launched

    def run(self, batch: Batch) -> StepResult:
        return self.launch(batch).wait()


class FaultyWait:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def wait(self) -> StepResult:
        raise self.error


def with_faults(
    engine: LanguageEngine,
    launches: dict[int, Exception] | None = None,
    waits: dict[int, Exception] | None = None,
) -> Faulty:
    faulty = Faulty(engine._runner, launches or {}, waits or {})
    engine._launcher = engine._runner = faulty  # type: ignore[assignment]
    return faulty


def test_steps_are_launched_before_their_tokens_are_known(folder: Path) -> None:
    expected = tokens(complete(build(folder, overlap=False), prompts(), GREEDY))
    engine = build(folder)
    faulty = with_faults(engine)
    assert tokens(complete(engine, prompts(), GREEDY)) == expected
    assert faulty.pending > 50


def test_steps_overlap_while_no_draft_is_found(folder: Path) -> None:
    """Drafts that are looked up cost nothing where nothing repeats itself."""
    drawn = SamplingParams(temperature=3.0, max_tokens=40, ignore_eos=True, seed=5)
    same = replace(GREEDY, logit_bias={7: 100.0})
    for sampling, repeats in ((drawn, False), (same, True)):
        plain, drafting = build(folder), build(folder, ngrams=3)
        launches = with_faults(plain), with_faults(drafting)
        expected = tokens(complete(plain, prompts(), sampling))
        assert tokens(complete(drafting, prompts(), sampling)) == expected
        without, overlapped = (faulty.pending for faulty in launches)
        check_scheduler(drafting._scheduler)
        if repeats:
            assert sum(drafting.stats().num_accepted) > 20
        else:
            assert overlapped > 0.5 * without


@pytest.mark.parametrize("overlap", [False, True])
def test_out_of_memory_runs_again_in_smaller_steps(folder: Path, overlap: bool) -> None:
    expected = tokens(complete(build(folder, overlap=False), prompts(), GREEDY))
    engine = build(folder, overlap)
    engine_faults = {turn: OutOfMemory("CUDA out of memory") for turn in (1, 4, 9)}
    if overlap:
        with_faults(engine, engine_faults)
    else:
        engine._runner = Faulty(engine._runner, engine_faults, {})
    assert tokens(complete(engine, prompts(), GREEDY)) == expected
    assert engine.stats().num_preemptions > 0
    check_scheduler(engine._scheduler)


def test_a_step_that_fails_once_runs_again(folder: Path) -> None:
    expected = tokens(complete(build(folder, overlap=False), prompts(), GREEDY))
    engine = build(folder)
    with_faults(engine, launches={6: RuntimeError("boom"), 13: RuntimeError("boom")})
    assert tokens(complete(engine, prompts(), GREEDY)) == expected
    check_scheduler(engine._scheduler)


def test_a_failed_step_ends_its_requests_and_no_other(folder: Path) -> None:
    engine = build(folder)
    with_faults(engine, waits={6: RuntimeError("boom")})
    answers = complete(engine, prompts(), GREEDY)
    ends = [answer.terminals[0].finish_reason for answer in answers]
    assert FinishReason.ERROR in ends
    failed = [a.terminals[0] for a in answers if a.terminals[0].finish_reason == "error"]
    assert all("boom" in (output.error or "") for output in failed)
    later = complete(engine, prompts(), GREEDY)
    expected = complete(build(folder, overlap=False), prompts(), GREEDY)
    assert tokens(later) == tokens(expected)
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0


def test_a_request_that_needs_the_host_runs_in_the_plain_loop(folder: Path) -> None:
    engine = build(folder)
    faulty = with_faults(engine)
    asks = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=0)
    (answer,) = complete(engine, prompts()[:1], asks)
    assert faulty.pending == 0 and answer.prompt_logprobs is not None
    complete(engine, prompts()[:1], GREEDY)
    assert faulty.pending > 0


def test_an_interrupted_launch_leaves_the_engine_whole(folder: Path) -> None:
    engine = build(folder)
    with_faults(engine, {3: KeyboardInterrupt()})  # type: ignore[dict-item]
    engine.submit(Request("r", Generate(prompts()[1], GREEDY)))
    engine.submit(Request("later", Generate(prompts()[2], GREEDY)))
    with pytest.raises(KeyboardInterrupt):
        for _ in range(5):
            engine.step()
    found = []
    while engine.has_work():
        found += engine.step()
    ends = {o.request_id: o.finish_reason for o in found if o.finish_reason is not None}
    assert set(ends) <= {"r", "later"} and FinishReason.ERROR in ends.values()
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0
