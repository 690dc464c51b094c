"""Attention of prompts on Hopper: against the reference, in a graph, and where it must not run."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "kernels"))
import triton_prefill_parity as parity

from attention_batches import paged_attention_reference
from tokenmill.kernels import MODE, attention
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import prefill
from tokenmill.kernels.pages import Pages, plan_pages

pytestmark = pytest.mark.skipif(not hopper.is_here(), reason="made for Hopper alone")


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[QueryTiles]:
    """Tiles that the Hopper kernel took."""
    launch, seen = prefill.launch, []

    def counted(*rest: Any) -> None:
        seen.append(rest[4])
        launch(*rest)

    monkeypatch.setattr(prefill, "launch", counted)
    return seen


def inputs(
    lens: list[int],
    contexts: list[int],
    heads: tuple[int, int] = (32, 8),
    dim: int = 128,
    unpacked: bool = False,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, AttentionBatch, int]:
    """Arguments of paged_attention; blocks of 64 in any order. Unpacked: of a cache in fp8."""
    torch.manual_seed(0)
    width = max(-(-(n + c) // 64) for n, c in zip(lens, contexts, strict=True))
    group = heads[0] // heads[1]
    plans = plan_tiles(np.array(lens), group, heads[1], True, np.array(contexts), full_tiles=True)
    shape = (len(lens) * width, heads[1], 64, dim)
    k_cache, v_cache = torch.randn(2, *shape, device="cuda", dtype=torch.bfloat16)
    qkv = torch.randn(sum(lens), (heads[0] + 2 * heads[1]) * dim, device="cuda") * dim**-0.5
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32, device="cuda")
    nothing = torch.zeros(1, dtype=torch.int32, device="cuda")
    pages = None
    if unpacked:
        rows = np.arange(len(lens))
        plan = plan_pages(plans, np.array(lens), np.array(contexts), rows, 64, shape[0])
        assert plan is not None
        pages = Pages(*(torch.tensor(part, dtype=torch.int32, device="cuda") for part in plan))
        k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache))
    batch = AttentionBatch(
        nothing, nothing, starts, torch.tensor(contexts, dtype=torch.int32, device="cuda"),
        torch.randperm(shape[0], device="cuda").int().view(len(lens), width),
        torch.arange(len(lens), dtype=torch.int32, device="cuda"),
        tuple(QueryTiles.of(plan, "cuda") for plan in plans), pages=pages,
    )  # fmt: skip
    return qkv.bfloat16()[:, : heads[0] * dim], k_cache, v_cache, batch, heads[0]


@pytest.mark.parametrize("check", parity.CHECKS)
def test_small_sizes_follow_the_reference(check: str) -> None:
    torch.manual_seed(0)
    parity.CHECKS[check]("cuda")


@pytest.mark.parametrize(
    ("lens", "contexts", "heads", "dim"),
    [
        ([4000], [0], (32, 8), 128),
        ([1, 1, 700, 1300, 10], [900, 64, 0, 3000, 128], (32, 8), 128),  # a mixed step
        ([2049], [5], (16, 8), 128),
        ([1000, 513], [0, 77], (64, 8), 64),
        ([600, 500], [0, 100], (8, 8), 128),
        ([1000, 2000], [0, 100], (40, 8), 128),  # five heads share a KV head, and no tile
        ([2000], [0], (28, 4), 128),
    ],
)
def test_large_sizes_follow_the_reference_in_a_graph(
    lens: list[int],
    contexts: list[int],
    heads: tuple[int, int],
    dim: int,
    launches: list[QueryTiles],
) -> None:
    own = inputs(lens, contexts, heads, dim)
    found = attention.paged_attention(*own)
    q, k_cache, v_cache, batch, _ = own
    expected = paged_attention_reference(
        q.float(), k_cache.float(), v_cache.float(), batch, heads[0]
    )
    assert len(launches) == 1
    assert parity.error(found, expected) < parity.LIMIT
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = attention.paged_attention(*own)
    graph.replay()
    assert torch.equal(found, again)


@pytest.mark.parametrize(
    ("lens", "contexts", "heads", "dim"),
    [
        ([4000], [0], (32, 8), 128),
        ([1, 1, 700, 1300, 10], [900, 64, 0, 3000, 128], (32, 8), 128),
        ([1000, 2000], [0, 100], (40, 8), 128),
        ([1000, 513], [0, 77], (64, 8), 64),
    ],
)
def test_prompts_over_an_fp8_cache_follow_the_reference(
    lens: list[int],
    contexts: list[int],
    heads: tuple[int, int],
    dim: int,
    launches: list[QueryTiles],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their pages are unpacked; for a window and in batch-invariant mode they are not."""
    own = inputs(lens, contexts, heads, dim, unpacked=True)
    q, k_cache, v_cache, batch, _ = own
    found = attention.paged_attention(*own)
    expected = paged_attention_reference(
        q.float(), k_cache.float(), v_cache.float(), batch, heads[0]
    )
    assert len(launches) == 1
    assert parity.error(found, expected) < parity.LIMIT
    attention.paged_attention(*own, window=300)
    monkeypatch.setattr(MODE, "batch_invariant", True)
    attention.paged_attention(*own)
    assert len(launches) == 1


def test_windows_and_sinks_follow_the_plain_kernel(
    launches: list[QueryTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    own = inputs([900, 300], [0, 2000], (64, 8), 64)
    sinks = torch.randn(64, device="cuda")
    found = attention.paged_attention(*own, window=128, sinks=sinks)
    monkeypatch.setattr(hopper, "ALLOWED", False)
    expected = attention.paged_attention(*own, window=128, sinks=sinks)
    assert len(launches) == 1
    assert parity.error(found, expected.float()) < 2 * parity.LIMIT


def test_others_take_the_plain_kernel(
    launches: list[QueryTiles], monkeypatch: pytest.MonkeyPatch
) -> None:
    attention.paged_attention(*inputs([1] * 40, [300] * 40))  # answers
    attention.paged_attention(*inputs([20], [0]))  # too few
    attention.paged_attention(*inputs([30] * 9, [500] * 9, (28, 4)))  # seven heads: tiles not full
    attention.paged_attention(*inputs([900], [0], (8, 8), 32))
    own = inputs([900], [0])
    halves: list[Any] = [x.half() if isinstance(x, torch.Tensor) else x for x in own]
    attention.paged_attention(*halves)
    q, k_cache, v_cache, batch, heads = own
    fp8 = torch.float8_e4m3fn
    attention.paged_attention(q, k_cache.to(fp8), v_cache.to(fp8), batch, heads)
    for switch in ((MODE, "batch_invariant", True), (hopper, "ALLOWED", False)):
        with monkeypatch.context() as patch:
            patch.setattr(*switch)
            attention.paged_attention(*own)
    assert not launches
