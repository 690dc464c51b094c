"""Copies blocks between two caches, whose tensors it knows by their addresses alone: those of
another process cannot be arguments, and one launch takes those of all layers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

TILE_BYTES = 16384  # that a program copies: eight 16-byte reads for each thread
ALIGNMENT = 16  # bytes that a thread reads at once, where all blocks are multiples of it


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


def copy_blocks(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor
) -> None:
    """Both sides lie in memory that the device of `pairs` reaches."""
    if not pairs.shape[1]:
        return
    both = list(zip(sources, targets, strict=True))
    for source, target in both:
        assert source.dtype == target.dtype == torch.uint8 and source.shape[1] == target.shape[1]
        assert source.is_contiguous() and target.is_contiguous() and pairs.is_contiguous()
    sizes = [target.shape[1] for target in targets]
    wide = all(x.data_ptr() % ALIGNMENT == 0 for pair in both for x in pair)
    wide = wide and all(size % ALIGNMENT == 0 for size in sizes)
    word = 8 if wide else 1
    rows = [(s.data_ptr(), t.data_ptr(), t.shape[1] // word) for s, t in both]
    regions = torch.tensor(rows, dtype=torch.int64, device=pairs.device)
    tile = TILE_BYTES // word
    count = pairs.shape[1]
    grid = (count, len(rows), triton.cdiv(max(sizes) // word, tile))
    _copy_kernel[grid](regions, pairs, count, WIDE=wide, TILE=tile)
