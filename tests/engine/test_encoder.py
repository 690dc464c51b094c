"""An encoder's engine and a language engine without one: the same answers as one engine gives."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from driver import Answer, assert_same, build, complete
from emulated_graphs import POOL, emulate
from gpu.setups import PLAIN, Checkpoints, EngineSetup
from tiny_images import Prompt, image, prompt
from tiny_models import make_model, save, tame
from tokenmill.core.config import (
    CacheConfig,
    ExecutionConfig,
    ModelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.images import FEATURES_LOST, FeatureBlocks, ImageInput, ImageSpan
from tokenmill.core.types import Engine, FinishReason, Request, RequestOutput, SamplingParams
from tokenmill.engine.build import BuiltEngine, build_engine
from tokenmill.engine.choices import resolve_setup, set_mode
from tokenmill.engine.encoder import EncoderEngine, build_encoder
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


@pytest.fixture(scope="module")
def golden(folder: Path) -> list[Answer]:
    return ask(
        build(folder, "fp32", chunked=False, prefix_cache=False, num_blocks=64).engine, PROMPTS
    )


def ask(engine: Engine, asked: list[Prompt]) -> list[Answer]:
    images = [each.images for each in asked]
    return complete(engine, [each.token_ids for each in asked], GREEDY, images=images)


def setup(folder: Path, part: str, num_blocks: int, chunked: bool = True) -> Setup:
    return resolve_setup(
        Setup(
            ModelConfig(str(folder), "fp32", "cpu", num_threads=1, part=part),  # type: ignore[arg-type]
            CacheConfig(16, num_blocks=num_blocks, feature_connector="shm"),
            SchedulerConfig(
                max_num_batched_tokens=64,
                max_num_seqs=16,
                encoder_patches=130,
                chunked_prefill=chunked,
            ),
        )
    )


def language(folder: Path, encoder: EncoderEngine, num_blocks: int, chunked: bool) -> BuiltEngine:
    built = build_engine(setup(folder, "language", num_blocks, chunked))
    assert built.engine.features is not None
    assert built.engine.features.connect(encoder.address) is None
    return built


class Encoder:
    """An encoder's engine, and what a front does with its notices."""

    def __init__(self, folder: Path, num_blocks: int = 64) -> None:
        self.engine = build_encoder(setup(folder, "encoder", num_blocks))
        self.num_sent = 0

    def submit(self, sent: ImageInput) -> str:
        self.num_sent += 1
        span = ImageSpan(0, sent.num_tokens(2), sent)
        self.engine.submit(Request(f"i{self.num_sent}", [], images=(span,)))
        return f"i{self.num_sent}"

    def notices(self) -> dict[str, list[int]]:
        assert self.engine.step() == []
        return {n.request_id: n.block_ids for n in self.engine.take_events().notices}

    def locate(self, asked: Prompt) -> Prompt:
        """The prompt with the places of its images' features."""
        spans = []
        for span in asked.images:
            name = self.submit(span.image)
            blocks = FeatureBlocks(self.engine.address.engine_id, tuple(self.notices()[name]))
            there = replace(span.image, data=b"", features=blocks)
            spans.append(replace(span, image=there))
        return Prompt(asked.token_ids, tuple(spans))


@pytest.mark.parametrize(("chunked", "num_blocks"), [(True, 400), (False, 400), (True, 11)])
def test_answers_are_those_of_one_engine(
    folder: Path, golden: list[Answer], chunked: bool, num_blocks: int
) -> None:
    encoder = Encoder(folder)
    built = language(folder, encoder.engine, num_blocks, chunked)
    assert getattr(built.runner.model, "visual", None) is None
    asked = [encoder.locate(each) for each in PROMPTS]
    assert_same(ask(built.engine, asked), golden)
    assert_same(ask(built.engine, asked), golden)
    stats = built.engine.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == 11)
    assert stats.num_images_encoded == 0 and stats.num_images_received >= 3
    told = encoder.engine.stats()
    assert (told.num_images_encoded, told.num_image_hits) == (3, 5)
    assert told.num_patches_encoded == 120 + 16 + 56


def test_an_image_has_one_owner_of_its_blocks_until_it_is_released(folder: Path) -> None:
    encoder = Encoder(folder, num_blocks=3)  # TALL has 30 tokens: 2 blocks; SMALL 4: 1 block
    first, again, second = encoder.submit(TALL), encoder.submit(TALL), encoder.submit(SMALL)
    held = encoder.notices() | encoder.notices()
    assert held[first] == held[again] and not set(held[first]) & set(held[second])
    other = image(7, (1, 12, 10))
    third = encoder.submit(other)
    for name in (first, second):
        encoder.engine.release(name)
        assert not encoder.engine.has_work() and encoder.notices() == {}
    encoder.engine.release(again)
    assert encoder.engine.has_work() and set(encoder.notices()) == {third}
    assert encoder.engine.stats().num_kv_blocks_used == 2
    kept = encoder.submit(SMALL)  # nobody used it, and nobody needed its room
    assert encoder.notices()[kept] == held[second]
    encoder.engine.abort(third)
    encoder.engine.abort(kept)
    assert encoder.engine.stats().num_kv_blocks_used == 0


def test_images_of_a_step_are_encoded_in_one_call_and_fail_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoder, calls = Encoder(folder), []
    encode = encoder.engine._encode

    def watched(images: list[ImageInput]) -> object:
        calls.append(len(images))
        if any(each.content_hash == WIDE.content_hash for each in images):
            raise RuntimeError("no memory")
        return encode(images)

    monkeypatch.setattr(encoder.engine, "_encode", watched)
    small, wide, again = encoder.submit(SMALL), encoder.submit(WIDE), encoder.submit(SMALL)
    encoder.submit(TALL)  # 120 patches more than the 72 before it: behind the budget of 130
    (output,) = encoder.engine.step()
    assert (output.request_id, output.finish_reason) == (wide, FinishReason.ERROR)
    assert calls == [2, 1, 1]
    held = {n.request_id: n.block_ids for n in encoder.engine.take_events().notices}
    assert set(held) == {small, again} and held[small] == held[again]
    assert encoder.engine.has_work() and len(encoder.notices()) == 1 and calls[3:] == [1]


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
    assert encode is not None
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


def test_the_warm_up_of_images_leaves_nothing_behind(folder: Path, golden: list[Answer]) -> None:
    """Neither where they are encoded nor where others encode them."""
    whole = build(folder, "fp32", chunked=True, prefix_cache=False, num_blocks=64)
    encoder = Encoder(folder)
    without = language(folder, encoder.engine, 64, True)
    located = [encoder.locate(each) for each in PROMPTS]
    for built, asked in ((whole, PROMPTS), (without, located)):
        built.runner.warm_up_images()
        images = built.runner.images
        assert images is not None and len(images) == 0 and not images._begun
        assert_same(ask(built.engine, asked), golden)


def test_wrong_images_are_refused(folder: Path) -> None:
    encoder = Encoder(folder)
    encoder.submit(replace(TALL, data=b"12"))
    (output,) = encoder.engine.step()
    assert output.finish_reason is FinishReason.REJECT and "data must be" in str(output.error)


def steps(built: BuiltEngine, count: int = 20) -> list[RequestOutput]:
    return [output for _ in range(count) for output in built.engine.step()]


def test_a_request_ends_in_error_when_its_encoder_is_gone_and_others_go_on(folder: Path) -> None:
    encoder = Encoder(folder)
    built = language(folder, encoder.engine, 400, True)
    asked = encoder.locate(PROMPTS[1])
    assert built.engine.features is not None
    built.engine.features.disconnect(encoder.engine.address.engine_id)
    built.engine.submit(Request("seen", asked.token_ids, GREEDY, images=asked.images))
    built.engine.submit(Request("text", PROMPTS[0].token_ids, GREEDY))
    ends = {o.request_id: o for o in steps(built, 60) if o.finish_reason is not None}
    assert ends["seen"].finish_reason is FinishReason.ERROR
    assert ends["seen"].stop_reason == FEATURES_LOST
    assert ends["text"].finish_reason is FinishReason.LENGTH
    assert not built.engine.has_work()
    assert built.engine.features.connect(encoder.engine.address) is None
    built.engine.submit(Request("again", asked.token_ids, GREEDY, images=asked.images))
    outputs = steps(built, 60)
    assert [o.finish_reason for o in outputs if o.finish_reason] == [FinishReason.LENGTH]


def test_a_request_does_not_end_while_features_are_read_for_it(folder: Path) -> None:
    """The front gives the blocks to others once it has ended."""
    encoder = Encoder(folder)
    built = language(folder, encoder.engine, 400, True)
    features, asked = built.engine.features, encoder.locate(PROMPTS[1])
    assert features is not None
    read: Future[None] = Future()
    connector = features._peers[encoder.engine.address.engine_id]
    connector.read = lambda *what: read  # type: ignore[method-assign]
    built.engine.submit(Request("seen", asked.token_ids, GREEDY, images=asked.images))
    assert steps(built, 3) == []
    built.engine.abort("seen")
    assert steps(built, 3) == [] and built.engine.has_work()
    read.set_result(None)
    (output,) = steps(built, 3)
    assert output.finish_reason is FinishReason.ABORT and not built.engine.has_work()


def test_an_engine_with_an_encoder_takes_patches_and_one_without_features(folder: Path) -> None:
    encoder = Encoder(folder)
    located = encoder.locate(PROMPTS[1])
    whole = build(folder, "fp32", chunked=True, prefix_cache=True, num_blocks=64)
    for built, asked in (
        (whole, located),
        (language(folder, encoder.engine, 64, True), PROMPTS[1]),
    ):
        built.engine.submit(Request("0", asked.token_ids, GREEDY, images=asked.images))
        (output,) = built.engine.step()
        assert output.finish_reason is FinishReason.REJECT
        assert "images[0].features: this engine" in str(output.error)
