"""Drafts on a GPU: the same answers with and without them, in graphs and out of them."""

import random
from dataclasses import replace
from pathlib import Path

import pytest

from draft_heads import forgetful, save_head
from driver import Answer, complete
from tiny_models import make_model, save, tame
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from tokenmill.core.types import EngineStats, SamplingParams
from tokenmill.engine.build import build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, ignore_eos=True)
SHAPE = {"head_dim": 64, "hidden_size": 128, "max_position_embeddings": 512}
Model = tuple[Path, Path]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    folder = tmp_path_factory.mktemp("tiny")
    model = forgetful(tame(make_model("llama", **SHAPE), 0.3))
    return save(model, folder / "model"), save_head(model, folder / "head.safetensors")


def answers(
    tiny: Model, execution: ExecutionConfig, sampling: SamplingParams
) -> tuple[list[Answer], EngineStats]:
    folder, head = tiny
    source = random.Random(2)
    prompts = [[source.randrange(64) for _ in range(n)] for n in (1, 9, 64, 100, 33)]
    engine = build_engine(
        ModelConfig(str(folder), "bf16", "cuda", draft=str(head)),
        CacheConfig(num_blocks=64),
        SchedulerConfig(max_num_seqs=8, max_num_batched_tokens=128),
        execution,
    ).engine
    return complete(engine, prompts, sampling), engine.stats()


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "graphs"])
def test_same_tokens_with_drafts(tiny: Model, graphs: bool, sampling: SamplingParams) -> None:
    """Batch invariance makes logits the same for one row and for four."""
    plain = ExecutionConfig(batch_invariant=True, cuda_graphs=graphs)
    expected, _ = answers(tiny, plain, sampling)
    found, stats = answers(tiny, replace(plain, mtp=3, mtp_adaptive=False), sampling)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]
    assert len(stats.num_accepted) == 3 and 0 < stats.num_accepted[0] < stats.num_drafted[0]


def test_one_sequence_has_the_same_logits_with_drafts(tiny: Model) -> None:
    """Up to four rows of one sequence go through kernels that keep each row's bits."""
    folder, head = tiny
    scored = replace(GREEDY, logprobs=1, max_tokens=200)
    found = []
    for depth in (0, 1, 2, 3):
        engine = build_engine(
            ModelConfig(str(folder), "bf16", "cuda", draft=str(head)),
            CacheConfig(num_blocks=64),
            SchedulerConfig(max_num_seqs=8),
            ExecutionConfig(mtp=depth, mtp_adaptive=False),
        ).engine
        answers = [complete(engine, [[3] * n], scored)[0] for n in (5, 70)]
        found.append([(a.token_ids, a.logprobs) for a in answers])
        assert not depth or engine.stats().num_accepted[0] > 0
    assert found[0] == found[1] == found[2] == found[3]


def test_cublas_kernels_nearly_agree(tiny: Model) -> None:
    fast = ExecutionConfig()
    expected, _ = answers(tiny, fast, GREEDY)
    found, stats = answers(tiny, replace(fast, mtp=3, mtp_adaptive=False), GREEDY)
    pairs = [
        a == b
        for f, e in zip(found, expected, strict=True)
        for a, b in zip(f.token_ids[:8], e.token_ids[:8], strict=True)
    ]
    assert sum(pairs) > 0.8 * len(pairs) and stats.num_accepted[0] > 0
