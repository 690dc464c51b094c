"""Multi-head latent attention: keys and values of all heads from one small vector per token."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MLASpec:
    """The cache holds a normed latent and one rotated key part per token, for all heads."""

    q_rank: int | None  # None: queries come straight from the hidden state
    kv_rank: int
    nope_dim: int  # of a head's query and key: the part without position
    rope_dim: int
    value_dim: int
    interleaved: bool  # a rotation turns channels 2i and 2i + 1, not i and i + rope_dim / 2

    def matmul_params(self, hidden: int, num_heads: int) -> int:
        """Matrix parameters of one layer's attention."""
        head = self.nope_dim + self.rope_dim
        queries = hidden * num_heads * head
        if self.q_rank is not None:
            queries = self.q_rank * (hidden + num_heads * head)
        latent = hidden * (self.kv_rank + self.rope_dim)
        return queries + latent + self.unpacked(num_heads) + num_heads * self.value_dim * hidden

    def unpacked(self, num_heads: int) -> int:
        """Parameters of kv_b_proj, which stays out of fp8 since it is part of the attention."""
        return self.kv_rank * num_heads * (self.nope_dim + self.value_dim)

    def norm_params(self) -> int:
        return self.kv_rank + (self.q_rank or 0)

    def seen_flops(self, num_heads: int, decode: bool) -> int:
        """FLOPs of one token for each position that it attends to, in one layer.

        A prompt's keys and values are unpacked once for all its tokens; a decoded token takes its
        query into the latent space instead, and never unpacks the cache.
        """
        if decode:
            return 2 * num_heads * (2 * self.kv_rank + self.rope_dim)
        return 2 * num_heads * (self.nope_dim + self.rope_dim + self.value_dim)
