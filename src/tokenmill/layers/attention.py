"""Grouped-query attention over the paged KV cache: what most families' layers begin with."""

from __future__ import annotations

import torch

from tokenmill.core.specs.spec import ModelSpec
from tokenmill.kernels.attention import AttentionBatch, paged_attention, rope_and_cache
from tokenmill.layers.linear import Linear
from tokenmill.layers.residual import Residual
from tokenmill.parallel import ONE, Ranks


class Attention:
    """The attention of one layer, of the normed stream, added to it."""

    def __init__(
        self,
        spec: ModelSpec,
        window: int | None,
        qkv: Linear,
        out: Linear,
        qk_norms: tuple[torch.Tensor, torch.Tensor] | None = None,
        ranks: Ranks = ONE,
        sinks: torch.Tensor | None = None,
    ) -> None:
        self.num_heads, self.scale, self.eps = spec.num_heads, spec.softmax_scale, spec.rms_eps
        self.window, self.qkv, self.out = window or 0, qkv, out
        self.qk_norms, self.ranks, self.sinks = qk_norms, ranks, sinks

    def __call__(
        self,
        stream: Residual,
        norm: torch.Tensor | None,
        cache: tuple[torch.Tensor, torch.Tensor],
        cos_sin: torch.Tensor,
        batch: AttentionBatch,
        post_norm: torch.Tensor | None = None,
    ) -> None:
        """`norm` is the stream's before it, `post_norm` that of what is added."""
        heads, scale = self.num_heads, self.scale
        qkv = stream.project(norm, self.qkv)
        q = rope_and_cache(qkv, *cache, cos_sin, batch, heads, scale, self.qk_norms, self.eps)
        attended = paged_attention(q, *cache, batch, heads, self.window, self.sinks)
        stream.add(self.out, attended, self.ranks, post_norm)

    @property
    def num_bytes(self) -> int:
        return self.qkv.num_bytes + self.out.num_bytes
