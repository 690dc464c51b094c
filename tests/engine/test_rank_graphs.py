"""Two ranks that replay their steps by graphs: the answers of one rank without graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

import tiny_images
from cycle_grammar import ANY, add_cycle, follows
from draft_heads import forgetful, save_head
from driver import assert_same, complete
from emulated_graphs import Again, emulate_start
from light_ranks import start_light_ranks
from tiny_models import make_model, save, tame
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup, set_mode
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.ranks.step_leader import StepLeader

BEST = SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True)
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=7, top_k=8, ignore_eos=True, logprobs=1)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1, frequency_penalty=0.5)
PROMPTS = [[(7 * place + length) % 64 for place in range(length)] for length in (3, 12, 21, 33)]


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


def build(
    folder: Path, draft: str | None = None, overlap: bool = False, **parallel: Any
) -> BuiltEngine:
    execution = ExecutionConfig(
        fused_kernels=False, overlap=overlap, mtp=2 if draft else 0, mtp_adaptive=False
    )
    setup = Setup(
        ModelConfig(str(folder), "fp32", "cpu", num_threads=1, draft=draft),
        CacheConfig(num_blocks=60),
        SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=4),
        execution,
        ParallelConfig(**parallel),
    )
    return build_engine(resolve_setup(setup))


def num_cuts(spec: ModelSpec, divided: bool) -> int:
    """Each attention, and a sum for the embedding and two for each layer; or all experts."""
    if divided:
        return 1 + 3 * spec.num_layers
    assert spec.moe is not None
    return spec.num_layers + sum(spec.moe.layers)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("family", "draft", "parallel"),
    [
        ("qwen3-tied", None, {"tp": 2}),
        ("qwen3-moe", None, {"ep": 2}),
        ("qwen3-moe", None, {"ep": 2, "attention_dp": True}),
        ("deepseek-v3", "head", {"tp": 2, "ep": 2}),
        ("gpt-oss", "head", {"ep": 2}),
        ("deepseek-v3", "head", {"ep": 2, "attention_dp": True}),
        ("qwen3-tied", "ngram", {"tp": 2}),
    ],
)
def test_steps_by_graphs_meet_the_other_rank(
    family: str,
    draft: str | None,
    parallel: dict[str, Any],
    overlap: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = forgetful(tame(make_model(family), 0.3), 0.1)
    folder = save(model, tmp_path)
    if draft == "head":
        draft = str(save_head(model, tmp_path / "head.safetensors"))
    asked = [(PROMPTS, BEST), (PROMPTS[::-1], GREEDY), (PROMPTS, [BEST, DRAWN, GREEDY, SCORED])]
    one = build(folder)
    expected = [complete(one.engine, *each) for each in asked]
    emulate_start(monkeypatch)
    start_light_ranks(monkeypatch, "emulated_graphs")
    built, before = build(folder, draft, overlap, **parallel), Again.num_replayed
    try:
        for each, answers in zip(asked, expected, strict=True):
            assert_same(complete(built.engine, *each), answers)
        graphs, own_tokens = built.runner.plain.graphs, "attention_dp" in parallel
        assert graphs is not None and graphs.num_replayed >= 3
        cuts = num_cuts(built.spec, "tp" in parallel)
        assert {len(pieces.cuts) for pieces, _ in graphs._pieces.values()} == {cuts}
        assert (Again.num_replayed - before >= 3) == (not own_tokens)
        if draft:
            assert sum(built.engine.stats().num_accepted) > 0
    finally:
        built.close()


def test_tokens_whose_masks_come_late_reach_the_other_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps overlap, and what follows a grammar is sampled once its step runs."""
    folder = save(tame(make_model("qwen3-tied"), 0.3), tmp_path)
    bound = SamplingParams(temperature=0.0, max_tokens=9, structured=ANY, logprobs=1)
    params = [bound, GREEDY, replace(bound, temperature=1.0, seed=3), BEST]
    one = build(folder)
    assert isinstance(one.engine, LanguageEngine)
    add_cycle(one.engine, one.spec.vocab_size)
    expected = complete(one.engine, PROMPTS, params)
    emulate_start(monkeypatch)
    start_light_ranks(monkeypatch, "emulated_graphs")
    late = Mock(wraps=StepLeader.tell_late)
    monkeypatch.setattr(StepLeader, "tell_late", lambda *told: late(*told))
    two = build(folder, overlap=True, tp=2)
    try:
        assert isinstance(two.engine, LanguageEngine)
        add_cycle(two.engine, two.spec.vocab_size)
        assert_same(complete(two.engine, PROMPTS, params), expected)
        assert late.call_count > 5
    finally:
        two.close()
    pairs = list(zip(PROMPTS, expected, strict=True))[::2]
    assert all(follows(prompt, answer.token_ids) for prompt, answer in pairs)


@pytest.mark.parametrize("parallel", [{"tp": 2}, {"ep": 2, "attention_dp": True}])
def test_images_stand_in_the_graphs_of_two_ranks(
    parallel: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 sends their features, or each rank encodes those of its own requests."""
    folder = save(tame(make_model("qwen3-vl-moe", vocab_size=67), 0.3), tmp_path)
    seen = [tiny_images.image(seed, (1, 6, 10)) for seed in (1, 2)]
    asked = [tiny_images.prompt(i, 20, seen[i % 2], 9) for i in range(3)]
    ids, images = [each.token_ids for each in asked], [each.images for each in asked]
    one = build(folder)
    expected = complete(one.engine, ids, GREEDY, images=images)
    emulate_start(monkeypatch)
    start_light_ranks(monkeypatch, "emulated_graphs")
    two = build(folder, **parallel)
    try:
        assert_same(complete(two.engine, ids, GREEDY, images=images), expected)
        graphs = two.runner.plain.graphs
        assert graphs is not None and graphs.num_with_images > 0
    finally:
        two.close()
