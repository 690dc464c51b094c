"""Tokens sorted by expert into tiles, on the device.

The number of tiles is known to the device alone; as many programs run as there can be at most, and
those beyond the last tile end at once. So a CUDA graph holds all of it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from tokenmill.kernels import MODE
from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick

RANK_BLOCK = 256
PLACE_BLOCK = 32
FEW_ROWS = 1024  # up to here one launch sorts
SORT_SPAN = 256


class ExpertTiles(NamedTuple):
    """Rows of tokens' choices (token * top_k + choice) sorted by expert, `rows` to a tile."""

    sorted_rows: torch.Tensor  # int32 [most * rows]
    experts: torch.Tensor  # int32 [most]
    sizes: torch.Tensor  # int32 [most]: rows of a tile that are used
    num_used: torch.Tensor  # int32 [1]: tiles that are used
    rows: int
    most: int  # tiles that there can be
    single: bool = False  # each row has a tile of its own, in the order of choices


@quick
@triton.jit(do_not_specialize=["count"])
def _rank_kernel(ids, counts, ranks, count, BLOCK: tl.constexpr):
    """Number each row among those of its expert; the order is any, and no result depends on it."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    expert = tl.load(ids + index, mask=inside, other=0)
    rank = tl.atomic_add(counts + expert, 1, mask=inside)
    tl.store(ranks + index, rank, mask=inside)


@triton.jit
def _place(
    index, own, rank, sizes, sorted_rows, tile_experts, tile_sizes, num_tiles, count,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    """Put each row into its tile; a tile's first row says whose it is and how many rows it has."""
    expert, inside = tl.arange(0, EXPERTS), index < count
    tiles = tl.cdiv(sizes, ROWS)
    ends = tl.cumsum(tiles, axis=0)
    starts = ends - tiles
    mine = own[:, None] == expert[None, :]
    tile = tl.sum(tl.where(mine, starts[None, :], 0), axis=1) + rank // ROWS
    left = tl.sum(tl.where(mine, sizes[None, :], 0), axis=1) - rank
    tl.store(sorted_rows + tile * ROWS + rank % ROWS, index, mask=inside)
    leads = inside & (rank % ROWS == 0)
    tl.store(tile_experts + tile, own, mask=leads)
    tl.store(tile_sizes + tile, tl.minimum(left, ROWS), mask=leads)
    if tl.program_id(0) == 0:
        tl.store(num_tiles, tl.sum(tiles, axis=0))


@quick
@triton.jit(do_not_specialize=["count"])
def _place_kernel(
    ids, ranks, counts, sorted_rows, tile_experts, tile_sizes, num_tiles, count, num_experts,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    expert = tl.arange(0, EXPERTS)
    sizes = tl.load(counts + expert, mask=expert < num_experts, other=0)
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.load(ids + index, mask=index < count, other=0)
    rank = tl.load(ranks + index, mask=index < count, other=0)
    _place(
        index, own, rank, sizes, sorted_rows, tile_experts, tile_sizes, num_tiles, count, ROWS,
        EXPERTS,
    )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["count"])
def _sort_kernel(
    ids, sorted_rows, tile_experts, tile_sizes, num_tiles, count,
    ROWS: tl.constexpr, EXPERTS: tl.constexpr, BLOCK: tl.constexpr, SPAN: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Few rows: each program counts all of them itself, and one launch is enough."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    sizes, rank = tl.zeros([EXPERTS], tl.int32), tl.zeros([BLOCK], tl.int32)
    wait(EARLY)
    own = tl.load(ids + index, mask=index < count, other=0)
    for start in range(0, count, SPAN):
        other = start + tl.arange(0, SPAN)
        chosen = tl.load(ids + other, mask=other < count, other=-1)
        sizes += tl.histogram(chosen, EXPERTS, mask=other < count)
        before = (chosen[None, :] == own[:, None]) & (other[None, :] < index[:, None])
        rank += tl.sum(before.to(tl.int32), axis=1)
    _place(
        index, own, rank, sizes, sorted_rows, tile_experts, tile_sizes, num_tiles, count, ROWS,
        EXPERTS,
    )  # fmt: skip


def tile_rows(num_rows: int, num_experts: int) -> int:
    """Rows per tile: about what an expert gets, as tensor cores take them."""
    if MODE.batch_invariant:
        return 64
    per_expert: int = next_power_of_2(-(-num_rows // num_experts))
    return min(128, max(16, per_expert))


def sort_by_expert(ids: torch.Tensor, num_experts: int, rows: int = 0) -> ExpertTiles:
    """Tiles of the rows of ids[t, top_k], `rows` to a tile or about what an expert gets."""
    count, device = ids.numel(), ids.device
    rows = rows or tile_rows(count, num_experts)
    most = min(count, count // rows + num_experts)
    sorted_rows = torch.empty(most * rows, dtype=torch.int32, device=device)
    experts, sizes = torch.empty(2, most, dtype=torch.int32, device=device)
    num_tiles = torch.empty(1, dtype=torch.int32, device=device)
    tiles = ExpertTiles(sorted_rows, experts, sizes, num_tiles, rows, most)
    sort = _sort_few if count <= FEW_ROWS else _sort_many
    sort(ids, tiles, num_experts)
    return tiles


def single_tiles(ids: torch.Tensor) -> ExpertTiles:
    """A tile for each row, which takes no launch: few tokens seldom choose the same expert."""
    flat = ids.flatten()
    return ExpertTiles(flat, flat, flat, flat, 16, flat.shape[0], single=True)


def _sort_few(ids: torch.Tensor, tiles: ExpertTiles, num_experts: int) -> None:
    count, slots = ids.numel(), next_power_of_2(num_experts)
    _sort_kernel[(cdiv(count, PLACE_BLOCK),)](
        ids, tiles.sorted_rows, tiles.experts, tiles.sizes, tiles.num_used, count,
        ROWS=tiles.rows, EXPERTS=slots, BLOCK=PLACE_BLOCK, SPAN=SORT_SPAN, num_warps=4,
        **launch_options(),
    )  # fmt: skip


def _sort_many(ids: torch.Tensor, tiles: ExpertTiles, num_experts: int) -> None:
    count, slots = ids.numel(), next_power_of_2(num_experts)
    counts = torch.zeros(num_experts, dtype=torch.int32, device=ids.device)
    ranks = torch.empty(count, dtype=torch.int32, device=ids.device)
    _rank_kernel[(cdiv(count, RANK_BLOCK),)](
        ids, counts, ranks, count, BLOCK=RANK_BLOCK, num_warps=4
    )
    _place_kernel[(cdiv(count, PLACE_BLOCK),)](
        ids, ranks, counts, tiles.sorted_rows, tiles.experts, tiles.sizes, tiles.num_used, count,
        num_experts, ROWS=tiles.rows, EXPERTS=slots, BLOCK=PLACE_BLOCK, num_warps=4,
    )  # fmt: skip
