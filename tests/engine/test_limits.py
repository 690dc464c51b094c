"""How many requests and tokens a step has by default: pure functions of memory and model."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tokenmill import bench
from tokenmill.core.config import (
    GIB,
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    Setup,
)
from tokenmill.core.requests import Generate, Request
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import ModelLoadError, SamplingParams, StepResult
from tokenmill.engine.choices import resolve_setup
from tokenmill.engine.graphs.graph_sizes import graph_sizes
from tokenmill.engine.limits import (
    MemoryRoom,
    choose_budget,
    choose_encoder_patches,
    choose_image_parts,
    choose_least_shared,
    choose_num_seqs,
)
from tokenmill.engine.memory import gpu_room
from tokenmill.models import spec_of
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler

H200, L4 = 139 * GIB, 22 * GIB


def shape(name: str) -> Path:
    return Path(bench.__file__).parent / "shapes" / f"{name}.json"


def shape_spec(name: str) -> ModelSpec:
    return spec_of(json.loads(shape(name).read_text()))


def room(name: str, memory: int, weight: int = 2, kv: int = 2) -> MemoryRoom:
    spec = shape_spec(name)
    return MemoryRoom(int(0.95 * memory), spec.weight_bytes(weight), spec.kv_bytes_per_token(kv))


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("qwen3-0.6b", H200, 960),
        ("qwen3-14b", H200, 512),
        ("qwen3-30b-a3b", H200, 640),
        ("llama3.1-8b", H200, 768),
        ("qwen3-0.6b", L4, 144),
        ("llama3.1-8b", L4, 64),
        ("llama3.1-8b", 8 * GIB, 64),  # the weights do not even fit
    ],
)
def test_requests_are_what_the_memory_holds(name: str, memory: int, expected: int) -> None:
    found = choose_num_seqs(room(name, memory), 40_960)
    assert found == expected and found in graph_sizes(1024)


def test_smaller_weights_and_kv_leave_room_for_more() -> None:
    assert choose_num_seqs(room("llama3.1-8b", H200, 1, 1), 8192) == 1024


def test_a_short_context_makes_room_for_more() -> None:
    own = room("qwen3-14b", H200)
    assert choose_num_seqs(own, 512) == 1024 > choose_num_seqs(own, 1024)


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("qwen3-0.6b", H200, 8448),
        ("llama3.1-8b", H200, 8448),
        ("qwen3-14b", H200, 4224),
        ("qwen3-30b-a3b", H200, 8448),  # of 128 experts a token takes eight
        ("llama3.1-8b", L4, 2048),
        ("llama3.1-8b", None, 512),
    ],
)
def test_tokens_of_a_step(name: str, memory: int | None, expected: int) -> None:
    assert choose_budget(shape_spec(name), memory) == expected


@pytest.mark.parametrize(
    ("name", "memory", "expected"),
    [
        ("llama3.1-8b", H200, 1024),
        ("qwen3-14b", H200, 512),
        ("qwen3-0.6b", H200, 8192),  # as many as a step has: its kernels are short
        ("qwen3-30b-a3b", H200, 8192),  # prompts read the experts that decoding does not
        ("gpt-oss-120b", H200, 16384),
        ("llama3.1-8b", None, None),
    ],
)
def test_tokens_of_a_step_that_prompts_share(
    name: str, memory: int | None, expected: int | None
) -> None:
    assert choose_least_shared(shape_spec(name), memory, 2) == expected


SCALE = 32  # tokens that one of the simulation stands for, and steps
NUM_PROMPTS = 1536
LOADS = [(1024, 1024), (560, 560), (224, 288), (128, 2048)]  # means
BYTES_PER_S, FLOPS = 3.9e12, 5.5e14


def simulated_tok_s(
    spec: ModelSpec, own: MemoryRoom, num_seqs: int, load: tuple[int, int]
) -> float:
    """Of the real scheduler, whose steps take the time that the GPU's rates allow."""
    block_size = 64 // SCALE
    limits = SchedulerConfig(choose_budget(spec, H200), num_seqs, NUM_PROMPTS)
    pool = BlockPool(own.num_kv_tokens // 64, block_size, prefix_cache=False)
    scheduler, seconds = Scheduler(limits, pool, frozenset()), 0.0
    source, num_outputs = random.Random(0), 0
    for number in range(NUM_PROMPTS):
        num_in, num_out = (round(source.uniform(0.5, 1.5) * mean / SCALE) for mean in load)
        sampling = SamplingParams(max_tokens=num_out, ignore_eos=True)
        scheduler.add(Request(str(number), Generate([1] * num_in, sampling), arrival_ns=number))
        num_outputs += num_out
    while scheduler.has_work():
        items = (batch := scheduler.schedule(0)).items
        num_bytes = own.weight_bytes + own.kv_bytes_per_token * SCALE * pool.num_used * block_size
        seconds += num_bytes / BYTES_PER_S + batch.num_tokens * spec.flops_per_token(0) / FLOPS
        done = [seq.num_computed_tokens + new == seq.num_tokens for seq, new in items]
        scheduler.update(batch, StepResult([[7] if ends else [] for ends in done]))
    return num_outputs / seconds


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "llama3.1-8b"])
def test_no_load_is_far_from_its_best_limit(name: str) -> None:
    spec, own = shape_spec(name), room(name, H200)
    chosen = choose_num_seqs(own, 40_960)
    for load in LOADS:
        speeds = {n: simulated_tok_s(spec, own, n, load) for n in (448, 1024, chosen)}
        assert speeds[chosen] > 0.85 * max(speeds.values()), (load, speeds)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (H200, 140 * GIB))


def chosen(cache: CacheConfig, limits: SchedulerConfig, device: str = "cuda") -> SchedulerConfig:
    model = ModelConfig(
        str(shape("qwen3-14b")),
        "bf16" if device == "cuda" else "fp32",
        device,  # type: ignore[arg-type]
        random_weights=True,
    )
    return resolve_setup(Setup(model, cache, limits)).scheduler


def test_resolve_chooses_what_was_left_open(gpu: None) -> None:
    found = chosen(CacheConfig(), SchedulerConfig())
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (512, 4224)
    small = chosen(CacheConfig(memory_bytes=20 * GIB), SchedulerConfig())
    assert small.max_num_seqs == 104
    exact = chosen(CacheConfig(num_blocks=100), SchedulerConfig())
    assert exact.max_num_seqs == 256
    given = chosen(CacheConfig(), SchedulerConfig(max_num_seqs=3, max_num_batched_tokens=77))
    assert (given.max_num_seqs, given.max_num_batched_tokens) == (3, 77)


def test_on_cpu_memory_does_not_matter() -> None:
    found = chosen(CacheConfig(), SchedulerConfig(), "cpu")
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (256, 512)
    assert replace(found, max_num_seqs=None).num_seqs == 256


@pytest.mark.parametrize(
    ("name", "tokens"), [("qwen3-vl-30b-a3b", 8448), ("qwen3-vl-235b-a22b", 2048)]
)
def test_images_lengthen_a_full_step_by_half_at_most(name: str, tokens: int) -> None:
    spec = shape_spec(name)
    assert spec.vision is not None and choose_budget(spec, H200) == tokens
    patches = choose_encoder_patches(spec, tokens)
    full = tokens * spec.flops_per_token(0)
    encoding = patches / 4096 * spec.vision.encode_flops(4096)
    assert 4096 <= patches <= 4 * tokens  # an image of 1,024 x 1,024 fits
    assert 0.1 * full < encoding <= 0.5 * full


def test_parts_of_images_take_as_long_as_a_step_reads_its_weights() -> None:
    """By hand: 39.2 GB at 4 TB/s, of that 0.9, at 700 TFLOP/s and 6.083 GFLOP a token."""
    spec = shape_spec("qwen3-vl-30b-a3b")
    patches, tokens = choose_image_parts(spec, H200, 2)
    assert spec.vision is not None and patches is not None and tokens is not None
    assert tokens == pytest.approx(0.9 * 39.17e9 / 4e12 * 7e14 / 6.083e9, rel=0.01)
    encoding = patches / 4096 * spec.vision.encode_flops(4096) / (0.65 * 7e14)
    assert encoding == pytest.approx(tokens * spec.flops_per_token(0) / 7e14, rel=0.01)
    assert choose_image_parts(spec, None, 2) == (None, None)  # on CPU
    assert choose_image_parts(shape_spec("qwen3-14b"), H200, 2) == (None, None)
    assert choose_image_parts(spec, 24 * GIB, 0)[1] == 512  # at least


def test_engines_and_ranks_on_one_gpu_take_their_share(
    gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is free: others may be loading."""
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 20 * GIB)
    assert gpu_room(None) == H200
    assert gpu_room(0.475) == int(0.475 * 140 * GIB) - 20 * GIB - GIB // 2
    assert gpu_room(0.99) < H200 and gpu_room(0.1) == 0
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    alone = chosen(CacheConfig(), SchedulerConfig()).num_seqs
    assert chosen(CacheConfig(gpu_share=0.475), SchedulerConfig()).num_seqs < alone

    def resolved(num_gpus: int, share_gpus: bool) -> Setup:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        model = ModelConfig(str(shape("qwen3-14b")), "bf16", "cuda", share_gpus, True)
        parallel = ParallelConfig(tp=2)
        return resolve_setup(Setup(model, CacheConfig(), SchedulerConfig(), parallel=parallel))

    for num_gpus, share in ((1, 0.475), (2, None), (4, None)):
        setup = resolved(num_gpus, num_gpus == 1)
        assert setup.cache.gpu_share == share and setup.execution.cuda_graphs
    with pytest.raises(ModelLoadError, match="2 ranks need 2 GPUs, and this process sees 1: give"):
        resolved(1, False)
    monkeypatch.setenv("TOKENMILL_RANK_ADDRESS", "10.0.0.1:5")  # somebody gives each rank a GPU
    assert resolved(1, False).cache.gpu_share is None
    monkeypatch.setenv("TOKENMILL_RANKS_PER_GPU", "2")
    assert resolved(1, True).cache.gpu_share == 0.475
