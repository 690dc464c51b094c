"""Paged attention over one KV cache layout, and RoPE with the KV write.

v_cache is [blocks, kv_heads, block_size, head_dim], and on a GPU k_cache too. On CPU k_cache is
[blocks, kv_heads, head_dim, block_size]: keys of a block lie side by side per channel.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from tokenmill.kernels import MODE, always, kernel, use_triton
from tokenmill.kernels.gpu import hopper

if TYPE_CHECKING:
    from tokenmill.kernels.pages import Pages

TILE_ROWS = 96  # query rows that share one pass over the keys on CPU
GPU_TILE_ROWS = 128
SHORT = 9  # most queries of a sequence that splits its keys: a token and its drafts
NARROW_ROWS = 16  # of the narrowest tile on a GPU, whatever it needs
GPU_PROGRAMS = 1024  # that keep the memory of a large GPU busy; fewer tiles split their keys
MAX_SPLITS = 32
HOPPER_DIMS = (64, 128)  # of the heads that kernels/gpu/hopper/prefill.py takes
HOPPER_KEYS, HOPPER_LEAST_BLOCK = 128, 8  # a tile's; rows that shared memory interleaves
FULL_TILES = 2.0  # times the keys may be visited: by 1.75 times Hopper's kernel is still faster


class TilePlan(NamedTuple):
    seqs: np.ndarray
    starts: np.ndarray
    tokens: int
    splits: int = 1
    rows: range = range(0)


@dataclass(frozen=True, slots=True)
class QueryTiles:
    """Work items of the attention kernels: tiles of at most `tokens` queries of one sequence."""

    seqs: torch.Tensor  # int32 [tiles]
    starts: torch.Tensor  # int32 [tiles]: first query token of the tile within its sequence
    tokens: int
    splits: int = 1  # programs that share the keys of a tile
    rows: range = range(0)  # of the batch that these tiles cover, where they share keys

    @classmethod
    def of(cls, plan: TilePlan, device: torch.device | str = "cpu") -> QueryTiles:
        seqs, starts = (torch.from_numpy(a).to(device) for a in (plan.seqs, plan.starts))
        return cls(seqs, starts, plan.tokens, plan.splits, plan.rows)


@dataclass(frozen=True, slots=True)
class AttentionBatch:
    """Where a step's tokens stand. Sequence i owns rows [query_starts[i], query_starts[i + 1])."""

    positions: torch.Tensor  # [tokens]
    slots: torch.Tensor  # [tokens]: block * block_size + offset
    query_starts: torch.Tensor  # int32 [seqs + 1]
    context_lens: torch.Tensor  # int32 [seqs]: tokens in the cache before this step
    block_tables: torch.Tensor  # int32 [rows, max blocks]
    table_rows: torch.Tensor  # int32 [seqs]: the sequence's row of block_tables
    tiles: tuple[QueryTiles, ...]  # one launch each
    # The same for each group of sliding layers, where these have slots and tables of their own.
    sliding: tuple[AttentionBatch, ...] = ()
    # Where a step is captured in pieces: called as between(attend, *tensors), it takes what attends
    # and calls attend(*tensors, batch) itself between two pieces. The last tensor is the output.
    between: Callable[..., object] | None = None
    pages: Pages | None = None  # those that prompts read, where a kernel wants them unpacked

    def attend(self, attend: Callable[..., None], *tensors: torch.Tensor) -> None:
        """Call attend(*tensors, batch) now, or let it be called between two pieces of a step."""
        if self.between is None:
            attend(*tensors, self)
        else:
            self.between(attend, *tensors)


def plan_tiles(
    query_lens: np.ndarray,
    group: int,
    kv_heads: int,
    on_gpu: bool,
    contexts: np.ndarray | None = None,
    full_tiles: bool = False,
) -> list[TilePlan]:
    """Cut each sequence's queries into tiles; contexts: keys before them, none unless given.

    On a GPU single queries, which come first, and after them the few of a token and its drafts get
    narrow tiles that split their keys; unless a result may not depend on the batch: then all tiles
    are alike. Tiles with the most keys start first. full_tiles: takes_full_tiles() of the cache.
    """
    if not on_gpu:
        return [_cut(query_lens, 0, max(1, TILE_ROWS // group))]
    if MODE.batch_invariant:
        return [_cut(query_lens, 0, max(1, GPU_TILE_ROWS // group))]
    if contexts is None:
        contexts = np.zeros_like(query_lens)
    num_single, num_short = _leading(query_lens, 1), _leading(query_lens, SHORT)
    if query_lens[:num_short].max(initial=0) * group <= NARROW_ROWS:
        num_single = 0  # one launch: the tile of a single query is no narrower
    bounds = ((0, num_single), (num_single, num_short))
    plans = [_narrow(query_lens, *each, kv_heads) for each in bounds if each[0] < each[1]]
    if num_short < len(query_lens):
        plans.append(_wide(query_lens, contexts, num_short, group, full_tiles))
    return [_longest_first(plan, contexts) for plan in plans]


def _longest_first(plan: TilePlan, contexts: np.ndarray) -> TilePlan:
    order = longest_first(plan.starts + contexts[plan.seqs])
    return plan._replace(seqs=plan.seqs[order], starts=plan.starts[order])


def longest_first(num_keys: np.ndarray) -> np.ndarray:
    """The order of tiles by the keys before them: a GPU ends together what it starts so."""
    return np.argsort(-num_keys, kind="stable")


def _leading(query_lens: np.ndarray, most: int) -> int:
    """How many sequences come before the first with more than `most` queries."""
    return int((query_lens > most).argmax()) if query_lens.max() > most else len(query_lens)


def _narrow(query_lens: np.ndarray, first: int, last: int, kv_heads: int) -> TilePlan:
    """One tile for each of these sequences, with its keys split over programs."""
    lens = query_lens[first:last]
    start = int(query_lens[:first].sum())
    plan = _cut(lens, first, int(lens.max()), num_splits(len(lens) * kv_heads))
    return plan._replace(rows=range(start, start + int(lens.sum())))


def _wide(
    query_lens: np.ndarray, contexts: np.ndarray, first: int, group: int, full_tiles: bool
) -> TilePlan:
    """Tiles of all heads that share a KV head, or of as many as divide a tile, where that pays."""
    together = _cut(query_lens[first:], first, max(1, GPU_TILE_ROWS // group))
    heads = group & -group
    if full_tiles and heads < group:
        apart = _cut(query_lens[first:], first, GPU_TILE_ROWS // heads)
        keys, fewer = (num_visited_keys(plan, query_lens, contexts) for plan in (apart, together))
        if keys * (group // heads) <= FULL_TILES * fewer:
            return apart
    return together


def num_visited_keys(plan: TilePlan, query_lens: np.ndarray, contexts: np.ndarray) -> int:
    """How many keys all tiles visit: each those up to its last query."""
    ends = np.minimum(plan.starts + plan.tokens, query_lens[plan.seqs])
    return int((contexts[plan.seqs] + ends).sum())


def num_splits(num_programs: int, enough: int = GPU_PROGRAMS) -> int:
    """Programs per tile, a power of two, so that all together fill a GPU."""
    wanted = min(MAX_SPLITS, enough // num_programs)
    return 1 << max(0, wanted.bit_length() - 1)


def _cut(query_lens: np.ndarray, first_seq: int, tokens: int, splits: int = 1) -> TilePlan:
    counts = -(-query_lens // tokens)
    numbers = np.arange(first_seq, first_seq + len(query_lens), dtype=np.int32)
    seqs = np.repeat(numbers, counts)
    ends = np.cumsum(counts)
    index = np.arange(len(seqs)) - np.repeat(ends - counts, counts)
    starts = (index * tokens).astype(np.int32)
    return TilePlan(seqs, starts, tokens, splits)


def takes_full_tiles(v_cache: torch.Tensor) -> bool:
    """Whether Hopper's kernel, which wants every row of a tile used, attends over this cache.

    It takes pages of an fp8 cache as bf16. Other heads, blocks that are no whole part or multiple
    of a tile of keys, and batch-invariant mode stay with the plain kernel.
    """
    _, _, block_size, dim = v_cache.shape
    return (
        use_triton(v_cache)
        and hopper.is_usable()
        and v_cache.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and block_size >= HOPPER_LEAST_BLOCK
        and (HOPPER_KEYS % block_size == 0 or block_size % HOPPER_KEYS == 0)
        and dim in HOPPER_DIMS
    )


def heads_of(tiles: QueryTiles, group: int) -> int:
    """Of the `group` query heads that share a KV head on a GPU, those that one tile has."""
    return group if tiles.rows else min(group, GPU_TILE_ROWS // tiles.tokens)


@kernel(gpu=always)
def place_tokens(
    staged: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    tables: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and cache slots of a step, int32 [tokens] each.

    staged holds ids the host knows; -1 - r stands for last_tokens[r], sampled by the step before.
    """
    known = last_tokens[(-1 - staged).clamp(min=0)]
    ids = torch.where(staged < 0, known, staged)
    blocks = tables[token_rows, positions // block_size]
    return ids, blocks * block_size + positions % block_size


def fits_cpu_tiles(v_cache: torch.Tensor) -> bool:
    """Tiles of the compiled kernels read 16 keys and 16 channels at a time."""
    return v_cache.shape[2] % 16 == 0 and v_cache.shape[3] % 16 == 0


@kernel(gpu=always, cpu=fits_cpu_tiles)
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
    Before k is rounded to fp8, one orthogonal matrix spreads q and k over channels: their
    products stay, but no channel that is large in both brings a large error.
    """
    _, kv_heads, block_size, dim = v_cache.shape
    q, k, v = qkv.unflatten(1, (-1, dim)).split([num_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (_head_norm(x, w, eps) for x, w in zip((q, k), norms, strict=True))
    cos, sin = cos_sin[batch.positions].unsqueeze(1).chunk(2, dim=-1)
    q, k = _rotate(q, cos, sin) * scale, _rotate(k, cos, sin)
    if k_cache.dtype == torch.float8_e4m3fn:
        spread = spread_matrix(dim).to(q)
        q, k = q @ spread, k @ spread
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    by_token(k_cache)[blocks, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v.to(v_cache.dtype)
    return q.flatten(1).to(qkv.dtype)


def spread_width(dim: int) -> int:
    """How many neighbouring channels are mixed; a tensor core's product takes 16 at least."""
    return min(32, dim // 2)


def spread_matrix(dim: int) -> torch.Tensor:
    """Orthogonal, fp32 [dim, dim]: mixes neighbours, and the two channels of a rotation."""
    pair = torch.tensor([[1.0, 1.0], [1.0, -1.0]])
    width = spread_width(dim)
    neighbours = torch.ones(1, 1)
    while neighbours.shape[0] < width:
        neighbours = torch.kron(pair, neighbours)
    matrix = torch.kron(pair, torch.kron(torch.eye(dim // 2 // width), neighbours))
    return matrix.mul((2 * width) ** -0.5)


def by_token(k_cache: torch.Tensor) -> torch.Tensor:
    """The keys as [blocks, kv_heads, block_size, head_dim], which they are on a GPU."""
    return k_cache if k_cache.is_cuda else k_cache.mT


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
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of scaled q[t, heads * dim] over each sequence's blocks -> [t, heads * dim].

    With window > 0 a query sees itself and the window - 1 keys before it. sinks[heads], fp32, are
    scores of one more key for each head, which every query sees and whose value is zero.
    """
    out = torch.empty(q.shape[0], num_heads * v_cache.shape[3], dtype=q.dtype, device=q.device)
    attend = partial(
        attend_paged,
        k_cache=k_cache,
        v_cache=v_cache,
        num_heads=num_heads,
        window=window,
        sinks=sinks,
    )
    batch.attend(attend, q, out)
    return out


@kernel(gpu=always, cpu=fits_cpu_tiles)
def attend_paged(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    """paged_attention() into `out`."""
    _, kv_heads, block_size, dim = v_cache.shape
    starts, table_rows = batch.query_starts.tolist(), batch.table_rows.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        length = context + starts[i + 1] - starts[i]
        blocks = batch.block_tables[table_rows[i], : -(-length // block_size)].long()
        k = by_token(k_cache[blocks]).transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
        v = v_cache[blocks].transpose(0, 1).flatten(1, 2)[:, :length].to(q.dtype)
        queries = q[rows].unflatten(1, (num_heads, dim)).transpose(0, 1)
        keys = torch.arange(length, device=q.device)
        distance = keys[context:, None] - keys
        seen = distance >= 0 if not window else (distance >= 0) & (distance < window)
        k, v = (x.repeat_interleave(num_heads // kv_heads, 0) for x in (k, v))
        out[rows] = _attend(queries, k, v, seen, sinks).transpose(0, 1).flatten(1)


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """softmax(q k^T) v of [heads, tokens, dim] each, over the keys that seen[queries, keys] has."""
    if sinks is None:
        attention = torch.nn.functional.scaled_dot_product_attention
        return attention(q[None], k[None], v[None], attn_mask=seen, scale=1.0)[0]
    scores = (q @ k.mT).float().masked_fill(~seen, -torch.inf)
    sink = sinks.float()[:, None, None].expand(-1, scores.shape[1], 1)
    weights = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    return weights.to(v.dtype) @ v
