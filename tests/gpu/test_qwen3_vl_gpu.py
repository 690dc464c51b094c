"""Qwen3-VL on a GPU: images through the encoder, prompts and graphs, against the CPU and itself."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from driver import Answer, complete
from gpu.setups import (
    MIXED_IMAGES,
    SETUPS,
    Checkpoints,
    ImagePrompt,
    image_prompts,
    random_prompts,
)
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine

Build = Callable[[str], BuiltEngine]
GREEDY = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)


def ask(built: BuiltEngine, asked: list[ImagePrompt], sampling: SamplingParams) -> list[Answer]:
    images = [each.images for each in asked]
    return complete(built.engine, [each.token_ids for each in asked], sampling, images=images)


def tokens(
    built: BuiltEngine, sampling: SamplingParams = GREEDY, asked: list[ImagePrompt] | None = None
) -> list[list[int]]:
    return [answer.token_ids for answer in ask(built, asked or image_prompts(), sampling)]


def scores(built: BuiltEngine, seed: int = 0) -> np.ndarray:
    """Log-probabilities of the first answered token and of the tokens of prompts with images."""
    asked = image_prompts(seed)[1:]
    for each, own in zip(asked, image_prompts()[1:], strict=True):  # other pixels, the same text
        each.token_ids[:] = own.token_ids
    answers = ask(built, asked, SamplingParams(max_tokens=1, prompt_logprobs=0))
    entries = [entry for a in answers for entry in a.prompt_logprobs or [] if entry is not None]
    return np.array([entry.logprobs[0] for entry in entries])


@pytest.mark.parametrize(
    ("name", "bound"),
    [
        ("qwen3-vl", 0.03),
        ("qwen3-vl-unfused", 0.03),
        ("qwen3-vl-fp8", 0.1),
        ("qwen3-vl-moe", 0.05),
        ("qwen3-vl-moe-fp8", 0.1),
    ],
)
def test_images_follow_the_cpu(
    build: Build, checkpoints: Checkpoints, name: str, bound: float
) -> None:
    on_cpu = SETUPS[name].build(checkpoints, "cpu")
    expected, others = scores(on_cpu), scores(on_cpu, seed=7)
    error = np.abs(scores(build(name)) - expected).mean()
    assert 0 < error < bound < np.abs(others - expected).mean()  # pixels matter more than rounding


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe"])
def test_graphs_and_overlap_give_what_the_plain_loop_gives(build: Build, name: str) -> None:
    """A second time, too, when features and prefixes are known: what is left of a prompt is then
    computed in other shapes, and rounds otherwise than the first time, in both engines."""
    plain, built = build(f"{name}-plain"), build(name)
    assert tokens(built) == tokens(plain)
    assert tokens(built) == (again := tokens(plain))
    assert tokens(built, replace(GREEDY, logprobs=None)) == again
    assert built.runner.decode.graphs is not None and built.runner.decode.graphs.report.steps > 0
    assert built.runner.images is not None and built.runner.images.encode is not None
    encoder = built.runner.images.encode.graphs
    assert encoder is not None and encoder.num_replayed > 0
    assert built.runner.plain.graphs is not None
    assert built.runner.plain.graphs.num_with_images > 0


@pytest.mark.parametrize("family", MIXED_IMAGES)
def test_graphs_of_steps_with_images_give_the_bits_of_plain_ones(build: Build, family: str) -> None:
    """Prompts run in chunks and images are encoded in parts; texts and other images follow them."""
    eager, built = build(f"mixed-{family}-eager"), build(f"mixed-{family}")
    pieces, images = built.runner.plain.graphs, built.runner.images
    assert pieces is not None and images is not None and images.encode is not None
    assert eager.runner.plain.graphs is None
    for seed in (0, 20):
        texts = [ImagePrompt(ids, ()) for ids in random_prompts((30, 70, 90), 500, seed)]
        asked = image_prompts(seed)
        assert tokens(built, GREEDY, texts) == tokens(eager, GREEDY, texts)
        found, expected = (ask(each, asked, GREEDY) for each in (built, eager))
        assert [a.token_ids for a in found] == [a.token_ids for a in expected]
        for ours, theirs in zip(found, expected, strict=True):
            assert [x.logprobs for x in ours.logprobs] == [x.logprobs for x in theirs.logprobs]
    assert 4 < pieces.num_with_images < pieces.num_replayed
    assert images.encode.graphs is not None and images.encode.graphs.num_parts_replayed > 2


def test_nothing_depends_on_the_images_beside_it(build: Build) -> None:
    """Bit by bit: alone, together, from a warm cache."""
    together = ask(build("qwen3-vl-invariant"), image_prompts(), GREEDY)
    built = build("qwen3-vl-invariant")
    for asked, answer in zip(image_prompts(), together, strict=True):
        for _ in range(2):
            (single,) = ask(built, [asked], GREEDY)
            assert single.token_ids == answer.token_ids
            assert [x.logprobs for x in single.logprobs] == [x.logprobs for x in answer.logprobs]


@pytest.mark.parametrize("name", ["few-patches", "ngram"])
def test_every_request_ends_with_nearly_the_same_tokens(build: Build, name: str) -> None:
    expected, found = tokens(build("qwen3-vl")), tokens(build(f"qwen3-vl-{name}"))
    assert [len(each) for each in found] == [16] * len(expected)
    assert sum(a[:4] == b[:4] for a, b in zip(found, expected, strict=True)) >= 3
