"""Attention without a mask or a cache: norms and rotation of queries and keys, then the softmax."""

from __future__ import annotations

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels import gpu_twin, triton_kernels, use_triton

# The order of preference on a GPU: cuDNN's kernel is made for Hopper, torch's flash for Ampere.
_BACKENDS = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]

HEAD_DIM = 128  # of the Hopper kernel

Rotation = tuple[torch.Tensor, torch.Tensor]  # cosines and sines, fp32 [tokens, head_dim / 2]


def norm_rotate(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_heads: int, rotation: Rotation | None
) -> torch.Tensor:
    """RMSNorm of x[b, n, k] over all heads, then each head's pairs turned: [b, n, heads, k/heads].

    Pairs lie side by side, (0, 1), (2, 3), ...; all is computed in fp32.
    """
    if use_triton(x, "norm_rotate"):
        return gpu_twin(norm_rotate_reference)(x, weight, eps, num_heads, rotation)
    return norm_rotate_reference(x, weight, eps, num_heads, rotation)


def norm_rotate_reference(
    x: torch.Tensor, weight: torch.Tensor, eps: float, num_heads: int, rotation: Rotation | None
) -> torch.Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight
    heads = wide.unflatten(-1, (num_heads, -1))
    if rotation is not None:
        cos, sin = (part[:, None] for part in rotation)
        a, b = heads[..., 0::2], heads[..., 1::2]
        heads = torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2)
    found: torch.Tensor = heads.to(x.dtype)
    return found


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Every query sees every key: q[b, n, heads, dim], k and v[b, m, heads, dim] -> as q."""
    if not q.is_cuda:
        return attend_reference(q, k, v)
    if takes_heads(q, "attend"):
        return gpu_twin(attend_reference)(q, k, v)
    with sdpa_kernel(_BACKENDS, set_priority=True):
        return attend_reference(q, k, v)


def attend_reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return scaled_dot_product_attention(q, k, v).transpose(1, 2)


def takes_heads(q: torch.Tensor, kernel: str) -> bool:
    """True where the Hopper kernel takes q[b, n, heads, dim]."""
    fits = q.shape[-1] == HEAD_DIM and q.dtype == torch.bfloat16
    return fits and use_triton(q, kernel) and bool(triton_kernels("bidirectional").runs_here())
