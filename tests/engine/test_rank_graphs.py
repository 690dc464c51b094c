"""Two ranks whose first replays its steps in pieces: the answers of steps without graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from driver import assert_same, complete
from emulated_graphs import POOL, emulate
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
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup, set_mode
from tokenmill.engine.graphs.piecewise_graphs import PiecewiseGraphs
from tokenmill.engine.ranks.rank_graphs import rank_graphs
from tokenmill.engine.ranks.rank_models import OwnModel, SharedModel

GREEDY = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=2)
PROMPTS = [[(7 * place + length) % 64 for place in range(length)] for length in (3, 12, 21, 33)]
# A sum for the embedding and two for each layer, or the experts of each; and each attention.
CUTS = {"tp": lambda layers: 1 + 3 * layers, "ep": lambda layers: 2 * layers}


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


def build(folder: Path, **parallel: Any) -> tuple[Setup, BuiltEngine]:
    setup = resolve_setup(
        Setup(
            ModelConfig(str(folder), "fp32", "cpu", num_threads=1),
            CacheConfig(num_blocks=60),
            SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=16),
            ExecutionConfig(fused_kernels=False, overlap=False),
            ParallelConfig(**parallel),
        )
    )
    return setup, build_engine(setup)


def capture(setup: Setup, built: BuiltEngine) -> PiecewiseGraphs:
    """Replay the steps of rank 0 from now on; the other rank has no graphs."""
    shared = built.runner.model
    assert isinstance(shared, SharedModel | OwnModel)
    graphs = rank_graphs(setup, shared._model, built.runner.layers, 0)
    with torch.inference_mode():
        for job in graphs.jobs(POOL):
            job.capture()
    graphs.start()
    shared.graphs = graphs
    built.runner.add_piecewise_graphs(graphs.sizes)
    return graphs


@pytest.mark.parametrize(
    ("family", "parallel"),
    [
        ("qwen3-tied", {"tp": 2}),
        ("qwen3-moe", {"ep": 2}),
        ("qwen3-moe", {"ep": 2, "attention_dp": True}),
    ],
)
def test_steps_in_pieces_meet_the_other_rank(
    family: str, parallel: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_light_ranks(monkeypatch)
    folder = save(tame(make_model(family), 0.3), tmp_path)
    setup, built = build(folder, **parallel)
    try:
        expected = complete(built.engine, PROMPTS, GREEDY)
        emulate(monkeypatch)
        graphs = capture(setup, built)
        cuts = CUTS["tp" if "tp" in parallel else "ep"](built.spec.num_layers)
        assert {len(pieces.cuts) for pieces in graphs._pieces.values()} == {cuts}
        assert_same(complete(built.engine, PROMPTS[::-1], GREEDY), expected[::-1])
        assert graphs.num_replayed >= 3
    finally:
        built.close()
