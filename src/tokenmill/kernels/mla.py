"""Latent attention: one cached vector per token serves all heads as keys and as values.

The cache has two parts, laid out as keys and values are (kernels/attention.py): the rotated part of
the keys, [.., rope_dim], and the normed latent, [.., kv_rank]. Queries are taken into the latent
space before, and results out of it after, so that the cache is never unpacked: prefill and decode
are one kernel. The torch reference sums in float64.
"""

from __future__ import annotations

from functools import partial

import torch

from tokenmill.kernels import always, kernel
from tokenmill.kernels.attention import AttentionBatch, by_token, fits_cpu_tiles
from tokenmill.kernels.matmul import unpack
from tokenmill.kernels.moe import PackedExperts


@kernel(cpu=lambda weight: weight.tiled)
def per_head(x: torch.Tensor, weight: PackedExperts) -> torch.Tensor:
    """x[t, heads, k] times each head's W[n, k].T -> [t, heads, n], contiguous."""
    tokens, heads, _ = x.shape
    assert weight.data is not None
    if weight.tiled:
        return torch.stack([x[:, i] @ unpack(weight.expert(i)).T for i in range(heads)], dim=1)
    out = x.new_empty(tokens, heads, weight.n)
    torch.bmm(x.transpose(0, 1), weight.data.mT, out=out.transpose(0, 1))
    return out


def _is_fp32(q: torch.Tensor, latent_cache: torch.Tensor) -> bool:
    return q.dtype == latent_cache.dtype == torch.float32 and fits_cpu_tiles(latent_cache)


@kernel(gpu=always, cpu=_is_fp32)
def latent_cache(
    q: torch.Tensor,
    kv: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    norm: torch.Tensor,
    eps: float,
    cos_sin: torch.Tensor,
    batch: AttentionBatch,
    interleaved: bool,
) -> None:
    """Write the RMSNorm of kv's latent and its rotated key part; rotate q's last channels in place.

    q is [t, heads, nope + rope], kv [t, kv_rank + rope]. cos_sin is [positions, rope]: cosines in
    the first half, sines in the second. A rotation turns channels 2i and 2i + 1 if interleaved,
    else i and i + rope / 2; either way they stay where they are.
    """
    block_size, kv_rank = latent_cache.shape[2:]
    latent, key = kv.float().split([kv_rank, kv.shape[1] - kv_rank], dim=1)
    mean = latent.double().pow(2).mean(-1, keepdim=True).float()
    latent = latent * torch.rsqrt(mean + eps) * norm
    cos, sin = cos_sin[batch.positions].chunk(2, dim=-1)
    blocks, offsets = batch.slots // block_size, batch.slots % block_size
    latent_cache[blocks, 0, offsets] = latent.to(latent_cache.dtype)
    rotated = _rotate(key, cos, sin, interleaved)
    by_token(rope_cache)[blocks, 0, offsets] = rotated.to(rope_cache.dtype)
    part = q[..., q.shape[2] - key.shape[1] :]
    part.copy_(_rotate(part.float(), cos[:, None], sin[:, None], interleaved))


def _rotate(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    a, b = a * cos - b * sin, b * cos + a * sin
    return torch.stack([a, b], dim=-1).flatten(-2) if interleaved else torch.cat([a, b], dim=-1)


def latent_attention(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    """Causal attention of q_latent[t, heads, kv_rank] and the last channels of q[t, heads, .].

    Returns the weighted latents, [t, heads, kv_rank].
    """
    out = torch.empty_like(q_latent)
    attend = partial(attend_latent, rope_cache=rope_cache, latent_cache=latent_cache, scale=scale)
    batch.attend(attend, q_latent, q, out)
    return out


@kernel(gpu=always, cpu=_is_fp32)
def attend_latent(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    scale: float,
) -> None:
    """latent_attention() into `out`."""
    block_size, keys = latent_cache.shape[2], by_token(rope_cache)
    queries = torch.cat([q_latent, q[..., q.shape[2] - keys.shape[3] :]], dim=-1).double() * scale
    starts, table_rows = batch.query_starts.tolist(), batch.table_rows.tolist()
    for i, context in enumerate(batch.context_lens.tolist()):
        rows = slice(starts[i], starts[i + 1])
        length = context + starts[i + 1] - starts[i]
        blocks = batch.block_tables[table_rows[i], : -(-length // block_size)].long()
        latents, ropes = (
            c[blocks, 0].flatten(0, 1)[:length].double() for c in (latent_cache, keys)
        )
        scores = queries[rows].transpose(0, 1) @ torch.cat([latents, ropes], dim=1).T
        places = torch.arange(length, device=q.device)
        scores.masked_fill_(places[context:, None] < places, -torch.inf)
        out[rows] = (scores.softmax(-1) @ latents).transpose(0, 1).to(out.dtype)
