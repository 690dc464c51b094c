"""Copies blocks between two KV caches: all layers in one launch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tokenmill.kernels import gpu_twin, use_triton


def copy_blocks(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor
) -> None:
    """Copy the rows pairs[0] of each source to the rows pairs[1] of its target.

    sources and targets are uint8 [blocks, bytes of a block], pairs is int64 [2, count].
    """
    copy = gpu_twin(copy_blocks_reference) if use_triton(pairs) else copy_blocks_reference
    copy(sources, targets, pairs)


def copy_blocks_reference(
    sources: Sequence[torch.Tensor], targets: Sequence[torch.Tensor], pairs: torch.Tensor
) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[pairs[1]] = source[pairs[0]]
