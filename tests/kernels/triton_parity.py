"""Checks of the Triton kernels against their torch references, by name and for a device.

fp32 and fp8 throughout, since the interpreter's bf16 products are wrong; on a GPU tf32 is what
dots use.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from triton.runtime import interpreter

import tokenmill.kernels
from attention_batches import paged_attention_reference
from tokenmill.kernels import MODE, attention, blocks, drafts, pages, rows
from tokenmill.kernels import matmul as mm
from tokenmill.kernels.attention import AttentionBatch, QueryTiles, plan_tiles
from tokenmill.kernels.gpu import attention as gpu_attention
from tokenmill.kernels.gpu import blocks as gpu_blocks
from tokenmill.kernels.gpu import drafts as gpu_drafts
from tokenmill.kernels.gpu import matmul as gpu_matmul
from tokenmill.kernels.gpu import pages as gpu_pages
from tokenmill.kernels.gpu import rows as gpu_rows
from tokenmill.kernels.gpu import spread as gpu_spread
from tokenmill.kernels.rows import FP8, QuantizedRows
from tokenmill.layers.linear import Linear
from tokenmill.layers.residual import Residual

ACTIVATIONS: tuple[rows.Activation, ...] = ("silu", "gelu_tanh")
CLAMPED = rows.ClampedSwiGLU(1.5, 2.0)
BLOCKS = 64
DOT_TOLERANCE = {"cpu": 1e-4, "cuda": 2e-2}  # tf32 on a GPU
NARROW = {"fp8e4nv": torch.float8_e4m3fn, "bf16": torch.bfloat16}


def round_like_torch(convert: Any) -> Any:
    """The interpreter drops a carry when it rounds to fp8, and cuts bf16 off: let torch round."""

    def rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
        narrow = NARROW.get(target.name)
        if narrow is None or source.name != "fp32":
            return convert(data, source, target, mode)
        bits = torch.uint8 if narrow.itemsize == 1 else torch.uint16
        return torch.from_numpy(np.ascontiguousarray(data)).to(narrow).view(bits).numpy()

    return rounded


interpreter._convert_float = round_like_torch(interpreter._convert_float)


def _dot_by_channel(_: Any, a: Any, b: Any, total: Any, *precision: Any) -> Any:
    sums = total.data
    for channel in range(a.data.shape[1]):
        sums = sums + a.data[:, channel, None] * b.data[channel]
    return interpreter.TensorHandle(sums, total.dtype.scalar)


@contextmanager
def batch_invariant_mode() -> Iterator[None]:
    """In it the interpreter adds up products by channel: BLAS rounds by a row's place in a tile."""
    builder = interpreter.InterpreterBuilder
    dot, builder.create_dot = builder.create_dot, _dot_by_channel
    MODE.batch_invariant = True
    try:
        yield
    finally:
        builder.create_dot, MODE.batch_invariant = dot, False


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
    plans = plan_tiles(lens, heads[0] // heads[1], heads[1], on_gpu=True, full_tiles=True)
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
        expected = attention.place_tokens.reference(*arguments)
        for ours, theirs in zip(gpu_attention.place_tokens(*arguments), expected, strict=True):
            assert torch.equal(ours, theirs)


def check_drafts(device: str) -> None:
    for count, depth in ((1, 1), (3, 3), (70, 2)):

        def integers(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(0, high, shape, dtype=torch.int32, device=device)

        tables, rows = integers(BLOCKS, count + 2, 5), integers(count + 2, count)
        base, capacities = integers(70, count), integers(5, count) * 16
        for offset, width in ((0, depth + 1), (2, 1)):
            arguments = (base, rows, capacities, tables, offset, width, 16, 72, BLOCKS - 1)
            expected = drafts.place_drafts.reference(*arguments)
            for ours, theirs in zip(gpu_drafts.place_drafts(*arguments), expected, strict=True):
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        tokens, ids = integers(2, count, depth + 1), integers(2, count, depth + 1)
        counts = integers(depth + 1, count)
        expected = drafts.accept_drafts.reference(tokens, ids, counts, base)
        found = gpu_drafts.accept_drafts(tokens, ids, counts, base)
        for ours, theirs in zip(found, expected, strict=True):
            assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
        state = [(ids.clone(), base.clone(), counts.clone()) for _ in range(2)]
        guesses = integers(99, count, depth)
        advance = drafts.advance_drafts.reference, gpu_drafts.advance_drafts
        packed = [
            each(tokens, guesses, found[1], *own, capacities, 72)
            for each, own in zip(advance, state, strict=True)
        ]
        assert torch.equal(*packed)
        for ours, theirs in zip(*state, strict=True):
            assert torch.equal(ours, theirs)


def check_copy_blocks(device: str) -> None:
    """Whole blocks arrive and nothing else changes, with a wide word, a narrow one, and tiles."""
    for sizes, count in (((64, 48), 5), ((16400, 32), 3), ((33, 17), 4), ((64,), 0)):
        shapes = [(9, size) for size in sizes]
        sources, ours, theirs = (
            [torch.randint(0, 255, s, dtype=torch.uint8, device=device) for s in shapes]
            for _ in range(3)
        )
        for own, other in zip(ours, theirs, strict=True):
            own.copy_(other)
        pairs = torch.stack([torch.randperm(9)[:count] for _ in range(2)]).to(device)
        gpu_blocks.copy_blocks(blocks.block_regions(sources, ours), pairs)
        blocks.copy_blocks.reference(blocks.block_regions(sources, theirs), pairs)
        for own, other in zip(ours, theirs, strict=True):
            assert torch.equal(own, other)


def assert_same_rows(
    found: torch.Tensor | QuantizedRows, expected: torch.Tensor | QuantizedRows
) -> None:
    """Equal rows; a few fp8 values may round to the neighbour."""
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
        return
    values, scales = found
    torch.testing.assert_close(scales, expected.scales)
    torch.testing.assert_close(values.float(), expected.values.float(), atol=0.002, rtol=0.13)
    assert (values.float() != expected.values.float()).float().mean() < 0.01


def check_unpack(device: str) -> None:
    """Pages of an fp8 cache, some of them twice, in parts that end within a page and not."""
    for shape in ((9, 2, 16, 64), (9, 3, 8, 64), (9, 8, 64, 128)):
        k_cache, v_cache = torch.randn(2, *shape, device=device).to(torch.float8_e4m3fn)
        tables = torch.randint(0, 9, (4, 5), dtype=torch.int32, device=device)
        rows = torch.randint(0, 4, (7,), dtype=torch.int32, device=device)
        columns = torch.randint(0, 5, (7,), dtype=torch.int32, device=device)
        arguments = k_cache, v_cache, tables, rows, columns
        expected = pages.unpack.reference(*arguments)
        for ours, theirs in zip(gpu_pages.unpack(*arguments), expected, strict=True):
            assert ours.dtype == torch.bfloat16 and torch.equal(ours, theirs)


def check_rms_norm(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 576)):
        for rounding in (None, FP8):
            x, delta = torch.randn(2, m, k, device=device)
            weight, own = torch.rand(k, device=device), x.clone()
            expected = rows.rms_norm.reference(x, weight, 1e-5, rounding)
            assert_same_rows(gpu_rows.rms_norm(own, weight, 1e-5, rounding), expected)
            assert torch.equal(own, x)
            expected = rows.rms_norm.reference(x, weight, 1e-5, rounding, delta)
            assert_same_rows(gpu_rows.rms_norm(own, weight, 1e-5, rounding, delta), expected)
            assert torch.equal(own, x)


def check_norm_pair(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 576)):
        a, b = torch.randn(2, m, k, device=device)
        weights = torch.rand(2, k, device=device)
        halves = zip((a, b), weights, strict=True)
        expected = torch.cat([rows.rms_norm.reference(x, w, 1e-5) for x, w in halves], dim=1)
        found = gpu_rows.norm_pair(a, b, *weights, 1e-5)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def check_act_and_mul(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 1500), (2, 2500)):
        x = 3 * torch.randn(m, 2 * k, device=device)
        for rounding, activation in itertools.product((None, FP8), (*ACTIVATIONS, CLAMPED)):
            found = gpu_rows.act_and_mul(x, rounding, activation)
            assert_same_rows(found, rows.act_and_mul.reference(x, rounding, activation))


def check_quantize_rows(device: str) -> None:
    for m, k in ((1, 16), (5, 100), (3, 1500)):
        x = torch.randn(m, k + 4, device=device)[:, :k] * torch.logspace(-9, 9, m)[:, None].to(
            device
        )
        x[-1] = 0.0
        found = gpu_rows.quantize_rows(x, FP8)
        assert_same_rows(found, rows.quantize_rows.reference(x, FP8))
        assert torch.equal(found[0][-1].float(), torch.zeros(k, device=device))


def _product(
    m: int, n: int, k: int, dtype: str, device: str
) -> tuple[torch.Tensor | QuantizedRows, mm.PackedWeight, torch.Tensor, torch.Tensor]:
    """Rows, weight, bias and a residual of one product, fp32 or fp8."""
    x, start = torch.randn(m, k, device=device), torch.randn(m, n, device=device)
    dense, bias = torch.randn(n, k, device=device) / k**0.5, torch.randn(n, device=device)
    if dtype == "fp8":
        return rows.quantize_rows.reference(x, FP8), mm.pack(dense, "fp8", device), bias, start
    return x, mm.PackedWeight(dense, None, n, k, tiled=False), bias, start


def _check_product(product: Any, shapes: tuple, device: str) -> None:
    for m, n, k in shapes:
        for dtype in ("fp32", "fp8"):
            x, weight, bias, start = _product(m, n, k, dtype, device)
            expected = mm.matmul.reference(x, weight, bias)
            tolerance = DOT_TOLERANCE[device] if dtype == "fp32" else 1e-2
            close = {"atol": tolerance, "rtol": tolerance}
            torch.testing.assert_close(product(x, weight, bias), expected, **close)
            total, own = mm.matmul.reference(x, weight, None, start.clone()), start.clone()
            assert product(x, weight, None, own) is own
            torch.testing.assert_close(own, total, **close)


def check_matmul(device: str) -> None:
    _check_product(
        gpu_matmul.matmul_by_tiles, ((1, 48, 64), (150, 300, 200), (130, 128, 33)), device
    )


def check_batch_invariance(device: str) -> None:
    for dtype in ("fp32", "fp8"):
        x, weight, bias, _ = _product(300, 200, 320, dtype, device)
        together = gpu_matmul.matmul_by_tiles(x, weight, bias)
        starts = (0,) if device == "cpu" else (0, 7, 100)  # BLAS rounds by the place in the tile
        for own in (slice(i, i + size) for i in starts for size in (1, 3, 130)):
            part = QuantizedRows(*(t[own] for t in x)) if dtype == "fp8" else x[own]
            assert torch.equal(gpu_matmul.matmul_by_tiles(part, weight, bias), together[own])


def check_matmul_parts(device: str) -> None:
    """Ranks that have a half, a quarter or an eighth of k each add up to the bits of one."""
    for m, n, k in ((5, 40, 320), (70, 150, 1024)):
        x, weight, _, start = _product(m, n, k, "fp32", device)
        whole = gpu_matmul.matmul_parts(x, weight, mm.SUM_PARTS)
        expected = mm.matmul.reference(x, weight)
        close = {"atol": DOT_TOLERANCE[device], "rtol": DOT_TOLERANCE[device]}
        torch.testing.assert_close(whole, expected, **close)
        own = start.clone()
        assert gpu_matmul.matmul_parts(x, weight, mm.SUM_PARTS, own) is own
        assert torch.equal(own, whole + start)
        for ranks in (2, 4, 8):
            shares = zip(x.chunk(ranks, 1), weight.data.chunk(ranks, 1), strict=True)
            sums = [
                gpu_matmul.matmul_parts(
                    rows.contiguous(),
                    mm.PackedWeight(columns.contiguous(), None, n, k // ranks, tiled=False),
                    mm.SUM_PARTS // ranks,
                )
                for rows, columns in shares
            ]
            while len(sums) > 1:
                sums = [a + b for a, b in zip(sums[::2], sums[1::2], strict=True)]
            assert torch.equal(sums[0], whole)


def check_skinny_matmul(device: str) -> None:
    shapes = ((1, 8, 64), (2, 30, 576), (3, 7, 1100), (4, 16, 48))
    _check_product(gpu_matmul.skinny_matmul, shapes, device)
    for m, n, k in shapes:
        x, weight, bias, _ = _product(m, 2 * n, k, "fp32", device)
        gain = torch.rand(k, device=device)
        dense = rows.rms_norm.reference(x, gain, 1e-5)
        expected = mm.matmul.reference(dense, weight, bias)
        found = gpu_matmul.skinny_matmul(x, weight, bias, norm=(gain, 1e-5))
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        alone = gpu_matmul.skinny_matmul(x[:1], weight, bias, norm=(gain, 1e-5))
        assert torch.equal(alone, found[:1])  # whatever rows are beside it
        for activation in ACTIVATIONS:
            gated = rows.act_and_mul.reference(expected, None, activation)
            found = gpu_matmul.skinny_matmul(x, weight, bias, norm=(gain, 1e-5), gate=activation)
            torch.testing.assert_close(found, gated, atol=1e-4, rtol=1e-4)


def check_scale_product(device: str) -> None:
    for m, n in ((1, 16), (5, 1500)):
        raw, start = torch.randn(2, m, n, device=device)
        rows, columns, bias = (torch.rand(size, device=device) for size in (m, n, n))
        expected = raw * rows[:, None] * columns
        found = gpu_matmul.scale_product(raw.clone(), rows, columns, bias)
        torch.testing.assert_close(found, expected + bias)
        found = gpu_matmul.scale_product(raw.clone(), rows, columns, None, start.clone())
        torch.testing.assert_close(found, start + expected)


def _run_layers(dtype: str, x: torch.Tensor, attended: torch.Tensor) -> list[torch.Tensor]:
    """Everything of two decoder layers but attention, and the states after them."""
    torch.manual_seed(1)
    hidden, device = x.shape[1], x.device
    outputs, inner = (96, 160) if x.is_cuda else (40, 48)  # the interpreter takes long

    def linear(n: int, k: int) -> Linear:
        return Linear([torch.randn(n, k) / k**0.5], [torch.randn(n)], dtype, device)

    stream, results = Residual(x.clone(), 1e-5), []
    plain = (None, None, *torch.rand(2, hidden, dtype=x.dtype).to(device))
    gains = 1.0 + torch.rand(4, hidden, device=device)  # Gemma's: in fp32, and of what is added
    layers: tuple[tuple[rows.Activation, Any], ...] = (("silu", plain), ("gelu_tanh", gains))
    for activation, (post_norm, mlp_post_norm, before, mlp_norm) in layers:
        results.append(stream.project(before, linear(outputs, hidden)))
        stream.add(linear(hidden, hidden), attended, norm=post_norm)
        down = linear(hidden, inner)
        gated = stream.gate(mlp_norm, linear(2 * inner, hidden), down.rounding, activation)
        stream.add(down, gated, norm=mlp_post_norm)
    return [*results, stream.complete()]


def check_layers(device: str) -> None:
    """Whatever kernels the number of rows leads to give what the references give."""
    if device == "cpu":
        tokenmill.kernels.on_gpu = lambda x: True
    for dtype, count, invariant in itertools.product(("bf16", "fp8"), (1, 3, 9, 70), (False, True)):
        if device == "cpu" and (invariant if dtype == "bf16" else count == 70):
            continue  # the interpreter takes long
        x, attended = torch.randn(2, count, 32 if device == "cpu" else 64, device=device).bfloat16()
        MODE.fused = False
        expected = _run_layers(dtype, x, attended)
        MODE.fused, MODE.batch_invariant = True, invariant
        for ours, theirs in zip(_run_layers(dtype, x, attended), expected, strict=True):
            assert ours.dtype == theirs.dtype
            assert (ours - theirs).norm() / theirs.norm() < (0.01 if dtype == "bf16" else 0.04)
        MODE.batch_invariant = False


SHAPES = (
    (6, 2, 32, 16, 0, False),
    (4, 4, 16, 32, 0, True),
    (8, 2, 64, 16, 20, True),
    (4, 1, 256, 16, 20, True),
)


def _inputs(
    shape: tuple[int, int, int, int, int, bool], device: str, query_lens: tuple = (1, 1, 5, 40, 33)
) -> tuple:
    heads, kv_heads, dim, block_size, _, normed = shape
    contexts = [0, 37, 11, 50, 0][: len(query_lens)]
    batch = make_batch(list(query_lens), contexts, block_size, (heads, kv_heads), device)
    k_cache = torch.randn(BLOCKS, kv_heads, block_size, dim, device=device)
    v_cache = torch.randn(BLOCKS, kv_heads, block_size, dim, device=device)
    qkv = torch.randn(len(batch.positions), (heads + 2 * kv_heads) * dim, device=device)
    cos_sin = torch.randn(128, dim, device=device)
    weights = (torch.rand(dim, device=device), torch.rand(dim, device=device))
    return batch, k_cache, v_cache, qkv, cos_sin, weights if normed else None


# More heads than a tile has of them, with 128 and 64 channels, and none of them a multiple.
WIDE_SHAPES = ((20, 10, 128, 16, 0, False), (40, 20, 64, 16, 0, True), (20, 10, 128, 16, 0, True))
FEW = (1, 1, 5)  # tokens, since the interpreter takes long


def check_rope_and_cache(device: str) -> None:
    for shape in SHAPES:
        _check_rope(shape, torch.float32, device)
    for shape, dtype in itertools.product(WIDE_SHAPES, (torch.float32, torch.bfloat16)):
        _check_rope(shape, dtype, device)


def _check_rope(shape: tuple, dtype: torch.dtype, device: str) -> None:
    heads, _, dim = shape[:3]
    batch, k_cache, v_cache, qkv, cos_sin, norms = _inputs(shape, device, FEW)
    qkv, k_cache, v_cache = (x.to(dtype) for x in (qkv, k_cache, v_cache))
    k_expected, v_expected, own = k_cache.float(), v_cache.clone(), qkv.clone()
    by_channel = k_expected.mT.contiguous()  # the layout of a CPU
    expected = attention.rope_and_cache.reference(
        qkv.float(), by_channel if device == "cpu" else k_expected, v_expected, cos_sin, batch,
        heads, dim**-0.5, norms, 1e-6,
    )  # fmt: skip
    if device == "cpu":
        k_expected = by_channel.mT
    found = gpu_attention.rope_and_cache(
        own, k_cache, v_cache, cos_sin, batch, heads, dim**-0.5, norms, 1e-6
    )
    torch.testing.assert_close(found, expected.to(dtype))
    torch.testing.assert_close(k_cache, k_expected.to(dtype))
    assert torch.equal(own[:, heads * dim :], qkv[:, heads * dim :])
    assert torch.equal(v_cache, v_expected)


def check_spread_own_bits(device: str) -> None:
    """A program may have one tile of a token's heads or several: every bit is the same."""
    for shape in WIDE_SHAPES[:2]:
        heads, _, dim = shape[:3]
        batch, k_cache, v_cache, qkv, cos_sin, norms = _inputs(shape, device, FEW[:2])
        rest = (cos_sin, batch, heads, dim**-0.5, norms, 1e-6)
        found = []
        for programs in (len(qkv) * 7, len(qkv) * 3, 1):  # one tile, two and all of seven
            gpu_spread.PROGRAMS, usual = programs, gpu_spread.PROGRAMS
            own = [qkv.bfloat16(), *(c.to(torch.float8_e4m3fn) for c in (k_cache, v_cache))]
            gpu_attention.rope_and_cache(*own, *rest)
            gpu_spread.PROGRAMS = usual
            found.append(own)
        for ours, twos, alls in zip(*found, strict=True):
            assert torch.equal(ours.float(), twos.float())
            assert torch.equal(ours.float(), alls.float())


def check_spread_keys(device: str) -> None:
    for shape in (SHAPES[0], SHAPES[2], *WIDE_SHAPES):  # wide enough for an fp8 cache
        _check_spread_keys(shape, device)


def _check_spread_keys(shape: tuple[int, int, int, int, int, bool], device: str) -> None:
    """Into an fp8 cache: the twin's keys, and the products of q and k that rotation alone gives."""
    heads, _, dim = shape[:3]
    batch, k_cache, v_cache, qkv, cos_sin, norms = _inputs(shape, device, FEW)
    fp8_k, fp8_v = (cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache))
    rest = (cos_sin, batch, heads, dim**-0.5, norms, 1e-6)
    own, plain = qkv.clone(), qkv.clone()
    gpu_attention.rope_and_cache(own, fp8_k, fp8_v, *rest)
    gpu_attention.rope_and_cache(plain, k_cache, v_cache, *rest)
    block_size = v_cache.shape[2]
    places = batch.slots // block_size, slice(None), batch.slots % block_size
    matrix = attention.spread_matrix(dim).to(device)
    expected = k_cache[places] @ matrix
    torch.testing.assert_close(fp8_k[places].float(), expected, rtol=0.07, atol=0.01)
    assert torch.equal(fp8_v[places].float(), v_cache[places].to(fp8_v.dtype).float())
    rotated, spread = (x[:, : heads * dim].unflatten(1, (heads, dim)) for x in (plain, own))
    torch.testing.assert_close(spread, rotated @ matrix, rtol=2e-3, atol=2e-3)
    by_channel = torch.zeros_like(k_cache, dtype=torch.float8_e4m3fn)
    by_channel = by_channel if device != "cpu" else by_channel.mT.contiguous()
    twin = attention.rope_and_cache.reference(
        qkv, by_channel, fp8_v.clone(), cos_sin, batch, heads, dim**-0.5, norms, 1e-6
    )
    torch.testing.assert_close(twin.unflatten(1, (heads, dim)), spread, rtol=2e-3, atol=2e-3)
    stored = attention.by_token(by_channel)[places].float()
    torch.testing.assert_close(stored, expected, rtol=0.07, atol=0.01)


def check_paged_attention(device: str) -> None:
    for shape in SHAPES:
        _check_paged_attention(shape, device, None)
    usual, attention.FULL_TILES = attention.FULL_TILES, 99.0  # three heads have tiles of their own
    _check_paged_attention(SHAPES[0], device, None)
    attention.FULL_TILES = usual


def check_sinks(device: str) -> None:
    for shape in (SHAPES[0], SHAPES[2]):
        sinks = 3 * torch.randn(shape[0], device=device)
        _check_paged_attention(shape, device, sinks)
    gpu_attention.NARROW_WINDOW = 0  # keys of a window are split, too
    _check_paged_attention(SHAPES[2], device, sinks)
    gpu_attention.NARROW_WINDOW = 256


def _check_paged_attention(shape: tuple, device: str, sinks: torch.Tensor | None) -> None:
    tolerance = 1e-5 if device == "cpu" else 5e-3
    heads, _, dim, _, window, _ = shape
    batch, k_cache, v_cache, qkv, _, _ = _inputs(shape, device)
    q = qkv[:, : heads * dim] * dim**-0.5
    expected = paged_attention_reference(
        q.cpu(), k_cache.mT.cpu(), v_cache.cpu(), _cpu_batch(batch), heads, window,
        None if sinks is None else sinks.cpu(),
    )  # fmt: skip
    _forget(batch, window, v_cache)
    out = torch.empty_like(expected, device=device)
    gpu_attention.attend_paged(q, out, batch, k_cache, v_cache, heads, window, sinks)
    torch.testing.assert_close(out.cpu(), expected, atol=tolerance, rtol=tolerance)


def check_attention_own_bits(device: str) -> None:
    """A query of GPT-OSS's layers has the same bits in any chunk, beside any other sequences."""
    heads, kv_heads, dim, block_size, lens = 8, 2, 32, 16, [100, 45]
    shape = (BLOCKS, kv_heads, block_size, dim)
    k_cache, v_cache = torch.randn(2, *shape, device=device)
    tables = torch.randperm(BLOCKS)[:14].view(2, 7).int().to(device)
    queries = [torch.randn(n, heads * dim, device=device) * dim**-0.5 for n in lens]
    sinks = 3 * torch.randn(heads, device=device)
    everything = [(0, 0, 100), (1, 0, 45)]
    others = (
        [(0, 99, 1)], [(1, 44, 1), (0, 70, 1)], [(0, 37, 5)], [(1, 7, 38), (0, 3, 90)],
    )  # fmt: skip

    def attend(pieces: list[tuple[int, int, int]], window: int) -> list[torch.Tensor]:
        seqs, firsts, counts = (list(column) for column in zip(*pieces, strict=True))
        batch = make_batch(counts, firsts, block_size, (heads, kv_heads), device)
        rows = torch.tensor(seqs, dtype=torch.int32, device=device)
        batch = replace(batch, block_tables=tables, table_rows=rows)
        q = torch.cat([queries[seq][first : first + n] for seq, first, n in pieces])
        out = torch.empty_like(q)
        gpu_attention.attend_paged(q, out, batch, k_cache, v_cache, heads, window, sinks)
        return list(out.split(counts))

    with batch_invariant_mode():
        for window, narrow in ((0, 256), (20, 256), (20, 0)):
            gpu_attention.NARROW_WINDOW = narrow
            whole = attend(everything, window)
            for pieces in others:
                for (seq, first, n), found in zip(pieces, attend(pieces, window), strict=True):
                    assert torch.equal(found, whole[seq][first : first + n]), (window, seq, first)
    gpu_attention.NARROW_WINDOW = 256


def _forget(batch: AttentionBatch, window: int, v_cache: torch.Tensor) -> None:
    """Make blocks behind all windows of a sequence such that no kernel may read them."""
    rows, contexts = batch.table_rows.tolist(), batch.context_lens.tolist()
    for row, context in zip(rows, contexts, strict=True):
        behind = max(0, context - window + 1) // v_cache.shape[2] if window else 0
        v_cache[batch.block_tables[row, :behind].long()] = torch.nan


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
    "norm_pair": check_norm_pair,
    "act_and_mul": check_act_and_mul,
    "place_tokens": check_place_tokens,
    "drafts": check_drafts,
    "copy_blocks": check_copy_blocks,
    "unpack": check_unpack,
    "quantize_rows": check_quantize_rows,
    "matmul": check_matmul,
    "batch_invariance": check_batch_invariance,
    "matmul_parts": check_matmul_parts,
    "skinny_matmul": check_skinny_matmul,
    "scale_product": check_scale_product,
    "rope_and_cache": check_rope_and_cache,
    "spread_keys": check_spread_keys,
    "spread_own_bits": check_spread_own_bits,
    "paged_attention": check_paged_attention,
    "sinks": check_sinks,
    "attention_own_bits": check_attention_own_bits,
    "layers": check_layers,  # last: it changes how the modules dispatch
}
