"""The engine of a video worker, with the files that it makes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from tokenmill.core.requests import Generate, Request, RequestOutput
from tokenmill.core.tasks import TaskProgress, Video, VideoFile, VideoFrames
from tokenmill.core.types import FinishReason
from tokenmill.core.video import VideoParams
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.wan.wan_transformer import WanTransformer
from tokenmill.video import video_task_engine
from tokenmill.video.pipeline import Pipeline, build_pipeline
from tokenmill.video.preview import frame_picture, latents_picture
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_files import mp4_bytes
from tokenmill.video.video_task_engine import VideoTaskEngine

PARAMS = VideoParams(size=(32, 16), num_frames=5, num_steps=4, negative_token_ids=(9, 8))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return build_pipeline(random_wan("wan-tiny"), torch.device("cpu"), "fp32")


@pytest.fixture
def worker(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> VideoTaskEngine:
    monkeypatch.setattr(video_task_engine, "PICTURE_S", 0.0)
    engine = VideoEngine(pipeline)
    return VideoTaskEngine(engine, mp4_bytes, frame_picture, lambda: latents_picture(engine))


def submit(worker: VideoTaskEngine, name: str, params: VideoParams = PARAMS) -> None:
    worker.submit(Request(name, Video([5, 6, 7], params)))


def run(worker: VideoTaskEngine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while worker.has_work():
        for output in worker.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def shape(picture: bytes) -> tuple[int, ...]:
    with Image.open(io.BytesIO(picture)) as image:
        return np.asarray(image).shape


def test_steps_are_told_with_pictures_and_the_end_has_the_files(worker: VideoTaskEngine) -> None:
    submit(worker, "a")
    *steps, end = run(worker)["a"]
    told = [step.delta for step in steps if isinstance(step.delta, TaskProgress)]
    assert [step.share for step in told] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.9])
    assert [step.is_denoising for step in told] == [True] * 4 + [False]
    assert all(step.step_s > 0 for step in told)
    assert {shape(step.picture) for step in told} == {(2, 4, 3)}  # the latents' own size
    made = end.delta
    assert end.finish_reason is FinishReason.STOP and isinstance(made, VideoFile)
    assert shape(made.picture) == (16, 32, 3)
    assert set(made.seconds) == {"text", "load", "denoise", "decode"}
    with av.open(io.BytesIO(made.video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 5 and frames[0].shape == (16, 32, 3)
    assert worker.stats().figures["engine_steps_total"] == 6


def test_large_frames_have_small_pictures() -> None:
    pixels = np.arange(3 * 4 * 1000, dtype=np.int64).astype(np.uint8).tobytes()
    assert shape(frame_picture(VideoFrames(1000, 4, 16, 1, pixels))) == (1, 250, 3)


def test_out_of_memory_fails_that_job_alone_and_the_next_has_its_pixels(
    worker: VideoTaskEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    submit(worker, "alone")
    alone = run(worker)["alone"][-1]
    compute, calls = WanTransformer.__call__, 0

    def scarce(self: WanTransformer, *args: object) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return compute(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(WanTransformer, "__call__", scarce)
    submit(worker, "large")
    submit(worker, "next")
    found = run(worker)
    (_, failed), (*_, done) = found["large"], found["next"]
    assert (failed.finish_reason, failed.stop_reason) == ("error", "out_of_memory")
    assert "do not fit the memory; ask for a smaller size" in (failed.error or "")
    files = [o.delta.video for o in (alone, done) if isinstance(o.delta, VideoFile)]
    assert len(files) == 2 and files[0] == files[1]


def test_jobs_that_cannot_be_made_fail_alone(worker: VideoTaskEngine, tmp_path: Path) -> None:
    worker.submit(Request("text", Generate([1])))
    submit(worker, "odd", replace(PARAMS, size=(33, 16)))
    submit(worker, "left")
    submit(worker, "good")
    worker.abort("left")
    found = run(worker)
    names = ("text", "odd", "left", "good")
    reasons = [found[name][-1].finish_reason for name in names]
    assert reasons == ["reject", "reject", "abort", "stop"]
    assert "task: this engine makes videos" in (found["text"][-1].error or "")
    assert found["odd"][-1].stop_reason == "invalid"
    error = found["odd"][-1].error or ""
    assert error.startswith("size: ") and "multiples of 16" in error
    (tmp_path / "odd.pt").write_text("no tensor")
    for file, says in (("odd.pt", "cannot be read"), ("none.pt", "cannot be read")):
        submit(worker, file, replace(PARAMS, latent=str(tmp_path / file)))
        (end,) = run(worker)[file]
        error = end.error or ""
        assert end.stop_reason == "invalid" and error.startswith(f"latent_path: {file} {says}")
        assert str(tmp_path) not in error  # paths are the server's own


def test_a_video_that_cannot_be_written_fails_its_job(pipeline: Pipeline) -> None:
    def fails(video: VideoFrames) -> bytes:
        raise RuntimeError("no codec")

    worker = VideoTaskEngine(VideoEngine(pipeline), fails, frame_picture, lambda: b"")
    submit(worker, "a")
    end = run(worker)["a"][-1]
    assert (end.finish_reason, end.stop_reason) == ("error", "encode")
    assert "no codec" in (end.error or "")
