"""The cache of table rows: a lookup probes and copies in one kernel, and no kernel waits for the
host, which never learns how many keys missed.

Programs that work on the misses are a fixed number and share the list by its length, which they
read on the device. atomic_min makes the first key of a set and of an id the same one every time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from tokenmill.kernels import embedding
from tokenmill.kernels.embedding import UNCLAIMED, Misses, RowCache
from tokenmill.kernels.gpu.launch import cdiv, next_power_of_2, quick

WAYS = tl.constexpr(embedding.WAYS)
CLAIM_MASK = tl.constexpr(embedding.CLAIMS - 1)
MIX0, MIX1, MIX2, MIX3 = (tl.constexpr(mix) for mix in embedding.MIX)
TILE_BYTES = 16384  # of rows that a program copies at once: eight 16-byte reads for each thread
MISS_PROGRAMS = 2048  # a row each at a time, enough to hide the latency of the host's memory
MAX_KEYS = 64  # whose tags fit the registers


@triton.jit
def _upper(x):
    return (x >> 32) & 0xFFFFFFFF


@triton.jit
def _mixed(ids):
    product = ids * MIX0
    return product ^ _upper(product)


@triton.jit
def _set_of(hashed, num_sets):
    return (_upper(hashed * MIX1) * num_sets) >> 32


@triton.jit
def _find(tags, ids, sets, inside):
    """The slot of each id, or -1."""
    ways = tl.arange(0, WAYS)
    slots = sets[:, None] * WAYS + ways[None, :]
    tag = tl.load(tags + slots, mask=inside[:, None], other=-1)
    return tl.max(tl.where(tag == ids[:, None], slots, -1), axis=1)


@quick
@triton.jit(do_not_specialize=["count"])
def _lookup_kernel(
    tags, counters, cached, sketch, claims, firsts, totals, ids, out, positions, num_misses,
    count, num_sets, sketch_mask, dim,
    KEYS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    inside = key < count
    wanted = tl.load(ids + key, mask=inside, other=-1)
    hashed = _mixed(wanted)
    sets = _set_of(hashed, num_sets)
    slot = _find(tags, wanted, sets, inside)
    hit = inside & (slot >= 0)
    columns = tl.arange(0, BLOCK)
    mask = hit[:, None] & (columns < dim)[None, :]
    rows = tl.load(cached + slot[:, None] * dim + columns[None, :], mask=mask)
    tl.store(out + key[:, None] * dim + columns[None, :], rows, mask=mask)
    tl.atomic_add(counters + slot, 1.0, mask=hit, sem="relaxed")
    miss = inside & (slot < 0)
    missed = tl.sum(miss.to(tl.int32), axis=0)
    if missed > 0:
        start = tl.atomic_add(num_misses, missed, sem="relaxed")
        tl.atomic_add(totals, missed, sem="relaxed")
        place = start + tl.cumsum(miss.to(tl.int32), axis=0) - 1
        tl.store(positions + place, key.to(tl.int32), mask=miss)
        tl.atomic_add(sketch + (_upper(hashed * MIX2) & sketch_mask), 1.0, mask=miss, sem="relaxed")
        third = _upper(hashed * MIX3)
        tl.atomic_add(sketch + (third & sketch_mask), 1.0, mask=miss, sem="relaxed")
        tl.atomic_min(claims + (third & CLAIM_MASK), key.to(tl.int32), mask=miss, sem="relaxed")
        tl.atomic_min(firsts + sets, key.to(tl.int32), mask=miss, sem="relaxed")


@triton.jit
def _owner(claims, ids, key, wanted, hashed):
    """The key that fetches the row of a missed key."""
    first = tl.load(claims + (_upper(hashed * MIX3) & CLAIM_MASK)).to(tl.int64)
    return tl.where(tl.load(ids + first) == wanted, first, key)


@quick
@triton.jit
def _fetch_kernel(
    claims, totals, ids, positions, num_misses, table, out, dim,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    fetched = 0
    for index in range(tl.program_id(0), tl.load(num_misses), PROGRAMS):
        key = tl.load(positions + index).to(tl.int64)
        wanted = tl.load(ids + key)
        if _owner(claims, ids, key, wanted, _mixed(wanted)) == key:
            row = tl.load(table + wanted * dim + columns, mask=mask)
            tl.store(out + key * dim + columns, row, mask=mask)
            fetched += 1
    if fetched > 0:
        tl.atomic_add(totals + 1, fetched, sem="relaxed")


@triton.jit
def _remember(sketch, old, uses, sketch_mask):
    hashed = _mixed(old)
    tl.atomic_max(sketch + (_upper(hashed * MIX2) & sketch_mask), uses, sem="relaxed")
    tl.atomic_max(sketch + (_upper(hashed * MIX3) & sketch_mask), uses, sem="relaxed")


@quick
@triton.jit
def _copy_kernel(
    sketch, estimates, claims, ids, positions, num_misses, out, sketch_mask, dim,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Estimates are read before any admission changes the sketch."""
    columns = tl.arange(0, BLOCK)
    mask = columns < dim
    for index in range(tl.program_id(0), tl.load(num_misses), PROGRAMS):
        key = tl.load(positions + index).to(tl.int64)
        wanted = tl.load(ids + key)
        hashed = _mixed(wanted)
        left = tl.load(sketch + (_upper(hashed * MIX2) & sketch_mask))
        right = tl.load(sketch + (_upper(hashed * MIX3) & sketch_mask))
        tl.store(estimates + index, tl.minimum(left, right))
        owner = _owner(claims, ids, key, wanted, hashed)
        if owner != key:
            row = tl.load(out + owner * dim + columns, mask=mask)
            tl.store(out + key * dim + columns, row, mask=mask)


@quick
@triton.jit
def _admit_kernel(
    tags, counters, cached, sketch, estimates, firsts, ids, positions, num_misses, out,
    num_sets, sketch_mask, dim,
    PROGRAMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    columns, ways = tl.arange(0, BLOCK), tl.arange(0, WAYS)
    mask = columns < dim
    for index in range(tl.program_id(0), tl.load(num_misses), PROGRAMS):
        key = tl.load(positions + index).to(tl.int64)
        wanted = tl.load(ids + key)
        home = _set_of(_mixed(wanted), num_sets)
        if tl.load(firsts + home) == key:
            uses = tl.load(estimates + index)
            counts = tl.load(counters + home * WAYS + ways)
            least = tl.min(counts, axis=0)
            if uses > least:
                slot = home * WAYS + tl.argmin(counts, axis=0)
                old = tl.load(tags + slot)
                if old >= 0:
                    _remember(sketch, old, least, sketch_mask)
                row = tl.load(out + key * dim + columns, mask=mask)
                tl.store(cached + slot * dim + columns, row, mask=mask)
                tl.store(counters + slot, uses)
                tl.store(tags + slot, wanted)


@quick
@triton.jit(do_not_specialize=["count"])
def _write_kernel(
    tags, cached, ids, rows, count, num_sets, dim, KEYS: tl.constexpr, BLOCK: tl.constexpr
):
    key = tl.program_id(0).to(tl.int64) * KEYS + tl.arange(0, KEYS)
    inside = key < count
    wanted = tl.load(ids + key, mask=inside, other=-1)
    slot = _find(tags, wanted, _set_of(_mixed(wanted), num_sets), inside)
    columns = tl.arange(0, BLOCK)
    mask = (inside & (slot >= 0))[:, None] & (columns < dim)[None, :]
    new = tl.load(rows + key[:, None] * dim + columns[None, :], mask=mask)
    tl.store(cached + slot[:, None] * dim + columns[None, :], new, mask=mask)


def lookup_cached(cache: RowCache, ids: torch.Tensor, out: torch.Tensor) -> Misses:
    count, (keys, block) = len(ids), _tile(cache.rows)
    assert ids.is_contiguous() and out.is_contiguous() and cache.rows.is_contiguous()
    positions = torch.empty(count, dtype=torch.int32, device=ids.device)
    num_misses = torch.zeros(1, dtype=torch.int32, device=ids.device)
    cache.claims.fill_(UNCLAIMED)
    cache.firsts.fill_(UNCLAIMED)
    if count:
        _lookup_kernel[(cdiv(count, keys),)](
            cache.tags, cache.counters, cache.rows, cache.sketch, cache.claims, cache.firsts,
            cache.totals, ids, out, positions, num_misses, count, len(cache.tags),
            len(cache.sketch) - 1, out.shape[1], KEYS=keys, BLOCK=block,
        )  # fmt: skip
    return Misses(positions, num_misses)


def fetch_misses(
    cache: RowCache, ids: torch.Tensor, misses: Misses, table: torch.Tensor, out: torch.Tensor
) -> None:
    assert table.is_contiguous() and table.dtype == out.dtype and table.shape[1] == out.shape[1]
    programs, block = _shared(misses), next_power_of_2(out.shape[1])
    _fetch_kernel[(programs,)](
        cache.claims, cache.totals, ids, misses.positions, misses.count, table, out, out.shape[1],
        PROGRAMS=programs, BLOCK=block, num_warps=row_warps(out),
    )  # fmt: skip


def admit_misses(cache: RowCache, ids: torch.Tensor, misses: Misses, out: torch.Tensor) -> None:
    programs, block = _shared(misses), next_power_of_2(out.shape[1])
    estimates = torch.empty(len(misses.positions), device=out.device)
    mask, dim = len(cache.sketch) - 1, out.shape[1]
    _copy_kernel[(programs,)](
        cache.sketch, estimates, cache.claims, ids, misses.positions, misses.count, out, mask, dim,
        PROGRAMS=programs, BLOCK=block, num_warps=row_warps(out),
    )  # fmt: skip
    _admit_kernel[(programs,)](
        cache.tags, cache.counters, cache.rows, cache.sketch, estimates, cache.firsts, ids,
        misses.positions, misses.count, out, len(cache.tags), mask, dim,
        PROGRAMS=programs, BLOCK=block, num_warps=row_warps(out),
    )  # fmt: skip


def write_cached(cache: RowCache, ids: torch.Tensor, rows: torch.Tensor) -> None:
    count, (keys, block) = len(ids), _tile(cache.rows)
    assert ids.is_contiguous() and rows.is_contiguous() and rows.dtype == cache.rows.dtype
    if count:
        _write_kernel[(cdiv(count, keys),)](
            cache.tags, cache.rows, ids, rows, count, len(cache.tags), rows.shape[1],
            KEYS=keys, BLOCK=block,
        )  # fmt: skip


def _tile(rows: torch.Tensor) -> tuple[int, int]:
    """Keys and columns that a program copies at once."""
    block = next_power_of_2(rows.shape[1])
    keys = TILE_BYTES // (block * rows.element_size())
    return min(max(keys, 1), MAX_KEYS), block


def row_warps(rows: torch.Tensor) -> int:
    """Warps of a program that copies one row: each has 1 KiB of it, two reads of 16 bytes."""
    kibibytes = rows.shape[1] * rows.element_size() // 1024
    return min(next_power_of_2(max(kibibytes, 1)), 8)


def _shared(misses: Misses) -> int:
    """Programs that share the list of misses; powers of two, so that few kernels are compiled."""
    return min(next_power_of_2(max(len(misses.positions), 1)), MISS_PROGRAMS)
