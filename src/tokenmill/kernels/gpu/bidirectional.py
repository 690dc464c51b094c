"""Queries and keys before attention without a cache: norm over all heads and rotation, one pass."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.gpu.dependent import launch_options, wait
from tokenmill.kernels.gpu.rows import ELEMENTS_PER_WARP, MAX_WARPS


@triton.jit
def norm_rotate_kernel(
    x, weight, cos, sin, out, tokens, stride, k, eps,
    HALF: tl.constexpr, ROTATE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < k
    gain = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    wait(EARLY)
    values = tl.load(x + row * stride + columns, mask=inside, other=0.0).to(tl.float32)
    y = values * tl.rsqrt(tl.sum(values * values, axis=0) / k + eps) * gain
    if ROTATE:
        pairs = tl.arange(0, BLOCK // 2)
        first, second = tl.split(tl.reshape(y, (BLOCK // 2, 2)))
        places = (row % tokens) * HALF + pairs % HALF  # the same turns for every head
        c, s = tl.load(cos + places), tl.load(sin + places)
        y = tl.reshape(tl.join(first * c - second * s, first * s + second * c), (BLOCK,))
    tl.store(out + row * k + columns, y.to(out.dtype.element_ty), mask=inside)


def norm_rotate(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    num_heads: int,
    rotation: tuple[torch.Tensor, torch.Tensor] | None,
) -> torch.Tensor:
    """x[b, n, k], a part of wider rows or whole ones, -> [b, n, heads, dim]."""
    branches, tokens, k = x.shape
    assert x.stride(2) == 1 and x.stride(0) == tokens * x.stride(1)
    assert k % (2 * num_heads) == 0 and weight.is_contiguous()
    cos, sin = (weight, weight) if rotation is None else rotation
    assert cos.is_contiguous() and sin.is_contiguous()
    out = torch.empty(branches, tokens, num_heads, k // num_heads, device=x.device, dtype=x.dtype)
    block = triton.next_power_of_2(k)
    norm_rotate_kernel[(branches * tokens,)](
        x, weight, cos, sin, out, tokens, x.stride(1), k, eps,
        HALF=k // num_heads // 2, ROTATE=rotation is not None, BLOCK=block,
        num_warps=min(MAX_WARPS, max(1, block // ELEMENTS_PER_WARP)), **launch_options(),
    )  # fmt: skip
    return out
