"""Drafts change the number of steps and nothing else: the same answer with MTP on and off."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Items
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draft_heads import eagle3_tensors, forgetful, look_at_newest, save_eagle3, save_head
from driver import assert_same, build, complete
from engine import disaggregated
from random_model import EOS, PIECES, vocab
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import (
    EngineStats,
    FinishReason,
    FreeText,
    SamplingParams,
    StructuredOutput,
)
from tokenmill.engine.executors import Ahead, HeldBlocks
from tokenmill.engine.graphs.draft_graphs import DraftGraphs, Verified
from tokenmill.engine.graphs.prompt_graphs import Prompted, PromptGraphs
from tokenmill.sched.sequence import Batch, Item, Sequence

GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(
    temperature=1.0, top_p=0.95, top_k=40, seed=5, max_tokens=24, min_tokens=6, logprobs=1,
    repetition_penalty=1.1, presence_penalty=0.2, frequency_penalty=0.1, logit_bias={7: 1.0},
)  # fmt: skip
WIDE = {"head_dim": 16, "hidden_size": 64, "max_position_embeddings": 512}
Model = tuple[Path, Path]  # of the model, of its MTP module


@pytest.fixture(scope="module", params=["llama", "deepseek-v3"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return tiny_model("llama", tmp_path_factory.mktemp("tiny"))


def tiny_model(variant: str, folder: Path, **changes: int) -> Model:
    shape = WIDE if variant == "llama" else {"max_position_embeddings": 512}
    model = forgetful(tame(make_model(variant, **shape, **changes), 0.3))
    return save(model, folder / "model"), save_head(model, folder / "head.safetensors")


def prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(40)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 15, 16, 33)]
    return own + [shared + tail for tail in own]


def assert_drafted(stats: EngineStats, count: int) -> None:
    """As many positions as asked for, and each was right sometimes and wrong sometimes."""
    assert len(stats.num_drafted) == len(stats.num_accepted) == count
    for drafted, accepted in zip(stats.num_drafted, stats.num_accepted, strict=True):
        assert 0 < accepted < drafted


# chunked, prefix_cache, num_blocks, mtp
LLAMA = [
    (*mode, 1 + 2 * (index % 2 == mode[0]))
    for index, mode in enumerate(itertools.product([False, True], [False, True], [400, 14]))
]
DEEPSEEK = [(True, True, 400, 3), (False, False, 14, 1)]


@pytest.mark.parametrize(
    ("tiny", "dtype", "modes"),
    [("llama", "fp32", LLAMA), ("llama", "int8", LLAMA), ("deepseek-v3", "fp32", DEEPSEEK)],
    indirect=["tiny"],
)
def test_every_mode_gives_the_answer_without_drafts(
    tiny: Model, dtype: str, modes: list[tuple[bool, bool, int, int]]
) -> None:
    folder, head = tiny
    alone = build(folder, dtype, chunked=False, prefix_cache=False, num_blocks=64)
    golden = [complete(alone.engine, [prompt], GREEDY)[0] for prompt in prompts()]
    for chunked, prefix_cache, num_blocks, mtp in modes:
        overlap = mtp == 3  # which an engine that drafts does not do
        built = build(
            folder, dtype, chunked=chunked, prefix_cache=prefix_cache, num_blocks=num_blocks,
            overlap=overlap, mtp=mtp, draft=head,
        )  # fmt: skip
        engine = built.engine
        for _ in range(1 + prefix_cache):
            answers = complete(engine, prompts(), GREEDY)
            assert_same(answers, golden)
        stats = engine.stats()
        assert_drafted(stats, mtp)
        if num_blocks == 14:
            assert stats.num_preemptions > 0
        elif prefix_cache:
            cached = [answer.num_cached_tokens for answer in answers]
            assert cached == [(len(prompt) - 1) // 16 * 16 for prompt in prompts()]
            follow_up = prompts()[7] + answers[7].token_ids  # blocks of accepted drafts are cached
            again = complete(engine, [follow_up], GREEDY)[0]
            assert again.num_cached_tokens == (len(follow_up) - 1) // 16 * 16
        check_scheduler(engine._scheduler)
        assert stats.num_kv_blocks_used == 0


def test_seeded_draws_penalties_and_stops_are_those_without_drafts(llama: Model) -> None:
    folder, head = llama
    params = [replace(DRAWN, seed=i) for i in range(6)]
    params[1] = replace(DRAWN, seed=1, stop_token_ids=(3, 50), min_tokens=0)
    params[2] = replace(GREEDY, ignore_eos=False, stop_token_ids=(41,))
    params[3] = replace(GREEDY, max_tokens=2)
    params[4] = replace(GREEDY, prompt_logprobs=1)
    asked = [prompts()[4]] * len(params)  # n > 1 is several requests of one prompt
    plain = build(folder, "int8", chunked=True, prefix_cache=True, num_blocks=100)
    golden = complete(plain.engine, asked, params)
    for num_blocks, mtp in ((100, 2), (100, 3), (16, 3)):
        built = build(
            folder, "int8", chunked=True, prefix_cache=True, num_blocks=num_blocks, mtp=mtp,
            draft=head,
        )  # fmt: skip
        answers = complete(built.engine, asked, params)
        assert_same(answers, golden)
        assert answers[4].prompt_logprobs is not None
        assert sum(built.engine.stats().num_accepted) > 0
    assert {a.terminals[0].finish_reason for a in golden} == {
        FinishReason.STOP,
        FinishReason.LENGTH,
    }


def test_the_shapes_of_cuda_graphs_give_the_same_answers_and_drafts(tiny: Model) -> None:
    """Padded to one shape, operation by operation: what a GPU captures."""
    folder, head = tiny
    params = [GREEDY, DRAWN, replace(GREEDY, max_tokens=9), replace(DRAWN, seed=8, logprobs=None)]
    options = {"chunked": True, "prefix_cache": True, "num_blocks": 60, "draft": head}
    asked = prompts()[:4]
    plain = build(folder, "fp32", mtp=3, **options)
    padded = build(folder, "fp32", mtp=3, **options)
    runner = padded.engine._runner
    runner.add_draft_graphs(3, 3)  # more than three sequences are computed as before
    expected, answers = (complete(b.engine, asked, params) for b in (plain, padded))
    assert_same(answers, expected)
    counts = [
        (b.engine.stats().num_drafted, b.engine.stats().num_accepted) for b in (plain, padded)
    ]
    assert counts[0] == counts[1]


@pytest.mark.parametrize(("variant", "dtype"), [("llama", "int8"), ("gpt-oss", "fp32")])
def test_an_eagle3_head_changes_no_answer(variant: str, dtype: str, tmp_path: Path) -> None:
    sizes = WIDE | {"num_hidden_layers": 4}
    model = forgetful(tame(make_model(variant, **sizes), 0.3))
    tensors = eagle3_tensors(model, bias=True)
    look_at_newest(tensors, model)
    head = save_eagle3(model, tmp_path / "head", tensors)
    folder, asked = save(model, tmp_path / "model"), prompts()
    params = [GREEDY, DRAWN, *[GREEDY] * (len(asked) - 2)]
    alone = build(folder, dtype, chunked=False, prefix_cache=False, num_blocks=64)
    golden = [complete(alone.engine, [p], s)[0] for p, s in zip(asked, params, strict=True)]
    counts = []
    for chunked, num_blocks, graphs in ((True, 60, 0), (False, 14, 0), (True, 60, 8)):
        built = build(
            folder, dtype, chunked=chunked, prefix_cache=chunked, num_blocks=num_blocks, mtp=2,
            draft=head,
        )  # fmt: skip
        if graphs:
            built.engine._runner.add_draft_graphs(graphs, 2)
            built.engine._runner.add_prompt_graphs(2)
        for _ in range(2):
            assert_same(complete(built.engine, asked, params), golden)
        stats = built.engine.stats()
        assert_drafted(stats, 2)
        assert stats.num_preemptions > 0 or num_blocks > 14
        counts.append((stats.num_drafted, stats.num_accepted))
        check_scheduler(built.engine._scheduler)
    assert counts[0] == counts[2]


@pytest.mark.parametrize("variant", ["llama", "gpt-oss"])
def test_drafts_that_are_looked_up_change_no_answer(variant: str, tmp_path: Path) -> None:
    """They come from the request itself; beside them there are requests that repeat nothing."""
    folder, _ = tiny_model(variant, tmp_path)
    greedy = replace(GREEDY, max_tokens=40)
    params = [greedy, DRAWN, greedy, replace(greedy, stop_token_ids=(41, 22)), greedy]
    asked = [p * 2 for p in prompts()[:5]]
    alone = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
    golden = [complete(alone.engine, [p], s)[0] for p, s in zip(asked, params, strict=True)]
    for chunked, num_blocks, graphs in ((True, 60, 0), (False, 13, 0), (True, 60, 3)):
        built = build(
            folder, "fp32", chunked=chunked, prefix_cache=chunked, num_blocks=num_blocks,
            overlap=chunked, mtp=4, draft=Path("ngram"),
        )  # fmt: skip
        if graphs:  # the shapes that a GPU captures; larger batches are computed as before
            built.engine._runner.add_draft_graphs(graphs, 4)
        for _ in range(2):
            assert_same(complete(built.engine, asked, params), golden)
        stats = built.engine.stats()
        assert_drafted(stats, 4)
        assert stats.num_preemptions > 0 or num_blocks > 13
        check_scheduler(built.engine._scheduler)
        assert stats.num_kv_blocks_used == 0


def test_padding_ends_with_the_context(tiny: Model) -> None:
    """41 positions are two blocks of 16 and a part: padded rows stand at none beyond."""
    folder, head = tiny
    options = {"chunked": True, "prefix_cache": False, "num_blocks": 60, "max_model_len": 41}
    endless = replace(GREEDY, max_tokens=None)
    plain = build(folder, "fp32", **options)
    padded = build(folder, "fp32", mtp=3, draft=head, **options)
    padded.engine._runner.add_draft_graphs(4, 3)
    for graphs in padded.engine._runner.drafts.graphs.values():
        graphs.sizes = [4]  # the other rows are nobody's
    padded.engine._runner.add_prompt_graphs(3)
    expected, answers = (complete(b.engine, prompts()[:4], endless) for b in (plain, padded))
    assert_same(answers, expected)
    assert [len(p) + len(a.token_ids) for p, a in zip(prompts(), answers, strict=False)] == [41] * 4


@pytest.mark.parametrize("depth", [0, 2])
def test_a_prompt_padded_to_the_shape_of_a_graph_gives_the_same_answer(
    tiny: Model, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, with the start of some in the cache; the last block is left to padding."""
    folder, head = tiny
    best = replace(GREEDY, logprobs=None)  # with drafts the only kind that is padded
    params = [best, DRAWN, best, GREEDY] * 2
    options = {"chunked": False, "prefix_cache": True, "num_blocks": 60}
    extra = {"mtp": depth, "draft": head} if depth else {}
    plain, padded = (build(folder, "fp32", **options, **extra) for _ in range(2))
    runner, used = padded.engine._runner, list[int]()
    run = PromptGraphs.run

    def counted(self: PromptGraphs, item: Item) -> Prompted:
        used.append(item[1])
        return run(self, item)

    monkeypatch.setattr(PromptGraphs, "run", counted)
    runner.add_prompt_graphs(depth)
    for prompt, sampling in zip(prompts(), params, strict=True):
        expected, answers = (complete(b.engine, [prompt], sampling) for b in (plain, padded))
        assert_same(answers, expected)
    drafted = [b.engine.stats().num_accepted for b in (plain, padded)]
    assert drafted[0] == drafted[1]
    assert {16, 41, 24} <= set(used)  # the last is what the cache leaves of 56


@pytest.mark.parametrize("num_blocks", [60, 12])
def test_steps_launched_ahead_change_no_answer(
    llama: Model, num_blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ends, stops, aborts, new requests and scarce blocks come between them."""
    folder, head = llama
    greedy = replace(GREEDY, logprobs=None, max_tokens=40)
    params = [
        greedy,
        replace(greedy, max_tokens=17),
        replace(greedy, stop_token_ids=(41, 22)),
        DRAWN,
    ]
    asked = [prompts()[i] for i in (0, 1, 3, 2)]
    options = {"chunked": True, "prefix_cache": True, "num_blocks": num_blocks}
    plain = build(folder, "fp32", **options)
    ahead = build(folder, "fp32", **options, mtp=3, draft=head)
    runner = ahead.engine._runner
    runner.add_draft_graphs(2, 3)
    runner.drafts.runs_ahead = True
    launches, used = [0], [0]
    verify_next, matches = DraftGraphs.verify_next, Ahead.matches

    def counted(self: DraftGraphs, count: int) -> Verified:
        launches[0] += 1
        return verify_next(self, count)

    def noted(self: Ahead, graphs: DraftGraphs, batch: Batch) -> bool:
        used[0] += matches(self, graphs, batch)
        return matches(self, graphs, batch)

    monkeypatch.setattr(DraftGraphs, "verify_next", counted)
    monkeypatch.setattr(Ahead, "matches", noted)
    for first, last in ((0, 1), (1, 3), (0, 4), (3, 4), (0, 2)):
        golden = complete(plain.engine, asked[first:last], params[first:last])
        answers = complete(ahead.engine, asked[first:last], params[first:last])
        assert_same(answers, golden)
        check_scheduler(ahead.engine._scheduler)
    assert used[0] > 10 and launches[0] > used[0]
    if num_blocks == 60:  # blocks come early enough that few steps wait for one
        before, used[0] = ahead.engine.stats().num_steps, 0
        complete(ahead.engine, asked[2:3], [replace(greedy, max_tokens=200)])
        assert used[0] > 0.9 * (ahead.engine.stats().num_steps - before)


@pytest.mark.parametrize("slides", [False, True])
@pytest.mark.parametrize(("changed", "same"), [(7, True), (8, False), (11, False)])
def test_a_step_ahead_lies_in_the_blocks_of_its_batch(
    changed: int, same: bool, slides: bool
) -> None:
    """However many blocks its tokens take, of full layers or of sliding ones."""
    seq = Sequence(Request("0", Generate([1] * 9)), (0, 0, 0), 100, frozenset())
    seq.num_computed_tokens, seq.block_ids = 8, list(range(20, 32))
    seq.window_first, seq.window_ids = 6, list(range(40, 46)) if slides else []
    known = HeldBlocks.of(seq)
    if slides:
        known.window_ids[changed - 6] = 99
    else:
        known.block_ids[changed] = 99
    tables = SimpleNamespace(sliding=[None] * slides)
    graphs: Any = SimpleNamespace(builder=SimpleNamespace(block_size=1, tables=tables), depth=3)
    ahead = Ahead(graphs, [seq], [known], torch.empty(0), None)
    assert ahead.matches(graphs, Batch([(seq, 4)], 4)) == same


class Fickle:
    """Drafts now and then: steps overlap in between."""

    def __init__(self) -> None:
        self.random, self.count, self.left = random.Random(2), 0, 0
        self.chosen: list[int] = []

    def choose(self) -> int:
        if not self.left:
            self.count, self.left = self.random.choice([0, 1, 3]), self.random.randint(1, 6)
        self.left -= 1
        self.chosen.append(self.count)
        return self.count

    def record(
        self, batch: Batch, drafted: Items[int], accepted: Items[int], seconds: float
    ) -> None:
        assert seconds > 0 and batch.items


@pytest.mark.parametrize("num_blocks", [60, 14])
def test_drafts_come_and_go_between_overlapped_steps(llama: Model, num_blocks: int) -> None:
    folder, head = llama
    params = [GREEDY, DRAWN] * 4
    alone = build(folder, "int8", chunked=False, prefix_cache=False, num_blocks=64)
    golden = [complete(alone.engine, [p], s)[0] for p, s in zip(prompts(), params, strict=True)]
    built = build(
        folder, "int8", chunked=True, prefix_cache=True, num_blocks=num_blocks, overlap=True,
        mtp=3, draft=head,
    )  # fmt: skip
    fickle = Fickle()
    built.engine.drafting = fickle
    built.engine._runner.add_draft_graphs(4, 3)
    built.engine._runner.drafts.runs_ahead = True
    for _ in range(3):
        answers = complete(built.engine, prompts(), params)
        for answer, expected in zip(answers, golden, strict=True):
            assert answer.token_ids == expected.token_ids
            assert answer.terminals[0].finish_reason == expected.terminals[0].finish_reason
    assert min(fickle.chosen.count(count) for count in (0, 1, 3)) > 10
    assert sum(built.engine.stats().num_accepted) > 10
    check_scheduler(built.engine._scheduler)


def test_structured_output_is_that_without_drafts(tmp_path: Path) -> None:
    folder, head = tiny_model("llama", tmp_path, vocab_size=len(PIECES), eos_token_id=EOS)
    kinds = [
        StructuredOutput("regex", "[a-z0-9 ]{5,12}"),
        StructuredOutput("json_schema", '{"type": "array", "items": {"type": "boolean"}}'),
        StructuredOutput("choice", '["red", "green", "blue"]'),
    ]
    params = [
        SamplingParams(temperature=t, seed=i, max_tokens=40, structured=kind, logprobs=1)
        for i, (kind, t) in enumerate(itertools.product(kinds, [0.0, 1.0]))
    ] + [GREEDY]
    end = PIECES.index(b"</")  # of free text before the schema
    reasons = replace(kinds[1], after=FreeText(end, banned=(EOS,)))
    params += [
        SamplingParams(seed=i, max_tokens=60, structured=reasons, logit_bias={end: 5.0})
        for i in range(3)
    ]
    asked = [[5, 6, 7, 8 + i] for i in range(len(params))]
    plain = build(folder, "fp32", chunked=True, prefix_cache=True, num_blocks=100, vocab=vocab())
    golden = complete(plain.engine, asked, params)
    for answer in golden[-3:]:
        start = answer.token_ids.index(end) + 1
        assert answer.token_ids[0] != answer.token_ids[start] == PIECES.index(b"[")
    built = build(
        folder, "fp32", chunked=True, prefix_cache=True, num_blocks=100, vocab=vocab(), mtp=3,
        draft=head,
    )  # fmt: skip
    assert_same(complete(built.engine, asked, params), golden)
    assert sum(built.engine.stats().num_accepted) > 0


def test_a_prompt_from_another_engine_goes_on_with_drafts(llama: Model) -> None:
    folder, head = llama
    alone = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=100)
    golden = complete(alone.engine, prompts(), GREEDY)
    engines = [disaggregated.build(folder, mtp=2, draft=head, budget=32) for _ in range(2)]
    pool = disaggregated.WorkerPool(*engines)
    try:
        for _ in range(2):
            answers = pool.complete(prompts(), GREEDY)
            assert [a.token_ids for a in answers] == [a.token_ids for a in golden]
        assert_drafted(engines[1].stats(), 2)
    finally:
        pool.close()
