"""Latent attention: the compiled kernels against their torch references, and a row by itself."""

import numpy as np
import pytest
import torch

from attention_batches import latent_attention_reference
from tokenmill.kernels import mla
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.matmul import pack
from tokenmill.kernels.moe import PackedExperts

BLOCKS, BLOCK_SIZE = 64, 16
# heads, nope, rope, latent, interleaved
SHAPES = ((4, 12, 16, 32, True), (20, 8, 6, 48, False), (1, 16, 8, 528, True))


def _batch(lens: list[int], contexts: list[int], heads: int) -> AttentionBatch:
    """Sequence i has blocks of its own, scattered."""
    order = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(5)).int()
    tables = order.view(len(lens), -1)
    starts = np.concatenate([[0], np.cumsum(lens)])
    owners = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    positions = torch.cat([torch.arange(c, c + n) for c, n in zip(contexts, lens, strict=True)])
    slots = tables[owners, positions // BLOCK_SIZE].long() * BLOCK_SIZE + positions % BLOCK_SIZE
    tiles = [QueryTiles.of(plan) for plan in plan_tiles(np.array(lens), heads, 1, on_gpu=False)]
    return AttentionBatch(
        positions, slots, torch.from_numpy(starts).int(), torch.tensor(contexts).int(), tables,
        torch.arange(len(lens)).int(), tuple(tiles),
    )  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_latent_cache(shape: tuple[int, int, int, int, bool]) -> None:
    heads, nope, rope, latent, interleaved = shape
    torch.manual_seed(3)
    batch = _batch([1, 5, 40, 33], [97, 11, 50, 0], heads)
    ropes = torch.zeros(BLOCKS, 1, rope, BLOCK_SIZE)
    latents = torch.zeros(BLOCKS, 1, BLOCK_SIZE, latent)
    projected = torch.randn(len(batch.positions), heads * (nope + rope) + latent + rope)
    q = projected[:, : heads * (nope + rope)].unflatten(1, (heads, -1))
    kv = projected[:, heads * (nope + rope) :]
    rest = (torch.rand(latent), 1e-6, torch.randn(128, rope), batch, interleaved)
    expected = q.clone(), kv, ropes.clone(), latents.clone()
    mla.latent_cache.reference(*expected, *rest)
    mla.latent_cache(q, kv, ropes, latents, *rest)
    for found, wanted in zip((q, kv, ropes, latents), expected, strict=True):
        torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_latent_attention(shape: tuple[int, int, int, int, bool]) -> None:
    heads, nope, rope, latent, _ = shape
    torch.manual_seed(4)
    lens, contexts = [1, 5, 40, 33], [97, 11, 70, 0]
    batch = _batch(lens, contexts, heads)
    caches = (torch.randn(BLOCKS, 1, rope, BLOCK_SIZE), torch.randn(BLOCKS, 1, BLOCK_SIZE, latent))
    q = torch.randn(sum(lens), heads, nope + rope)
    q_latent = torch.randn(sum(lens), heads, latent)
    found = mla.latent_attention(q_latent, q, *caches, batch, 0.11)
    expected = latent_attention_reference(q_latent, q, *caches, batch, 0.11)
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    for position in (0, 1, 16, 39):  # query by query, each alone
        row = sum(lens[:2]) + position
        single = _batch([1], [70 + position], heads)
        single = AttentionBatch(
            single.positions, single.slots, single.query_starts, single.context_lens,
            batch.block_tables, torch.tensor([2], dtype=torch.int32), single.tiles,
        )  # fmt: skip
        one = slice(row, row + 1)
        alone = mla.latent_attention(q_latent[one], q[one], *caches, single, 0.11)
        assert torch.equal(alone[0], found[row])


@pytest.mark.parametrize(("k", "n"), [(12, 32), (300, 20), (64, 64)])
def test_products_of_heads(k: int, n: int) -> None:
    torch.manual_seed(5)
    dense = torch.randn(5, n, k)
    weight = PackedExperts(5)
    for head, matrix in enumerate(dense):
        weight.put(head, pack(matrix, "fp32"))
    x = torch.randn(140, 5, k + 8)[..., :k]
    found = mla.per_head(x, weight)
    torch.testing.assert_close(found, torch.einsum("thk,hnk->thn", x, dense), atol=2e-4, rtol=1e-4)
    for rows in torch.arange(140).split(13):
        assert torch.equal(mla.per_head(x[rows], weight), found[rows])
