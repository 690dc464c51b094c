"""Steps overlap while requests follow grammars: same answers as one step after the other."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from cycle_grammar import CycleRow
from draft_heads import forgetful, save_head
from driver import Answer, assert_same, build, complete
from random_model import EOS, PIECES, vocab
from sampling_rows import mask_of
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import (
    FinishReason,
    FreeText,
    ReasoningMarks,
    SamplingParams,
    StructuredOutput,
)
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.launched import LaunchedStep
from tokenmill.engine.runner import ModelRunner
from tokenmill.engine.sampling.grammar_pool import GrammarPool, GrammarRow
from tokenmill.engine.sampling.sampler import Sampler, state_of
from tokenmill.engine.sampling.step_sampler import StepSampler
from tokenmill.sched.sequence import PENDING, Batch, Sequence

FREE = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True, logprobs=2)
KINDS = [
    StructuredOutput("regex", "[a-z0-9 ]{5,12}"),
    StructuredOutput("json_schema", '{"type": "array", "items": {"type": "boolean"}}'),
    StructuredOutput("choice", '["red", "green", "blue"]'),
]
END = PIECES.index(b"</")  # of free text before a constraint
REASONS = replace(KINDS[0], after=FreeText(END, banned=(EOS,)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    shape = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}
    model = make_model("llama", vocab_size=len(PIECES), eos_token_id=EOS, **shape)
    model = forgetful(tame(model, 0.3))
    return save(model, folder / "model"), save_head(model, folder / "head.safetensors")


def params() -> list[SamplingParams]:
    """Every kind greedily and drawn, what else changes logits, reasoning first, and free rows."""
    found = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, structured=kind, logprobs=1)
        for i, (kind, t) in enumerate(itertools.product(KINDS, [0.0, 1.0]))
    ]
    changed = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "logit_bias": {101: 3.0}}
    found.append(replace(found[1], top_k=9, top_p=0.9, **changed))
    found += [replace(found[1], seed=seed) for seed in (7, 8)]  # as n = 2 does
    biased = SamplingParams(max_tokens=60, structured=REASONS, logit_bias={END: 5.0})
    found += [replace(biased, seed=seed) for seed in range(2)]
    marks = ReasoningMarks(((5, END),), 0, (6, END))
    spent = replace(biased, seed=9, logit_bias=None, thinking_token_budget=6, reasoning=marks)
    drawn = SamplingParams(
        seed=3, max_tokens=25, min_tokens=4, frequency_penalty=0.5, logit_bias={EOS: 2.0}
    )
    return [*found, spent, FREE, replace(FREE, temperature=1.0, seed=4), drawn]


def prompts() -> list[list[int]]:
    source = random.Random(5)
    lens = itertools.cycle((4, 60, 17, 9, 33))
    return [[source.randrange(2, len(PIECES)) for _ in range(next(lens))] for _ in params()]


def make(tiny: tuple[Path, Path], overlap: bool, **options: Any) -> LanguageEngine:
    options = {"chunked": True, "prefix_cache": True, "num_blocks": 200} | options
    engine = build(tiny[0], "fp32", vocab=vocab(), overlap=overlap, **options).engine
    assert isinstance(engine, LanguageEngine)
    return engine


@pytest.fixture(scope="module")
def expected(tiny: tuple[Path, Path]) -> list[Answer]:
    answers = complete(make(tiny, overlap=False), prompts(), params())
    assert b"".join(PIECES[t] for t in answers[4].token_ids) in (b"red", b"green", b"blue")
    return answers


class Counting:
    """A launcher that counts items launched before their newest token was known."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.num_free, self.num_constrained = inner, 0, 0
        self.late: Callable[[LaunchedStep], None] = inner.sample_late

    def launch(self, batch: Batch) -> Any:
        for seq, _ in batch.items:
            if seq.token_ids[-1] == PENDING:
                constrained = seq.request.task.sampling.structured is not None
                self.num_constrained += constrained
                self.num_free += not constrained
        return self.inner.launch(batch)

    def run(self, batch: Batch) -> Any:
        return self.inner.run(batch)

    def sample_late(self, launched: LaunchedStep) -> None:
        self.late(launched)


def count(engine: LanguageEngine) -> Counting:
    counting = Counting(engine._runner)
    engine._launcher = engine._runner = counting
    return counting


def test_one_constrained_request_leaves_all_overlapped(tiny: tuple[Path, Path]) -> None:
    bound = SamplingParams(temperature=0.0, max_tokens=20, structured=KINDS[0])
    free = replace(FREE, max_tokens=20)
    found = {}
    for name, first in (("free", free), ("bound", bound)):
        counting = count(engine := make(tiny, overlap=True, prefix_cache=False))
        answers = complete(engine, prompts()[:5], [first, *[free] * 4])
        found[name] = counting.num_free, counting.num_constrained, len(answers[0].token_ids)
    # Of 20 tokens the last one is not waited for, and the first has a known one before it.
    assert found["free"] == (5 * 19, 0, 20)
    assert found["bound"][0] == 4 * 19 and found["bound"][1] >= found["bound"][2] - 1 > 4


@pytest.mark.parametrize("options", [{}, {"num_blocks": 9}, {"chunked": False}], ids=str)
def test_answers_are_those_of_one_step_after_the_other(
    tiny: tuple[Path, Path], expected: list[Answer], options: dict[str, Any]
) -> None:
    counting = count(engine := make(tiny, overlap=True, **options))
    assert_same(complete(engine, prompts(), params()), expected)
    assert counting.num_constrained > 60
    check_scheduler(engine._scheduler)
    stats = engine.stats()
    assert stats.num_kv_blocks_used == 0 and (stats.num_preemptions > 0) == (
        "num_blocks" in options
    )
    assert not engine._structured.num_open


def on_device(engine: LanguageEngine, monkeypatch: pytest.MonkeyPatch) -> StepSampler:
    """Sample as on a GPU; the host's sampler is not to be used."""
    runner = engine._runner
    assert isinstance(runner, ModelRunner)
    runner.sampler.on_gpu = True
    monkeypatch.setattr(StepSampler, "mark", lambda self: None)
    monkeypatch.setattr(Sampler, "__call__", lambda *_: pytest.fail("logits went to the host"))
    return runner.sampler


@pytest.mark.parametrize("overlap", [False, True])
def test_no_logits_go_to_the_host(
    tiny: tuple[Path, Path],
    expected: list[Answer],
    overlap: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_device(engine := make(tiny, overlap), monkeypatch)
    found = complete(engine, prompts(), params())
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for mine, other in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert mine.token_ids == other.token_ids and mine.rank == other.rank
            assert mine.logprobs == pytest.approx(other.logprobs, abs=1e-4)


@pytest.mark.parametrize("adaptive", [False, True])
def test_drafts_with_masks_on_the_device(
    tiny: tuple[Path, Path],
    expected: list[Answer],
    adaptive: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Drafts are verified under their masks; steps without any overlap."""
    engine = make(tiny, overlap=True, mtp=3, draft=tiny[1])
    on_device(engine, monkeypatch)
    if adaptive:
        assert engine.drafting is not None
        turns = itertools.cycle((*[0] * 6, 2, 3))
        monkeypatch.setattr(engine.drafting, "choose", lambda: next(turns))
    counting = count(engine)
    found = complete(engine, prompts(), params())
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert sum(engine.stats().num_accepted) > 0 and (counting.num_constrained > 9) == adaptive


def test_only_constrained_rows_are_sampled_again(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    sampler = on_device(engine := make(tiny, overlap=True, prefix_cache=False), monkeypatch)
    sampled: list[tuple[int, ...]] = []
    launch = sampler._late.launch

    def noted(logits: torch.Tensor, rows: list[Any], last_ids: torch.Tensor) -> Any:
        sampled.append(tuple(logits.shape))
        return launch(logits, rows, last_ids)

    monkeypatch.setattr(sampler._late, "launch", noted)
    bound = SamplingParams(temperature=0.0, max_tokens=20, structured=KINDS[0])
    complete(engine, prompts()[:5], [bound, *[FREE] * 4])
    assert sampled and set(sampled) == {(1, len(PIECES))}


def test_it_goes_on_where_another_engine_left_it(
    tiny: tuple[Path, Path], expected: list[Answer]
) -> None:
    for index in (1, 3, 9, 11):
        for known in (1, len(expected[index].token_ids) // 2):
            engine = make(tiny, overlap=True)
            tokens = expected[index].token_ids[:known]
            engine.submit(
                Request("r", Generate(prompts()[index], params()[index], output_token_ids=tokens))
            )
            while engine.has_work():
                for output in engine.step():
                    tokens += output.token_ids
            assert tokens == expected[index].token_ids


class Impatient:
    """Masks that are never there in the step that asks for them."""

    def __init__(self, pool: GrammarPool) -> None:
        self._pool = pool

    def wait(self, rows: list[GrammarRow], runs: object = None) -> None:
        """Nobody has patience."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def test_who_has_no_mask_sits_out_the_step(tiny: tuple[Path, Path], expected: list[Answer]) -> None:
    engine = make(tiny, overlap=True)
    structured = engine._structured
    assert structured._pool is not None
    structured._pool = cast("GrammarPool", Impatient(structured._pool))
    found = complete(engine, prompts(), params())
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    check_scheduler(engine._scheduler)


def test_a_token_outside_the_grammar_ends_its_request_alone(
    tiny: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    counting = count(engine := make(tiny, overlap=True))
    late, num_late = counting.late, itertools.count()

    def wrong(launched: LaunchedStep) -> None:
        if next(num_late) == 3 and launched.late is not None:
            state_of(launched.late.rows[0]).mask = mask_of([PIECES.index(b"a")])
        late(launched)

    counting.late = wrong
    digits = SamplingParams(temperature=0.0, structured=StructuredOutput("regex", "[0-9]{9,20}"))
    odd, fine = complete(engine, prompts()[:2], [digits, FREE])
    (end,) = odd.terminals
    assert (end.finish_reason, end.stop_reason) == (FinishReason.ERROR, "grammar")
    assert "does not continue" in (end.error or "") and len(odd.token_ids) == 4
    assert len(fine.token_ids) == 30
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0 and not engine._structured.num_open


def test_a_step_whose_late_rows_fail_runs_again(
    tiny: tuple[Path, Path], expected: list[Answer]
) -> None:
    counting = count(engine := make(tiny, overlap=True))
    late, num_late = counting.late, itertools.count()

    def failing(launched: LaunchedStep) -> None:
        if next(num_late) in (2, 3, 9):
            raise RuntimeError("boom")
        late(launched)

    counting.late = failing
    assert_same(complete(engine, prompts(), params()), expected)
    check_scheduler(engine._scheduler)


def test_an_interrupted_wait_for_masks_leaves_the_engine_whole(tiny: tuple[Path, Path]) -> None:
    counting = count(engine := make(tiny, overlap=True))
    late, num_late = counting.late, itertools.count()

    def interrupted(launched: LaunchedStep) -> None:
        if next(num_late) == 4:
            raise KeyboardInterrupt
        late(launched)

    counting.late = interrupted
    asked = list(zip(prompts()[:4], [*params()[1:4], FREE], strict=True))
    for index, (prompt, sampling) in enumerate(asked):
        engine.submit(Request(str(index), Generate(prompt, sampling), arrival_ns=index))
    found = []
    with pytest.raises(KeyboardInterrupt):
        while True:
            found += engine.step()
    known = sum(len(output.token_ids) for output in found)
    while engine.has_work():
        found += engine.step()
    ends = [output.request_id for output in found if output.finish_reason is not None]
    assert sorted(ends) == ["0", "1", "2", "3"] and known > 4
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0 and not engine._structured.num_open


def test_random_trouble_ends_every_request_once(tiny: tuple[Path, Path]) -> None:
    """Aborts and deadlines while a step with masks is under way."""
    chance, engine = random.Random(2), make(tiny, overlap=True, num_blocks=24)
    submitted, ended = [], []
    for step in range(150):
        for _ in range(chance.choice((0, 0, 1, 2))):
            sampling = replace(chance.choice(params()), max_tokens=chance.randint(4, 20))
            name, prompt = f"r{len(submitted)}", chance.choice(prompts())
            engine.submit(Request(name, Generate(prompt, sampling), arrival_ns=step))
            submitted.append(name)
        if submitted and chance.random() < 0.2:
            engine.abort(chance.choice(submitted[-6:]))
        ended += [o.request_id for o in engine.step() if o.finish_reason is not None]
    while engine.has_work():
        ended += [o.request_id for o in engine.step() if o.finish_reason is not None]
    assert sorted(ended) == sorted(submitted)
    check_scheduler(engine._scheduler)
    assert engine.stats().num_kv_blocks_used == 0 and not engine._structured.num_open


def test_the_table_of_masks_stops_at_a_forbidden_draft() -> None:
    row = CycleRow(masks := [torch.tensor([k]).numpy() for k in range(7)])
    seq = Sequence(Request("r", Generate([3], FREE)), (0, 0, 0), 99, frozenset())
    assert row.masks(seq, [11, 5, 7]) == [masks[4], masks[5], masks[6]]
