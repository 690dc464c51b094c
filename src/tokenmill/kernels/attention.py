"""Paged attention over one KV cache layout, and RoPE with the KV write.

k_cache is [blocks, kv_heads, head_dim, block_size] (keys of a block lie side by side per channel),
v_cache is [blocks, kv_heads, block_size, head_dim].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.kernels import compiled, cpu_kernels

TILE_ROWS = 24  # query rows that share one pass over the keys: four register tiles


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a step's tokens stand. Sequence i owns rows [query_starts[i], query_starts[i + 1])."""

    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens]: block * block_size + offset
    query_starts: torch.Tensor  # int32 [seqs + 1]
    context_lens: torch.Tensor  # int32 [seqs]: tokens in the cache before this step
    block_tables: torch.Tensor  # int32 [seqs, max blocks]
    tile_seqs: torch.Tensor  # int32 [tiles]: work items of the compiled kernel
    tile_starts: torch.Tensor  # int32 [tiles]: first query token of the tile within its sequence
    tile_tokens: int


def query_tiles(query_lens: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Cut each sequence's queries into tiles: sequence and first token of each, tokens a tile."""
    tokens = max(1, TILE_ROWS // group)
    counts = -(-query_lens // tokens)
    seqs = np.repeat(np.arange(len(query_lens), dtype=np.int32), counts)
    ends = np.cumsum(counts)
    index = np.arange(len(seqs)) - np.repeat(ends - counts, counts)
    return seqs, (index * tokens).astype(np.int32), tokens


def _compiled(k_cache: torch.Tensor) -> bool:
    if not cpu_kernels():
        return False
    supports: bool = compiled("attention").supports(k_cache.shape[2], k_cache.shape[3])
    return supports


def rope_and_cache(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """Rotate q and k of qkv[t, (heads + 2 kv_heads) * dim], write k and v, return q times scale.

    `norms` are per-head RMSNorm weights for q and k (Qwen3), applied before the rotation.
    cos_sin is [positions, dim]: cosines in the first half, sines in the second.
    """
    dim = k_cache.shape[2]
    if _compiled(k_cache):
        compiled("attention").rope_and_cache(
            qkv,
            k_cache,
            v_cache,
            cos_sin,
            batch.positions,
            batch.slots,
            num_heads,
            scale,
            norms,
            eps,
        )
        return qkv[:, : num_heads * dim]
    return rope_and_cache_reference(
        qkv, k_cache, v_cache, cos_sin, batch, num_heads, scale, norms, eps
    )


def rope_and_cache_reference(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    _, kv_heads, dim, block_size = k_cache.shape
    q, k, v = qkv.unflatten(1, (-1, dim)).split([num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (_head_norm(x, w, eps) for x, w in zip((q, k), norms, strict=True))
    cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
    q, k = _rotate(q, cos, sin) * scale, _rotate(k, cos, sin)
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    k_cache[blocks, :, :, offsets] = k
    v_cache[blocks, :, offsets] = v
    return q.flatten(1)


def _head_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    window: int = 0,
) -> torch.Tensor:
    """Causal attention of scaled q[t, heads * dim] over each sequence's blocks -> [t, heads * dim].

    With window > 0 a query sees itself and the window - 1 keys before it.
    """
    if not _compiled(k_cache):
        return paged_attention_reference(q, k_cache, v_cache, batch, num_heads, window)
    out: torch.Tensor = compiled("attention").paged_attention(
        q,
        k_cache,
        v_cache,
        batch.tile_seqs,
        batch.tile_starts,
        batch.query_starts,
        batch.context_lens,
        batch.block_tables,
        num_heads,
        batch.tile_tokens,
        window,
    )
    return out


def paged_attention_reference(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: AttentionBatch,
    num_heads: int,
    window: int = 0,
) -> torch.Tensor:
    _, kv_heads, dim, block_size = k_cache.shape
    out = torch.empty(q.shape[0], num_heads * dim)
    starts = batch.query_starts.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        length = context + starts[i + 1] - starts[i]
        blocks = batch.block_tables[i, : -(-length // block_size)].long()
        k = k_cache[blocks].permute(1, 0, 3, 2).flatten(1, 2)[:, :length]
        v = v_cache[blocks].permute(1, 0, 2, 3).flatten(1, 2)[:, :length]
        queries = q[rows].unflatten(1, (num_heads, dim)).transpose(0, 1)
        distance = torch.arange(context, length)[:, None] - torch.arange(length)
        seen = distance >= 0 if not window else (distance >= 0) & (distance < window)
        attended = torch.nn.functional.scaled_dot_product_attention(
            queries[None],
            k.repeat_interleave(num_heads // kv_heads, 0)[None],
            v.repeat_interleave(num_heads // kv_heads, 0)[None],
            attn_mask=seen,
            scale=1.0,
        )
        out[rows] = attended[0].transpose(0, 1).flatten(1)
    return out
