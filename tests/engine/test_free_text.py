"""Free text before a constraint: it starts where the tokens say, whatever is drafted or lost."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from random_model import EOS, PAD_TO, PIECES, RandomRunner, noise, sequence, text_of, vocab
from tokenmill.core.config import SchedulerConfig
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import (
    Branch,
    FinishReason,
    FreeText,
    SamplingParams,
    StepResult,
    StructuredOutput,
    TokenRules,
)
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.sampling.free_text import AnyText, FreeTextMatcher, GrammarError, RuledMatcher
from tokenmill.engine.sampling.grammar import GrammarCompiler
from tokenmill.engine.sampling.grammar_pool import GrammarPool
from tokenmill.engine.sampling.grammar_process import next_masks
from tokenmill.engine.sampling.sampler import Sampler, allowed_ids, sampled_rows, state_of
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Batch, Scheduler
from tokenmill.sched.sequence import num_drafts

END = PIECES.index(b"</")  # in the place of </think>
OPEN = PIECES.index(b"yes")
SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "ok": {"type": "boolean"}},
    "required": ["n", "ok"],
    "additionalProperties": False,
}
LIKELIER = {END: 5.0}  # noise alone would hardly say it
AFTER_END = FreeText(end=END, banned=(EOS,))
AFTER_OPENING = replace(AFTER_END, opening=OPEN)


def constraint(after: FreeText | None) -> StructuredOutput:
    return StructuredOutput("json_schema", json.dumps(SCHEMA), after=after)


@pytest.fixture(scope="module")
def pool() -> GrammarPool:
    return GrammarPool(vocab(), PAD_TO)


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(vocab(), PAD_TO)


class DraftRunner(RandomRunner):
    """Verifies drafts as executors do; `salt` makes the drafts right, wrong or half right."""

    def __init__(self, salt: int) -> None:
        super().__init__()
        self._salt = salt

    def run(self, batch: Batch) -> StepResult:
        result = StepResult([[] for _ in batch.items], draft_ids=[[] for _ in batch.items])
        for index, item in enumerate(batch.items):
            seq, count = item[0], num_drafts(item)
            if count < 0:
                continue
            rows = sampled_rows(seq, count)
            logits = torch.stack([noise(row.token_ids) for row in rows])
            masks = [state_of(row).mask for row in rows]
            tokens, _ = self.sampler(logits, rows, masks)
            kept = 0
            while kept < count and tokens[kept] == seq.draft_ids[kept]:
                kept += 1
            result.token_ids[index] = tokens[: kept + 1]
            result.draft_ids[index] = self._guess(seq.token_ids + tokens[: kept + 1])
        return result

    def _guess(self, token_ids: list[int]) -> list[int]:
        """Two guesses: what the noise alone would say, wrong at times."""
        guesses: list[int] = []
        for step in range(2):
            token = int(noise(token_ids + guesses).argmax())
            guesses.append(token if (len(token_ids) + step + self._salt) % 3 else END)
        return guesses


def run(
    pool: GrammarPool,
    requests: list[Request],
    runner: RandomRunner | None = None,
    num_blocks: int = 512,
) -> dict[str, tuple[list[int], FinishReason]]:
    limits = SchedulerConfig(max_model_len=96, max_num_batched_tokens=64)
    scheduler = Scheduler(limits, BlockPool(num_blocks, 4), frozenset({EOS}))
    engine = LanguageEngine(scheduler, runner or RandomRunner(), pool, PAD_TO)
    for request in requests:
        engine.submit(request)
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    reasons: dict[str, FinishReason] = {}
    while engine.has_work():
        for output in engine.step():
            assert output.error is None, output
            tokens[output.request_id] += output.token_ids
            if output.finish_reason is not None:
                reasons[output.request_id] = output.finish_reason
    assert engine.stats().num_preemptions > 0 or num_blocks == 512
    return {key: (tokens[key], reasons[key]) for key in reasons}


def request(index: int, after: FreeText | None, **fields: object) -> Request:
    sampling = SamplingParams(
        max_tokens=None, seed=index, structured=constraint(after), logit_bias=LIKELIER
    )
    return Request(f"r{index}", Generate([5 + index, 7], sampling, **fields))  # type: ignore[arg-type]


def check(tokens: list[int], reason: FinishReason, after: FreeText) -> bool:
    """The part after the free text obeys the schema; returns whether there was free text."""
    assert tokens.count(EOS) == (reason == FinishReason.STOP)
    free = after.opening is None or tokens[0] == after.opening
    cut = tokens.index(END) + 1 if free else 0
    if reason == FinishReason.STOP:
        value = json.loads(text_of(tokens[cut:]))
        assert set(value) == {"n", "ok"}
    return free


class TestFreeText:
    @pytest.mark.parametrize("after", [AFTER_END, AFTER_OPENING])
    def test_the_constraint_starts_after_it(self, pool: GrammarPool, after: FreeText) -> None:
        outputs = run(pool, [request(i, after) for i in range(8)])
        thought = [check(tokens, reason, after) for tokens, reason in outputs.values()]
        assert any(thought) and all(thought) == (after.opening is None)
        assert any(reason == FinishReason.STOP for _, reason in outputs.values())
        free = [t for tokens, _ in outputs.values() for t in tokens if END in tokens]
        assert any(t >= len(PIECES) for t in free), "no grammar allows what has no text"

    @pytest.mark.parametrize("salt", range(3))
    def test_drafts_change_nothing(self, pool: GrammarPool, salt: int) -> None:
        requests = [request(i, AFTER_END if i % 2 else AFTER_OPENING) for i in range(6)]
        assert run(pool, requests, DraftRunner(salt)) == run(pool, requests)

    def test_preemption_changes_nothing(self, pool: GrammarPool) -> None:
        requests = [request(i, AFTER_END) for i in range(4)]
        assert run(pool, requests, num_blocks=26) == run(pool, requests)

    @pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.0])
    def test_it_goes_on_in_another_engine(self, pool: GrammarPool, share: float) -> None:
        for index, after in enumerate((AFTER_END, AFTER_OPENING)):
            whole, reason = run(pool, [request(index, after)])[f"r{index}"]
            known = whole[: int(share * (len(whole) - 1))]
            moved = request(index, after, output_token_ids=known)
            rest, again = run(pool, [moved])[f"r{index}"]
            assert (known + rest, again) == (whole, reason)

    def test_max_tokens_may_cut_the_free_text(self, pool: GrammarPool) -> None:
        cut = request(1, AFTER_END)
        cut = cut.with_task(sampling=replace(cut.task.sampling, max_tokens=2))
        tokens, reason = run(pool, [cut])["r1"]
        assert reason == FinishReason.LENGTH and len(tokens) == 2


HEADER = FreeText(end=9, begin=(5, 6, 7), breaks=(3,))


@pytest.mark.parametrize(
    ("tokens", "bound"),
    [
        ([5, 6, 7, 9], True),
        ([1, 9, 5, 6, 7, 20, 21, 9], True),  # other tokens may stand in the header
        ([5, 6, 9], False),
        ([5, 6, 7, 3, 9], False),
        ([5, 6, 7, 5, 9], False),
        ([6, 7, 9], False),
        ([9, 9], False),
        ([5, 6, 8, 9, 5, 6, 7, 9], True),
    ],
)
def test_a_header_ends_it(compiler: GrammarCompiler, tokens: list[int], bound: bool) -> None:
    matcher = FreeTextMatcher(compiler.compile(constraint(None)).matcher(), HEADER)
    for token in tokens:
        assert matcher.allowed() is None
        matcher.accept(token)
    assert (matcher.allowed() is not None) == bound


BRANCHES = StructuredOutput(
    "branches",
    branches=(
        Branch((1, 40, 41, 1), json.dumps(SCHEMA)),
        Branch((1, 40, 300, 42, 1), '{"type": "object", "additionalProperties": false}'),
    ),
)


class TestBranches:
    def test_one_of_them_and_then_its_schema(self, pool: GrammarPool) -> None:
        seen = set()
        for index in range(8):
            structured = replace(BRANCHES, after=AFTER_END if index % 2 else None)
            sampling = SamplingParams(
                max_tokens=None, seed=index, structured=structured, logit_bias=LIKELIER
            )
            outputs = run(pool, [Request(f"r{index}", Generate([5 + index], sampling))])
            ((tokens, reason),) = outputs.values()
            tokens = tokens[tokens.index(END) + 1 if index % 2 else 0 :]
            size = 4 if tokens[2] == 41 else 5
            seen.add(size)
            assert tokens[:size] in ([1, 40, 41, 1], [1, 40, 300, 42, 1])
            if reason == FinishReason.STOP:
                value = json.loads(text_of(tokens[size:]))
                assert set(value) == ({"n", "ok"} if size == 4 else set())
        assert seen == {4, 5}

    def test_a_bad_schema_is_refused(self, pool: GrammarPool) -> None:
        bad = StructuredOutput("branches", branches=(Branch((1,), '{"type": "nonsense"}'),))
        sampling = SamplingParams(structured=bad)
        scheduler = Scheduler(SchedulerConfig(max_model_len=64), BlockPool(64, 4), frozenset({EOS}))
        engine = LanguageEngine(scheduler, RandomRunner(), pool, PAD_TO)
        engine.submit(Request("r", Generate([5], sampling)))
        outputs = []
        while engine.has_work():
            outputs += engine.step()
        (output,) = outputs
        assert output.finish_reason == FinishReason.REJECT
        assert output.stop_reason == "invalid_grammar"


def free_matcher(compiler: GrammarCompiler) -> FreeTextMatcher:
    return FreeTextMatcher(compiler.compile_any(BRANCHES).matcher(), AFTER_OPENING)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(data=st.data())
def test_taking_tokens_back_is_as_if_they_never_came(data: st.DataObject) -> None:
    compiler = _shared_compiler()
    matcher, kept = free_matcher(compiler), list[int]()
    for _ in range(data.draw(st.integers(1, 30))):
        mask = matcher.allowed()
        choices = [END, OPEN, 9] if mask is None else allowed_ids(mask, PAD_TO).tolist()
        token = data.draw(st.sampled_from([t for t in choices if t != EOS] or [EOS]))
        if token == EOS:
            break
        matcher.accept(token)
        kept.append(token)
        back = data.draw(st.integers(0, min(3, len(kept))))
        matcher.rollback(back)
        del kept[len(kept) - back :]
    fresh = free_matcher(compiler)
    for token in kept:
        fresh.accept(token)
    assert _as_bytes(matcher) == _as_bytes(fresh)


def test_next_masks_crosses_the_border(compiler: GrammarCompiler) -> None:
    matcher = FreeTextMatcher(compiler.compile(constraint(None)).matcher(), AFTER_END)
    brace = PIECES.index(b"{")
    masks = next_masks(matcher, [9, END, brace, 9])
    assert masks[0] is None and masks[1] is None
    assert [mask is None for mask in masks[2:]] == [False, False]  # 9 may not come after the brace
    assert matcher.allowed() is None
    with pytest.raises(GrammarError):
        for token in (END, 9):
            matcher.accept(token)


def test_the_sampler_bans_what_free_text_has_not() -> None:
    logits = torch.zeros(1, 64)
    logits[0, EOS] = 9.0
    seq = sequence([5], temperature=0.0)
    assert Sampler()(logits, [seq], [None])[0] == [EOS]
    state_of(seq).banned = (EOS, 10_000)
    assert Sampler()(logits, [seq], [None])[0] != [EOS]


_SHARED: list[GrammarCompiler] = []


def _shared_compiler() -> GrammarCompiler:
    if not _SHARED:
        _SHARED.append(GrammarCompiler(vocab(), PAD_TO))
    return _SHARED[0]


def _as_bytes(matcher: FreeTextMatcher) -> bytes | None:
    mask = matcher.allowed()
    return None if mask is None else np.trim_zeros(mask, "b").tobytes()


def test_rules_forbid_tokens_whatever_holds_beside_them() -> None:
    """Allowed ids, sequences that end in a forbidden token, and what free text must not have."""
    rules = TokenRules(allowed=tuple(range(8)), banned=((3,), (1, 2), (1, 2, 4)))
    matcher = RuledMatcher(AnyText(), rules, 40, banned=(7,))

    def allowed() -> list[int]:
        return allowed_ids(matcher.allowed(), 40).tolist()

    assert allowed() == [0, 1, 2, 4, 5, 6]
    matcher.accept(1)
    assert allowed() == [0, 1, 4, 5, 6], "2 would end a forbidden sequence"
    matcher.accept(2)
    assert allowed() == [0, 1, 2, 5, 6]
    matcher.rollback(1)
    assert allowed() == [0, 1, 4, 5, 6]
    matcher.rollback(0)
    matcher.rollback(1)
    assert allowed() == [0, 1, 2, 4, 5, 6]
    nothing = RuledMatcher(AnyText(), TokenRules(allowed=(3,), banned=((3,),)), 40, ())
    with pytest.raises(GrammarError, match="leave no token"):
        nothing.allowed()
