"""The video engine: one terminal output per job, true progress, same seed, same pixels."""

from __future__ import annotations

from dataclasses import replace
from math import prod
from pathlib import Path

import msgspec
import pytest
import torch

from tokenmill.core.requests import Engine, Generate, Request, RequestOutput
from tokenmill.core.specs.wan import TINY
from tokenmill.core.tasks import TaskProgress, Video, VideoFrames
from tokenmill.core.types import FinishReason, ModelLoadError
from tokenmill.core.video import VideoParams
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.checkpoints.weights import RandomTensor
from tokenmill.models.wan.wan_transformer import TextAttention, transformer_tensors
from tokenmill.video.experts import Experts
from tokenmill.video.pipeline import Pipeline, build_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_job import VideoJob
from tokenmill.workers.messages import Outputs, Submit

PARAMS = VideoParams(size=(32, 16), num_frames=5, num_steps=4, negative_token_ids=(9, 8))
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pipeline() -> Pipeline:
    return build_pipeline(random_wan("wan-tiny"), CPU, "fp32")


def job(name: str = "a", params: VideoParams = PARAMS, **more: object) -> Request:
    return Request(name, Video([5, 6, 7], params), **more)  # type: ignore[arg-type]


def run(engine: Engine) -> dict[str, list[RequestOutput]]:
    found: dict[str, list[RequestOutput]] = {}
    while engine.has_work():
        for output in engine.step():
            found.setdefault(output.request_id, []).append(output)
    return found


def video(pipeline: Pipeline, params: VideoParams = PARAMS) -> VideoFrames:
    engine = VideoEngine(pipeline)
    engine.submit(job(params=params))
    made = run(engine)["a"][-1].delta
    assert made is not None
    return made


def test_a_job_steps_to_its_video_and_its_progress_is_true(pipeline: Pipeline) -> None:
    engine = VideoEngine(pipeline)
    engine.submit(job())
    outputs = run(engine)["a"]
    # Four denoising steps, then two latent frames, which are one step together; then the video.
    expected = [steps / 5 for steps in (1, 2, 3, 4, 4.5)]
    shares = [o.delta.share for o in outputs if isinstance(o.delta, TaskProgress)]
    assert shares == pytest.approx(expected)
    assert [output.finish_reason for output in outputs] == [None] * 5 + [FinishReason.STOP]
    made = outputs[-1].delta
    assert made is not None and len(made.data) == 5 * 16 * 32 * 3
    assert len(set(made.data)) > 32  # not one colour
    assert set(made.seconds) == {"text", "load", "denoise", "decode"}
    assert outputs[-1].cost is not None and outputs[-1].cost.spent_s > 0
    stats = engine.stats()
    assert (stats.num_steps, stats.num_finished) == (6, {"stop": 1})


def test_same_seed_same_pixels_whatever_ran_before_or_waits_beside(pipeline: Pipeline) -> None:
    alone = video(pipeline).data
    engine = VideoEngine(pipeline)
    other = replace(PARAMS, seed=7, size=(16, 32), num_frames=9, guidance_scale=1.0)
    for name, params in (("b", other), ("a", PARAMS), ("c", other), ("d", PARAMS)):
        engine.submit(job(name, params))
    found = {name: outputs[-1].delta for name, outputs in run(engine).items()}
    data = {name: made.data for name, made in found.items() if made is not None}
    assert data["a"] == data["d"] == alone
    assert data["b"] == data["c"] != video(pipeline, replace(other, seed=8)).data


def test_jobs_run_one_by_one_and_the_urgent_one_first(pipeline: Pipeline) -> None:
    engine = VideoEngine(pipeline)
    for name, priority in (("late", 1), ("first", 0), ("second", 0)):
        engine.submit(job(name, priority=priority))
    assert list(run(engine)) == ["first", "second", "late"]


def test_an_abort_ends_a_job_between_steps(pipeline: Pipeline) -> None:
    engine = VideoEngine(pipeline)
    for name in ("a", "b", "c"):
        engine.submit(job(name))
    engine.step()
    engine.abort("a")
    engine.abort("c")
    engine.abort("unknown")
    found = run(engine)
    assert [len(found[name]) for name in "abc"] == [1, 6, 1]
    assert found["a"][0].finish_reason is FinishReason.ABORT
    assert found["a"][0].delta == TaskProgress(pytest.approx(0.2))
    assert found["c"][0].finish_reason is FinishReason.ABORT
    made = found["b"][-1].delta
    assert made is not None and made.data == video(pipeline).data
    assert engine.stats().num_finished == {"abort": 2, "stop": 1}


def test_a_deadline_ends_a_job_between_steps(pipeline: Pipeline) -> None:
    engine = VideoEngine(pipeline)
    engine.submit(job("late", deadline_ns=1))
    (output,) = engine.step()
    assert (output.finish_reason, output.stop_reason) == (FinishReason.ABORT, "deadline")
    assert not engine.has_work()


def test_keys_and_values_of_the_text_are_computed_once_for_each_expert(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    compute = TextAttention.text_kv

    def counted(self: TextAttention, text: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(len(text))
        return compute(self, text)

    monkeypatch.setattr(TextAttention, "text_kv", counted)
    video(pipeline, replace(PARAMS, num_steps=8))
    assert calls == [2] * 2 * TINY.transformer.num_layers  # both prompts at once, two experts


def test_jobs_and_videos_travel_to_and_from_workers(pipeline: Pipeline) -> None:
    request = job()
    sent = msgspec.msgpack.encode(Submit([request]))
    assert msgspec.msgpack.decode(sent, type=Submit).requests == [request]
    output = RequestOutput("a", [], finish_reason=FinishReason.STOP, delta=video(pipeline))
    answered = msgspec.msgpack.encode(Outputs([output]))
    assert msgspec.msgpack.decode(answered, type=Outputs).outputs == [output]


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("not enough memory: you tried")],
)
@pytest.mark.parametrize("where", ["denoise", "decode"])
def test_out_of_memory_ends_that_job_alone(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch, error: Exception, where: str
) -> None:
    engine = VideoEngine(pipeline)
    engine.submit(job("a"))
    engine.submit(job("b"))
    for _ in range(4 if where == "decode" else 2):
        engine.step()

    def full(*_: object, **__: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.models.wan.wan_vae.conv3d", full)
        patch.setattr("tokenmill.models.wan.wan_transformer.attend", full)
        (ended,) = engine.step()
    assert (ended.request_id, ended.finish_reason) == ("a", FinishReason.ERROR)
    assert ended.stop_reason == "out_of_memory"
    assert ended.error is not None and "5 frames of 32x16 do not fit the memory" in ended.error
    made = run(engine)["b"][-1].delta
    assert made is not None and made.data == video(pipeline).data


def test_a_job_that_waits_holds_no_noise_and_ends_alone_where_it_does_not_fit(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate")

    engine = VideoEngine(pipeline)
    with monkeypatch.context() as patch:
        patch.setattr("tokenmill.video.video_job._noise", full)
        engine.submit(job("a"))  # the most frames that positions allow would be 275 GB of noise
        engine.submit(job("b"))
        (ended,) = engine.step()
    assert (ended.request_id, ended.stop_reason) == ("a", "out_of_memory")
    made = run(engine)["b"][-1].delta
    assert made is not None and made.data == video(pipeline).data


def test_other_errors_are_not_taken_for_a_full_memory(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("an illegal memory access was encountered")

    monkeypatch.setattr("tokenmill.models.wan.wan_transformer.attend", broken)
    engine = VideoEngine(pipeline)
    engine.submit(job())
    with pytest.raises(RuntimeError, match="illegal"):
        engine.step()


def test_one_branch_at_a_time_and_offload_give_the_same_video(pipeline: Pipeline) -> None:
    whole = torch.frombuffer(bytearray(video(pipeline).data), dtype=torch.uint8).int()
    offloaded = build_pipeline(random_wan("wan-tiny"), CPU, "fp32", offload=True)
    tight = replace(pipeline, memory_bytes=1)
    assert not tight.batches_guidance(8) and pipeline.batches_guidance(8)
    assert video(offloaded).data == video(pipeline).data
    assert offloaded.experts.load_s > 0
    assert video(offloaded).seconds["load"] > 0
    apart = torch.frombuffer(bytearray(video(tight).data), dtype=torch.uint8).int()
    assert (apart - whole).abs().max() <= 1  # sums of other lengths may round a pixel otherwise


@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_experts_of_an_fp32_checkpoint_wait_on_the_host_in_bf16(dtype: ComputeType) -> None:
    checkpoint = random_wan("wan-tiny")
    stored = sum(tensor.num_bytes for tensor in checkpoint.parts["transformer"].values())
    offloaded = build_pipeline(checkpoint, CPU, dtype, offload=True)
    fp32, in_bf16 = 0, 0
    for name, shape in transformer_tensors(TINY.transformer).items():
        linear = name.endswith("weight") and len(shape) > 1 and ".time_" not in name
        fp32, in_bf16 = fp32 + prod(shape) * (not linear), in_bf16 + prod(shape) * linear
    assert stored == 4 * (fp32 + in_bf16)
    padding = offloaded.experts.num_bytes - 4 * fp32 - 2 * in_bf16
    assert 0 <= padding < 64 * len(checkpoint.parts["transformer"])
    made = video(offloaded).data
    assert made == video(build_pipeline(checkpoint, CPU, dtype)).data


def test_an_expert_on_the_host_is_one_pinned_block(monkeypatch: pytest.MonkeyPatch) -> None:
    pinned: list[tuple[int, int]] = []

    class Driver:
        def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
            pinned.append((address, num_bytes))
            return 0

        def cudaHostUnregister(self, address: int) -> int:
            pinned.remove(next(block for block in pinned if block[0] == address))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    source = random_wan("wan-tiny").readers(CPU)["transformer"]
    experts = Experts(TINY.transformer, [source], "bf16", torch.device("cuda"), offload=True)
    assert [num_bytes for _, num_bytes in pinned] == [experts.num_bytes]
    del experts
    assert pinned == []  # before its memory is freed
    monkeypatch.setattr(Driver, "cudaHostRegister", lambda *_: 2)
    with pytest.raises(ModelLoadError, match=r"--offload: .* cannot be pinned \(CUDA error 2\)"):
        Experts(TINY.transformer, [source], "bf16", torch.device("cuda"), offload=True)


def test_the_bar_of_random_weights_ends_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RandomTensor, "read", lambda tensor: torch.empty(tensor.shape))
    seen: list[tuple[int, int]] = []
    readers = random_wan("wan-tiny").readers("cuda", lambda *now: seen.append(now))
    for tensors in readers.values():
        dict(tensors)
    assert seen[-1][0] == seen[-1][1] == random_wan("wan-tiny").num_bytes // 2  # bf16 there


def test_the_step_cache_skips_steps_and_zero_is_off(pipeline: Pipeline) -> None:
    made = [
        video(pipeline, replace(PARAMS, num_steps=8, step_cache=value))
        for value in (0.0, 0.0, 10.0, 1e-9)
    ]
    exact, off, loose, tight = (each.data for each in made)
    assert exact == off == tight != loose
    # Not the first step of either expert, nor the last step.
    assert [each.num_skipped for each in made] == [0, 0, 5, 0]


@torch.inference_mode()
def latents(pipeline: Pipeline, params: VideoParams) -> torch.Tensor:
    job = VideoJob(Request("a", Video([5, 6, 7], params)), pipeline)
    for _ in range(params.num_steps):
        next(job.steps)
    assert job.latents is not None
    return job.latents


def test_rounded_attention_is_near_and_one_job_alone_has_it(pipeline: Pipeline) -> None:
    exact = latents(pipeline, PARAMS)
    for dtype in ("int8", "int8-fp8", "fp8"):
        found = latents(pipeline, replace(PARAMS, attention_dtype=dtype))
        assert 0.0 < (found - exact).norm() / exact.norm() < 1e-3, dtype
    assert torch.equal(latents(pipeline, PARAMS), exact)


def test_a_fixed_latent_takes_the_place_of_the_seed(pipeline: Pipeline, tmp_path: Path) -> None:
    noise = torch.randn(1, 16, 2, 2, 4, generator=torch.Generator().manual_seed(PARAMS.seed))
    torch.save(noise, tmp_path / "latent.pt")
    fixed = replace(PARAMS, seed=1, latent=str(tmp_path / "latent.pt"))
    assert video(pipeline, fixed).data == video(pipeline).data
    torch.save(noise[:, :8], tmp_path / "latent.pt")
    assert "needs [1, 16, 2, 2, 4]" in rejected(pipeline, fixed)
    (tmp_path / "latent.pt").write_text("no tensor")
    assert "cannot be read" in rejected(pipeline, fixed)


def rejected(pipeline: Pipeline, params: VideoParams) -> str:
    engine = VideoEngine(pipeline)
    engine.submit(Request("a", Video([5], params)))
    (output,) = engine.step()
    assert output.finish_reason is FinishReason.REJECT and output.error
    return output.error


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_frames": 6}, "num_frames must be 4 n + 1, such as 5 or 9, got 6"),
        ({"size": (30, 16)}, "got 30x16"),
        ({"size": (32, 8)}, "a height in multiples of 16"),
        ({"size": (16_400, 16)}, "too large"),
        ({"negative_token_ids": ()}, "negative_prompt must have at least one token"),
        ({"negative_token_ids": (256,)}, "token ids must be from 0 to 255"),
        ({"num_steps": 0}, "num_steps must be at least 1"),
        ({"seed": 10**19}, "seed must be a 64-bit integer, got 10000000000000000000"),
        ({"latent": "nowhere.pt"}, "nowhere.pt cannot be read"),
    ],
)
def test_wrong_jobs_are_rejected(pipeline: Pipeline, changes: dict[str, object], says: str) -> None:
    assert says in rejected(pipeline, replace(PARAMS, **changes))  # type: ignore[arg-type]


def test_a_text_request_is_rejected(pipeline: Pipeline) -> None:
    engine = VideoEngine(pipeline)
    engine.submit(Request("a", Generate([5, 6, 7])))
    (end,) = run(engine)["a"]
    assert end.finish_reason is FinishReason.REJECT
    assert "this engine makes videos" in (end.error or "")


def test_the_tiny_shape_has_both_experts() -> None:
    assert random_wan("wan-tiny").experts == ["transformer", "transformer_2"]
    assert TINY.boundary_ratio == 0.875
