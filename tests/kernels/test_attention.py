"""RoPE with KV write and paged attention: the compiled kernels against their torch references."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from attention_batches import NUM_BLOCKS, make_batch, paged_attention_reference
from tokenmill import kernels
from tokenmill.kernels import MODE, attention

SHAPES = [  # heads, kv_heads, dim, block_size, window
    (9, 3, 64, 16, 0),
    (4, 4, 32, 32, 0),
    (8, 2, 128, 16, 20),
    (6, 1, 16, 64, 100),
    (14, 2, 64, 16, 1),
]


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "block_size", "window"), SHAPES)
def test_matches_reference(
    heads: int, kv_heads: int, dim: int, block_size: int, window: int, kind: torch.dtype
) -> None:
    torch.manual_seed(0)
    batch = make_batch(
        [1, 1, 5, 70, 33, 200, 1], [0, 37, 11, 100, 0, 0, 200], block_size, heads // kv_heads
    )
    k_cache = torch.randn(NUM_BLOCKS, kv_heads, dim, block_size).to(kind)
    v_cache = torch.randn(NUM_BLOCKS, kv_heads, block_size, dim).to(kind)
    k_expected, v_expected = k_cache.clone(), v_cache.clone()
    qkv = torch.randn(len(batch.positions), (heads + 2 * kv_heads) * dim)
    cos_sin = torch.randn(512, dim)
    norms = (torch.rand(dim), torch.rand(dim)) if dim == 128 else None
    rest = (cos_sin, batch, heads, dim**-0.5, norms, 1e-6)
    assert attention.fits_cpu_tiles(v_cache)
    q = attention.rope_and_cache(qkv.clone(), k_cache, v_cache, *rest)
    q_expected = attention.rope_and_cache.reference(qkv, k_expected, v_expected, *rest)
    torch.testing.assert_close(q, q_expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(k_cache, k_expected, atol=1e-5, rtol=torch.finfo(kind).eps)
    assert torch.equal(v_cache, v_expected)
    found = attention.paged_attention(q, k_cache, v_cache, batch, heads, window)
    expected = paged_attention_reference(q_expected, k_expected, v_expected, batch, heads, window)
    bound = 1e-5 if kind == torch.float32 else 5e-3  # products of an fp16 cache are in integers
    torch.testing.assert_close(found, expected, atol=bound, rtol=bound)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 20])
def test_sinks(
    window: int, kind: torch.dtype, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink is one more key that every query sees, whose value is zero; written out here."""
    monkeypatch.setattr(MODE, "fused", fused)
    torch.manual_seed(4)
    heads, kv_heads, dim, lens, contexts = 6, 2, 32, [1, 70, 3], [90, 0, 11]
    batch = make_batch(lens, contexts, 16, heads // kv_heads)
    k_cache = torch.randn(NUM_BLOCKS, kv_heads, dim, 16).to(kind)
    v_cache = torch.randn(NUM_BLOCKS, kv_heads, 16, dim).to(kind)
    q, sinks = torch.randn(sum(lens), heads * dim), torch.linspace(-40.0, 9.0, heads)
    found = attention.paged_attention(q, k_cache, v_cache, batch, heads, window, sinks)
    without = attention.paged_attention(q, k_cache, v_cache, batch, heads, window)
    positions = [c + i for n, c in zip(lens, contexts, strict=True) for i in range(n)]
    seqs = [seq for seq, n in enumerate(lens) for _ in range(n)]
    rows = q.view(-1, heads, dim)
    weights = torch.empty(len(seqs), heads)  # what all other keys have of one
    for row, (seq, position) in enumerate(zip(seqs, positions, strict=True)):
        keys = range(max(0, position - window + 1) if window else 0, position + 1)
        places = [(int(batch.block_tables[seq, key // 16]), key % 16) for key in keys]
        for head in range(heads):
            of_head = [k_cache[block, head // 3, :, at].float() for block, at in places]
            total = (torch.stack(of_head) @ rows[row, head]).logsumexp(0)
            weights[row, head] = torch.sigmoid(total - sinks[head])
    expected = without.view(-1, heads, dim) * weights[..., None]
    bound = 1e-5 if kind == torch.float32 or not fused else 5e-3
    torch.testing.assert_close(found.view(-1, heads, dim), expected, atol=bound, rtol=bound)


def test_values_of_any_size_are_kept_in_fp16() -> None:
    """Scores of a hundred, and values from fp16's smallest to its largest, beside each other."""
    torch.manual_seed(2)
    batch = make_batch([1, 90], [77, 0], 16, 3)
    sizes = torch.logspace(-6, 4, 16)[:, None]
    k_cache = (10 * torch.randn(NUM_BLOCKS, 2, 32, 16)).half()
    v_cache = (torch.randn(NUM_BLOCKS, 2, 16, 32) * sizes).half()
    q = torch.randn(91, 6 * 32)
    found = attention.paged_attention(q, k_cache, v_cache, batch, 6)
    expected = paged_attention_reference(q, k_cache, v_cache, batch, 6)
    error = (found - expected).norm(dim=1) / expected.norm(dim=1)
    assert error.max() < 0.05 and error.mean() < 0.01


def test_what_fp16_cannot_hold_is_its_largest_number() -> None:
    batch = make_batch([2], [0], 16, 1)
    caches = torch.zeros(NUM_BLOCKS, 1, 16, 16).half(), torch.zeros(NUM_BLOCKS, 1, 16, 16).half()
    qkv = torch.tensor([[1e6], [-1e6]]).expand(2, 48).contiguous()
    no_rotation = torch.cat([torch.ones(64, 8), torch.zeros(64, 8)], 1)
    attention.rope_and_cache(qkv, *caches, no_rotation, batch, 1, 1.0)
    for cache in caches:
        assert cache.isfinite().all() and cache.max() == 65504 and cache.min() == -65504


def test_reference_is_causal_attention() -> None:
    """The reference itself against torch's own causal attention on contiguous keys."""
    torch.manual_seed(0)
    heads, dim, length = 4, 16, 50
    batch = make_batch([length], [0], 16, group=1)
    k_cache, v_cache = (
        torch.zeros(NUM_BLOCKS, heads, dim, 16),
        torch.zeros(NUM_BLOCKS, heads, 16, dim),
    )
    qkv = torch.randn(length, 3 * heads * dim)
    no_rotation = torch.cat([torch.ones(64, dim // 2), torch.zeros(64, dim // 2)], 1)
    q = attention.rope_and_cache.reference(
        qkv, k_cache, v_cache, no_rotation, batch, heads, dim**-0.5
    )
    found = paged_attention_reference(q, k_cache, v_cache, batch, heads)
    q, k, v = qkv.view(length, 3, heads, dim).permute(1, 2, 0, 3)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(found, expected.transpose(0, 1).flatten(1), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
@pytest.mark.parametrize("window", [0, 20])
def test_chunks_and_neighbours_do_not_change_a_bit(kind: torch.dtype, window: int) -> None:
    torch.manual_seed(1)
    heads, kv_heads, dim = 6, 2, 32
    k_cache = torch.randn(NUM_BLOCKS, kv_heads, dim, 16).to(kind)
    v_cache = torch.randn(NUM_BLOCKS, kv_heads, 16, dim).to(kind)
    q = torch.randn(150, heads * dim)
    whole = make_batch([150, 3], [0, 9], 16, heads // kv_heads)
    together = torch.cat([q, torch.randn(3, heads * dim)])
    sinks, paged_attention = torch.randn(heads), attention.paged_attention
    expected = paged_attention(together, k_cache, v_cache, whole, heads, window, sinks)[:150]
    done = 0
    for size in (1, 40, 64, 2, 43):
        part = make_batch([size], [done], 16, heads // kv_heads)
        tables = whole.block_tables[:1, : part.block_tables.shape[1]].contiguous()
        chunk = replace(part, block_tables=tables)
        rows = q[done : done + size]
        found = paged_attention(rows, k_cache, v_cache, chunk, heads, window, sinks)
        assert torch.equal(found, expected[done : done + size])
        done += size


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_later_keys_do_not_change_a_bit(kind: torch.dtype) -> None:
    torch.manual_seed(3)
    batch = make_batch([70], [0], 16, 2)
    k_cache = torch.randn(NUM_BLOCKS, 1, 32, 16).to(kind)
    v_cache = torch.randn(NUM_BLOCKS, 1, 16, 32).to(kind)
    q = torch.randn(70, 64)
    before = attention.paged_attention(q, k_cache, v_cache, batch, 2)
    block = int(batch.block_tables[0, 2])  # positions 32 to 47
    for size in (5000.0, 0.0):
        k_cache[block, :, :, 8:], v_cache[block, :, 8:] = size, -size
        after = attention.paged_attention(q, k_cache, v_cache, batch, 2)
        assert torch.equal(before[:40], after[:40]) and not torch.equal(before[40:], after[40:])


@pytest.mark.parametrize(
    ("lens", "context", "group", "full", "tokens"),
    [
        ([1024], 0, 5, True, 128),  # 23,040 keys are visited in place of 21,524
        ([1024], 0, 5, False, 25),
        ([300], 0, 5, True, 128),  # 3,420 in place of 1,950
        ([150], 0, 5, True, 25),  # 1,390 in place of 525
        ([640, 1024], 4000, 5, True, 128),  # long contexts: whose queries share a tile counts less
        ([30] * 9, 4000, 5, True, 25),
        ([560], 0, 6, True, 64),
        ([560], 0, 4, True, 32),
    ],
)
def test_long_prompts_have_full_tiles(
    lens: list[int], context: int, group: int, full: bool, tokens: int
) -> None:
    """Of fewer heads, where a kernel wants them and they do not visit many more keys."""
    contexts = np.full(len(lens), context)
    (plan,) = attention.plan_tiles(np.array(lens), group, 2, True, contexts, full)
    tiles = attention.QueryTiles.of(plan)
    assert tiles.tokens == tokens
    heads = attention.heads_of(tiles, group)
    assert group % heads == 0 and (not full or heads in (group, group & -group))
    pairs = zip(plan.seqs, plan.starts, strict=True)
    assert sum(min(tokens, lens[seq] - start) for seq, start in pairs) == sum(lens)


@pytest.mark.parametrize(
    ("block_size", "taken"), [(4, False), (8, True), (64, True), (192, False), (256, True)]
)
def test_blocks_that_hopper_takes(
    block_size: int, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tile of 128 keys is whole blocks or lies in one of them."""
    gpu = pytest.importorskip("tokenmill.kernels.gpu.attention")
    monkeypatch.setattr(kernels, "on_gpu", lambda x: True)
    monkeypatch.setattr(attention.hopper, "is_usable", lambda: True)
    plan = attention.plan_tiles(np.array([900]), 4, 8, True, np.array([0]))[0]
    q = torch.zeros(900, 32 * 128, dtype=torch.bfloat16)
    cache = torch.zeros(2, 8, block_size, 128, dtype=torch.bfloat16)
    tiles = attention.QueryTiles.of(plan, "cpu")
    batch = make_batch([900], [0], 16, 4)
    assert gpu.suits_hopper(q, cache, tiles, batch, 32, 0) is taken


def test_tiles_with_the_most_keys_start_first() -> None:
    """Of sequences that decode, and of prompts beside them."""
    lens, contexts = np.array([1, 1, 1, 200, 300]), np.array([50, 900, 70, 0, 400])
    singles, prompts = attention.plan_tiles(lens, 4, 8, True, contexts)
    assert singles.seqs.tolist() == [1, 2, 0] and not singles.starts.any()
    keys = prompts.starts + contexts[prompts.seqs]
    assert (np.diff(keys) <= 0).all() and set(prompts.seqs) == {3, 4}
