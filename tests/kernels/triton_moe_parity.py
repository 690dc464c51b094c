"""Experts and latent attention against their torch references, by name and for a device.

The limits are those of triton_parity.py.
"""

import itertools
from typing import Any

import torch
from triton_parity import BLOCKS, _cpu_batch, batch_invariant_mode, make_batch

from attention_batches import latent_attention_reference
from tokenmill import kernels
from tokenmill.kernels import MODE, mla, moe
from tokenmill.kernels import matmul as mm
from tokenmill.kernels.gpu import expert_tiles
from tokenmill.kernels.gpu import mla as gpu_mla
from tokenmill.kernels.gpu import moe as gpu_moe
from tokenmill.kernels.gpu import mxfp4 as gpu_mxfp4
from tokenmill.kernels.moe import PackedExperts, Routing
from tokenmill.kernels.rows import ClampedSwiGLU

TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # tf32 on a GPU


def check_route(device: str) -> None:
    for tokens, experts, routing, biased in (
        (1, 8, Routing(2), False),
        (6, 12, Routing(3, renormalise=False), False),
        (9, 256, Routing(8, True, True, 2.5, 8, 4), True),
        (5, 24, Routing(5, True, False, 1.5, 3, 2), True),
    ):
        logits = torch.randn(tokens, experts, device=device)
        bias = torch.randn(experts, device=device) * 0.3 if biased else None
        logit_bias = None if biased else torch.randn(experts, device=device)
        rest = (bias, routing, logit_bias)
        ids, weights = gpu_moe.route(logits, *rest)
        expected_ids, expected_weights = moe.route.reference(logits, *rest)
        assert ids.dtype == torch.int32 and torch.equal(ids, expected_ids)
        torch.testing.assert_close(weights, expected_weights)


def check_sort_by_expert(device: str) -> None:
    """Every row is in a tile of its expert once, and tiles do not mix experts."""
    for tokens, top_k, experts in ((1, 2, 8), (9, 3, 5), (60, 8, 256), (300, 2, 3), (400, 4, 6)):
        ids = torch.rand(tokens, experts).pow(2).topk(top_k, dim=1)[1].int().to(device)
        tiles = expert_tiles.sort_by_expert(ids, experts)
        used = int(tiles.num_used)
        assert 0 < used <= tiles.most
        seen, flat = [], ids.flatten().tolist()
        for tile in range(used):
            size, expert = int(tiles.sizes[tile]), int(tiles.experts[tile])
            start = tile * tiles.rows
            rows = tiles.sorted_rows[start : start + size].tolist()
            assert 0 < size <= tiles.rows and {flat[row] for row in rows} == {expert}
            seen += rows
        assert sorted(seen) == list(range(tokens * top_k))


def packed(experts: int, n: int, k: int, dtype: str, device: str) -> PackedExperts:
    stack = PackedExperts(experts)
    for expert in range(experts):
        dense = torch.randn(n, k, device=device) / k**0.5
        weight = mm.PackedWeight(dense, None, n, k, tiled=False)
        stack.put(expert, mm.pack(dense, "fp8", device) if dtype == "fp8" else weight)
    return stack


def check_experts(device: str) -> None:
    shapes = ((1, 2, 8, 64, 32), (27, 3, 4, 96, 40))
    for (tokens, top_k, experts, hidden, inner), dtype in itertools.product(
        shapes, ("fp32", "fp8")
    ):
        gate_up = packed(experts, 2 * inner, hidden, dtype, device)
        down = packed(experts, hidden, inner, dtype, device)
        kind = torch.bfloat16 if dtype == "fp8" else torch.float32
        x, start = torch.randn(2, tokens, hidden, device=device).to(kind)
        ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1)[1].int()
        weights = torch.rand(tokens, top_k, device=device)
        own, expected = start.clone(), start.clone()
        gpu_moe.add_choices(gpu_moe.apply_experts(x, ids, gate_up, down), weights, own)
        results = moe.apply_experts.reference(x, ids, gate_up, down)
        moe.add_choices.reference(results, weights, expected)
        if dtype == "fp8":
            rounded = expected.norm() * 2**-8  # both sums are rounded to bf16 once
            assert (own - expected).norm() < 0.02 * (expected - start).norm() + rounded
        else:
            limit = TOLERANCE[device]
            torch.testing.assert_close(own, expected, atol=limit, rtol=limit)


# heads, nope, rope, latent, block size, interleaved
SHAPES = ((4, 12, 16, 32, 16, True), (40, 8, 16, 16, 64, False))


def _latent_inputs(shape: tuple[int, int, int, int, int, bool], device: str) -> tuple[Any, ...]:
    heads, nope, rope, latent, block_size, _ = shape
    batch = make_batch([1, 1, 5, 40, 33], [0, 97, 11, 50, 0], block_size, (heads, 1), device)
    tokens = len(batch.positions)
    rope_cache = torch.randn(BLOCKS, 1, block_size, rope, device=device)
    latent_cache = torch.randn(BLOCKS, 1, block_size, latent, device=device)
    projected = torch.randn(tokens, heads * (nope + rope) + latent + rope, device=device)
    q = projected[:, : heads * (nope + rope)].unflatten(1, (heads, -1))
    return batch, rope_cache, latent_cache, q, projected[:, heads * (nope + rope) :]


def check_latent_cache(device: str) -> None:
    for shape in SHAPES:
        rope, latent, interleaved = shape[2], shape[3], shape[5]
        batch, rope_cache, latent_cache, q, kv = _latent_inputs(shape, device)
        norm, cos_sin = torch.rand(latent, device=device), torch.randn(128, rope, device=device)
        ropes, latents, turned = rope_cache.clone(), latent_cache.clone(), q.clone()
        as_stored = ropes.mT.contiguous() if device == "cpu" else ropes  # a CPU's keys by channel
        rest = (norm, 1e-6, cos_sin, batch, interleaved)
        mla.latent_cache.reference(turned, kv, as_stored, latents, *rest)
        gpu_mla.latent_cache(q, kv, rope_cache, latent_cache, *rest)
        torch.testing.assert_close(q, turned)
        torch.testing.assert_close(latent_cache, latents)
        torch.testing.assert_close(rope_cache, as_stored.mT if device == "cpu" else as_stored)


def check_latent_attention(device: str) -> None:
    tolerance = 1e-5 if device == "cpu" else 5e-3
    for shape, invariant in zip((*SHAPES, SHAPES[0]), (False, False, True), strict=True):
        MODE.batch_invariant = invariant
        batch, rope_cache, latent_cache, q, _ = _latent_inputs(shape, device)
        q_latent = torch.randn(*q.shape[:2], shape[3], device=device)
        expected = latent_attention_reference(
            q_latent.cpu(), q.cpu(), rope_cache.mT.cpu(), latent_cache.cpu(), _cpu_batch(batch),
            0.11,
        )  # fmt: skip
        out = torch.empty_like(expected, device=device)
        gpu_mla.attend_latent(q_latent, q, out, batch, rope_cache, latent_cache, 0.11)
        torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)
        MODE.batch_invariant = False


def _mxfp4(
    experts: int, n: int, k: int, scales: tuple[int, int], device: str
) -> tuple[PackedExperts, PackedExperts]:
    """Random codes with biases, as a checkpoint has them and as the kernels of a GPU read them."""
    codes = torch.randint(0, 256, (experts, n, k // 32, 16), dtype=torch.uint8, device=device)
    powers = torch.randint(*scales, (experts, n, k // 32), dtype=torch.uint8, device=device)
    bias = torch.randn(experts, n, device=device)
    parts = [gpu_mxfp4.pack_expert(*expert) for expert in zip(codes, powers, strict=True)]
    words, exponents = (torch.stack(part) for part in zip(*parts, strict=True))
    stored = PackedExperts(experts, codes, powers, n, k, bias=bias)
    return stored, PackedExperts(experts, words, exponents, n, k, bias=bias)


def check_mxfp4(device: str) -> None:
    """Few and many rows, all by one expert, experts without any, odd widths, and large scales."""
    for tokens, top_k, experts, hidden, inner, scales in (
        (1, 4, 8, 96, 32, (117, 123)),
        (40, 3, 4, 64, 96, (117, 123)),
        (30, 1, 3, 224, 192, (117, 123)),
        (2, 2, 4, 32, 64, (150, 154)),
        (3, 2, 5, 416, 64, (70, 75)),
    ):
        gate_up, down = (
            _mxfp4(experts, n, k, scales, device) for n, k in ((2 * inner, hidden), (hidden, inner))
        )
        factor = 2.0 ** (120 - scales[0])
        x = torch.randn(tokens, hidden, device=device) * factor * hidden**-0.5
        ids = torch.rand(tokens, experts, device=device).topk(top_k, dim=1)[1].int()
        if top_k == 1:
            ids.fill_(1)
        stored = (gate_up[0], down[0])
        expected = moe.apply_experts.reference(x, ids, *stored, ClampedSwiGLU())
        own = gpu_moe.apply_experts(x, ids, gate_up[1], down[1], ClampedSwiGLU())
        assert (own.dim() == 3) == (top_k > 1)  # in parts, to be added up with the choices
        limit, weights = TOLERANCE[device], torch.rand(tokens, top_k, device=device)
        found, total = torch.zeros(2, tokens, hidden, device=device)
        gpu_moe.add_choices(own, weights, found)
        moe.add_choices.reference(expected, weights, total)
        assert (found - total).norm() < limit * total.norm()


def check_biased_experts(device: str) -> None:
    """Plain weights with biases, gate and up in turns."""
    gate_up, down = packed(4, 80, 64, "fp32", device), packed(4, 64, 40, "fp32", device)
    gate_up.bias, down.bias = (torch.randn(4, w.n, device=device) for w in (gate_up, down))
    x = torch.randn(21, 64, device=device)
    ids = torch.rand(21, 4, device=device).topk(2, dim=1)[1].int()
    rest = (x, ids, gate_up, down, ClampedSwiGLU(1.5, 2.0))
    expected, limit = moe.apply_experts.reference(*rest), TOLERANCE[device]
    torch.testing.assert_close(gpu_moe.apply_experts(*rest), expected, atol=limit, rtol=limit)


def check_experts_own_bits(device: str) -> None:
    """A row's experts in MXFP4 give the same bits beside any other rows: router, sort, products."""
    tokens, experts, hidden, inner, routing = 40, 4, 96, 32, Routing(2)
    gate_up, down = (
        _mxfp4(experts, n, k, (117, 123), device)[1]
        for n, k in ((2 * inner, hidden), (hidden, inner))
    )
    dense = torch.randn(experts, hidden, device=device)
    router, bias = mm.PackedWeight(dense, None, experts, hidden, tiled=False), torch.randn(experts)
    x = torch.randn(tokens, hidden, device=device) * hidden**-0.5

    def add_experts(rows: slice) -> torch.Tensor:
        part = x[rows].clone()
        ids, weights = moe.route(moe.router_logits(part, router), None, routing, bias.to(device))
        results = moe.apply_experts(part, ids, gate_up, down, ClampedSwiGLU())
        moe.add_choices(results, weights, part)
        return part

    by_triton, few, split = kernels.on_gpu, expert_tiles.FEW_ROWS, gpu_mxfp4.SPLIT_TILES
    kernels.on_gpu = lambda x: True
    gpu_mxfp4.SPLIT_TILES = 6  # few rows would share their channels, many would not
    with batch_invariant_mode():
        together = add_experts(slice(None))
        for rows in (slice(1), slice(7, 12), slice(20, 40)):
            assert torch.equal(add_experts(rows), together[rows]), rows
        expert_tiles.FEW_ROWS = 0  # the sort of many rows
        assert torch.equal(add_experts(slice(None)), together)
    assert not torch.equal(add_experts(slice(1)), together[:1])
    kernels.on_gpu, expert_tiles.FEW_ROWS, gpu_mxfp4.SPLIT_TILES = by_triton, few, split


CHECKS = {
    "route": check_route,
    "sort_by_expert": check_sort_by_expert,
    "experts": check_experts,
    "mxfp4": check_mxfp4,
    "biased_experts": check_biased_experts,
    "experts_own_bits": check_experts_own_bits,
    "latent_cache": check_latent_cache,
    "latent_attention": check_latent_attention,
}
