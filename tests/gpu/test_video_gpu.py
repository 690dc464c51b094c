"""Videos on a GPU: near those of the CPU, the same by the same seed, alone after a full memory."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from tokenmill.core.requests import Request
from tokenmill.core.tasks import Video, VideoFrames
from tokenmill.core.types import FinishReason
from tokenmill.core.video import VideoParams
from tokenmill.kernels import bidirectional
from tokenmill.kernels.gpu import bidirectional as gpu_bidirectional
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import bidirectional as hopper_bidirectional
from tokenmill.kernels.gpu.hopper.two_groups import ProgramShape
from tokenmill.layers.linear import ComputeType
from tokenmill.models.checkpoints.diffusers_folder import random_wan
from tokenmill.models.checkpoints.weights import ReadableTensor
from tokenmill.video.pipeline import Pipeline, build_pipeline
from tokenmill.video.video_engine import VideoEngine
from tokenmill.video.video_job import VideoJob

PARAMS = VideoParams(size=(64, 48), num_frames=9, num_steps=6, negative_token_ids=(9, 8))
LARGE = replace(PARAMS, size=(1024, 1024), num_frames=9)


@dataclass(frozen=True)
class DrawnOnHost:
    """A random tensor that is the same for every device: each has a generator of its own."""

    tensor: ReadableTensor

    @property
    def num_bytes(self) -> int:
        return self.tensor.num_bytes

    def read(self) -> torch.Tensor:
        return self.tensor.read()


def pipeline(dtype: ComputeType, device: str = "cuda", offload: bool = False) -> Pipeline:
    drawn = random_wan("wan-tiny")
    parts = {
        part: {name: DrawnOnHost(tensor) for name, tensor in tensors.items()}
        for part, tensors in drawn.parts.items()
    }
    return build_pipeline(replace(drawn, parts=parts), torch.device(device), dtype, offload)


@torch.inference_mode()
def moved(own: Pipeline) -> torch.Tensor:
    """How far the steps have moved the latents from their noise."""
    job = VideoJob(Request("a", Video([5, 6, 7], PARAMS)), own)
    for _ in range(PARAMS.num_steps):
        next(job.steps)
    assert job.latents is not None
    return job.latents.cpu() - job.noise


def pixels(own: Pipeline) -> np.ndarray:
    engine = VideoEngine(own)
    engine.submit(Request("a", Video([5, 6, 7], PARAMS)))
    outputs = [output for _ in range(PARAMS.num_steps + 3) for output in engine.step()]
    made = outputs[-1].delta
    assert isinstance(made, VideoFrames)
    return np.frombuffer(made.data, np.uint8)


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 0.03), ("fp8", 0.05)])
def test_latents_follow_the_cpu(dtype: ComputeType, bound: float) -> None:
    expected = moved(pipeline("fp32", "cpu"))
    found = moved(pipeline(dtype))
    assert (found - expected).norm() / expected.norm() < bound


def test_same_seed_same_pixels_also_with_offload() -> None:
    own = pipeline("bf16")
    expected = pixels(own)
    assert np.array_equal(pixels(own), expected)
    assert np.array_equal(pixels(pipeline("bf16", offload=True)), expected)


def test_a_full_memory_ends_one_job() -> None:
    own = pipeline("bf16")
    expected = pixels(own)
    engine = VideoEngine(own)
    engine.submit(Request("large", Video([5], LARGE)))
    engine.submit(Request("a", Video([5, 6, 7], PARAMS)))
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 2**25) / total)
    try:
        outputs = []
        while engine.has_work():
            outputs += engine.step()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    ended = [output for output in outputs if output.finish_reason is not None]
    assert [output.finish_reason for output in ended] == [FinishReason.ERROR, FinishReason.STOP]
    assert ended[0].stop_reason == "out_of_memory"
    made = ended[1].delta
    assert isinstance(made, VideoFrames)
    assert np.array_equal(np.frombuffer(made.data, np.uint8), expected)


# Queries, keys, heads and branches: ragged ends, one query, one key, more keys than queries, the
# text's keys, and enough tiles that the rings of stages turn many times.
ATTENTION = [
    (1, 1, 1, 1),
    (1, 5000, 2, 1),
    (128, 128, 1, 2),
    (300, 1000, 3, 2),
    (1000, 512, 2, 2),
    (5000, 4999, 4, 1),
    (75_600, 129, 1, 1),
]
ON_HOPPER = pytest.mark.skipif(not hopper.is_here(), reason="made for Hopper alone")


def attention_inputs(case: tuple[int, int, int, int]) -> list[torch.Tensor]:
    """Keys share a large part; values are a part of wider rows."""
    n, m, heads, branches = case
    torch.manual_seed(0)

    def some(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    k = some(branches, m, heads, 128) + 2 * some(128)
    v = some(branches, m, 3 * heads * 128).chunk(3, dim=-1)[2]
    return [some(branches, n, heads, 128), k, v.unflatten(-1, (heads, 128))]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The shapes of the Hopper kernel's launches so far."""
    launch, shapes = hopper_bidirectional.launch, list[object]()

    def counted(packed: Any, out: torch.Tensor, *rest: Any) -> None:
        out.fill_(torch.nan)  # every row must be written
        shapes.append(out.shape)
        launch(packed, out, *rest)

    monkeypatch.setattr(hopper_bidirectional, "launch", counted)
    return shapes


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


@ON_HOPPER
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_is_right_and_the_same_every_time(
    case: tuple[int, int, int, int], launches: list[object]
) -> None:
    q, k, v = attention_inputs(case)
    expected = bidirectional.attend.reference(q.float(), k.float(), v.float())
    found = bidirectional.attend(q, k, v)
    assert error(found, expected) < 0.005
    assert all(torch.equal(bidirectional.attend(q, k, v), found) for _ in range(3))
    assert len(launches) == 4


@ON_HOPPER
@pytest.mark.parametrize("dtype", ["int8", "int8-fp8", "fp8"])
@pytest.mark.parametrize("case", ATTENTION[:-1])
def test_rounded_attention_errs_as_its_reference(
    case: tuple[int, int, int, int],
    dtype: bidirectional.AttentionType,
    launches: list[object],
) -> None:
    q, k, v = attention_inputs(case)
    rounding = bidirectional.ROUNDINGS[dtype]
    assert rounding is not None
    exact = bidirectional.attend.reference(q.float(), k.float(), v.float())
    expected = bidirectional.attend_rounded.reference(q, k, v, rounding)
    found = bidirectional.attend_rounded(q, k, v, rounding)
    assert error(found, exact) < 1.2 * error(expected, exact) + 0.005
    assert torch.equal(bidirectional.attend_rounded(q, k, v, rounding), found)
    assert len(launches) == 2


@ON_HOPPER
@pytest.mark.parametrize("dtype", ["auto", "int8", "int8-fp8", "fp8"])
@pytest.mark.parametrize(("stages", "turns"), [(2, True), (2, False), (3, True), (3, False)])
def test_all_shapes_of_the_hopper_kernel_give_the_same_bits(
    stages: int, turns: bool, dtype: bidirectional.AttentionType
) -> None:
    q, k, v = attention_inputs((5000, 4999, 4, 1))
    rounding = bidirectional.ROUNDINGS[dtype]
    pack = gpu_bidirectional
    packed = pack.pack(q, k, v, rounding) if rounding else pack.plain(q, k, v)
    expected, found = torch.empty_like(q), torch.empty_like(q)
    hopper_bidirectional.launch(packed, expected, k.shape[1])
    hopper_bidirectional.launch(packed, found, k.shape[1], ProgramShape(stages, turns))
    assert torch.equal(found, expected)
