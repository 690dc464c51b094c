"""Tiers: evicted blocks come back from host memory and disk, and the answers stay the same bits."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from driver import Answer, assert_same, build
from kv.conversations import FEW, GREEDY, ask, assert_same_words, converse, engine, grow, hits
from scheduler_integrity import check_host_tier, check_scheduler
from tiny_images import image, prompt
from tiny_models import make_model, save, tame
from tokenmill.core.kv import TierSizes, parse_tiers
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import ModelLoadError
from tokenmill.engine.build import BuiltEngine
from tokenmill.kv.tiers.page_copies import CpuCopies


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = make_model("llama", head_dim=16, hidden_size=64)  # as wide as compiled kernels want
    return save(tame(model, 0.3), tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("variant", ["llama", "deepseek-v3", "gemma3", "gpt-oss"])
def test_the_same_bits_as_with_room_for_all(variant: str, overlap: bool, tmp_path: Path) -> None:
    """Blocks that left and came back hold what they held: also those of answers."""
    changes = {"sliding_window": 24} if variant in ("gemma3", "gpt-oss") else {}
    model = save(tame(make_model(variant, **changes), 0.3), tmp_path / variant)
    few = 12 if changes else FEW  # with windows, FEW hold all six conversations
    expected = converse(engine(model, num_blocks=400))
    built = engine(model, "host=64MiB", overlap=overlap, num_blocks=few)
    answers = converse(built)
    assert_same(answers, expected)
    assert hits(built) > 0
    cached = [answer.num_cached_tokens for answer in answers]
    assert cached == [answer.num_cached_tokens for answer in expected]


def test_the_same_bits_on_and_off(folder: Path) -> None:
    """With preemption, and with salts that keep equal prompts apart."""
    plain, built = engine(folder), engine(folder, "host=64MiB", overlap=True)
    assert_same(grow(built), grow(plain))
    assert built.engine.stats().num_preemptions > 0 and hits(built) > 0
    computed = [e.engine.stats().prefix_hit_tokens for e in (plain, built)]
    assert computed[1] > computed[0]


def test_a_small_host_tier_keeps_the_latest(folder: Path) -> None:
    built = engine(folder, f"host={12 * 8192}")
    assert len(built.engine.tiers.copies.host) == 12
    assert_same_words(grow(built), grow(engine(folder, num_blocks=400)))
    assert built.engine.stats().tiers["dropped"] > 0
    built.close()
    with pytest.raises(RuntimeError, match="after shutdown"):
        built.engine.tiers.copies.load([], [])


def test_a_request_that_ends_while_it_loads_gives_its_blocks_back(folder: Path) -> None:
    built = engine(folder, "host=64MiB")
    converse(built)
    source = random.Random(5)
    prompt = [source.randrange(3, 60) for _ in range(40)]
    ask(built, [([9] * 200, "")], "other")
    built.engine.submit(Request("x", Generate(prompt, GREEDY)))
    scheduler, tiers = built.engine._scheduler, built.engine.tiers
    scheduler.schedule(0)
    tiers.exchange()
    assert built.engine.stats().num_loading == 1 and tiers.busy
    built.engine.abort("x")
    ended = []
    while built.engine.has_work():
        ended += built.engine.step()
    assert [output.request_id for output in ended] == ["x"]
    check_scheduler(scheduler)
    check_host_tier(tiers.host)
    assert built.engine.stats().num_kv_blocks_used == 0


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"prefix_cache": False}, "needs the prefix cache"),
        ({"chunked": False}, "needs chunked prefill"),
        ({"offloading": "host=900TiB"}, "host=921600.0GiB: only"),
        ({"offloading": "host=1KiB"}, "one block of 16 tokens takes 8192 bytes"),
    ],
)
def test_wrong_settings(folder: Path, options: dict[str, Any], problem: str) -> None:
    given = {"chunked": True, "prefix_cache": True, "num_blocks": 8, "offloading": "host=1MiB"}
    with pytest.raises(ModelLoadError, match=problem):
        build(folder, "fp32", **(given | options))


@pytest.mark.parametrize(
    "text", ["gpu=1GiB", "host=", "host=lots", "disk=/tmp", "disk=:1GiB", "host=1GiB,host=2GiB", ""]
)
def test_wrong_tiers(text: str) -> None:
    with pytest.raises(ValueError):
        parse_tiers(text)


def test_tiers_in_words() -> None:
    assert parse_tiers("8GiB") == parse_tiers("host=8GiB") == TierSizes(8 * 2**30)
    both = parse_tiers("host=1GiB, disk=/a:b:2GiB")
    assert both == TierSizes(2**30, "/a:b", 2 * 2**30)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.float32])
def test_pages_keep_their_bytes(dtype: torch.dtype) -> None:
    source = torch.Generator().manual_seed(1)
    tensors = [
        torch.randint(0, 255, (9, *shape), dtype=torch.uint8, generator=source).view(dtype)
        for shape in ((2, 4, 32), (2, 16, 8))
    ]
    before = [tensor.view(torch.uint8).clone() for tensor in tensors]
    copies = CpuCopies(tensors, 3)
    copies.save([7, 2, 4], [1, 0, 2])
    for tensor in tensors:
        tensor.view(torch.uint8)[:] = 0
    read = copies.load([0, 1, 2], [5, 7, 0])
    while not read.done():
        time.sleep(0.001)
    assert read.exception() is None
    for tensor, kept in zip(tensors, before, strict=True):
        pages = tensor.view(torch.uint8)
        assert torch.equal(pages[[5, 7, 0]], kept[[2, 7, 4]]) and not pages[[1, 2, 3]].any()
    copies.close()


def test_images_are_told_apart(tmp_path: Path) -> None:
    """Two images of one size: what tiers hold of one prompt is not found for the other."""
    model = save(tame(make_model("qwen3-vl"), 0.3), tmp_path / "model")
    prompts = [prompt(2, 20, image(seed, (1, 12, 10)), 40) for seed in (3, 9)]
    big, built = engine(model, num_blocks=400), engine(model, "host=64MiB")
    other = [([5 + i] * 200, "") for i in range(3)]

    def see(built: BuiltEngine, turn: int) -> list[Answer]:
        asked = [(each.token_ids, "") for each in prompts]
        answers = ask(built, asked[turn:], f"images{turn}", [p.images for p in prompts[turn:]])
        ask(built, other, f"others{turn}")
        return answers

    for turn in (1, 0):  # first one prompt, then both, after others have taken the device
        answers = see(built, turn)
        assert_same_words(answers, see(big, turn))
    assert hits(built) > 0 and answers[0].num_cached_tokens < answers[1].num_cached_tokens
