"""Attention inside segments of rows, in both directions: a vision encoder's, whose images are that.

q, k and v of all heads lie side by side in a row, [q of every head, k, v]; nothing is cached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from tokenmill.kernels import always, kernel

TILE_ROWS = 128  # query rows of a program on a GPU


@dataclass(frozen=True, slots=True)
class Segments:
    """Rows one after the other that see each other, and the tiles of queries that they make."""

    lens: tuple[int, ...]
    tiles: torch.Tensor  # int32 [tiles, 3]: first row, and its segment's first and end


def plan_segments(lens: tuple[int, ...], device: torch.device) -> Segments:
    """Segments of so many rows each; tiles of the longest come first, since they take longest."""
    ends = np.cumsum(lens)
    order = np.argsort(-np.array(lens), kind="stable")
    tiles = [
        (first, ends[i] - lens[i], ends[i])
        for i in order
        for first in range(ends[i] - lens[i], ends[i], TILE_ROWS)
    ]
    host = torch.tensor(tiles, dtype=torch.int32, pin_memory=device.type == "cuda")
    return Segments(lens, host.to(device, non_blocking=True))


@kernel(gpu=always)
def rotate_heads(qkv: torch.Tensor, cos_sin: torch.Tensor, num_heads: int, scale: float) -> None:
    """Rotate q (times `scale`) and k of qkv[t, 3 * heads * dim] in place.

    cos_sin[t, dim] has the cosines of a row's pairs, then their sines.
    """
    heads = qkv.unflatten(1, (3, num_heads, -1))[:, :2]
    cos, sin = cos_sin[:, None, None].chunk(2, dim=-1)
    a, b = heads.float().chunk(2, dim=-1)
    rotated = torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
    rotated[:, 0] *= scale
    heads.copy_(rotated)


@kernel(gpu=always)
def segment_attention(qkv: torch.Tensor, segments: Segments, num_heads: int) -> torch.Tensor:
    """Attention of pre-scaled q over k and v of its segment, [t, 3 * heads * dim] -> [t, .]."""
    parts = []
    for rows in qkv.split(segments.lens):
        q, k, v = rows.unflatten(1, (3, num_heads, -1)).permute(1, 2, 0, 3)[:, None]
        out = scaled_dot_product_attention(q, k, v, scale=1.0)[0]
        parts.append(out.transpose(0, 1).flatten(1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)
