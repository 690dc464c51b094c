"""Attention without a mask or a cache: norms and rotation of queries and keys, then the softmax.

Of rounded queries and keys it is faster, and not exact. A query is rounded with a scale of its own,
keys with one scale for 128 of them, after their mean over the sequence was subtracted: that adds
the same to all scores of a query, which its softmax does not see, and what is left is smaller.
Values in fp8 have one scale for each channel, and then the weights are fp8, too.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Literal, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels import always, kernel
from tokenmill.kernels.gpu import hopper

# The order of preference on a GPU: cuDNN's kernel is made for Hopper, torch's flash for Ampere.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

HEAD_DIM = 128  # of the Hopper kernel
AttentionType = Literal["auto", "int8", "int8-fp8", "fp8"]
KEY_BLOCK = 128  # keys that share a scale
WEIGHT_SCALE = 256.0  # of weights in fp8, which are up to 1

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, fp32 [tokens, head_dim / 2]


class AttentionRounding(NamedTuple):
    codes: torch.dtype  # of queries and keys
    fp8_values: bool  # else they are as they come

    @property
    def limit(self) -> float:
        return 127.0 if self.codes == torch.int8 else 448.0


ROUNDINGS: dict[AttentionType, AttentionRounding | None] = {
    "auto": None,  # as q, k and v come
    "int8": AttentionRounding(torch.int8, False),
    "int8-fp8": AttentionRounding(torch.int8, True),
    "fp8": AttentionRounding(torch.float8_e4m3fn, True),
}


@kernel(gpu=always)
def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_heads: int, rotation: Rotation | None
) -> torch.Tensor:
    """RMSNorm of x[b, n, k] over all heads, then each head's pairs turned: [b, n, heads, k/heads].

    Pairs lie side by side, (0, 1), (2, 3), ...; all is computed in fp32.
    """
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    heads = wide.unflatten(-1, (num_heads, -1))
    if rotation is not None:
        cos, sin = (part[:, None] for part in rotation)
        a, b = heads[..., 0::2], heads[..., 1::2]
        heads = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    found: torch.Tensor = heads.to(x.dtype)
    return found


def runs_on(device: torch.device) -> bool:
    """On CPU by the reference, whose scores are all in memory at once; of GPUs on Hopper."""
    return device.type != "cuda" or hopper.is_here()


def _takes_heads(q: torch.Tensor) -> bool:
    return q.shape[-1] == HEAD_DIM and q.dtype == torch.bfloat16 and hopper.is_here()


@kernel(gpu=_takes_heads)
def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key: q[b, n, heads, dim], k and v[b, m, heads, dim] -> as q."""
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    with sdpa_kernel(_BACKENDS, set_priority=True) if q.is_cuda else nullcontext():
        return scaled_dot_product_attention(q, k, v).transpose(1, 2)


@kernel(gpu=_takes_heads)
def attend_rounded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, rounding: AttentionRounding
) -> torch.Tensor:
    queries, keys, values = (part.float().transpose(1, 2) for part in (q, k, v))
    keys = keys - keys.mean(2, keepdim=True)
    queries = _rounded(queries, _scale_of(queries.abs().amax(-1, keepdim=True), rounding), rounding)
    blocks = [
        _rounded(block, _scale_of(block.abs().amax((-2, -1), keepdim=True), rounding), rounding)
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


def _scale_of(peak: torch.Tensor, rounding: AttentionRounding) -> torch.Tensor:
    """What codes are multiplied by, where the largest value is `peak`."""
    return peak.clamp(min=1e-30) / rounding.limit


def _rounded(x: torch.Tensor, scale: torch.Tensor, rounding: AttentionRounding) -> torch.Tensor:
    codes = x / scale
    if rounding.codes == torch.int8:
        return torch.floor(codes + 0.5) * scale
    return codes.to(rounding.codes).float() * scale
