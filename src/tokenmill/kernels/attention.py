"""Paged attention over one KV cache layout, and RoPE with the KV write.

v_cache is [blocks, kv_heads, block_size, head_dim], and on a GPU k_cache too. On CPU k_cache is
[blocks, kv_heads, head_dim, block_size]: keys of a block lie side by side per channel.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from tokenmill.kernels import compiled, cpu_kernels, triton_kernels

TILE_ROWS = 24  # query rows that share one pass over the keys on CPU: four register tiles
GPU_TILE_ROWS = 64


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Work items of the attention kernels: tiles of at most `tokens` queries of one sequence."""

    seqs: torch.Tensor  # int32 [tiles]
    starts: torch.Tensor  # int32 [tiles]: first query token of the tile within its sequence
    tokens: int


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a step's tokens stand. Sequence i owns rows [query_starts[i], query_starts[i + 1])."""

    positions: torch.Tensor  # int64 [tokens]
    slots: torch.Tensor  # int64 [tokens]: block * block_size + offset
    query_starts: torch.Tensor  # int32 [seqs + 1]
    context_lens: torch.Tensor  # int32 [seqs]: tokens in the cache before this step
    block_tables: torch.Tensor  # int32 [seqs, max blocks]
    tiles: tuple[QueryTiles, ...]  # one launch each


def query_tiles(
    query_lens: np.ndarray, group: int, device: torch.device | str = "cpu", split: bool = False
) -> tuple[QueryTiles, ...]:
    """Cut each sequence's queries into tiles.

    With `split` single queries, which come first, get narrow tiles and a launch of their own.
    """
    if not split:
        return (_cut(query_lens, 0, max(1, TILE_ROWS // group), device),)
    num_single = int((query_lens > 1).argmax()) if query_lens.max() > 1 else len(query_lens)
    parts = []
    if num_single:
        parts.append(_cut(query_lens[:num_single], 0, 1, device))
    if num_single < len(query_lens):
        tokens = max(1, GPU_TILE_ROWS // group)
        parts.append(_cut(query_lens[num_single:], num_single, tokens, device))
    return tuple(parts)


def _cut(
    query_lens: np.ndarray, first_seq: int, tokens: int, device: torch.device | str
) -> QueryTiles:
    counts = -(-query_lens // tokens)
    numbers = np.arange(first_seq, first_seq + len(query_lens), dtype=np.int32)
    seqs = np.repeat(numbers, counts)
    ends = np.cumsum(counts)
    index = np.arange(len(seqs)) - np.repeat(ends - counts, counts)
    starts = (index * tokens).astype(np.int32)
    return QueryTiles(
        torch.from_numpy(seqs).to(device), torch.from_numpy(starts).to(device), tokens
    )


def _compiled(v_cache: torch.Tensor) -> bool:
    if not cpu_kernels():
        return False
    supports: bool = compiled("attention").supports(v_cache.shape[3], v_cache.shape[2])
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
    dim = v_cache.shape[3]
    if qkv.is_cuda or _compiled(v_cache):
        kernels = triton_kernels if qkv.is_cuda else compiled
        kernels("attention").rope_and_cache(
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
    if not (q.is_cuda or _compiled(v_cache)):
        return paged_attention_reference(q, k_cache, v_cache, batch, num_heads, window)
    kernels = triton_kernels if q.is_cuda else compiled
    out = torch.empty(q.shape[0], num_heads * v_cache.shape[3], dtype=q.dtype, device=q.device)
    for tiles in batch.tiles:
        kernels("attention").paged_attention(
            q,
            out,
            k_cache,
            v_cache,
            tiles.seqs,
            tiles.starts,
            batch.query_starts,
            batch.context_lens,
            batch.block_tables,
            num_heads,
            tiles.tokens,
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
