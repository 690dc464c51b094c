"""Steps that decode beside short prompts, run as one step each: the answers of whole ones."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cycle_grammar import ANY, add_cycle, follows
from driver import Answer, assert_same, complete
from gpu.setups import LIMITS, PLAIN, Checkpoints, EngineSetup, drafting
from scheduler_integrity import check_scheduler
from tokenmill.core.config import ExecutionConfig
from tokenmill.core.types import SamplingParams, StepResult, TokenLogprobs
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.choices import set_mode
from tokenmill.engine.engine import LanguageEngine
from tokenmill.engine.executors import SplitExecutor
from tokenmill.engine.graphs.decode_graphs import CapturedDecode, DecodeGraphs
from tokenmill.engine.graphs.prompt_graphs import Prompted, PromptGraphs
from tokenmill.engine.launched import LaunchedStep
from tokenmill.sched.sequence import Batch, Item

GREEDY = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True, logprobs=2)
BEST = replace(GREEDY, logprobs=None)  # what drafts can follow at once
DRAWN = SamplingParams(temperature=1.0, seed=5, max_tokens=7, top_k=8, ignore_eos=True, logprobs=1)
MOST = {2: 2, 4: 1}  # by sequences that decode
FEW = replace(LIMITS, max_num_seqs=4)  # so that prompts come while others decode


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


def prompts() -> list[list[int]]:
    """More than run at once, some longer than a step."""
    source = random.Random(9)
    lens = (3, 12, 300, 21, 33, 5, 9, 60, 18, 2, 30, 7)
    return [[source.randrange(64) for _ in range(n)] for n in lens]


def ask(built: BuiltEngine, usual: SamplingParams) -> list[Answer]:
    """Some draw their tokens, one wants its prompt's scores, and some end together."""
    asked = prompts()
    params = [
        replace(DRAWN if i % 3 == 1 else usual, max_tokens=(5, 5, 9, 10)[i % 4])
        for i in range(len(asked))
    ]
    params[-1] = replace(usual, prompt_logprobs=1)
    return complete(built.engine, asked, params)


class Again:
    """In the place of a graph: computes its size anew and writes what it would write."""

    def __init__(self, graphs: DecodeGraphs, size: int) -> None:
        self._graphs, self._size = graphs, size
        self.decoded = graphs._decode(size)

    def replay(self) -> None:
        new = self._graphs._decode(self._size)
        self.decoded.logits.copy_(new.logits)
        self.decoded.best.copy_(new.best)


@torch.inference_mode()
def add_decode_graphs(built: BuiltEngine) -> None:
    runner = built.runner
    graphs = DecodeGraphs(runner.model, runner.layers, runner.builder, 4, [1, 2, 3, 4])
    for size in graphs.sizes:
        again: Any = Again(graphs, size)
        graphs._graphs[size] = CapturedDecode(again, again.decoded)
    runner.decode.graphs = graphs


def split(built: BuiltEngine, depth: int, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Run such steps apart from now on; the number of prompts of each is noted."""
    runner, noted = built.runner, list[int]()
    runner.add_prompt_graphs(depth)
    runner.add_draft_graphs(16, depth)
    runner.split.most_prompts = MOST
    launch = SplitExecutor.launch

    def counted(self: SplitExecutor, batch: Batch) -> LaunchedStep | None:
        launched = launch(self, batch)
        noted.extend([] if launched is None else [len(launched.others)])
        return launched

    monkeypatch.setattr(SplitExecutor, "launch", counted)
    return noted


def engines(name: str, execution: ExecutionConfig, folder: Path) -> list[BuiltEngine]:
    setup = EngineSetup(name, execution, num_blocks=60, limits=FEW)
    checkpoints = Checkpoints(folder)
    return [setup.build(checkpoints, "cpu") for _ in range(2)]


@pytest.mark.parametrize("name", ["qwen3", "gemma3"])
def test_answers_are_those_of_whole_steps(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, apart = engines(name, PLAIN, tmp_path)
    expected = ask(plain, GREEDY)
    add_decode_graphs(apart)
    noted = split(apart, 0, monkeypatch)
    assert_same(ask(apart, GREEDY), expected)
    assert set(noted) == {1, 2}
    check_scheduler(apart.engine._scheduler)


def test_a_graph_may_write_over_the_logits_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decoding beside short prompts, each by its graph: masks come when all of them have run."""
    plain, apart = engines("qwen3", replace(PLAIN, overlap=True), tmp_path)
    add_decode_graphs(apart)
    noted = split(apart, 0, monkeypatch)
    run = PromptGraphs.run

    def over_others(self: PromptGraphs, item: Item) -> Prompted:
        graphs = apart.runner.decode.graphs
        assert graphs is not None
        for captured in graphs._graphs.values():
            captured.decoded.logits.fill_(torch.nan)
        return run(self, item)

    monkeypatch.setattr(PromptGraphs, "run", over_others)
    bound = SamplingParams(temperature=0.0, max_tokens=9, structured=ANY, logprobs=1)
    asked = prompts()
    sampling = [
        bound if i % 2 else replace(GREEDY, max_tokens=5 + i % 4) for i in range(len(asked))
    ]
    found = []
    for built in (plain, apart):
        assert isinstance(built.engine, LanguageEngine)
        add_cycle(built.engine, built.runner.model.spec.vocab_size)
        found.append(complete(built.engine, asked, sampling))
    assert_same(found[1], found[0])
    assert noted
    assert all(follows(p, a.token_ids) for p, a in list(zip(asked, found[1], strict=True))[1::2])


def test_drafts_follow_prompts_and_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, apart = engines("drafted-qwen3", drafting(PLAIN, 2), tmp_path)
    expected = ask(plain, BEST)
    noted = split(apart, 2, monkeypatch)
    assert_same(ask(apart, BEST), expected)
    assert noted and sum(apart.engine.stats().num_accepted) > 0


def test_what_is_quicker_is_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps by themselves: 1 ms for a prompt; beside others as long as these, and 5 ms at least."""
    (built, _) = engines("qwen3", PLAIN, tmp_path)
    asked: list[list[int]] = []

    def seconds(step: list[int]) -> float:
        asked.append(step)
        decode_s = 1e-3 + 3e-5 * step.count(1)
        if step[-1] == 1:
            return decode_s
        return 1e-3 if len(step) == 1 else max(5e-3, decode_s + 4e-4)

    monkeypatch.setattr(built.runner, "_seconds", seconds)
    assert built.runner._time_short_prompts(640, 8448) == {8: 3, 32: 2}
    assert max(map(len, asked)) == 128 + 1  # larger batches are not timed any more
    assert built.runner._time_short_prompts(16, 8448) == {8: 3}
    asked.clear()
    assert (
        built.runner._time_short_prompts(640, 130) == {} == built.runner._time_short_prompts(4, 0)
    )
    assert not asked


def test_beside_how_many_sequences() -> None:
    nobody = SplitExecutor(None, None, None)  # type: ignore[arg-type]
    assert [nobody._most(n) for n in (1, 4)] == [0, 0]
    nobody.most_prompts = MOST
    assert [nobody._most(n) for n in (1, 2, 3, 4, 5)] == [2, 2, 1, 1, 0]


def test_results_of_parts_run_parallel_to_the_items() -> None:
    scored = TokenLogprobs([7], [-1.0], 1)
    first = LaunchedStep(StepResult([[1], [2, 3]], draft_ids=[[4], [5]]))
    first.others = [
        LaunchedStep(StepResult([[7]], logprobs=[[scored]])),
        LaunchedStep(StepResult([[8]], prompt_logprobs={0: [scored]})),
    ]
    result = first.wait()
    assert result.token_ids == [[1], [2, 3], [7], [8]]
    assert result.draft_ids == [[4], [5], [], []]
    assert result.logprobs == [None, None, [scored], None]
    assert result.prompt_logprobs == {3: [scored]}
