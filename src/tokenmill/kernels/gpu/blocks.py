"""Copies blocks between two caches, whose tensors it knows by their addresses alone: those of
another process cannot be arguments, and one launch takes those of all layers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.blocks import BlockRegions
from tokenmill.kernels.gpu.launch import cdiv, quick

TILE_BYTES = 16384  # that a program copies: eight 16-byte reads for each thread
NUM_WARPS = 4


@quick
@triton.jit(do_not_specialize=["count"])
def _copy_kernel(regions, pairs, count, WIDE: tl.constexpr, TILE: tl.constexpr):
    """regions is int64 [regions, 3]: addresses of source and target, words of a block."""
    pair, region = tl.program_id(0), regions + 3 * tl.program_id(1)
    words = tl.load(region + 2)
    kind: tl.constexpr = tl.pointer_type(tl.int64 if WIDE else tl.uint8)
    source = tl.load(region).to(kind) + tl.load(pairs + pair) * words
    target = tl.load(region + 1).to(kind) + tl.load(pairs + count + pair) * words
    offsets = tl.program_id(2) * TILE + tl.arange(0, TILE)
    if WIDE:
        source, target = tl.multiple_of(source, 16), tl.multiple_of(target, 16)
        words = tl.multiple_of(words, 2)
    mask = offsets < words
    tl.store(target + offsets, tl.load(source + offsets, mask=mask), mask=mask)


def copy_blocks(regions: BlockRegions, pairs: torch.Tensor) -> None:
    """Both sides lie in memory that the device of `pairs` reaches."""
    count, tile = pairs.shape[1], TILE_BYTES // regions.word
    if not count:
        return
    assert pairs.is_contiguous() and pairs.dtype == torch.int64
    grid = (count, len(regions.addresses), cdiv(regions.most_words, tile))
    _copy_kernel[grid](
        regions.addresses, pairs, count, WIDE=regions.word > 1, TILE=tile, num_warps=NUM_WARPS
    )
