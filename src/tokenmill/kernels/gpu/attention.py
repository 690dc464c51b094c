"""Paged attention for prefill and decode alike, and RoPE with the KV write in front of it.

A program takes one tile of a sequence's query tokens and one KV head; its rows are the tokens times
the query heads that share the KV head, so that every key is read once for all of them. A tile of a
prompt has as many of these heads as divide its rows, and other tiles have the rest. Where few
sequences do not fill the chip, the keys of a tile are split over several programs, and a second
kernel joins their partial sums.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels import MODE, triton_kernels
from tokenmill.kernels.attention import GPU_TILE_ROWS, heads_of, spread_width
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.dependent import enabled, launch_options, wait
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.pages import unpack_pages

if TYPE_CHECKING:
    from tokenmill.kernels.attention import AttentionBatch, QueryTiles

LOG2E = tl.constexpr(1.4426950408889634)
ROPE_CHANNELS = 1024  # of the heads that a program rotates at a time: 16 rows of a tensor core
ROPE_PROGRAMS = 8192  # that fill a large GPU more than twice; beyond, each takes more heads
NARROW_WINDOW = 256  # keys
HOPPER_DIMS = (64, 128)  # of the heads that kernels/gpu/hopper/prefill.py takes
HOPPER_KEYS, HOPPER_LEAST_BLOCK = 128, 8  # a tile's; rows that shared memory interleaves
HOPPER_ITEMS = 32  # tiles of all heads, at least; fewer leave most of a GPU idle either way


# Arguments that change from step to step are not specialised: each new kind would be compiled.
@quick
@triton.jit(do_not_specialize=["count", "stride"])
def _place_kernel(
    staged, positions, token_rows, tables, stride, last_tokens, ids, slots, count, block_size,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    token = tl.load(staged + index, mask=inside, other=0)
    known = tl.load(last_tokens + tl.where(token < 0, -1 - token, 0), mask=inside, other=0)
    tl.store(ids + index, tl.where(token < 0, known, token), mask=inside)
    position = tl.load(positions + index, mask=inside, other=0)
    row = tl.load(token_rows + index, mask=inside, other=0).to(tl.int64)
    block = tl.load(tables + row * stride + position // block_size, mask=inside, other=0)
    tl.store(slots + index, block * block_size + position % block_size, mask=inside)


@quick
@triton.jit(do_not_specialize=["q_parts", "kv_parts"])
def _rope_kernel(
    qkv, k_cache, v_cache, cos_sin, positions, slots, q_norm, k_norm, stride, heads, kv_heads,
    q_parts, kv_parts, scale, eps,
    HAS_NORM: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, HEADS: tl.constexpr,
    SPREAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has queries, keys or values of a token, HEADS heads at a time.

    `q_parts` programs share the queries, `kv_parts` the keys, and as many the values.
    """
    token, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    slot = tl.load(slots + token)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * DIM
    line = (slot // BLOCK).to(tl.int64) * kv_heads * (BLOCK * DIM) + slot % BLOCK * DIM
    q = qkv + token * stride
    k, v = q + heads * DIM, q + (heads + kv_heads) * DIM
    if part < q_parts:
        _rotate_heads(
            q, q, DIM, part, q_parts, heads, table, q_norm, scale, eps,
            HAS_NORM, DIM // 2, HEADS, SPREAD, EARLY,
        )  # fmt: skip
    elif part < q_parts + kv_parts:
        _rotate_heads(
            k, k_cache + line, BLOCK * DIM, part - q_parts, kv_parts, kv_heads, table, k_norm, 1.0,
            eps, HAS_NORM, DIM // 2, HEADS, SPREAD, EARLY,
        )  # fmt: skip
    else:
        _copy_heads(
            v, v_cache + line, BLOCK * DIM, part - q_parts - kv_parts, kv_parts, kv_heads,
            DIM // 2, HEADS, EARLY,
        )  # fmt: skip


@triton.jit
def _rotate_heads(
    x, out, out_stride, part, parts, heads, table, norm, scale, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, SPREAD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Norm, rotation and spread of every `parts`-th HEADS heads of x[heads, 2 * HALF] into out."""
    channels = _channels(HALF)
    cos, sin = tl.load(table + channels), tl.load(table + HALF + channels)
    if HAS_NORM:
        a_gain, b_gain = tl.load(norm + channels), tl.load(norm + HALF + channels)
    wait(EARLY)
    # Heads are on their way while what all of them share is computed, and then while the heads
    # before them are rotated.
    next_a, next_b = _load_heads(x, part * HEADS, heads, HALF, HEADS)
    if SPREAD:
        scale *= (2 * SPREAD) ** -0.5
        signs = _hadamard(SPREAD)
    cos, sin = cos * scale, sin * scale
    a_cos, a_sin, b_cos, b_sin = cos, sin, cos, sin
    if HAS_NORM:
        a_gain, b_gain = a_gain.to(tl.float32), b_gain.to(tl.float32)
        a_cos, a_sin, b_cos, b_sin = cos * a_gain, sin * a_gain, cos * b_gain, sin * b_gain
    if SPREAD:  # the two channels of a rotation become their sum and difference
        a_cos, a_sin, b_cos, b_sin = a_cos + a_sin, a_cos - a_sin, b_cos + b_sin, b_cos - b_sin
    # More stages would take the heads through shared memory.
    for first in tl.range(part * HEADS, heads, parts * HEADS, num_stages=1):
        a, b = next_a.to(tl.float32), next_b.to(tl.float32)
        next_a, next_b = _load_heads(x, first + parts * HEADS, heads, HALF, HEADS)
        if HAS_NORM:
            total = tl.sum(tl.sum(a * a + b * b, axis=2), axis=1)
            inverse = tl.rsqrt(total / (2 * HALF) + eps)[:, None, None]
            a, b = a * inverse, b * inverse
        if SPREAD:
            low = _spread(a * a_cos + b * b_sin, signs, HEADS, HALF, SPREAD)
            high = _spread(a * a_sin - b * b_cos, signs, HEADS, HALF, SPREAD)
        else:
            low, high = a * a_cos - b * b_sin, b * b_cos + a * a_sin
        _store_heads(out, out_stride, first, heads, low, high, HALF, HEADS)


@triton.jit
def _copy_heads(
    x, out, out_stride, part, parts, heads,
    HALF: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Every `parts`-th HEADS heads of x[heads, 2 * HALF] as they are."""
    wait(EARLY)
    for first in range(part * HEADS, heads, parts * HEADS):
        a, b = _load_heads(x, first, heads, HALF, HEADS)
        _store_heads(out, out_stride, first, heads, a.to(tl.float32), b.to(tl.float32), HALF, HEADS)


@triton.jit
def _channels(HALF: tl.constexpr):
    """Channels [1, HALF / 8, 8] of half a head.

    The last dimension gives a thread eight neighbours, also where more would fit into a store.
    """
    return (tl.arange(0, HALF // 8)[:, None] * 8 + tl.arange(0, 8)[None, :])[None]


@triton.jit
def _load_heads(x, first, heads, HALF: tl.constexpr, HEADS: tl.constexpr):
    """Both halves of x[first : first + HEADS], [HEADS, HALF / 8, 8] each; zeros from `heads` on."""
    head = tl.arange(0, HEADS)[:, None, None]
    inside = head < heads - first
    places = x + first * (2 * HALF) + head * (2 * HALF) + _channels(HALF)
    return tl.load(places, mask=inside, other=0.0), tl.load(places + HALF, mask=inside, other=0.0)


@triton.jit
def _store_heads(out, stride, first, heads, low, high, HALF: tl.constexpr, HEADS: tl.constexpr):
    head = tl.arange(0, HEADS)[:, None, None]
    inside = head < heads - first
    places = out + first * stride + head * stride + _channels(HALF)
    tl.store(places, low.to(out.dtype.element_ty), mask=inside)
    tl.store(places + HALF, high.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _hadamard(WIDTH: tl.constexpr):
    """fp16 [WIDTH, WIDTH], up to 32: negative where row and column share an odd number of bits."""
    shared = tl.arange(0, WIDTH)[:, None] & tl.arange(0, WIDTH)[None, :]
    ODD: tl.constexpr = -0x6996966A  # of its bits those whose number has an odd number of ones
    return tl.where((ODD >> shared) & 1 == 1, -1.0, 1.0).to(tl.float16)


@triton.jit
def _spread(x, signs, HEADS: tl.constexpr, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Each WIDTH channels of x[HEADS, HALF / 8, 8] times the signs.

    In a row of a tensor core a thread has two of every eight elements, and here eight neighbours.
    So the elements of a row change places: the bits of their numbers do, and a Hadamard matrix
    whose rows and columns change places alike is the same. Thus no value leaves its thread.
    """
    ROWS: tl.constexpr = HEADS * HALF // WIDTH
    rows = tl.reshape(x.to(tl.float16), [ROWS, 4, WIDTH // 8, 2])
    rows = tl.reshape(tl.permute(rows, [0, 2, 1, 3]), [ROWS, WIDTH])
    rows = tl.reshape(tl.dot(rows, signs), [ROWS, WIDTH // 8, 4, 2])
    return tl.reshape(tl.permute(rows, [0, 2, 1, 3]), [HEADS, HALF // 8, 8])


@triton.jit
def _place(
    table, span, low, end, head, kv_heads,
    DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Where the keys of a turn lie: offsets [KEYS, DIM], or the row of the first one."""
    if TMA:  # a block holds whole tiles
        block = tl.load(table + span // BLOCK)
        return (block * kv_heads + head) * BLOCK + span % BLOCK
    else:
        return _lines(table, span, low, end, head, kv_heads, DIM, KEYS, BLOCK)


@triton.jit
def _load_tile(cache, place, TMA: tl.constexpr):
    if TMA:
        return cache.load([place, 0])
    else:
        return tl.load(cache + place)


@triton.jit
def _lines(
    table, span, low, end, head, kv_heads,
    DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Offsets [KEYS, DIM] of the keys from `span` on; one block holds all of them, or several.

    Keys before `low`, whose blocks may be gone, and from `end` on may be any others: they are
    masked.
    """
    keys, channels = tl.arange(0, KEYS), tl.arange(0, DIM)
    if BLOCK >= KEYS:
        block = tl.load(table + span // BLOCK).to(tl.int64)
        page = ((block * kv_heads + head) * BLOCK + span % BLOCK) * DIM
        return page + keys[:, None] * DIM + channels[None, :]
    else:
        place = tl.maximum(tl.minimum(span + keys, end - 1), low)
        blocks = tl.load(table + place // BLOCK).to(tl.int64)
        page = ((blocks * kv_heads + head) * BLOCK + place % BLOCK) * DIM
        return page[:, None] + channels[None, :]


@triton.jit
def _attend(
    queries, peak, total, acc, k_cache, v_cache, table, head, kv_heads, low, begin, end,
    position, window,
    MASKED: tl.constexpr, DIM: tl.constexpr, KEYS: tl.constexpr, BLOCK: tl.constexpr,
    STRIDE: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Online softmax over KEYS keys at every STRIDE in [begin, end); MASKED: some are not seen."""
    for span in tl.range(begin, end, STRIDE, num_stages=STAGES):
        place = _place(table, span, low, end, head, kv_heads, DIM, KEYS, BLOCK, TMA)
        keys = _load_tile(k_cache, place, TMA).to(queries.dtype)
        scores = tl.dot(queries, tl.trans(keys)) * LOG2E
        if MASKED:
            key = span + tl.arange(0, KEYS)
            seen = key[None, :] <= position[:, None]
            if window > 0:
                seen = seen & (key[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, -1e30)
        top = tl.maximum(peak, tl.max(scores, axis=1))
        weights = tl.exp2(scores - top[:, None])
        shrink = tl.exp2(peak - top)
        total = total * shrink + tl.sum(weights, axis=1)
        values = _load_tile(v_cache, place, TMA).to(queries.dtype)
        acc = tl.dot(weights.to(values.dtype), values, acc * shrink[:, None])
        peak = top
    return peak, total, acc


@quick
@triton.jit(do_not_specialize=["num_tokens", "table_stride", "tile_tokens"])
def _attention_kernel(
    q, k_cache, v_cache, sinks, out, partial, stats, tile_seqs, tile_starts, query_starts,
    context_lens, table_rows, tables, table_stride, q_stride, out_stride, num_tokens, kv_heads,
    window, tile_tokens,
    GROUP: tl.constexpr, SHARE: tl.constexpr, DIM: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, SINKS: tl.constexpr,
    HALF_PRECISION: tl.constexpr, INVARIANT: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    head, tile, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    seq = tl.load(tile_seqs + tile)
    first = tl.load(tile_starts + tile)
    start = tl.load(query_starts + seq)
    length = tl.load(query_starts + seq + 1) - start
    context = tl.load(context_lens + seq)
    table = tables + tl.load(table_rows + seq).to(tl.int64) * table_stride
    rows, channels = tl.arange(0, ROWS), tl.arange(0, DIM)
    token = first + rows // GROUP
    valid = (rows < tile_tokens * GROUP) & (token < length)
    columns = (head * GROUP + rows % GROUP) * DIM
    row = (start + token).to(tl.int64)
    peak = tl.full([ROWS], -1e30, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SINKS:  # a key without a value, which the first of several programs counts
        scores = tl.load(sinks + head * GROUP + rows % GROUP).to(tl.float32) * LOG2E
        peak, total = tl.where(split == 0, scores, peak), tl.where(split == 0, 1.0, total)
    wait(EARLY)
    queries = tl.load(
        q + row[:, None] * q_stride + columns[:, None] + channels[None, :],
        mask=valid[:, None],
        other=0.0,
    )
    if HALF_PRECISION:  # an fp8 cache converts to fp16 in one instruction, to bf16 in several
        queries = queries.to(tl.float16)
    position = context + token
    end = context + tl.minimum(first + tile_tokens, length)
    low = 0
    if window > 0:
        low = tl.maximum(0, context + first - window + 1)
    begin = low // KEYS * KEYS
    # Which program takes a key depends on its place alone: then a row's bits are the same whatever
    # other queries its sequence has in the step.
    STRIDE: tl.constexpr = SPLITS * KEYS
    begin += (split - begin // KEYS % SPLITS + SPLITS) % SPLITS * KEYS
    clear = (context + first + 1) // KEYS * KEYS  # keys before it are seen by every row
    if window > 0:
        clear = begin
    clear = begin + tl.cdiv(tl.maximum(clear - begin, 0), STRIDE) * STRIDE
    acc = tl.zeros([ROWS, DIM], tl.float32)
    if INVARIANT:  # the two loops round differently, and where they meet depends on the tile
        clear = begin
    else:
        peak, total, acc = _attend(
            queries, peak, total, acc, k_cache, v_cache, table, head // SHARE, kv_heads, low, begin,
            clear, position, window, False, DIM, KEYS, BLOCK, STRIDE, TMA, STAGES,
        )  # fmt: skip
    peak, total, acc = _attend(
        queries, peak, total, acc, k_cache, v_cache, table, head // SHARE, kv_heads, low, clear,
        end, position, window, True, DIM, KEYS, BLOCK, STRIDE, TMA, STAGES,
    )  # fmt: skip
    if SPLITS > 1:
        line = (split * num_tokens + row) * (kv_heads * SHARE * GROUP) + head * GROUP + rows % GROUP
        tl.store(partial + line[:, None] * DIM + channels[None, :], acc, mask=valid[:, None])
        tl.store(stats + 2 * line, peak, mask=valid)
        tl.store(stats + 2 * line + 1, total, mask=valid)
    else:
        tl.store(
            out + row[:, None] * out_stride + columns[:, None] + channels[None, :],
            (acc / total[:, None]).to(out.dtype.element_ty),
            mask=valid[:, None],
        )


@quick
@triton.jit(do_not_specialize=["num_tokens", "first"])
def _join_kernel(
    partial, stats, out, out_stride, num_tokens, heads, first,
    DIM: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    wait(EARLY)
    token, head = first + tl.program_id(0).to(tl.int64), tl.program_id(1)
    splits, channels = tl.arange(0, SPLITS), tl.arange(0, DIM)
    line = (splits * num_tokens + token) * heads + head
    peaks, totals = tl.load(stats + 2 * line), tl.load(stats + 2 * line + 1)
    weights = tl.exp2(peaks - tl.max(peaks, axis=0))
    parts = tl.load(partial + line[:, None] * DIM + channels[None, :])
    joined = tl.sum(parts * weights[:, None], axis=0) / tl.sum(totals * weights, axis=0)
    tl.store(out + token * out_stride + head * DIM + channels, joined.to(out.dtype.element_ty))


def place_tokens(
    staged: torch.Tensor,
    positions: torch.Tensor,
    token_rows: torch.Tensor,
    tables: torch.Tensor,
    last_tokens: torch.Tensor,
    block_size: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids and cache slots, int32 [tokens] each."""
    ids, slots = torch.empty_like(staged), torch.empty_like(staged)
    count = staged.shape[0]
    assert staged.dtype == positions.dtype == tables.dtype == last_tokens.dtype == torch.int32
    _place_kernel[(cdiv(count, 256),)](
        staged, positions, token_rows, tables, tables.stride(0), last_tokens, ids, slots, count,
        block_size, BLOCK=256,
    )  # fmt: skip
    return ids, slots


def rope_and_cache(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None,
    eps: float,
) -> None:
    """Rotate q (times `scale`) of qkv[t, .] in place; rotate k and write k, v into their slots.

    With an fp8 cache q and k are also spread over channels.
    """
    _, kv_heads, block_size, dim = v_cache.shape
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    q_norm, k_norm = norms if norms is not None else (cos_sin, cos_sin)
    heads = max(1, ROPE_CHANNELS // dim)
    q_tiles, kv_tiles = cdiv(num_heads, heads), cdiv(kv_heads, heads)
    turns = max(1, qkv.shape[0] * (q_tiles + 2 * kv_tiles) // ROPE_PROGRAMS)
    q_parts, kv_parts = cdiv(q_tiles, turns), cdiv(kv_tiles, turns)
    _rope_kernel[(qkv.shape[0], q_parts + 2 * kv_parts)](
        qkv, k_cache, v_cache, cos_sin, positions, slots, q_norm, k_norm, qkv.stride(0), num_heads,
        kv_heads, q_parts, kv_parts, scale, eps,
        HAS_NORM=norms is not None, DIM=dim, BLOCK=block_size, HEADS=heads,
        SPREAD=spread_width(dim) if k_cache.dtype == torch.float8_e4m3fn else 0, num_warps=1,
        **launch_options(),
    )  # fmt: skip


def paged_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: QueryTiles,
    batch: AttentionBatch,
    num_heads: int,
    window: int,
    sinks: torch.Tensor | None,
) -> None:
    """Attention of pre-scaled q[t, heads * dim] over the cache into out's rows of these tiles."""
    if suits_hopper(q, v_cache, tiles, batch, num_heads, window):
        if batch.pages is not None:
            k_cache, v_cache, batch = unpack_pages(k_cache, v_cache, batch)
        triton_kernels("hopper.prefill").launch(
            q, out, k_cache, v_cache, tiles, batch, num_heads, window, sinks
        )
        return
    _, kv_heads, block_size, dim = v_cache.shape
    group = heads_of(tiles, num_heads // kv_heads)
    rows = max(16, next_power_of_2(tiles.tokens * group))
    splits, tables = window_splits(tiles.splits, window), batch.block_tables
    fp8 = k_cache.dtype == torch.float8_e4m3fn
    keys, warps, stages = launch_shape(rows, dim, k_cache.element_size())
    tma = rows > 16 and block_size % keys == 0 and enabled() and not MODE.batch_invariant
    caches = [_descriptor(c, keys) if tma else c for c in (k_cache, v_cache)]
    assert q.stride(1) == 1 and tables.stride(1) == 1 and dim & (dim - 1) == 0
    assert block_size % keys == 0 or keys % block_size == 0
    partial = stats = out
    if splits > 1:
        shape = (splits, q.shape[0], num_heads)
        partial = torch.empty(*shape, dim, dtype=torch.float32, device=q.device)
        stats = torch.empty(*shape, 2, dtype=torch.float32, device=q.device)
    _attention_kernel[(num_heads // group, tiles.seqs.shape[0], splits)](
        q, *caches, sinks, out, partial, stats, tiles.seqs, tiles.starts, batch.query_starts,
        batch.context_lens, batch.table_rows, tables, tables.stride(0), q.stride(0), out.stride(0),
        q.shape[0], kv_heads, window, tiles.tokens,
        GROUP=group, SHARE=num_heads // kv_heads // group, DIM=dim, ROWS=rows, KEYS=keys,
        BLOCK=block_size, SPLITS=splits, SINKS=sinks is not None, HALF_PRECISION=fp8,
        INVARIANT=MODE.batch_invariant, TMA=tma, STAGES=stages, num_warps=warps,
        enable_fp_fusion=rows > 16, **launch_options(),
    )  # fmt: skip
    if splits > 1:
        _join_kernel[(len(tiles.rows), num_heads)](
            partial, stats, out, out.stride(0), q.shape[0], num_heads, tiles.rows.start, DIM=dim,
            SPLITS=splits, num_warps=1, **launch_options(),
        )  # fmt: skip


def suits_hopper(
    q: torch.Tensor,
    v_cache: torch.Tensor,
    tiles: QueryTiles,
    batch: AttentionBatch,
    num_heads: int,
    window: int,
) -> bool:
    """Whether kernels/gpu/hopper/prefill.py takes these tiles, which the plain kernel does too.

    They are those of prompts of some size, and full. Of an fp8 cache all their pages are to be
    unpacked, of which a window needs a few.
    """
    heads = heads_of(tiles, num_heads // v_cache.shape[1])
    return (
        hopper_takes(v_cache)
        and (v_cache.dtype == torch.bfloat16 or (batch.pages is not None and not window))
        and q.dtype == torch.bfloat16
        and not tiles.rows  # narrow tiles share keys
        and tiles.tokens * heads == GPU_TILE_ROWS
        and tiles.seqs.shape[0] * (num_heads // heads) >= HOPPER_ITEMS
        and q.stride(0) % 8 == 0  # rows are copied 16 bytes at a time
    )


def hopper_takes(v_cache: torch.Tensor) -> bool:
    """Whether kernels/gpu/hopper/prefill.py attends over a cache like this, or its pages unpacked.

    Other heads, blocks that are no whole part or multiple of a tile of keys, and batch-invariant
    mode stay with the plain kernel.
    """
    _, _, block_size, dim = v_cache.shape
    return (
        hopper.is_usable()
        and v_cache.dtype in (torch.bfloat16, torch.float8_e4m3fn)
        and block_size >= HOPPER_LEAST_BLOCK
        and (HOPPER_KEYS % block_size == 0 or block_size % HOPPER_KEYS == 0)
        and dim in HOPPER_DIMS
    )


def window_splits(splits: int, window: int) -> int:
    """Programs per tile: one takes a narrow window in a few turns, and nothing is left to join.

    Where sequences are too few to fill the GPU, up to eight programs share the window.
    """
    if 0 < window <= NARROW_WINDOW:
        return min(splits, 8) if splits >= 8 else 1
    return splits


def launch_shape(rows: int, dim: int, itemsize: int) -> tuple[int, int, int]:
    """Keys per turn, warps and pipeline stages of a tile; measured on an H200 for 128 channels.

    Sums of more channels need the registers of more threads; two stages of 256 in fp32 do not fit
    into shared memory.
    """
    keys, warps, stages = (32, 1, 2) if rows == 16 else (64, 4, 2)
    if dim * itemsize >= 1024:
        keys, stages = 32, 1
    return keys, warps * (2 if dim > 128 else 1), stages


def _descriptor(cache: torch.Tensor, keys: int) -> TensorDescriptor:
    """The cache as rows [., head_dim] that the copy engine reads in tiles of `keys` rows."""
    return TensorDescriptor.from_tensor(cache.view(-1, cache.shape[3]), [keys, cache.shape[3]])
