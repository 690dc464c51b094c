"""The bookkeeping of drafts, a kernel each: one program serves a few dozen sequences."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels.drafts import Pair
from tokenmill.kernels.gpu.launch import cdiv, quick

BLOCK = 64


@quick
@triton.jit(do_not_specialize=["count", "stride", "offset", "width", "last", "pad_slot"])
def _place_kernel(
    base, rows, capacities, tables, stride, positions, slots, count, offset, width, block_size,
    last, pad_slot,
    BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    seq = index // width
    start = tl.load(base + seq, mask=inside, other=0)
    position = tl.minimum(start + offset + index % width, last)
    row = tl.load(rows + seq, mask=inside, other=0).to(tl.int64)
    block = tl.load(tables + row * stride + position // block_size, mask=inside, other=0)
    capacity = tl.load(capacities + seq, mask=inside, other=0)
    slot = tl.where(position < capacity, block * block_size + position % block_size, pad_slot)
    tl.store(positions + index, position, mask=inside)
    tl.store(slots + index, slot, mask=inside)


@quick
@triton.jit(do_not_specialize=["count"])
def _accept_kernel(
    tokens, ids, counts, contexts, lasts, positions, count,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < count
    num_drafts = tl.load(counts + seq, mask=inside, other=0)
    num_right = tl.zeros([BLOCK], tl.int32)
    for place in tl.static_range(DEPTH):
        token = tl.load(tokens + seq * (DEPTH + 1) + place, mask=inside, other=0)
        draft = tl.load(ids + seq * (DEPTH + 1) + place + 1, mask=inside, other=0)
        right = (token == draft) & (place < num_drafts) & (num_right == place)
        num_right += right.to(tl.int32)
    context = tl.load(contexts + seq, mask=inside, other=0)
    tl.store(lasts + seq, (seq * (DEPTH + 1) + num_right).to(tl.int64), mask=inside)
    tl.store(positions + seq, context + num_right, mask=inside)


@quick
@triton.jit(do_not_specialize=["count", "last"])
def _advance_kernel(
    tokens, drafts, positions, ids, contexts, counts, capacities, packed, count, last,
    DEPTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    seq = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = seq < count
    position = tl.load(positions + seq, mask=inside, other=0)
    num_right = position - tl.load(contexts + seq, mask=inside, other=0)
    real = tl.load(capacities + seq, mask=inside, other=0) > 0
    newest = tl.load(tokens + seq * (DEPTH + 1) + num_right, mask=inside, other=0)
    tl.store(ids + seq * (DEPTH + 1), newest, mask=inside)
    line = packed + seq * (2 * DEPTH + 1)
    for place in tl.static_range(DEPTH + 1):
        token = tl.load(tokens + seq * (DEPTH + 1) + place, mask=inside, other=0)
        tl.store(line + place, token, mask=inside)
    for place in tl.static_range(DEPTH):
        draft = tl.load(drafts + seq * DEPTH + place, mask=inside, other=0)
        tl.store(ids + seq * (DEPTH + 1) + place + 1, draft, mask=inside)
        tl.store(line + DEPTH + 1 + place, draft, mask=inside)
    tl.store(contexts + seq, tl.where(real, tl.minimum(position + 1, last), 0), mask=inside)
    tl.store(counts + seq, tl.where(real, DEPTH, 0), mask=inside)


def place_drafts(
    base: torch.Tensor,
    rows: torch.Tensor,
    capacities: torch.Tensor,
    tables: torch.Tensor,
    offset: int,
    width: int,
    block_size: int,
    max_len: int,
    pad_block: int,
) -> Pair:
    count = base.shape[0] * width
    positions = torch.empty(count, dtype=torch.int32, device=base.device)
    slots = torch.empty_like(positions)
    assert base.dtype == rows.dtype == capacities.dtype == tables.dtype == torch.int32
    assert base.is_contiguous() and rows.is_contiguous() and capacities.is_contiguous()
    _place_kernel[(cdiv(count, BLOCK),)](
        base, rows, capacities, tables, tables.stride(0), positions, slots, count, offset, width,
        block_size, max_len - 1, pad_block * block_size, BLOCK=BLOCK,
    )  # fmt: skip
    return positions, slots


def accept_drafts(
    tokens: torch.Tensor, ids: torch.Tensor, counts: torch.Tensor, contexts: torch.Tensor
) -> Pair:
    count, width = ids.shape
    lasts = torch.empty(count, dtype=torch.int64, device=ids.device)
    positions = torch.empty(count, dtype=torch.int32, device=ids.device)
    assert tokens.is_contiguous() and ids.is_contiguous() and contexts.is_contiguous()
    assert tokens.dtype == ids.dtype == counts.dtype == contexts.dtype == torch.int32
    _accept_kernel[(cdiv(count, BLOCK),)](
        tokens, ids, counts, contexts, lasts, positions, count, DEPTH=width - 1, BLOCK=BLOCK,
    )  # fmt: skip
    return lasts, positions


def advance_drafts(
    tokens: torch.Tensor,
    drafts: torch.Tensor,
    positions: torch.Tensor,
    ids: torch.Tensor,
    contexts: torch.Tensor,
    counts: torch.Tensor,
    capacities: torch.Tensor,
    max_len: int,
) -> torch.Tensor:
    count, depth = drafts.shape
    packed = torch.empty(count, 2 * depth + 1, dtype=torch.int32, device=ids.device)
    assert tokens.is_contiguous() and drafts.is_contiguous() and ids.is_contiguous()
    assert tokens.dtype == drafts.dtype == ids.dtype == positions.dtype == torch.int32
    _advance_kernel[(cdiv(count, BLOCK),)](
        tokens, drafts, positions, ids, contexts, counts, capacities, packed, count,
        max_len - 1 - depth, DEPTH=depth, BLOCK=BLOCK,
    )  # fmt: skip
    return packed
