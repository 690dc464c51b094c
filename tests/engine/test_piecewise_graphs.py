"""Steps padded to a few numbers of tokens, whole and in pieces: the answers of plain ones."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from draft_heads import forgetful, save_head
from driver import Answer, assert_same, build, complete
from emulated_graphs import POOL, emulate
from gpu.setups import LIMITS, PLAIN, Checkpoints, EngineSetup
from scheduler_integrity import check_scheduler
from tiny_images import Prompt, image, prompt
from tiny_models import make_model, save, tame
from tokenmill.core.config import ExecutionConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.choices import set_mode
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


def pad_steps(built: BuiltEngine, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Pad steps to SIZES from now on; returns what counted() does."""
    built.runner.add_piecewise_graphs(SIZES)
    assert built.runner.plain.graphs is not None
    return counted(built.runner.plain.graphs, monkeypatch)


@pytest.mark.parametrize("family", ["llama", "qwen3-moe", "deepseek-v3", "gemma3", "gpt-oss"])
def test_padding_changes_no_answer(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tame(make_model(family), 0.3), tmp_path)
    options = {"chunked": True, "prefix_cache": True, "num_blocks": 60}
    plain, padded = (build(folder, "fp32", **options) for _ in range(2))
    steps = pad_steps(padded, monkeypatch)
    assert_same(ask(padded), ask(plain))
    assert any(num_tokens < size for num_tokens, size in steps)
    check_scheduler(padded.engine._scheduler)


def test_padding_changes_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The module sees what pads a step, too, and writes it where nobody reads."""
    model = forgetful(tame(make_model("qwen3-tied"), 0.3))
    folder, head = save(model, tmp_path), save_head(model, tmp_path / "head.safetensors")
    options = {"chunked": True, "prefix_cache": True, "num_blocks": 60, "mtp": 2, "draft": head}
    plain, padded = (build(folder, "fp32", **options) for _ in range(2))
    steps = pad_steps(padded, monkeypatch)
    assert_same(ask(padded), ask(plain))
    assert any(num_tokens < size for num_tokens, size in steps)
    found, expected = padded.engine.stats(), plain.engine.stats()
    assert sum(expected.num_accepted) > 0
    assert (found.num_drafted, found.num_accepted) == (expected.num_drafted, expected.num_accepted)


def captured(built: BuiltEngine) -> PiecewiseGraphs:
    built.runner.add_piecewise_graphs(SIZES)
    graphs = built.runner.plain.graphs
    assert graphs is not None
    with torch.inference_mode():
        for job in graphs.jobs(POOL):
            job.capture()
    assert graphs.start() == SIZES[-1]
    return graphs


@pytest.mark.parametrize("family", ["gemma3", "deepseek-v3"])
def test_pieces_replayed_give_what_the_step_gives(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes share their inputs and are captured before the first step, as on a GPU."""
    emulate(monkeypatch)
    save(tame(make_model(family, **NO_EXPERTS.get(family, {})), 0.3), tmp_path / "tiny")
    setup = EngineSetup("tiny", UNFUSED, num_blocks=60, limits=FEW)
    plain, pieced = (setup.build(Checkpoints(tmp_path), "cpu") for _ in range(2))
    graphs = captured(pieced)
    num_layers = pieced.runner.model.spec.num_layers
    for size in SIZES:
        pieces, _ = graphs._pieces[size]
        assert len(pieces.graphs) == num_layers + 1 and len(pieces.cuts) == num_layers
    assert_same(ask(pieced, most=2), ask(plain, most=2))
    assert graphs.num_replayed > 2


def image_prompts() -> list[Prompt]:
    """Images that several steps run, at the ends of prompts too, and a text among them."""
    tall, wide = image(1, (1, 14, 12)), image(2, (1, 4, 14))
    parts = (30, tall, 9), (25,), (7, wide, 3, tall), (40, wide, 20), (tall, 5, wide)
    return [prompt(seed, *each) for seed, each in enumerate(parts)]


def ask_about_images(built: BuiltEngine, most: int) -> list[Answer]:
    asked, greedy = image_prompts(), replace(GREEDY, max_tokens=most)
    images = [each.images for each in asked]
    return complete(built.engine, [each.token_ids for each in asked], greedy, images=images)


@pytest.mark.parametrize("family", ["qwen3-vl", "qwen3-vl-moe"])
def test_padding_changes_no_answer_about_an_image(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(tame(make_model(family), 0.3), tmp_path)
    options = {"chunked": True, "prefix_cache": False, "num_blocks": 60}
    plain, padded = (build(folder, "fp32", **options) for _ in range(2))
    steps = pad_steps(padded, monkeypatch)
    assert_same(ask_about_images(padded, 12), ask_about_images(plain, 12))
    assert any(num_tokens < size for num_tokens, size in steps)


def test_pieces_replayed_with_images_give_what_the_step_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps with images and without take turns, and no step sees the images of another."""
    emulate(monkeypatch)
    save(tame(make_model("qwen3-vl"), 0.3), tmp_path / "tiny")
    setup = EngineSetup("tiny", UNFUSED, num_blocks=60, limits=FEW)
    plain, pieced = (setup.build(Checkpoints(tmp_path), "cpu") for _ in range(2))
    graphs = captured(pieced)
    for _ in range(2):
        assert_same(ask_about_images(pieced, 3), ask_about_images(plain, 3))
    assert_same(ask(pieced, most=2), ask(plain, most=2))
    assert 4 < graphs.num_with_images < graphs.num_replayed


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
