"""Latent attention on Hopper: against the reference, in a graph, and where it must not run."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
from triton_parity import BLOCKS, make_batch

from attention_batches import latent_attention_reference
from tokenmill.kernels import MODE, mla
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import mla as hopper_mla

pytestmark = pytest.mark.skipif(not hopper.is_here(), reason="made for Hopper alone")
LATENT, ROPE, HEAD_DIM, SCALE = 512, 64, 192, 192**-0.5


def make_inputs(
    query_lens: list[int], contexts: list[int], heads: int, block_size: int = 64
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    batch = make_batch(query_lens, contexts, block_size, (heads, 1), "cuda")

    def values(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)

    q_latent = values(sum(query_lens), heads, LATENT)
    q = values(sum(query_lens), heads * HEAD_DIM + 64)[:, :-64].unflatten(1, (heads, HEAD_DIM))
    ropes, latents = (values(BLOCKS, 1, block_size, width) for width in (ROPE, LATENT))
    return q_latent, q, ropes, latents, batch, SCALE


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Grids of the Hopper kernel's launches."""
    launch, grids = hopper_mla.launch, []

    def counted(grid: tuple[int, int, int], *rest: Any) -> None:
        grids.append(grid)
        launch(grid, *rest)

    monkeypatch.setattr(hopper_mla, "launch", counted)
    return grids


@pytest.mark.parametrize(
    ("query_lens", "contexts", "heads", "block_size"),
    [
        ([1] * 7, [0, 62, 63, 64, 127, 200, 500], 128, 64),  # split, some programs without keys
        ([1] * 3, [128, 191, 192], 64, 128),
        ([4] * 5, [0, 62, 126, 189, 500], 128, 64),  # drafts
        ([70, 9], [0, 300], 128, 64),  # prefill: one token a tile
        ([40, 70], [30, 0], 16, 64),  # eight tokens a tile
    ],
)
def test_it_matches_the_reference(
    query_lens: list[int],
    contexts: list[int],
    heads: int,
    block_size: int,
    launches: list[tuple[int, int, int]],
) -> None:
    inputs = make_inputs(query_lens, contexts, heads, block_size)
    found = mla.latent_attention(*inputs)
    expected = latent_attention_reference(*inputs)
    assert launches
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)
    assert torch.equal(found, mla.latent_attention(*inputs))


def test_unsplit_keys_and_a_graph(launches: list[tuple[int, int, int]]) -> None:
    inputs = make_inputs([1] * 64, list(range(64)), 128)
    expected = latent_attention_reference(*inputs)
    mla.latent_attention(*inputs)
    assert {grid[2] for grid in launches} == {1}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = mla.latent_attention(*inputs)
    graph.replay()
    torch.testing.assert_close(found, expected, atol=1e-2, rtol=1e-2)


def test_others_take_the_plain_kernel(
    launches: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = make_inputs([1] * 3, [70, 5, 200], 128)
    halves: list[Any] = [x.half() if isinstance(x, torch.Tensor) else x for x in inputs]
    mla.latent_attention(*halves)
    mla.latent_attention(*make_inputs([1] * 3, [70, 5, 200], 16))
    mla.latent_attention(*make_inputs([1] * 3, [7, 5, 20], 128, 16))
    for switch in ((MODE, "batch_invariant", True), (hopper, "ALLOWED", False)):
        with monkeypatch.context() as patch:
            patch.setattr(*switch)
            mla.latent_attention(*inputs)
    assert not launches
