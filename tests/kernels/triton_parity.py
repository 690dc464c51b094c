"""Compare one Triton kernel with its torch reference: `triton_parity.py KERNEL [cpu|cuda]`.

fp32 throughout, since the interpreter's bf16 products are wrong; on a GPU tf32 is what dots use.
"""

import sys

import numpy as np
import torch

from tokenmill.kernels import attention, norm
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import attention as gpu_attention
from tokenmill.kernels.gpu import rows as gpu_rows

BLOCKS = 64


def make_batch(
    query_lens: list[int], contexts: list[int], block_size: int, heads: tuple[int, int], device: str
) -> AttentionBatch:
    lens, starts = np.array(query_lens), np.concatenate([[0], np.cumsum(query_lens)])
    width = max(-(-(c + q) // block_size) for c, q in zip(contexts, query_lens, strict=True))
    tables = torch.randperm(BLOCKS)[: len(lens) * width].view(-1, width).int().contiguous()
    owners = torch.from_numpy(np.repeat(np.arange(len(lens)), lens))
    pieces = [torch.arange(c, c + q) for c, q in zip(contexts, query_lens, strict=True)]
    positions = torch.cat(pieces)
    slots = tables[owners, positions // block_size].long() * block_size + positions % block_size
    table_rows = torch.randperm(len(lens))
    tables[table_rows] = tables.clone()
    plans = plan_tiles(lens, heads[0] // heads[1], heads[1], on_gpu=True)
    return AttentionBatch(
        positions.int().to(device),
        slots.int().to(device),
        torch.from_numpy(starts.astype(np.int32)).to(device),
        torch.tensor(contexts, dtype=torch.int32, device=device),
        tables.to(device),
        table_rows.int().to(device),
        tuple(QueryTiles.of(plan, device) for plan in plans),
    )


def check_place_tokens(device: str) -> None:
    tables = torch.randint(0, BLOCKS, (7, 9), dtype=torch.int32, device=device)
    for count in (1, 300):
        staged = torch.randint(-7, 1000, (count,), dtype=torch.int32, device=device)
        positions = torch.randint(0, 9 * 16, (count,), dtype=torch.int32, device=device)
        rows = torch.randint(0, 7, (count,), dtype=torch.int32, device=device)
        last = torch.randint(0, 1000, (7,), dtype=torch.int32, device=device)
        arguments = (staged, positions, rows, tables, last, 16)
        expected = attention.place_tokens_reference(*arguments)
        for ours, theirs in zip(gpu_attention.place_tokens(*arguments), expected, strict=True):
            assert torch.equal(ours, theirs)


def check_rms_norm(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 576)):
        x, weight = torch.randn(m, k, device=device), torch.rand(k, device=device)
        expected = norm.rms_norm_reference(x, weight, 1e-5)
        torch.testing.assert_close(gpu_rows.rms_norm(x, weight, 1e-5), expected)


def check_silu_mul(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 1500)):
        x = 3 * torch.randn(m, 2 * k, device=device)
        torch.testing.assert_close(gpu_rows.silu_mul(x), norm.silu_mul_reference(x))


SHAPES = ((6, 2, 32, 16, 0, False), (4, 4, 16, 32, 0, True), (8, 2, 64, 16, 20, True))


def _inputs(shape: tuple[int, int, int, int, int, bool], device: str) -> tuple:
    heads, kv_heads, dim, block_size, _, normed = shape
    batch = make_batch([1, 1, 5, 40, 33], [0, 37, 11, 50, 0], block_size, (heads, kv_heads), device)
    k_cache = torch.randn(BLOCKS, kv_heads, block_size, dim, device=device)
    v_cache = torch.randn(BLOCKS, kv_heads, block_size, dim, device=device)
    qkv = torch.randn(len(batch.positions), (heads + 2 * kv_heads) * dim, device=device)
    cos_sin = torch.randn(128, dim, device=device)
    weights = (torch.rand(dim, device=device), torch.rand(dim, device=device))
    return batch, k_cache, v_cache, qkv, cos_sin, weights if normed else None


def check_rope_and_cache(device: str) -> None:
    for shape in SHAPES:
        heads, _, dim = shape[:3]
        batch, k_cache, v_cache, qkv, cos_sin, norms = _inputs(shape, device)
        k_expected, v_expected, own = k_cache.clone(), v_cache.clone(), qkv.clone()
        by_channel = k_expected.mT.contiguous()  # the layout of a CPU
        expected = attention.rope_and_cache_reference(
            qkv, by_channel if device == "cpu" else k_expected, v_expected, cos_sin, batch, heads,
            dim**-0.5, norms, 1e-6,
        )  # fmt: skip
        if device == "cpu":
            k_expected = by_channel.mT
        gpu_attention.rope_and_cache(
            own,
            k_cache,
            v_cache,
            cos_sin,
            batch.positions,
            batch.slots,
            heads,
            dim**-0.5,
            norms,
            1e-6,
        )
        torch.testing.assert_close(own[:, : heads * dim], expected)
        torch.testing.assert_close(k_cache, k_expected)
        assert torch.equal(v_cache, v_expected)


def check_paged_attention(device: str) -> None:
    tolerance = 1e-5 if device == "cpu" else 5e-3
    for shape in SHAPES:
        heads, _, dim, _, window, _ = shape
        batch, k_cache, v_cache, qkv, _, _ = _inputs(shape, device)
        q = qkv[:, : heads * dim] * dim**-0.5
        expected = attention.paged_attention_reference(
            q.cpu(), k_cache.mT.cpu(), v_cache.cpu(), _cpu_batch(batch), heads, window
        )
        out = torch.empty_like(expected, device=device)
        for tiles in batch.tiles:
            gpu_attention.paged_attention(q, out, k_cache, v_cache, tiles, batch, heads, window)
        torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)


def _cpu_batch(batch: AttentionBatch) -> AttentionBatch:
    return AttentionBatch(
        batch.positions.cpu(),
        batch.slots.cpu(),
        batch.query_starts.cpu(),
        batch.context_lens.cpu(),
        batch.block_tables.cpu(),
        batch.table_rows.cpu(),
        (),
    )


CHECKS = {
    "rms_norm": check_rms_norm,
    "silu_mul": check_silu_mul,
    "place_tokens": check_place_tokens,
    "rope_and_cache": check_rope_and_cache,
    "paged_attention": check_paged_attention,
}

if __name__ == "__main__":
    torch.manual_seed(0)
    name, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cpu"
    CHECKS[name](device)
    print(f"{name}: ok on {device}")
