"""Videos divided over ranks: those of one rank, jobs that end alone, and what cannot be divided."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from light_ranks import start_light_ranks
from tokenmill.__main__ import run
from tokenmill.core.config import ModelConfig
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.specs.wan import A14B, TINY
from tokenmill.core.tasks import Video
from tokenmill.core.types import (
    FinishReason,
    InvalidRequestError,
    ModelLoadError,
    RanksLostError,
)
from tokenmill.core.video import VideoParams
from tokenmill.core.video_parallel import VideoParallel, check_division, check_ranks
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.wan import wan_transformer
from tokenmill.video import video_ranks
from tokenmill.video.pipeline import Pipeline, load_pipeline
from tokenmill.video.video_engine import VideoEngine
from video import small_memory_rank

CONFIG = ModelConfig(model="wan-tiny", random_weights=True, device="cpu", num_threads=1)
PARAMS = VideoParams(size=(32, 16), num_frames=5, num_steps=2, negative_token_ids=(9, 8))
BOUND = 1e-5  # of the latents, whose values are about 1: sums of another number of rows


def job(name: str, params: VideoParams = PARAMS, **more: object) -> Request:
    return Request(name, Video([5, 6, 7], params), **more)  # type: ignore[arg-type]


@contextmanager
def ranks(cfg: int, ulysses: int) -> Iterator[Pipeline]:
    parallel = VideoParallel(cfg, ulysses)
    pipeline = video_ranks.load_ranks(random_wan("wan-tiny"), CONFIG, parallel)
    assert pipeline.group is not None
    try:
        yield pipeline
    finally:
        pipeline.group.close()


def outputs(pipeline: Pipeline, *requests: Request) -> dict[str, RequestOutput]:
    """The last output of each job."""
    engine = video_ranks.make_engine(pipeline)
    for request in requests:
        engine.submit(request)
    found = {}
    while engine.has_work():
        found |= {output.request_id: output for output in engine.step()}
    return found


def pixels(output: RequestOutput) -> torch.Tensor:
    assert output.delta is not None
    return torch.frombuffer(bytearray(output.delta.data), dtype=torch.uint8).int()


@torch.inference_mode()
def made(pipeline: Pipeline, params: VideoParams = PARAMS) -> tuple[torch.Tensor, torch.Tensor]:
    """Latents after the last denoising step, and pixels."""
    engine = VideoEngine(pipeline)
    group = pipeline.group
    leading = engine if group is None else video_ranks.LeadingVideoEngine(engine, group)
    leading.submit(job("a", params))
    for _ in range(params.num_steps):
        leading.step()
    assert engine.running is not None and engine.running.latents is not None
    latents = engine.running.latents.clone()
    while engine.has_work():
        found = leading.step()
    return latents, pixels(found[-1])


def check_close(
    found: tuple[torch.Tensor, torch.Tensor], expected: tuple[torch.Tensor, torch.Tensor]
) -> None:
    assert (found[0] - expected[0]).abs().max() < BOUND
    assert (found[1] - expected[1]).abs().max() <= 1


@pytest.fixture(scope="module")
def alone() -> Pipeline:
    return load_pipeline(random_wan("wan-tiny"), CONFIG)


def test_a_prompt_on_each_of_two_ranks_is_one_prompt_after_the_other(alone: Pipeline) -> None:
    apart = replace(alone, memory_bytes=1)  # one branch at a time: the same products
    with ranks(cfg=2, ulysses=1) as pipeline:
        assert torch.equal(made(pipeline)[0], made(apart)[0])
        cached = replace(PARAMS, num_steps=8, step_cache=10.0)
        found, expected = (outputs(each, job("a", cached))["a"] for each in (pipeline, apart))
        assert found.delta is not None and found.delta.num_skipped == 5
        assert (pixels(found) - pixels(expected)).abs().max() <= 1


def test_tokens_and_heads_on_two_ranks_are_those_of_one(
    alone: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    start_light_ranks(monkeypatch)
    other = replace(PARAMS, size=(80, 32), num_frames=9)
    with ranks(cfg=1, ulysses=2) as pipeline:
        for params in (PARAMS, other, replace(PARAMS, guidance_scale=1.0)):
            check_close(made(pipeline, params), made(alone, params))
        refused = outputs(pipeline, job("a", replace(PARAMS, vae_tiles=True)))["a"]
        assert refused.finish_reason is FinishReason.REJECT
        assert pipeline.split.ranks.size == 2


def test_four_ranks_end_and_drop_jobs_together(
    alone: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An abort, a deadline, a full memory: the jobs beside them have the pixels of one rank."""
    start_light_ranks(monkeypatch)
    monkeypatch.setattr(video_ranks, "PROGRAM", "video.small_memory_rank")
    wide = replace(PARAMS, size=(80, 32))  # ten columns of latents: two and three on a rank
    expected = {"a": made(alone), "b": made(alone, wide)}
    monkeypatch.setattr(wan_transformer, "attend", small_memory_rank.attend)
    large = replace(PARAMS, size=(48, 16))
    with ranks(cfg=2, ulysses=2) as pipeline:
        check_close(made(pipeline, wide), expected["b"])
        engine = video_ranks.make_engine(pipeline)
        for request in (
            job("aborted", wide),
            job("late", wide, deadline_ns=1),
            job("large", large),
        ):
            engine.submit(request)
        engine.submit(job("a"))
        found = {output.request_id: output for output in engine.step()}
        engine.abort("aborted")
        engine.submit(job("b", wide))
        while engine.has_work():
            found |= {output.request_id: output for output in engine.step()}
        ends = {name: output.finish_reason for name, output in found.items()}
        stop, abort = FinishReason.STOP, FinishReason.ABORT
        assert ends == {
            "late": abort, "aborted": abort, "large": FinishReason.ERROR, "a": stop, "b": stop
        }  # fmt: skip
        assert found["large"].stop_reason == "out_of_memory"
        for name, (_, one_rank) in expected.items():
            assert (pixels(found[name]) - one_rank).abs().max() <= 1
        assert engine.stats().num_gpus == 4
        times = video_ranks.measure_ranks(pipeline, job("m", wide), 2)
        assert len(times.steps_s) == 2 and times.parts_s["decode"] > 0
        assert pipeline.group is not None
        pipeline.group._children[1].kill()
        with pytest.raises(RanksLostError):
            for _ in range(3):
                outputs(pipeline, job("lost"))


def test_the_real_model_is_divided_as_mlperfs_submitters_did() -> None:
    for parallel in (VideoParallel(2, 4), VideoParallel(2, 2), VideoParallel(1, 8)):
        check_ranks(parallel, A14B)
        check_division(parallel, VideoParams(), A14B)


@pytest.mark.parametrize(
    ("parallel", "changes", "says"),
    [
        (
            VideoParallel(1, 2),
            {"size": (48, 16), "num_frames": 1},
            "are 3 tokens, which --ulysses 2",
        ),
        (VideoParallel(2, 1), {"guidance_scale": 1.0}, "--cfg-parallel 2 divides two"),
        (VideoParallel(2, 2), {"size": (16, 32)}, "is 2 latents, too few for 4 ranks"),
        (VideoParallel(2, 1), {"vae_tiles": True}, "vae_tiles is for one rank"),
    ],
)
def test_jobs_that_cannot_be_divided_are_refused(
    parallel: VideoParallel, changes: dict[str, object], says: str
) -> None:
    with pytest.raises(InvalidRequestError, match=says):
        check_division(parallel, replace(PARAMS, **changes), TINY)  # type: ignore[arg-type]


def test_ranks_that_do_not_divide_the_heads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ModelLoadError, match="--ulysses 3 does not divide the 40 heads"):
        check_ranks(VideoParallel(1, 3), A14B)
    tiny = ["--random-weights", "--model", "wan-tiny", "--size", "32x16", "--frames", "5"]
    for command in (["video", "a fox"], ["bench", "video"]):
        assert run([*command, *tiny, "--ulysses", "4"]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert "does not divide the 2 heads of the model; use one of 1, 2" in said
        assert run([*command, *tiny, "--cfg-parallel", "3"]) == 2
        assert "--cfg-parallel must be a whole number from 1 to 2" in capsys.readouterr().err
