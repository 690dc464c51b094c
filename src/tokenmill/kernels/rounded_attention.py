"""Attention without a mask over rounded queries and keys: faster, and not exact.

A query is rounded with a scale of its own, keys with one scale for 128 of them, after their mean
over the sequence was subtracted: that adds the same to all scores of a query, which its softmax
does not see, and what is left is smaller. Values in fp8 have one scale for each channel, and then
the weights are fp8, too.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch

from tokenmill.kernels import triton_kernels
from tokenmill.kernels.bidirectional import takes_heads

AttentionType = Literal["auto", "int8", "int8-fp8", "fp8"]
KEY_BLOCK = 128  # keys that share a scale
WEIGHT_SCALE = 256.0  # of weights in fp8, which are up to 1


class Rounding(NamedTuple):
    """What is rounded to what."""

    codes: torch.dtype  # of queries and keys
    fp8_values: bool  # else they are as they come

    @property
    def limit(self) -> float:
        """The largest code."""
        return 127.0 if self.codes == torch.int8 else 448.0


ROUNDINGS: dict[AttentionType, Rounding | None] = {
    "auto": None,  # as q, k and v come
    "int8": Rounding(torch.int8, False),
    "int8-fp8": Rounding(torch.int8, True),
    "fp8": Rounding(torch.float8_e4m3fn, True),
}


def runs_on(device: torch.device) -> bool:
    """On CPU by the reference, whose scores are all in memory at once; of GPUs on Hopper."""
    return device.type != "cuda" or bool(triton_kernels("bidirectional").runs_here())


def attend_rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    """Every query sees every key: q[b, n, heads, dim], k and v[b, m, heads, dim] -> as q."""
    if takes_heads(q, "attend_rounded"):
        found: torch.Tensor = triton_kernels("bidirectional").attend_rounded(q, k, v, rounding)
        return found
    return attend_rounded_reference(q, k, v, rounding)


def attend_rounded_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: Rounding
) -> torch.Tensor:
    queries, keys, values = (part.float().transpose(1, 2) for part in (q, k, v))
    keys = keys - keys.mean(2, keepdim=True)
    queries = rounded(queries, scale_of(queries.abs().amax(-1, keepdim=True), rounding), rounding)
    blocks = [
        rounded(block, scale_of(block.abs().amax((-2, -1), keepdim=True), rounding), rounding)
        for block in keys.split(KEY_BLOCK, dim=2)
    ]
    scores = queries @ torch.cat(blocks, dim=2).mT * q.shape[-1] ** -0.5
    weights = torch.exp(scores - scores.amax(-1, keepdim=True))
    total = weights.sum(-1, keepdim=True)
    if rounding.fp8_values:
        scales = values.abs().amax(2, keepdim=True).clamp(min=1e-30) / 448.0
        values = (values / scales).to(torch.float8_e4m3fn).float() * scales
        weights = (weights * WEIGHT_SCALE).to(torch.float8_e4m3fn).float() / WEIGHT_SCALE
    else:
        weights, values = weights.to(v.dtype).float(), values.to(v.dtype).float()
    return (weights @ values / total).to(q.dtype).transpose(1, 2)


def scale_of(peak: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """What codes are multiplied by, where the largest value is `peak`."""
    return peak.clamp(min=1e-30) / rounding.limit


def rounded(x: torch.Tensor, scale: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """Values as their codes say them."""
    codes = x / scale
    if rounding.codes == torch.int8:
        return torch.floor(codes + 0.5) * scale
    return codes.to(rounding.codes).float() * scale
