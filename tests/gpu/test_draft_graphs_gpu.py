"""Drafts on a GPU: captured graphs, steps launched ahead, and the answers without them."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from draft_heads import OUTPUTS, make_head
from driver import Answer, complete
from gpu.test_gpu import CONFIG, prompts
from tokenmill.core.config import CacheConfig, ExecutionConfig, ModelConfig, SchedulerConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import build_engine
from tokenmill.engine.engine import LanguageEngine
from tokenmill.models.weights import open_checkpoint

GREEDY = SamplingParams(temperature=0.0, max_tokens=80, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=60, frequency_penalty=0.4)
PLAIN = ExecutionConfig(batch_invariant=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose newest token decides most, and a head that knows it."""
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    checkpoint = open_checkpoint(folder, random_weights=True)
    spec = checkpoint.spec
    weights = {
        name: tensor * (0.02 if name.endswith(OUTPUTS) else 1.0)
        for name, tensor in checkpoint.tensors()
    }
    save_file(weights, folder / "model.safetensors")
    head = make_head(spec, torch.ones(spec.hidden_size), 0.003)
    save_file(head, folder.parent / f"{folder.name}.safetensors")
    return folder


def build(folder: Path, execution: ExecutionConfig, num_blocks: int = 200) -> LanguageEngine:
    return build_engine(
        ModelConfig(
            str(folder), "bf16", "cuda", draft=str(folder.parent / f"{folder.name}.safetensors")
        ),
        CacheConfig(num_blocks=num_blocks),
        SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=256),
        execution,
    ).engine


def tokens(answers: list[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, replace(GREEDY, logprobs=1)])
def test_answers_are_those_without_drafts(folder: Path, sampling: SamplingParams) -> None:
    expected = tokens(complete(build(folder, PLAIN), prompts(), sampling))
    for graphs, num_blocks in ((True, 200), (False, 200), (True, 12)):
        drafting = replace(PLAIN, mtp=3, mtp_adaptive=False, cuda_graphs=graphs)
        engine = build(folder, drafting, num_blocks)
        assert tokens(complete(engine, prompts(), sampling)) == expected
        stats = engine.stats()
        assert sum(stats.num_drafted) > 0 and (sampling is DRAWN or sum(stats.num_accepted) > 0)
        for prompt, answer in list(zip(prompts(), expected, strict=True))[:2]:  # alone: run ahead
            assert tokens(complete(engine, [prompt], sampling)) == [answer]
        engine._scheduler.check_integrity()
    build(folder, ExecutionConfig())  # switches invariance off again


def test_adaptive_drafts_come_and_go(folder: Path) -> None:
    expected = tokens(complete(build(folder, PLAIN), prompts(), GREEDY))
    engine = build(folder, replace(PLAIN, mtp=3))
    for _ in range(3):
        assert tokens(complete(engine, prompts(), GREEDY)) == expected
    assert sum(engine.stats().num_drafted) > 0
    build(folder, ExecutionConfig())  # switches invariance off again
