"""What the start of an engine on a GPU promises: graphs for all batches, and no compiler later."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from driver import complete
from gpu.setups import image_prompts, prompts, random_prompts
from tokenmill.core.specs.rope import RopeSpec
from tokenmill.core.types import SamplingParams
from tokenmill.engine.build import BuiltEngine
from tokenmill.engine.graphs.graph_sizes import graph_sizes
from tokenmill.layers.rotary import rotary_table
from tokenmill.models.checkpoints.upload import upload
from tokenmill.models.checkpoints.weights import read_stored

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
DRAWN = SamplingParams(temperature=0.9, top_p=0.9, seed=4, max_tokens=8, logprobs=1)
Build = Callable[[str], BuiltEngine]


def test_every_batch_has_a_graph_and_they_share_their_memory(build: Build) -> None:
    built = build("graphs-overlap")
    assert built.runner.decode.graphs is not None
    report = built.runner.decode.graphs.report
    assert report.captured == report.planned and report.cut_by is None
    assert report.decode_sizes == graph_sizes(16)
    complete(built.engine, prompts() * 2, replace(GREEDY, max_tokens=30))
    found = report.as_json()
    assert found["decode_steps"] > 20 and found["decode_steps_without_graph"] == 0
    assert found["padding"] <= 0.125 and found["warnings"] == []
    logits = {c.decoded.logits.data_ptr() for c in built.runner.decode.graphs._graphs.values()}
    assert len(logits) < len(report.decode_sizes)


def test_graphs_of_other_sizes_leave_the_answers_alone(build: Build) -> None:
    """Their logits lie in the same memory: sampled tokens must be those of the plain loop."""
    asked = random_prompts((3, 9, 30, 70, 100, 20, 11, 5), 512, 7)
    params = [
        replace(DRAWN, max_tokens=4 + 5 * i) if i % 2 else replace(GREEDY, max_tokens=4 + 5 * i)
        for i in range(len(asked))
    ]
    expected = complete(build("invariant-plain").engine, asked, params)
    found = complete(build("invariant").engine, asked, params)
    assert [a.token_ids for a in found] == [a.token_ids for a in expected]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The kernels that are compiled, or loaded, while a test runs."""
    from triton import knobs

    found = list[str]()

    def note(**about: object) -> bool:
        found.append(str(about.get("repr")))
        return False

    monkeypatch.setattr(knobs.runtime, "jit_cache_hook", note)
    return found


@pytest.mark.parametrize("name", ["default", "fp8-kv-fp8", "invariant"])
def test_no_kernel_is_compiled_after_the_start(
    build: Build, name: str, compiled: list[str]
) -> None:
    built = build(name)
    built.runner.sampler.device.warm_up(torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda"))
    compiled.clear()
    for prompt in prompts():
        complete(built.engine, [prompt], GREEDY)
    complete(built.engine, prompts(), GREEDY)
    complete(built.engine, prompts(), DRAWN)
    assert compiled == []


@pytest.mark.parametrize("name", ["qwen3-vl", "qwen3-vl-moe", "qwen3-vl-parts"])
def test_images_compile_no_kernel_after_the_start(
    build: Build, name: str, compiled: list[str]
) -> None:
    """One after the other and together, and while 1 to 14 texts decode, which pads steps by any."""
    built, asked = build(name), image_prompts()
    texts = random_prompts((5, 11, 3, 30, 8, 2, 17, 40, 6, 9, 25, 4, 13, 7), 500, 3)
    built.runner.sampler.device.warm_up(torch.zeros(1, 512, dtype=torch.bfloat16, device="cuda"))
    compiled.clear()
    for each in asked:
        complete(built.engine, [each.token_ids], GREEDY, images=[each.images])
    together, images = [each.token_ids for each in asked], [each.images for each in asked]
    complete(built.engine, together, DRAWN, images=images)
    for count in range(1, len(texts) + 1):
        last = image_prompts(10 * count)[1 + count % 3]
        spans = [*[()] * count, last.images]
        complete(built.engine, [*texts[:count], last.token_ids], GREEDY, images=spans)
    assert compiled == []


def test_rotary_tables_have_the_bits_of_a_cpu() -> None:
    rope = RopeSpec(theta=500_000.0)
    on_gpu = rotary_table(rope, 128, 131_072, "cuda")
    assert torch.equal(on_gpu.cpu(), rotary_table(rope, 128, 131_072))


def test_kernels_are_compiled_by_processes_beside_a_gpu_in_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forks of a process with a context; what they leave in the cache is loaded and launched."""
    from triton import knobs

    from tokenmill.kernels.gpu import launch
    from tokenmill.kernels.sampling import argmax

    monkeypatch.setattr(knobs.cache, "dir", str(tmp_path))
    logits = torch.randn(3, 777, device="cuda")

    def run() -> None:
        argmax(logits.half())

    launch.compile_ahead(run, "a test")
    assert torch.equal(argmax(logits.half()).long(), logits.half().argmax(-1))


def test_uploaded_weights_are_the_bits_of_the_file(tmp_path: Path) -> None:
    """Also where memory that a copy writes to was freed while a kernel still reads it."""
    shapes = [(4096, 4096), (1,), (12_345, 789), (128, 100_000)] * 6
    tensors = {str(i): torch.randn(shape).bfloat16() for i, shape in enumerate(shapes)}
    save_file(tensors, tmp_path / "model.safetensors")
    stored, kept = read_stored(tmp_path), {}
    for name, tensor in zip(stored, upload(stored.values(), "cuda"), strict=True):
        kept[name] = torch.cat([tensor])  # nothing waits for it before the tensor is freed
        del tensor
    assert all(torch.equal(kept[name].cpu(), tensor) for name, tensor in tensors.items())
