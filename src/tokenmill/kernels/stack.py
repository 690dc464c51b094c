"""Dense layers as the compiled kernels run them in one call, and when they can."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tokenmill.kernels import cpu_kernels
from tokenmill.kernels.attention import AttentionBatch
from tokenmill.kernels.matmul import PackedWeight

if TYPE_CHECKING:
    from tokenmill.kernels.cpu.stack import Stack


@dataclass(frozen=True, slots=True)
class DenseLayer:
    """A decoder layer's weights: attention, then one gated MLP."""

    norm: torch.Tensor
    qkv: PackedWeight
    qkv_bias: torch.Tensor | None
    qk_norms: tuple[torch.Tensor, torch.Tensor] | None
    out: PackedWeight
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: PackedWeight
    down: PackedWeight
    window: int

    @property
    def plain(self) -> bool:
        """Every product is grouped int8 in whole tiles."""
        weights = self.qkv, self.out, self.gate_up, self.down
        return all(w.tiled and w.grouped and w.padded == w.n for w in weights)


@dataclass(frozen=True, slots=True)
class Heads:
    """Shape of the attention and its cache."""

    num_heads: int
    num_kv_heads: int
    dim: int
    block_size: int
    scale: float


def make_stack(layers: list[DenseLayer], heads: Heads, eps: float) -> Stack | None:
    """These layers as one call, or None where they run one by one."""
    if not cpu_kernels() or not all(layer.plain for layer in layers):
        return None
    if heads.dim % 16 or heads.block_size % 16:  # as fits_cpu_tiles() of attention
        return None
    from tokenmill.kernels.cpu.stack import Stack

    return Stack(layers, heads, eps)


def run_stack(
    stack: Stack | None,
    x: torch.Tensor,
    kv_cache: list[tuple[torch.Tensor, torch.Tensor]],
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
) -> bool:
    """Add all layers to x in place; False where the switches say otherwise now."""
    if stack is None or not cpu_kernels() or len(batch.tiles) != 1 or batch.sliding:
        return False
    stack.run(x, kv_cache, cos_sin, batch)
    return True
