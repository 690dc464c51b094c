"""A budget of reasoning in the engine: the same answer in every mode, and the one done by hand."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draft_heads import forgetful, save_head
from driver import Answer, assert_same, build, complete
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import FinishReason, ReasoningMarks, SamplingParams
from tokenmill.engine.engine import LanguageEngine
from tokenmill.sched.sequence import PENDING, Batch

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
WIDE = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}
OPEN = 63  # what opens a block where the prompt has not
CLOSE_AT = 6  # where the answer without a budget has the token that ends its reasoning
BUDGETS = [0, 1, 3, 6, 9, 0, 4, 12]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("llama")
    model = forgetful(tame(make_model("llama", **WIDE), 0.3))
    return save(model, folder / "model"), save_head(model, folder / "head.safetensors")


def prompts() -> list[list[int]]:
    source = random.Random(3)
    return [[source.randrange(60) for _ in range(n)] for n in (1, 15, 16, 33, 40, 7, 21, 3)]


def make(folder: Path, num_blocks: int = 400, **options: Any) -> LanguageEngine:
    options = {"chunked": True, "prefix_cache": True} | options
    return build(folder, "fp32", num_blocks=num_blocks, **options).engine


def limited(free: list[Answer]) -> list[SamplingParams]:
    """Two of the answers open their reasoning themselves, or do not."""
    params = []
    for index, (answer, budget) in enumerate(zip(free, BUDGETS, strict=True)):
        end = (answer.token_ids[CLOSE_AT], 5) if index % 2 else (answer.token_ids[CLOSE_AT],)
        marks = ReasoningMarks((end,), 0, (OPEN, end[0]))
        if index in (5, 6):
            opening = answer.token_ids[0] if index == 5 else OPEN
            marks = replace(marks, opened=None, tag_ids=(opening, end[0]))
        params.append(replace(GREEDY, thinking_token_budget=budget, reasoning=marks))
    return params


def by_hand(engine: LanguageEngine, prompt: list[int], free: Answer, p: SamplingParams) -> Answer:
    """The answer as another engine would go on after what is forced."""
    assert p.reasoning is not None and p.thinking_token_budget is not None
    tokens, (opening, close) = free.token_ids, p.reasoning.tag_ids or (0, 0)
    first = 0 if p.reasoning.opened is not None else 1
    if first and tokens[0] != opening:
        return free
    end = first + p.thinking_token_budget
    if close in tokens[first:end]:
        return free
    known = tokens[:end] + list(p.reasoning.forced[0])
    params = replace(p, thinking_token_budget=None)
    engine.submit(Request("rest", Generate(prompt, params, output_token_ids=known)))
    rest = Answer()
    while engine.has_work():
        for output in engine.step():
            rest.add(output)
    return Answer(known + rest.token_ids, free.logprobs[:end], terminals=rest.terminals)


def test_every_mode_gives_the_answer_done_by_hand(tiny: tuple[Path, Path]) -> None:
    folder, head = tiny
    alone = make(folder, prefix_cache=False)
    free = [complete(alone, [prompt], GREEDY)[0] for prompt in prompts()]
    params = limited(free)
    each = zip(prompts(), free, params, strict=True)
    expected = [by_hand(alone, *one) for one in each]
    golden = complete(alone, prompts(), params)
    assert [a.token_ids for a in golden] == [a.token_ids for a in expected]
    assert sum(a.token_ids != b.token_ids for a, b in zip(golden, free, strict=True)) == 5
    modes: list[dict[str, Any]] = [
        {"overlap": True},
        {"overlap": True, "num_blocks": 14},
        {"mtp": 3, "draft": head},
        {"mtp": 1, "draft": head, "num_blocks": 14},
        {"mtp": 3, "draft": Path("ngram")},
        {"mtp": 3, "draft": Path("ngram"), "overlap": True},
    ]
    for mode in modes:
        engine = make(folder, **mode)
        assert_same(complete(engine, prompts(), params), golden)
        stats = engine.stats()
        assert stats.num_budgets_spent == 5
        assert stats.num_preemptions or mode.get("num_blocks") != 14
        check_scheduler(engine._scheduler)
        if mode.get("draft") == head:
            assert 0 < stats.num_accepted[0] < stats.num_drafted[0]


def test_what_is_forced_has_its_own_log_probability(tiny: tuple[Path, Path]) -> None:
    engine, prompt = make(tiny[0]), prompts()[3]
    marks = ReasoningMarks(((61, 62),), 0, (OPEN, 61))
    params = replace(
        GREEDY, thinking_token_budget=4, reasoning=marks, prompt_logprobs=1, max_tokens=9
    )
    (answer,) = complete(engine, [prompt], params)
    assert answer.token_ids[4:6] == [61, 62]
    whole = prompt + answer.token_ids
    (scored,) = complete(engine, [whole], SamplingParams(max_tokens=1, prompt_logprobs=1))
    assert scored.prompt_logprobs is not None
    for index, entry in enumerate(answer.logprobs):
        other = scored.prompt_logprobs[len(prompt) + index]
        assert other is not None and entry.token_ids[0] == answer.token_ids[index]
        assert entry.logprobs[0] == pytest.approx(other.logprobs[0], abs=1e-3)
        assert entry.rank == other.rank


@pytest.mark.parametrize("overlap", [False, True])
def test_a_request_goes_on_where_another_engine_left_it(
    tiny: tuple[Path, Path], overlap: bool
) -> None:
    """At every token: before the budget is spent, within what is forced, and after it."""
    engine, prompt = make(tiny[0], overlap=overlap), prompts()[4]
    marks = ReasoningMarks(((61, 62, 60),), 0, (OPEN, 61))
    params = replace(GREEDY, thinking_token_budget=3, reasoning=marks, max_tokens=10)
    (whole,) = complete(engine, [prompt], params)
    assert whole.token_ids[3:6] == [61, 62, 60]
    for count in range(1, 10):
        known = whole.token_ids[:count]
        engine.submit(Request("rest", Generate(prompt, params, output_token_ids=known)))
        rest = Answer()
        while engine.has_work():
            for output in engine.step():
                rest.add(output)
        assert known + rest.token_ids == whole.token_ids
        assert rest.logprobs == whole.logprobs[count:]


class Recording:
    """A launcher that notes what was launched before its newest token was known."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.sizes, self.pending = inner, [0], 0

    def launch(self, batch: Batch) -> Any:
        self.sizes.append(len(batch.items))
        self.pending += sum(seq.token_ids[-1] == PENDING for seq, _ in batch.items)
        return self.inner.launch(batch)

    def run(self, batch: Batch) -> Any:
        return self.launch(batch).wait()


def test_steps_overlap_with_budgets(tiny: tuple[Path, Path]) -> None:
    """A sequence misses one step where its budget ends, whatever is forced; others miss none."""
    marks = ReasoningMarks(((61, 62, 60),), 0, (OPEN, 61))
    spent = replace(GREEDY, thinking_token_budget=8, reasoning=marks)
    plenty = replace(GREEDY, thinking_token_budget=10_000, reasoning=marks)
    pending = {}
    for name, params in {"none": GREEDY, "plenty": plenty, "spent": spent}.items():
        engine = make(tiny[0], overlap=True, prefix_cache=False)
        engine._launcher = engine._runner = recording = Recording(engine._runner)
        complete(engine, prompts(), [params, *[GREEDY] * 7])
        pending[name] = recording.pending
    assert pending["none"] == pending["plenty"] == pending["spent"] + 1


def test_a_loop_ends_in_every_mode(tiny: tuple[Path, Path]) -> None:
    folder, _ = tiny
    detection: Any = {"max_pattern_size": 4, "min_pattern_size": 2, "min_count": 3}
    loops = replace(
        GREEDY, logit_bias={7: 100.0}, max_tokens=60, repetition_detection=detection, min_tokens=5
    )
    later = replace(loops, min_tokens=13)
    asked = [prompts()[0], prompts()[1], prompts()[2]]
    params = [loops, later, replace(loops, repetition_detection=None)]
    golden = complete(make(folder), asked, params)
    assert [len(a.token_ids) for a in golden] == [6, 13, 60]
    reasons = [(a.terminals[0].finish_reason, a.terminals[0].stop_reason) for a in golden]
    looped = (FinishReason.STOP, "repetition_detected")
    assert reasons == [looped, looped, (FinishReason.LENGTH, None)]
    for mode in ({"overlap": True}, {"mtp": 3, "draft": Path("ngram")}):
        engine = make(folder, **mode)
        assert_same(complete(engine, asked, params), golden)
        assert engine.stats().num_loops_ended == 2
        check_scheduler(engine._scheduler)
