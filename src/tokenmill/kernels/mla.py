"""Latent attention: one cached vector per token serves all heads as keys and as values.

The cache has two parts, laid out as keys and values are (kernels/attention.py): the rotated part of
the keys, [.., rope_dim], and the normed latent, [.., kv_rank]. Queries are taken into the latent
space before, and results out of it after, so that the cache is never unpacked: prefill and decode
are one kernel. The torch reference sums in float64.
"""

from __future__ import annotations

from functools import partial

import torch

from tokenmill.kernels import (
    compiled,
    cpu_kernels,
    cpu_twin,
    gpu_twin,
    triton_kernels,
    use_triton,
)
from tokenmill.kernels.attention import AttentionBatch, by_token
from tokenmill.kernels.moe import PackedExperts


def per_head(x: torch.Tensor, weight: PackedExperts) -> torch.Tensor:
    """x[t, heads, k] times each head's W[n, k].T -> [t, heads, n], contiguous."""
    tokens, heads, _ = x.shape
    assert weight.data is not None
    if weight.tiled:
        padded = x.new_empty(tokens, heads, weight.n + -weight.n % 8)
        compiled("grouped").multiply_heads(x, weight.data, padded)
        return padded[..., : weight.n].contiguous()
    out = x.new_empty(tokens, heads, weight.n)
    torch.bmm(x.transpose(0, 1), weight.data.mT, out=out.transpose(0, 1))
    return out


def _compiled(q: torch.Tensor, latent_cache: torch.Tensor) -> bool:
    plain = q.dtype == latent_cache.dtype == torch.float32
    if q.is_cuda or not plain or not cpu_kernels():
        return False
    supports: bool = compiled("mla").supports(latent_cache.shape[3], latent_cache.shape[2])
    return supports


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
    write = latent_cache_reference
    if use_triton(q, "latent_cache"):
        write = gpu_twin(latent_cache_reference)
    elif _compiled(q, latent_cache):
        write = cpu_twin(latent_cache_reference)
    write(q, kv, rope_cache, latent_cache, norm, eps, cos_sin, batch, interleaved)


def latent_cache_reference(
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
    attend = partial(_latent_attention_into, (rope_cache, latent_cache), scale)
    batch.attend(attend, q_latent, q, out)
    return out


def _latent_attention_into(
    caches: tuple[torch.Tensor, torch.Tensor],
    scale: float,
    q_latent: torch.Tensor,
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
) -> None:
    if not (use_triton(q) or _compiled(q, caches[1])):
        out.copy_(latent_attention_reference(q_latent, q, *caches, batch, scale))
        return
    kernels = triton_kernels if q.is_cuda else compiled
    for tiles in batch.tiles:
        kernels("mla").latent_attention(q_latent, q, out, *caches, tiles, batch, scale)


def latent_attention_reference(
    q_latent: torch.Tensor,
    q: torch.Tensor,
    rope_cache: torch.Tensor,
    latent_cache: torch.Tensor,
    batch: AttentionBatch,
    scale: float,
) -> torch.Tensor:
    block_size, keys = latent_cache.shape[2], by_token(rope_cache)
    queries = torch.cat([q_latent, q[..., q.shape[2] - keys.shape[3] :]], dim=-1).double() * scale
    out = torch.empty_like(q_latent)
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
    return out
