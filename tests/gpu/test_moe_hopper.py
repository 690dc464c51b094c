"""Experts on Hopper: against the reference, in a graph, and where the kernel must not run."""

from typing import Any

import pytest
import torch

from tokenmill.kernels import MODE, moe
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu import moe as gpu_moe
from tokenmill.kernels.gpu.hopper import moe as hopper_moe
from tokenmill.kernels.moe import PackedExperts

pytestmark = pytest.mark.skipif(not hopper.is_here(), reason="made for Hopper alone")


def experts(count: int, n: int, k: int, dtype: torch.dtype = torch.bfloat16) -> PackedExperts:
    data = torch.randn(count, n, k, device="cuda", dtype=dtype) / k**0.5
    return PackedExperts(count, data, None, n, k)


def make_inputs(
    tokens: int, top_k: int, count: int, hidden: int, inner: int, power: float = 1.0
) -> tuple[torch.Tensor, torch.Tensor, PackedExperts, PackedExperts]:
    """The higher the power, the more tokens choose the same experts."""
    torch.manual_seed(0)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    favour = torch.arange(1, count + 1, device="cuda") ** -power
    ids = torch.multinomial(favour.expand(tokens, -1), top_k).int()
    return x, ids, experts(count, 2 * inner, hidden), experts(count, hidden, inner)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, int]]:
    """Of the Hopper kernel: which product, and rows of its tiles."""
    launch, seen = hopper_moe._launch, []

    def counted(x: Any, weight: Any, out: Any, tiles: Any, up: bool, share: int) -> None:
        seen.append((up, tiles.rows))
        launch(x, weight, out, tiles, up, share)

    monkeypatch.setattr(hopper_moe, "_launch", counted)
    return seen


def assert_near(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found.float(), expected.float(), atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize(
    ("tokens", "rows", "power"),
    [(1, 16, 0.0), (5, 16, 3.0), (40, 32, 0.0), (90, 64, 0.5), (150, 128, 0.0), (700, 128, 1.5)],
)
def test_it_matches_the_reference(
    tokens: int, rows: int, power: float, launches: list[tuple[bool, int]]
) -> None:
    inputs = make_inputs(tokens, 4, 12, 512, 384, power)
    found = gpu_moe.apply_experts(*inputs)
    assert launches == [(True, rows), (False, rows)]
    assert_near(found, moe.apply_experts.reference(*inputs))
    assert torch.equal(found, gpu_moe.apply_experts(*inputs))


def test_more_tiles_than_programs_and_a_graph() -> None:
    x, ids, gate_up, down = make_inputs(2000, 2, 9, 2048, 1024)
    gpu_moe.apply_experts(x, ids, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = gpu_moe.apply_experts(x, ids, gate_up, down)
    for shift in (0, 4):  # the same graph with other choices
        ids.copy_((ids + shift) % 9)
        graph.replay()
        assert_near(found, moe.apply_experts.reference(x, ids, gate_up, down))


def test_others_take_the_plain_kernel(
    launches: list[tuple[bool, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    x, ids, gate_up, down = make_inputs(20, 2, 4, 256, 128)
    assert gate_up.data is not None and down.data is not None
    half = {
        name: PackedExperts(4, data.half(), None, w.n, w.k)
        for name, w, data in (("gate_up", gate_up, gate_up.data), ("down", down, down.data))
    }
    gpu_moe.apply_experts(x.half(), ids, half["gate_up"], half["down"])
    narrow = make_inputs(20, 2, 4, 256, 96)
    assert_near(gpu_moe.apply_experts(*narrow), moe.apply_experts.reference(*narrow))
    for switch in ((MODE, "batch_invariant", True), (hopper, "ALLOWED", False)):
        with monkeypatch.context() as patch:
            patch.setattr(*switch)
            gpu_moe.apply_experts(x, ids, gate_up, down)
    assert not launches
