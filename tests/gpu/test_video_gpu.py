"""Videos on a GPU: near those of the CPU, the same by the same seed, alone after a full memory."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from tokenmill.core.types import FinishReason, Request
from tokenmill.core.video import VideoParams
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
    job = VideoJob(Request("a", [5, 6, 7], video=PARAMS), own)
    for _ in range(PARAMS.num_steps):
        next(job.steps)
    assert job.latents is not None
    return job.latents.cpu() - job.noise


def pixels(own: Pipeline) -> np.ndarray:
    engine = VideoEngine(own)
    engine.submit(Request("a", [5, 6, 7], video=PARAMS))
    outputs = [output for _ in range(PARAMS.num_steps + 3) for output in engine.step()]
    made = outputs[-1].video
    assert made is not None
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
    engine.submit(Request("large", [5], video=LARGE))
    engine.submit(Request("a", [5, 6, 7], video=PARAMS))
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
    made = ended[1].video
    assert made is not None and np.array_equal(np.frombuffer(made.data, np.uint8), expected)
