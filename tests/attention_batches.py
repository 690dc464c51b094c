"""Batches for attention kernels: sequences over shuffled blocks."""

import numpy as np
import torch

from tokenmill.kernels.attention import AttentionBatch, QueryTiles, attend_paged, plan_tiles
from tokenmill.kernels.mla import attend_latent

NUM_BLOCKS = 200


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """paged_attention() without its twins."""
    out = q.new_empty(q.shape[0], num_heads * v_cache.shape[3])
    attend_paged.reference(q, out, batch, k_cache, v_cache, num_heads, window, sinks)
    return out


def latent_attention_reference(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """latent_attention() without its twins."""
    out = torch.empty_like(q_latent)
    attend_latent.reference(q_latent, q, out, batch, rope_cache, latent_cache, scale)
    return out


def make_batch(
    query_lens: list[int], contexts: list[int], block_size: int, group: int
) -> AttentionBatch:
    """Sequences with these new and cached tokens, over shuffled blocks."""
    lens, starts = np.array(query_lens), np.concatenate([[0], np.cumsum(query_lens)])
    width = max(-(-(c + q) // block_size) for c, q in zip(contexts, query_lens, strict=True))
    tables = torch.randperm(NUM_BLOCKS)[: len(lens) * width].view(-1, width).int().contiguous()
    owners = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    pieces = [torch.arange(c, c + q) for c, q in zip(contexts, query_lens, strict=True)]
    positions = torch.cat(pieces)
    slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
    return AttentionBatch(
        positions=positions,
        slots=slots,
        query_starts=torch.from_numpy(starts.astype(np.int32)),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=tables,
        table_rows=torch.arange(len(lens), dtype=torch.int32),
        tiles=tuple(QueryTiles.of(plan) for plan in plan_tiles(lens, group, 1, on_gpu=False)),
    )
