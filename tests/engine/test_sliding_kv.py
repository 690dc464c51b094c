"""Layers that slide keep the KV of their window: the same answers in every mode, in fewer bytes."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from driver import Answer, assert_same, build, complete
from engine import disaggregated
from scheduler_integrity import check_scheduler
from tiny_models import make_model, save, tame
from tokenmill.core.kv_groups import KVGroups, plan_groups
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import SamplingParams
from tokenmill.engine import load as engine_load
from tokenmill.engine.engine import LanguageEngine

WINDOW = 24  # one block and a half
TURN = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True, logprobs=2)


def prompts() -> list[list[int]]:
    source = random.Random(3)
    shared = [source.randrange(64) for _ in range(90)]
    own = [[source.randrange(64) for _ in range(n)] for n in (1, 17, 33, 120)]
    return own + [shared + tail for tail in own]


@pytest.fixture(scope="module", params=["gemma3", "gpt-oss"])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def groups(family: str) -> int:
    """Of sliding layers: three of four in one model, two of four in the other."""
    return {"gemma3": 3, "gpt-oss": 1}[family]


@pytest.fixture(scope="module")
def folder(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tame(make_model(family, sliding_window=WINDOW), 0.3)
    return save(model, tmp_path_factory.mktemp(family))


def plain_groups(windows: tuple[int | None, ...], num_drafting: int = 0) -> KVGroups:
    return plan_groups((None,) * len(windows), num_drafting)


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[Answer]:
    """What an engine says whose layers all keep everything."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_load, "plan_groups", plain_groups)
        built = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
    assert built.num_blocks == 64 and not built.runner.sliding.num_groups
    return [complete(built.engine, [prompt], GREEDY)[0] for prompt in prompts()]


@pytest.mark.parametrize(
    ("chunked", "prefix_cache", "num_blocks", "overlap"),
    [
        (False, False, 400, True),
        (True, False, 400, False),
        (True, True, 400, True),
        (True, True, 12, False),
        (True, True, 12, True),
    ],
)
def test_same_bits_as_with_plain_paging(
    folder: Path, groups: int, plain: list[Answer], chunked: bool, prefix_cache: bool,
    num_blocks: int, overlap: bool,
) -> None:  # fmt: skip
    built = build(
        folder, "fp32", chunked=chunked, prefix_cache=prefix_cache, num_blocks=num_blocks,
        overlap=overlap,
    )  # fmt: skip
    assert built.num_blocks == (1 + groups) * num_blocks
    assert built.runner.sliding == (WINDOW, groups)
    for _ in range(1 + prefix_cache):
        answers = complete(built.engine, prompts(), GREEDY)
        assert_same(answers, plain)
    if num_blocks == 400:
        most = [(len(prompt) - 1) // 16 * 16 * prefix_cache for prompt in prompts()]
        assert [answer.num_cached_tokens for answer in answers] == most
    else:
        assert built.engine.stats().num_preemptions > 0
    check_scheduler(built.engine._scheduler)
    assert built.engine.stats().num_kv_blocks_used == 0


def test_a_long_sequence_holds_its_window(folder: Path, groups: int) -> None:
    """A prompt runs that plain paging of the same memory does not hold."""
    num_blocks = {3: 8, 1: 10}[groups]
    built = build(folder, "fp32", chunked=True, prefix_cache=False, num_blocks=num_blocks)
    scheduler, most = built.engine._scheduler, []
    assert built.kv_tokens == 16 * (num_blocks * (1 + groups) - groups * 6) == 224

    def look(_: int) -> None:
        seqs = scheduler._queues.running
        most.extend(len(seq.window_ids) // groups for seq in seqs if seq.num_output_tokens > 1)

    prompt = prompts()[-1]
    (answer,) = complete(built.engine, [prompt], replace(GREEDY, max_tokens=10), look)
    assert len(prompt) + 10 > num_blocks * 16 and len(answer.token_ids) == 10
    assert max(most) == 3  # blocks that 24 tokens and the next one may lie in


def test_a_request_that_began_elsewhere_goes_on(folder: Path, plain: list[Answer]) -> None:
    """As after a migration: with the tokens that another engine has generated, and no KV."""
    built = build(folder, "fp32", chunked=True, prefix_cache=True, num_blocks=64)
    for index, (prompt, answer) in enumerate(zip(prompts(), plain, strict=True)):
        begun = answer.token_ids[: 5 + 4 * index]
        request = Request(str(index), Generate(prompt, GREEDY, output_token_ids=begun))
        built.engine.submit(request)
        rest = Answer()
        while built.engine.has_work():
            for output in built.engine.step():
                rest.add(output)
        assert begun + rest.token_ids == answer.token_ids


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_prefill_and_decode_in_two_engines(
    folder: Path, groups: int, plain: list[Answer], overlap: bool, prefix_cache: bool
) -> None:
    source, target = (
        disaggregated.build(folder, budget=48, overlap=overlap, prefix_cache=prefix_cache)
        for _ in range(2)
    )
    pool = disaggregated.WorkerPool(source, target)
    for _ in range(2):
        assert_same(pool.complete(prompts(), GREEDY), plain)
    assert pool.num_early > 0
    windows = [notice.window_ids for notice in pool.notices if notice.token_id is not None]
    assert max(map(len, windows)) == 3 * groups
    pool.close()


def converse(ask: Callable[[list[list[int]]], list[Answer]]) -> list[list[list[int]]]:
    """Six sessions behind one prompt take three turns; returns what is cached and said, by turn."""
    source = random.Random(6)
    shared = [source.randrange(64) for _ in range(70)]
    spoken = [shared + [source.randrange(64) for _ in range(30 + 5 * i)] for i in range(6)]
    turns = []
    for _ in range(3):
        answers = ask(spoken[:1]) + ask(spoken[1:3]) + ask(spoken[3:])
        cached = [answer.num_cached_tokens for answer in answers]
        turns.append([cached, *(answer.token_ids for answer in answers)])
        new = [[source.randrange(64) for _ in range(20)] for _ in spoken]
        spoken = [s + a.token_ids + n for s, a, n in zip(spoken, answers, new, strict=True)]
    return turns


@pytest.fixture(scope="module")
def said(folder: Path) -> list[list[list[int]]]:
    built = build(folder, "fp32", chunked=True, prefix_cache=False, num_blocks=400)
    return converse(lambda prompts: complete(built.engine, prompts, TURN))


@pytest.mark.parametrize("way", ["cached", "overlap", "two engines"])
def test_sessions_say_the_same_with_and_without_the_cache(
    folder: Path, said: list[list[list[int]]], way: str
) -> None:
    if way == "two engines":
        prefill, decode = (disaggregated.build(folder, budget=48) for _ in range(2))
        pool = disaggregated.WorkerPool(prefill, decode)
        found = converse(lambda prompts: pool.complete(prompts, TURN))
        engines = [prefill, decode]
    else:
        built = build(
            folder, "fp32", chunked=True, prefix_cache=True, overlap=way == "overlap",
            num_blocks=400,
        )  # fmt: skip
        found = converse(lambda prompts: complete(built.engine, prompts, TURN))
        assert isinstance(built.engine, LanguageEngine)
        engines = [built.engine]
    assert [turn[1:] for turn in found] == [turn[1:] for turn in said]
    for each in engines:
        check_scheduler(each._scheduler)
        assert each.stats().num_kv_blocks_used == 0

    assert engines[0].stats().num_branch_points > 0 and engines[0].stats().prefix_hit_tokens > 1000
    assert min(found[0][0][3:]) >= 64, "the shared prompt"
    for turn in (1, 2):  # all but an answer's last token are computed
        behind = 32 * (turn - 1) + 11
        assert found[turn][0] == [(100 + 5 * i + behind) // 16 * 16 for i in range(6)]


def test_pages_move_only_between_engines_that_slide_alike(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = disaggregated.build(folder)
    monkeypatch.setattr(engine_load, "plan_groups", plain_groups)
    theirs = disaggregated.build(folder)
    problem = disaggregated.kv_of(ours).connect(disaggregated.kv_of(theirs).address)
    assert problem is not None and "bytes of a block" in problem
