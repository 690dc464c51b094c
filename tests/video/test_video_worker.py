"""The video engine as an engine of jobs, with the files that its worker makes."""

from __future__ import annotations

import io
from dataclasses import replace
from pathlib import Path

import av
import msgspec
import numpy as np
import pytest
import torch
from PIL import Image

from tokenmill.core.jobs.job_engine import JobOutput
from tokenmill.core.types import Request
from tokenmill.core.video import Video, VideoParams
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.wan.wan_transformer import WanTransformer
from tokenmill.video.pipeline import Pipeline, build_pipeline
from tokenmill.video.preview import frame_picture, latents_picture
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_files import mp4_bytes
from tokenmill.workers.jobs import video_worker
from tokenmill.workers.jobs.video_worker import (
    VideoProgress,
    VideoResult,
    VideoWorker,
    encode_request,
)

PARAMS = VideoParams(size=(32, 16), num_frames=5, num_steps=4, negative_token_ids=(9, 8))


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return build_pipeline(random_wan("wan-tiny"), torch.device("cpu"), "fp32")


@pytest.fixture
def worker(pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> VideoWorker:
    monkeypatch.setattr(video_worker, "PICTURE_S", 0.0)
    engine = VideoEngine(pipeline)
    return VideoWorker(engine, mp4_bytes, frame_picture, lambda: latents_picture(engine))


def submit(worker: VideoWorker, name: str, params: VideoParams = PARAMS) -> None:
    worker.submit(name, encode_request(Request(name, [5, 6, 7], video=params)))


def run(worker: VideoWorker) -> dict[str, list[JobOutput]]:
    found: dict[str, list[JobOutput]] = {}
    while worker.has_work():
        for output in worker.step():
            found.setdefault(output.job_id, []).append(output)
    return found


def shape(picture: bytes) -> tuple[int, ...]:
    with Image.open(io.BytesIO(picture)) as image:
        return np.asarray(image).shape


def test_steps_are_told_with_pictures_and_the_end_has_the_files(worker: VideoWorker) -> None:
    submit(worker, "a")
    *steps, end = run(worker)["a"]
    told = [msgspec.msgpack.decode(step.payload, type=VideoProgress) for step in steps]
    assert [step.progress for step in told] == pytest.approx([0.2, 0.4, 0.6, 0.8, 0.9])
    assert [step.is_denoising for step in told] == [True] * 4 + [False]
    assert all(step.step_s > 0 for step in told)
    assert {shape(step.picture) for step in told} == {(2, 4, 3)}  # the latents' own size
    made = msgspec.msgpack.decode(end.payload, type=VideoResult)
    assert end.kind == "done" and shape(made.picture) == (16, 32, 3)
    assert set(made.seconds) == {"text", "load", "denoise", "decode"}
    with av.open(io.BytesIO(made.video)) as container:
        frames = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert len(frames) == 5 and frames[0].shape == (16, 32, 3)
    assert worker.stats()["engine_steps_total"] == 6


def test_large_frames_have_small_pictures() -> None:
    pixels = np.arange(3 * 4 * 1000, dtype=np.int64).astype(np.uint8).tobytes()
    assert shape(frame_picture(Video(1000, 4, 16, 1, pixels))) == (1, 250, 3)


def test_out_of_memory_fails_that_job_alone_and_the_next_has_its_pixels(
    worker: VideoWorker, monkeypatch: pytest.MonkeyPatch
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
    assert (failed.kind, failed.error_kind) == ("failed", "out_of_memory")
    assert "do not fit the memory; ask for a smaller size" in failed.error
    results = [msgspec.msgpack.decode(o.payload, type=VideoResult) for o in (alone, done)]
    assert results[0].video == results[1].video


def test_jobs_that_cannot_be_made_fail_alone(worker: VideoWorker, tmp_path: Path) -> None:
    for payload in (b"", b"\x80", encode_request(Request("a", [1]))):
        with pytest.raises(ValueError, match="the job"):
            worker.submit("a", payload)
    submit(worker, "odd", replace(PARAMS, size=(33, 16)))
    submit(worker, "left")
    submit(worker, "good")
    worker.abort("left")
    found = run(worker)
    assert [found[name][-1].kind for name in ("odd", "left", "good")] == ["failed"] * 2 + ["done"]
    assert found["odd"][-1].error_kind == "invalid"
    assert found["odd"][-1].error.startswith("size: ")
    assert "multiples of 16" in found["odd"][-1].error
    (tmp_path / "odd.pt").write_text("no tensor")
    for file, says in (("odd.pt", "cannot be read"), ("none.pt", "cannot be read")):
        submit(worker, file, replace(PARAMS, latent=str(tmp_path / file)))
        (end,) = run(worker)[file]
        assert end.error_kind == "invalid" and end.error.startswith(f"latent_path: {file} {says}")
        assert str(tmp_path) not in end.error  # paths are the server's own


def test_a_video_that_cannot_be_written_fails_its_job(pipeline: Pipeline) -> None:
    def fails(video: Video) -> bytes:
        raise RuntimeError("no codec")

    worker = VideoWorker(VideoEngine(pipeline), fails, frame_picture, lambda: b"")
    submit(worker, "a")
    end = run(worker)["a"][-1]
    assert (end.kind, end.error_kind) == ("failed", "encode") and "no codec" in end.error
