"""Pages of an fp8 cache that are unpacked for prompts: which, and that attention reads the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_batches import NUM_BLOCKS, make_batch, paged_attention_reference
from tokenmill.kernels import pages
from tokenmill.kernels.attention import plan_tiles
from tokenmill.kernels.pages import PagePlan, Pages, plan_pages, unpack_pages

FP8 = torch.float8_e4m3fn


def plan(lens: list[int], contexts: list[int], most: int = 1000) -> PagePlan | None:
    """Of a group of four heads and blocks of 64; sequence i has row 10 + i of the tables."""
    query_lens, before = np.array(lens), np.array(contexts)
    tiles = plan_tiles(query_lens, 4, 8, True, before)
    return plan_pages(tiles, query_lens, before, 10 + np.arange(len(lens)), 64, most)


def test_pages_of_prompts_alone() -> None:
    """Of three prompts beside two sequences that decode; a last page may be partly used."""
    found = plan([1, 1, 300, 64, 500], [900, 30, 0, 64, 70])
    assert found is not None
    assert found.rows.tolist() == [12] * 5 + [13] * 2 + [14] * 9
    assert found.columns.tolist() == [*range(5), *range(2), *range(9)]
    assert found.firsts.tolist() == [0, 0, 0, 5, 7]
    assert found.numbers.tolist() == list(range(16))


@pytest.mark.parametrize(
    ("lens", "contexts", "most"),
    [
        ([1, 1], [900, 900], 1000),  # nobody but those that decode
        ([40], [9000], 1000),  # two tiles would read many pages
        ([900], [0], 14),  # more pages than there is memory for
        ([900], [0], 0),  # no kernel wants them
    ],
)
def test_pages_that_stay_packed(lens: list[int], contexts: list[int], most: int) -> None:
    assert plan(lens, contexts, most) is None


def test_a_cache_that_no_kernel_wants_unpacked() -> None:
    assert pages.most_pages(torch.zeros(3, 8, 64, 128, dtype=FP8)) == 0


def test_attention_reads_the_same_from_unpacked_pages() -> None:
    torch.manual_seed(0)
    block_size, heads, kv_heads, dim = 16, 4, 2, 32
    lens, contexts = [1, 70, 40], [50, 0, 33]
    batch = make_batch(lens, contexts, block_size, 2)
    shape = (NUM_BLOCKS, kv_heads, dim, block_size)
    k_cache, v_cache = torch.randn(shape).to(FP8), torch.randn(shape).mT.contiguous().to(FP8)
    query_lens, before = np.array(lens), np.array(contexts)
    tiles = plan_tiles(query_lens, 2, kv_heads, True, before)
    rows = batch.table_rows.numpy()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pages, "LEAST_VISITS", 0)
        found = plan_pages(tiles, query_lens, before, rows, block_size, 100)
    assert found is not None
    own = Pages(*(torch.from_numpy(part.astype(np.int32)) for part in found))
    q = torch.randn(sum(lens), heads * dim).bfloat16()
    plain = paged_attention_reference(q, k_cache.bfloat16(), v_cache.bfloat16(), batch, heads)
    *caches, unpacked = unpack_pages(k_cache, v_cache, replace(batch, pages=own))
    assert all(cache.shape[0] == 5 + 5 for cache in caches)
    prompts = replace(
        unpacked, query_starts=batch.query_starts[1:] - 1, table_rows=unpacked.table_rows[1:],
        context_lens=batch.context_lens[1:],
    )  # fmt: skip
    width = 5  # of a table that the reference reads row by row
    table = torch.arange(width, dtype=torch.int32) + unpacked.table_rows[1:, None]
    rows_of = torch.arange(2, dtype=torch.int32)
    prompts = replace(prompts, block_tables=table.clamp(max=9), table_rows=rows_of)
    assert torch.equal(paged_attention_reference(q[1:], *caches, prompts, heads), plain[1:])
