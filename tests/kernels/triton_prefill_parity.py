"""Checks of the Hopper kernel for prompts against the reference; on CPU it is emulated."""

import random
from dataclasses import replace
from typing import NamedTuple

import gluon_emulator
import numpy as np
import torch
from gluon_emulator import Descriptor, Pointer
from triton_parity import make_batch

from attention_batches import paged_attention_reference
from tokenmill.kernels import attention
from tokenmill.kernels.attention import AttentionBatch, QueryTiles
from tokenmill.kernels.gpu import hopper
from tokenmill.kernels.gpu.hopper import prefill

LIMIT = 0.005  # bf16 weights and results
NUM_DRAWN = 12


class Case(NamedTuple):
    query_lens: list[int]
    contexts: list[int]
    heads: tuple[int, int] = (4, 1)  # of queries and of the cache
    dim: int = 64
    block_size: int = 64
    window: int = 0
    sinks: bool = False
    programs: int = 3


CASES = (
    Case([33], [0]),
    Case([300], [0], (1, 1), 128),  # a tile's rows end in different tiles of keys
    Case([130, 10], [61, 500], (8, 1), programs=2),
    Case([1, 45], [127, 128], (4, 2), 128, 16, programs=1),
    Case([70], [190], (2, 2), 64, 256),
    Case([200], [100], (2, 1), 64, 32, window=90),
    Case([40], [700], (8, 1), 64, 64, window=128, sinks=True),
    Case([65], [3], (4, 1), 64, 128, sinks=True, programs=100),
    Case([140, 300], [61, 0], (10, 2), 128, programs=4),  # five heads by KV head: a tile has one
    Case([90], [70], (6, 1), 64, 32, sinks=True),  # six: a tile has two
)


class Inputs(NamedTuple):
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    batch: AttentionBatch
    sinks: torch.Tensor | None


def make_inputs(case: Case, device: str) -> Inputs:
    """Queries amid wider rows, keys that share a large part, blocks in any order."""
    heads, kv_heads = case.heads
    batch = make_batch(case.query_lens, case.contexts, case.block_size, case.heads, device)
    (tiles,) = tiles_of(case, batch)
    shape = (64, kv_heads, case.block_size, case.dim)
    k_cache = torch.randn(shape) + 2 * torch.randn(case.dim)
    rows = torch.randn(sum(case.query_lens), (heads + 2 * kv_heads) * case.dim)
    rows = (rows * case.dim**-0.5).to(device, torch.bfloat16)
    keys, values = (c.to(device, torch.bfloat16) for c in (k_cache, torch.randn(shape)))
    sinks = 3 * torch.randn(heads, device=device) if case.sinks else None
    batch = replace(batch, tiles=(tiles,))
    return Inputs(rows[:, : heads * case.dim], keys, values, batch, sinks)


def tiles_of(case: Case, batch: AttentionBatch) -> tuple[QueryTiles, ...]:
    """Wide tiles for all sequences, as those of long prompts."""
    group = case.heads[0] // case.heads[1]
    lens = np.array([1000])
    tokens = attention.plan_tiles(lens, group, case.heads[1], True, full_tiles=True)[0].tokens
    pairs = [(i, s) for i, n in enumerate(case.query_lens) for s in range(0, n, tokens)]
    random.Random(0).shuffle(pairs)
    columns = torch.tensor(pairs, dtype=torch.int32).T.contiguous().to(batch.positions.device)
    return (QueryTiles(columns[0], columns[1], tokens),)


def attend(case: Case, own: Inputs) -> torch.Tensor:
    """All rows by the Hopper kernel; a row that is not written stays NaN."""
    out = torch.full(own.q.shape, torch.nan, dtype=torch.bfloat16, device=own.q.device)
    arguments = (own.k_cache, own.v_cache, own.batch.tiles[0], own.batch, case.heads[0])
    if own.q.is_cuda:
        prefill.launch(own.q, out, *arguments, case.window, own.sinks)
    else:
        emulated(case, own, out)
    return out


def emulated(case: Case, own: Inputs, out: torch.Tensor) -> None:
    heads, kv_heads = case.heads
    tiles, batch = own.batch.tiles[0], own.batch
    group = attention.heads_of(tiles, heads // kv_heads)
    pages = (min(case.block_size, 128), case.dim)
    items = len(tiles.seqs) * heads // group
    lists = (
        tiles.seqs, tiles.starts, batch.query_starts, batch.context_lens, batch.table_rows,
        batch.block_tables,
    )  # fmt: skip
    gluon_emulator.run(
        prefill, "prefill_kernel", (min(items, case.programs),),
        Descriptor(own.q.unflatten(1, (-1, case.dim)), (tiles.tokens, group, case.dim)),
        *(Descriptor(cache.view(-1, case.dim), pages) for cache in (own.k_cache, own.v_cache)),
        None if own.sinks is None else Pointer(own.sinks),
        Pointer(out), *(Pointer(part) for part in lists),
        batch.block_tables.stride(0), out.stride(0), items - 1, case.window,
        DIM=case.dim, KV_HEADS=kv_heads, SHARE=heads // kv_heads // group, GROUP=group,
        BLOCK=case.block_size, SLIDING=case.window > 0, SINKS=case.sinks, STAGES=prefill.STAGES,
        EARLY=False,
    )  # fmt: skip


def reference(case: Case, own: Inputs) -> torch.Tensor:
    """In fp32."""
    k_cache = own.k_cache.float() if own.q.is_cuda else own.k_cache.float().mT
    return paged_attention_reference(
        own.q.float(), k_cache, own.v_cache.float(), own.batch, case.heads[0], case.window,
        own.sinks,
    )  # fmt: skip


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected).norm() / expected.norm())


def check_prompts(device: str) -> None:
    """Every row is written, and right."""
    if device == "cuda" and not hopper.is_here():
        return
    for case in CASES:
        own = make_inputs(case, device)
        assert error(attend(case, own), reference(case, own)) < LIMIT, case


def drawn(number: int) -> Case:
    """Prompts of any lengths after contexts of any lengths, in blocks of any size."""
    rng = random.Random(number)
    group, kv_heads = rng.choice([1, 2, 4, 5, 6, 8]), rng.choice([1, 2, 3])
    count = rng.randint(1, 4)
    block_size = rng.choice([16, 32, 64, 128, 256])
    room = min(700, 64 // count * block_size)  # of one sequence's blocks
    lens = [rng.randint(1, min(room, 160)) for _ in range(count)]
    return Case(
        lens, [rng.choice([0, rng.randint(0, room - n)]) for n in lens],
        (group * kv_heads, kv_heads), rng.choice([64, 128]), block_size,
        rng.choice([0, 0, rng.randint(1, 300)]), rng.random() < 0.3, rng.randint(1, 9),
    )  # fmt: skip


def check_drawn_prompts(device: str) -> None:
    if device == "cuda" and not hopper.is_here():
        return
    for number in range(NUM_DRAWN):
        case = drawn(number)
        own = make_inputs(case, device)
        assert error(attend(case, own), reference(case, own)) < LIMIT, (number, case)


def check_neighbours(device: str) -> None:
    """A prompt has the same bits alone and beside others, wherever its blocks lie."""
    if device == "cuda" and not hopper.is_here():
        return
    case = Case([70, 130, 33], [90, 0, 200], (8, 2), programs=2)
    own = make_inputs(case, device)
    together = attend(case, own).split(case.query_lens)
    blocks = torch.randperm(64).to(device)  # where each block moves to
    k_cache, v_cache = torch.empty_like(own.k_cache), torch.empty_like(own.v_cache)
    k_cache[blocks], v_cache[blocks] = own.k_cache, own.v_cache
    tables = blocks[own.batch.block_tables.long()].int()
    queries = own.q.split(case.query_lens)
    for i, found in enumerate(together):
        alone = case._replace(
            query_lens=[case.query_lens[i]], contexts=[case.contexts[i]], programs=1 + i
        )
        batch = make_batch(alone.query_lens, alone.contexts, 64, case.heads, device)
        batch = replace(batch, block_tables=tables, table_rows=own.batch.table_rows[i : i + 1])
        batch = replace(batch, tiles=tiles_of(alone, batch))
        single = attend(alone, Inputs(queries[i], k_cache, v_cache, batch, None))
        assert torch.equal(single, found), i


CHECKS = {
    "prompts": check_prompts,
    "drawn_prompts": check_drawn_prompts,
    "neighbours": check_neighbours,
}
