"""Copies blocks between two KV caches: all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tokenmill.kernels import always, kernel

ALIGNMENT = 16  # bytes that a thread of a GPU reads at once, where all blocks are multiples of it


@dataclass(frozen=True, slots=True, eq=False)
class BlockRegions:
    """The tensors of two caches, and where they lie."""

    sources: Sequence[torch.Tensor]  # uint8 [blocks, bytes of a block]
    targets: Sequence[torch.Tensor]
    # int64 [regions, 3]: addresses of source and target, words of a block
    addresses: torch.Tensor
    word: int  # bytes
    most_words: int  # of a block


def block_regions(sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> BlockRegions:
    """Each source with its target, on whose device the addresses lie; made once, used often."""
    both = list(zip(sources, targets, strict=True))
    for source, target in both:
        assert source.dtype == target.dtype == torch.uint8 and source.shape[1] == target.shape[1]
        assert source.is_contiguous() and target.is_contiguous()
    places = [(s.data_ptr(), t.data_ptr(), t.shape[1]) for s, t in both]
    word = 8 if all(number % ALIGNMENT == 0 for place in places for number in place) else 1
    rows = [(source, target, size // word) for source, target, size in places]
    addresses = torch.tensor(rows, dtype=torch.int64, device=targets[0].device)
    return BlockRegions(sources, targets, addresses, word, max(row[2] for row in rows))


@kernel(gpu=always, device_of=lambda pairs: pairs)
def copy_blocks(regions: BlockRegions, pairs: torch.Tensor) -> None:
    """Copy the rows pairs[0] of each source to the rows pairs[1] of its target.

    pairs is int64 [2, count], on the targets' device.
    """
    for source, target in zip(regions.sources, regions.targets, strict=True):
        target[pairs[1]] = source[pairs[0]]
