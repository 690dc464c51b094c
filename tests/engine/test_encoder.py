"""Images are encoded alike by padded calls, in parts and by graphs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from driver import assert_same, build, complete
from emulated_graphs import POOL, emulate
from gpu.setups import PLAIN, Checkpoints, EngineSetup
from tiny_images import image, prompt
from tiny_models import make_model, save, tame
from tokenmill.core.config import ExecutionConfig
from tokenmill.core.types import SamplingParams
from tokenmill.engine.choices import set_mode
from tokenmill.engine.graphs.encoder_graphs import EncoderGraphs
from tokenmill.engine.images import normalised

GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
SMALL, WIDE, TALL = image(1, (1, 4, 4)), image(2, (1, 4, 14)), image(3, (1, 12, 10))
PROMPTS = [
    prompt(1, 20),
    prompt(2, 9, TALL, 14),
    prompt(3, 5, TALL, SMALL, 2, WIDE, 11, SMALL),
    prompt(4, TALL, 7),
    prompt(6, SMALL, WIDE, 1),
]


@pytest.fixture(autouse=True)
def default_mode() -> object:
    yield
    set_mode(ExecutionConfig())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tame(make_model("qwen3-vl"), 0.3), tmp_path_factory.mktemp("model"))


@torch.inference_mode()
def test_padded_calls_give_what_the_images_alone_give(folder: Path) -> None:
    """Sums of the products depend on the number of rows, by rounding alone."""
    built = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
    visual, vision = built.runner.model.visual, built.spec.vision
    assert visual is not None and vision is not None
    graphs = EncoderGraphs(visual, vision, sizes=(128, 256))
    for asked in ([SMALL], [TALL, WIDE], [image(9, (2, 4, 4)), SMALL, WIDE], [SMALL] * 3):
        grids = [each.grid for each in asked]
        parts = [normalised(each, vision, torch.device("cpu")) for each in asked]
        expected = [visual(part, [grid])[0] for part, grid in zip(parts, grids, strict=True)]
        found = graphs(torch.cat(parts), grids)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("by_graphs", [False, True])
@torch.inference_mode()
def test_parts_give_what_an_image_at_once_gives(
    folder: Path, by_graphs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are encoded in between, whole and in parts."""
    plain = replace(PLAIN, fused_kernels=False)  # operations of torch, which can be replayed
    built = EngineSetup(folder.name, plain).build(Checkpoints(folder.parent), "cpu")
    assert built.runner.images is not None and built.spec.vision is not None
    encode = built.runner.images.encode
    # Operations of torch do not read the tiles of attention: captured, it has the whole size.
    first, second = (image(seed, (1, 8, 16) if by_graphs else (1, 12, 10)) for seed in (4, 5))
    whole = [found for _, found in encode([first, second, SMALL])]
    graphs = encode.graphs = EncoderGraphs(built.runner.model.visual, built.spec.vision, (128,))
    if by_graphs:
        emulate(monkeypatch)
        for job in graphs.jobs(POOL):
            job.capture()
        graphs.start()
    begun = [encode.begin(first), encode.begin(second)]
    for share in (0.3, 0.4, 0.7, 0.99):
        for each in begun:
            encode.go_on(each, share)
        ((_, alone),) = encode([first if by_graphs else SMALL])
        torch.testing.assert_close(alone, whole[0 if by_graphs else 2], atol=1e-5, rtol=1e-5)
    for each, expected in zip(begun, whole, strict=False):
        torch.testing.assert_close(encode.finish(each), expected, atol=1e-5, rtol=1e-5)
    assert (graphs.num_replayed, graphs.num_parts_replayed) == ((4, 6) if by_graphs else (0, 0))


def test_the_warm_up_of_images_leaves_nothing_behind(folder: Path) -> None:
    texts, images = [each.token_ids for each in PROMPTS], [each.images for each in PROMPTS]
    plain = build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64)
    expected = complete(plain.engine, texts, GREEDY, images=images)
    built = build(folder, "fp32", chunked=True, prefix_cache=False, num_blocks=64)
    built.runner.warm_up_images()
    kept = built.runner.images
    assert kept is not None and len(kept) == 0 and not kept._begun
    assert_same(complete(built.engine, texts, GREEDY, images=images), expected)
