"""Paged attention for prefill and decode alike, and RoPE with the KV write in front of it.

A program takes one tile of a sequence's query tokens and one KV head; its rows are the tokens times
the query heads that share the KV head, so that every key is read once for all of them. A tile of a
prompt has as many of these heads as divide its rows, and other tiles have the rest. Where few
sequences do not fill the chip, the keys of a tile are split over several programs, and a second
kernel joins their partial sums.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tokenmill.kernels import MODE
from tokenmill.kernels.attention import (
    GPU_TILE_ROWS,
    AttentionBatch,
    QueryTiles,
    heads_of,
    takes_full_tiles,
)
from tokenmill.kernels.gpu import spread
from tokenmill.kernels.gpu.dependent import enabled, launch_options, wait
from tokenmill.kernels.gpu.hopper import prefill
from tokenmill.kernels.gpu.hopper.two_groups import LOG2E
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick
from tokenmill.kernels.pages import unpack_pages

NARROW_WINDOW = 256  # keys
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
@triton.jit
def _rope_kernel(
    qkv, k_cache, v_cache, cos_sin, positions, slots, q_norm, k_norm, stride, heads, kv_heads,
    block_size, scale, eps,
    HAS_NORM: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    channels = tl.arange(0, HALF)
    inside = head < heads + 2 * kv_heads
    is_q, is_k = head < heads, (head >= heads) & (head < heads + kv_heads)
    base = qkv + token * stride + head[:, None] * (2 * HALF) + channels[None, :]
    slot = tl.load(slots + token).to(tl.int64)
    table = cos_sin + tl.load(positions + token).to(tl.int64) * (2 * HALF) + channels
    cos, sin = tl.load(table)[None, :], tl.load(table + HALF)[None, :]
    wait(EARLY)
    a = tl.load(base, mask=inside[:, None], other=0.0).to(tl.float32)
    b = tl.load(base + HALF, mask=inside[:, None], other=0.0).to(tl.float32)
    block, offset = slot // block_size, slot % block_size
    page = ((block * kv_heads + (head - heads) % kv_heads) * block_size + offset) * (2 * HALF)
    line = page[:, None] + channels[None, :]
    is_v = (inside & (head >= heads + kv_heads))[:, None]
    tl.store(v_cache + line, a.to(v_cache.dtype.element_ty), mask=is_v)
    tl.store(v_cache + line + HALF, b.to(v_cache.dtype.element_ty), mask=is_v)
    if HAS_NORM:
        total = tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)
        inverse = tl.rsqrt(total / (2 * HALF) + eps)[:, None]
        q_low = tl.load(q_norm + channels).to(tl.float32)[None, :]
        k_low = tl.load(k_norm + channels).to(tl.float32)[None, :]
        q_high = tl.load(q_norm + HALF + channels).to(tl.float32)[None, :]
        k_high = tl.load(k_norm + HALF + channels).to(tl.float32)[None, :]
        a = a * inverse * tl.where(is_q[:, None], q_low, k_low)
        b = b * inverse * tl.where(is_q[:, None], q_high, k_high)
    low, high = a * cos - b * sin, b * cos + a * sin
    tl.store(base, low * scale, mask=is_q[:, None])
    tl.store(base + HALF, high * scale, mask=is_q[:, None])
    tl.store(k_cache + line, low.to(k_cache.dtype.element_ty), mask=is_k[:, None])
    tl.store(k_cache + line + HALF, high.to(k_cache.dtype.element_ty), mask=is_k[:, None])


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
    batch: AttentionBatch,
    num_heads: int,
    scale: float,
    norms: tuple[torch.Tensor, torch.Tensor] | None = None,
    eps: float = 0.0,
) -> torch.Tensor:
    """In place; what is returned is a view of qkv."""
    _, kv_heads, block_size, dim = v_cache.shape
    assert qkv.stride(1) == 1 and k_cache.is_contiguous() and v_cache.is_contiguous()
    queries = qkv[:, : num_heads * dim]
    if k_cache.dtype == torch.float8_e4m3fn:
        spread.rotate_and_spread(
            qkv, k_cache, v_cache, cos_sin, batch, num_heads, scale, norms, eps
        )
        return queries
    q_norm, k_norm = norms if norms is not None else (cos_sin, cos_sin)
    total = num_heads + 2 * kv_heads
    # The layout of a tile decides in which order a norm adds up.
    heads = 16 if MODE.batch_invariant else min(16, next_power_of_2(total))
    _rope_kernel[(qkv.shape[0], cdiv(total, heads))](
        qkv, k_cache, v_cache, cos_sin, batch.positions, batch.slots, q_norm, k_norm,
        qkv.stride(0), num_heads, kv_heads, block_size, scale, eps,
        HAS_NORM=norms is not None, HALF=dim // 2, HEADS=heads, num_warps=4, **launch_options(),
    )  # fmt: skip
    return queries


def attend_paged(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: AttentionBatch,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    num_heads: int,
    window: int = 0,
    sinks: torch.Tensor | None = None,
) -> None:
    for tiles in batch.tiles:
        if not suits_hopper(q, v_cache, tiles, batch, num_heads, window):
            attend_tiles(q, out, k_cache, v_cache, tiles, batch, num_heads, window, sinks)
            continue
        keys, values, unpacked = k_cache, v_cache, batch
        if batch.pages is not None:
            keys, values, unpacked = unpack_pages(k_cache, v_cache, batch)
        prefill.launch(q, out, keys, values, tiles, unpacked, num_heads, window, sinks)


def attend_tiles(
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
    """Attention of the queries of these tiles by the plain kernel."""
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
        takes_full_tiles(v_cache)
        and (v_cache.dtype == torch.bfloat16 or (batch.pages is not None and not window))
        and q.dtype == torch.bfloat16
        and not tiles.rows  # narrow tiles share keys
        and tiles.tokens * heads == GPU_TILE_ROWS
        and tiles.seqs.shape[0] * (num_heads // heads) >= HOPPER_ITEMS
        and q.stride(0) % 8 == 0  # rows are copied 16 bytes at a time
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
