"""Pages of an fp8 KV cache as bf16, for the attention of a step's prompts.

Hopper's kernel for prompts multiplies bf16 alone. Each tile of queries reads all pages before it,
so that they are better unpacked once for all tiles of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch

from tokenmill.kernels import always, kernel
from tokenmill.kernels.attention import (
    AttentionBatch,
    TilePlan,
    num_visited_keys,
    takes_full_tiles,
)

UNPACKED_BYTES = 2**28  # of keys and values that a step may unpack
LEAST_VISITS = 3  # of a page, in the mean: to unpack it takes about as long as one visit spares


class PagePlan(NamedTuple):
    """The pages of all prompts, one sequence after the other, on the host."""

    rows: np.ndarray  # [pages]: of the block tables
    columns: np.ndarray  # [pages]
    numbers: np.ndarray  # [pages]: 0, 1, 2, ...: the block table of what is unpacked
    firsts: np.ndarray  # [sequences]: the first page of each


@dataclass(frozen=True, slots=True)
class Pages:
    """A PagePlan on the device, int32 each."""

    rows: torch.Tensor
    columns: torch.Tensor
    numbers: torch.Tensor
    firsts: torch.Tensor


def most_pages(v_cache: torch.Tensor) -> int:
    """How many pages of this cache a step may unpack; none where no kernel wants them."""
    if v_cache.dtype != torch.float8_e4m3fn or not takes_full_tiles(v_cache):
        return 0
    return UNPACKED_BYTES // (2 * v_cache[0].numel() * torch.bfloat16.itemsize)


def plan_pages(
    tiles: list[TilePlan],
    query_lens: np.ndarray,
    contexts: np.ndarray,
    table_rows: np.ndarray,
    block_size: int,
    most: int,
) -> PagePlan | None:
    """The pages that a step's prompts read; None where unpacking them would not pay."""
    prompts = tiles[-1]
    if not most or prompts.rows:  # only sequences that decode
        return None
    counts = -(-(contexts + query_lens) // block_size)
    counts[: prompts.seqs.min()] = 0
    total = int(counts.sum())
    visits = num_visited_keys(prompts, query_lens, contexts)
    if total > most or visits < LEAST_VISITS * total * block_size:
        return None
    firsts, owners = np.cumsum(counts) - counts, np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(total)
    return PagePlan(table_rows[owners], numbers - firsts[owners], numbers, firsts)


def unpack_pages(
    k_cache: torch.Tensor, v_cache: torch.Tensor, batch: AttentionBatch
) -> tuple[torch.Tensor, torch.Tensor, AttentionBatch]:
    """Both caches in bf16, with the pages of batch.pages alone, and the batch that reads them."""
    pages = batch.pages
    assert pages is not None
    keys, values = unpack(k_cache, v_cache, batch.block_tables, pages.rows, pages.columns)
    tables = pages.numbers[:, None]
    return keys, values, replace(batch, block_tables=tables, table_rows=pages.firsts, pages=None)


@kernel(gpu=always)
def unpack(
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tables: torch.Tensor,
    rows: torch.Tensor,
    columns: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The pages tables[rows, columns] of both caches, bf16 [pages, kv_heads, block_size, dim]."""
    blocks = tables[rows.long(), columns.long()].long()
    keys, values = (c.view(torch.uint8)[blocks].view(c.dtype) for c in (k_cache, v_cache))
    return keys.bfloat16(), values.bfloat16()
