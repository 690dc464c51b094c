"""Checks of the row cache's kernels against their references, by name and for a device."""

from dataclasses import fields, replace

import torch

from tokenmill.kernels import embedding
from tokenmill.kernels.gpu import embedding as gpu_embedding


def _same(left: embedding.RowCache, right: embedding.RowCache) -> None:
    for field in fields(left):
        a, b = getattr(left, field.name), getattr(right, field.name)
        assert torch.equal(a, b), field.name


def _copy(cache: embedding.RowCache) -> embedding.RowCache:
    return replace(cache, **{f.name: getattr(cache, f.name).clone() for f in fields(cache)})


def _lookup(module, cache, ids, table, out) -> torch.Tensor:
    """By the module's functions; of those that have twins by the references."""
    lookup, fetch, admit = (
        getattr(getattr(module, name), "reference", getattr(module, name))
        for name in ("lookup_cached", "fetch_misses", "admit_misses")
    )
    misses = lookup(cache, ids, out)
    fetch(cache, ids, misses, table, out)
    admit(cache, ids, misses, out)
    return misses.positions[: misses.count].sort().values


def check_lookup(device: str) -> None:
    """Rows, misses and the whole state after lookups, decays and writes, step by step."""
    for rows, dim, dtype in ((300, 24, torch.float16), (90, 130, torch.float32)):
        few = [9] * 17 if dim == 24 else []
        table = torch.randn(rows, dim).to(device, dtype)
        ours = embedding.make_row_cache(16, dim, dtype, device)
        theirs, first = _copy(ours), ours.tags.clone()
        for count in (1, 20, 0, 40, *few):
            ids = (rows * torch.rand(count, device=device) ** 3).long()
            expected, got = table.new_zeros(count, dim), table.new_zeros(count, dim)
            right = _lookup(embedding, ours, ids, table, expected)
            assert torch.equal(_lookup(gpu_embedding, theirs, ids, table, got), right)
            assert torch.equal(got, expected) and torch.equal(got, table[ids])
            _same(ours, theirs)
            first = torch.where(first < 0, ours.tags, first)
            for cache in (ours, theirs):
                cache.counters.mul_(0.75)
                cache.sketch.mul_(0.75)
        if few:  # and some were replaced
            assert ours.tags.amin() >= 0 and not torch.equal(ours.tags, first)


def check_write(device: str) -> None:
    table = torch.randn(200, 24, device=device)
    ours = embedding.make_row_cache(32, 24, torch.float32, device)
    ids = torch.arange(0, 200, 3, device=device)
    _lookup(embedding, ours, ids, table, table.new_zeros(len(ids), 24))
    theirs, written = _copy(ours), torch.arange(0, 200, 2, device=device)
    rows = torch.randn(len(written), 24, device=device)
    embedding.write_cached.reference(ours, written, rows)
    gpu_embedding.write_cached(theirs, written, rows)
    _same(ours, theirs)
    slots, found = embedding.find_slots(ours, written)
    assert found.any() and torch.equal(ours.rows[slots[found]], rows[found])


CHECKS = {"lookup": check_lookup, "write": check_write}
