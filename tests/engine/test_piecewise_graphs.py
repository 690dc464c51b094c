"""Steps padded to a few numbers of tokens, whole and in pieces: the answers of plain ones."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from driver import Answer, assert_same, build, complete
from gpu.setups import LIMITS, PLAIN, Checkpoints, EngineSetup
from tiny_models import make_model, save, tame
from tokenmill.core.config import ExecutionConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.choices import set_mode
from tokenmill.engine.graphs import piecewise_graphs
from tokenmill.engine.graphs.capture import CaptureReport
from tokenmill.engine.graphs.graph_sizes import graph_for
from tokenmill.engine.graphs.piecewise_graphs import (
    LEAST_TOKENS,
    PiecewiseGraphs,
    most_tokens,
    piecewise_sizes,
)
from tokenmill.models.checkpoints.weights import open_checkpoint

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True, logprobs=2)
SIZES = [16, 40, 64]  # multiples of 4; steps of 10 or fewer tokens, and of more than 64, have none
UNFUSED = replace(PLAIN, fused_kernels=False)
NO_EXPERTS = {"deepseek-v3": {"first_k_dense_replace": 9}}  # the host counts their rows on CPU
FEW = replace(LIMITS, max_num_batched_tokens=48)


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


def prompts() -> list[list[int]]:
    source = random.Random(5)
    return [[source.randrange(64) for _ in range(n)] for n in (3, 12, 21, 33, 70)]


def ask(built: BuiltEngine, most: int = 12) -> list[Answer]:
    """Prompts of which most come while others decode, and one that wants its own scores."""
    greedy = replace(GREEDY, max_tokens=most)
    scored = replace(greedy, prompt_logprobs=1)
    return complete(built.engine, prompts(), [greedy, scored, greedy, greedy, greedy])


def counted(graphs: PiecewiseGraphs, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tokens, size) of all steps that ask for a size from now on and get one."""
    found: list[tuple[int, int]] = []
    size_for = graphs.size_for

    def noted(num_tokens: int) -> int | None:
        size = size_for(num_tokens)
        found.extend([] if size is None else [(num_tokens, size)])
        return size

    monkeypatch.setattr(graphs, "size_for", noted)
    return found


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3", "gemma3", "gpt-oss"])
def test_padding_changes_no_answer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tame(make_model(family), 0.3), tmp_path)
    options = {"chunked": True, "prefix_cache": True, "num_blocks": 60}
    plain, padded = (build(folder, "fp32", **options) for _ in range(2))
    padded.runner.add_piecewise_graphs(SIZES)
    assert padded.runner.plain.graphs is not None
    steps = counted(padded.runner.plain.graphs, monkeypatch)
    assert_same(ask(padded), ask(plain))
    assert any(num_tokens < size for num_tokens, size in steps)
    padded.engine._scheduler.check_integrity()


class Operations(TorchDispatchMode):
    """Notes every operation of torch with its arguments and results."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.noted.append((func, args, kwargs or {}, out))
        return out


def storages(values: Any) -> set[int]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


class Graph:
    """In place of a CUDAGraph: operations of torch, done again over the same tensors."""

    def capture_begin(self, pool: str, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "global")
        self.operations = Operations()
        self.operations.__enter__()

    def capture_end(self) -> None:
        self.operations.__exit__(None, None, None)

    def replay(self) -> None:
        for func, args, kwargs, out in self.operations.noted:
            again, known = func(*args, **kwargs), storages((args, kwargs))
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if isinstance(old, torch.Tensor) and not storages(old) & known:
                    old.copy_(new)


class Capture:
    """In place of torch.cuda.graph."""

    capture_error_mode = "global"
    capture_stream = None

    def __init__(self, cuda_graph: Graph, pool: str) -> None:
        self.cuda_graph, self.pool = cuda_graph, (pool,)


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_pieces_replayed_give_what_the_step_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes share their inputs and are captured before the first step, as on a GPU."""
    for place, name, value in (
        (torch.cuda, "CUDAGraph", Graph),
        (torch.cuda, "graph", Capture),
        (torch.cuda, "synchronize", lambda: None),
        (piecewise_graphs, "unowned", same),
    ):
        monkeypatch.setattr(place, name, value)
    save(tame(make_model(family, **NO_EXPERTS.get(family, {})), 0.3), tmp_path / "tiny")
    setup = EngineSetup("tiny", UNFUSED, num_blocks=60, limits=FEW)
    plain, pieced = (setup.build(Checkpoints(tmp_path), "cpu") for _ in range(2))
    pieced.runner.add_piecewise_graphs(SIZES)
    graphs = pieced.runner.plain.graphs
    assert graphs is not None
    with torch.inference_mode():
        for job in graphs.jobs("pool"):
            job.capture()
    assert graphs.start() == SIZES[-1]
    num_layers = pieced.runner.model.spec.num_layers
    for size in SIZES:
        pieces = graphs._pieces[size]
        assert len(pieces.graphs) == num_layers + 1 and len(pieces.cuts) == num_layers
    assert_same(ask(pieced, most=2), ask(plain, most=2))
    assert graphs.num_replayed > 2


def test_sizes_are_an_eighth_apart_where_products_bound_the_time() -> None:
    sizes = piecewise_sizes(1024)
    assert sizes[0] == LEAST_TOKENS and sizes[-1] == 1024
    taken = {n: graph_for(sizes, n) for n in range(LEAST_TOKENS, 1025)}
    assert all(size is not None for size in taken.values())
    assert max((size or 0) / n for n, size in taken.items() if n > 256) <= 1.125
    assert max((size or 0) / n for n, size in taken.items()) < 1.5
    assert piecewise_sizes(100)[-1] == 100


def make_config(layers: int, hidden: int, inner: int, vocab: int) -> dict[str, object]:
    heads = {"num_attention_heads": hidden // 128, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "vocab_size": vocab}
    return {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": layers, **heads, **sizes}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ((32, 4096, 14336, 128256), 1024),
        ((28, 1024, 3072, 151936), 2048),
        ((80, 8192, 28672, 128256), 256),
    ],
)
def test_larger_models_keep_a_gpu_busy_with_fewer_tokens(
    config: tuple[int, int, int, int], expected: int, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(make_config(*config)))
    spec = open_checkpoint(tmp_path, random_weights=True).spec
    assert most_tokens(spec, 8192) == expected
    assert most_tokens(spec, 128) == 128


def test_padding_ends_with_the_context(tmp_path: Path) -> None:
    """A step that would take more padding than a sequence has positions runs as it is."""
    folder = save(tame(make_model("llama"), 0.3), tmp_path)
    built = build(folder, "fp32", chunked=True, prefix_cache=False, num_blocks=60, max_model_len=20)
    built.runner.add_piecewise_graphs([80])
    graphs = built.runner.plain.graphs
    assert graphs is not None
    assert graphs.size_for(60) == 80 and graphs.size_for(59) is None


def test_the_log_says_up_to_how_many_tokens() -> None:
    report = CaptureReport(planned=2, captured=2, max_size=16, piecewise_tokens=896)
    assert "other steps of up to 896 tokens" in report.describe()
    assert report.as_json()["piecewise_tokens"] == 896
