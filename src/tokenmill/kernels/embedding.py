"""A set-associative cache of table rows: lookup, fetch of misses, admission, writing.

A row of the table may lie in the ways of one set. Counters of the resident rows, and a sketch of
the others' counts, decay together, so that they compare. Of the misses in one lookup the first of
each set is a candidate: it takes the place of the set's least counted row if it is counted higher.
Which rows are resident therefore depends on the keys alone, not on the order of a GPU's programs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tokenmill.kernels import always, kernel

WAYS = 16  # int64 tags of a set: one line of 128 bytes
SKETCH_PER_SLOT = 8  # counters
CLAIMS = 2**20  # places where equal misses of a lookup meet
UNCLAIMED = 2**31 - 1
# Odd constants of splitmix64 and of the golden ratio, as signed numbers.
MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685, 7046029254386353131)


@dataclass(frozen=True, slots=True)
class RowCache:
    tags: torch.Tensor  # int64 [sets, WAYS]: the row in each slot, or -1
    counters: torch.Tensor  # float32 [sets, WAYS]: its decayed uses; -1 where the slot is empty
    rows: torch.Tensor  # [sets * WAYS, dim]
    sketch: torch.Tensor  # float32 [a power of two]: decayed uses of the rows that are not here
    claims: torch.Tensor  # int32 [CLAIMS]: the first key of a lookup that missed, by its id's hash
    firsts: torch.Tensor  # int32 [sets]: the first key of a lookup that missed, by set
    totals: torch.Tensor  # int64 [2]: keys that missed, and rows that were fetched for them

    @property
    def num_bytes(self) -> int:
        tensors = (self.tags, self.counters, self.rows, self.sketch)
        return sum(x.nbytes for x in (*tensors, self.claims, self.firsts, self.totals))


@dataclass(frozen=True, slots=True)
class Misses:
    positions: torch.Tensor  # int32 [keys], of which the first `count` hold
    count: torch.Tensor  # int32 [1]


@torch.inference_mode(False)  # which tensors made in that mode would need for ever
def make_row_cache(
    num_slots: int, dim: int, dtype: torch.dtype, device: torch.device | str
) -> RowCache:
    sets, width = num_slots // WAYS, sketch_width(num_slots)
    return RowCache(
        tags=torch.full((sets, WAYS), -1, dtype=torch.int64, device=device),
        counters=torch.full((sets, WAYS), -1.0, device=device),
        rows=torch.zeros(sets * WAYS, dim, dtype=dtype, device=device),
        sketch=torch.zeros(width, device=device),
        claims=torch.full((CLAIMS,), UNCLAIMED, dtype=torch.int32, device=device),
        firsts=torch.full((sets,), UNCLAIMED, dtype=torch.int32, device=device),
        totals=torch.zeros(2, dtype=torch.int64, device=device),
    )


def sketch_width(num_slots: int) -> int:
    """A power of two, at least SKETCH_PER_SLOT counters for each slot."""
    return 1 << (num_slots * SKETCH_PER_SLOT - 1).bit_length()


def cache_bytes(num_slots: int, row_bytes: int) -> int:
    sets = num_slots // WAYS
    slots = num_slots * (8 + 4 + row_bytes)
    return slots + 4 * (sketch_width(num_slots) + CLAIMS + sets) + 16


@kernel(gpu=always, device_of=lambda cache: cache.tags)
def lookup_cached(cache: RowCache, ids: torch.Tensor, out: torch.Tensor) -> Misses:
    """Copy the resident rows of ids int64 [n] to out [n, dim], count all keys, list the misses.

    What out holds for those is not defined.
    """
    slots, found = find_slots(cache, ids)
    torch.index_select(cache.rows, 0, slots, out=out)  # those of misses come later
    hits = slots[found]
    cache.counters.view(-1).index_add_(0, hits, torch.ones_like(hits, dtype=torch.float32))
    positions = (~found).nonzero().view(-1).int()
    missed = ids[positions.long()]
    ones = torch.ones(len(missed), device=ids.device)
    for places in sketch_places(cache, missed):
        cache.sketch.index_add_(0, places, ones)
    cache.claims.fill_(UNCLAIMED).scatter_reduce_(0, claim_places(missed), positions, "amin")
    cache.firsts.fill_(UNCLAIMED).scatter_reduce_(0, set_of(cache, missed), positions, "amin")
    cache.totals[0] += len(missed)
    return Misses(positions, torch.tensor([len(missed)], dtype=torch.int32, device=ids.device))


@kernel(gpu=always, device_of=lambda cache: cache.tags)
def fetch_misses(
    cache: RowCache, ids: torch.Tensor, misses: Misses, table: torch.Tensor, out: torch.Tensor
) -> None:
    """Copy the rows that missed from table [rows, dim] to out, each distinct one once or so.

    The table may lie in pinned host memory. Keys whose id an earlier key has fetched are left to
    admit_misses.
    """
    positions = misses.positions[: misses.count].long()
    fetched = positions[_owners(cache, ids, positions) == positions]
    out.index_copy_(0, fetched, table.index_select(0, ids[fetched]))
    cache.totals[1] += len(fetched)


@kernel(gpu=always, device_of=lambda cache: cache.tags)
def admit_misses(cache: RowCache, ids: torch.Tensor, misses: Misses, out: torch.Tensor) -> None:
    """Complete the rows of equal misses in out, and put candidates in place of lesser rows."""
    positions = misses.positions[: misses.count].long()
    out.index_copy_(0, positions, out.index_select(0, _owners(cache, ids, positions)))
    candidates = positions[cache.firsts[set_of(cache, ids[positions])] == positions]
    sets = set_of(cache, ids[candidates])
    first, second = sketch_places(cache, ids[candidates])
    uses = torch.minimum(cache.sketch[first], cache.sketch[second])
    least, ways = cache.counters[sets].min(dim=1)
    better = uses > least
    slots, winners = (sets * WAYS + ways)[better], candidates[better]
    old, old_uses = cache.tags.view(-1)[slots], least[better]
    remembered = old >= 0
    for places in sketch_places(cache, old[remembered]):
        cache.sketch.scatter_reduce_(0, places, old_uses[remembered], "amax")
    cache.tags.view(-1)[slots] = ids[winners]
    cache.counters.view(-1)[slots] = uses[better]
    cache.rows.index_copy_(0, slots, out.index_select(0, winners))


@kernel(gpu=always, device_of=lambda cache: cache.tags)
def write_cached(cache: RowCache, ids: torch.Tensor, rows: torch.Tensor) -> None:
    """Write rows [n, dim] of distinct ids where they are resident; others are left alone."""
    slots, found = find_slots(cache, ids)
    cache.rows.index_copy_(0, slots[found], rows[found])


def find_slots(cache: RowCache, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The slot of each id, and whether it is resident; the slot means nothing where it is not."""
    sets = set_of(cache, ids)
    equal = cache.tags.index_select(0, sets) == ids[:, None]
    return sets * WAYS + equal.int().argmax(dim=1), equal.any(dim=1)


def set_of(cache: RowCache, ids: torch.Tensor) -> torch.Tensor:
    """The set of each id: the upper half of its hash, scaled to the number of sets."""
    return (_upper(mixed(ids) * MIX[1]) * len(cache.tags)) >> 32


def sketch_places(cache: RowCache, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Two counters of each id; the lesser one is the better estimate."""
    hashed, mask = mixed(ids), len(cache.sketch) - 1
    return _upper(hashed * MIX[2]) & mask, _upper(hashed * MIX[3]) & mask


def claim_places(ids: torch.Tensor) -> torch.Tensor:
    return _upper(mixed(ids) * MIX[3]) & (CLAIMS - 1)


def mixed(ids: torch.Tensor) -> torch.Tensor:
    """Products in 64 bits drop what overflows; the upper half is then folded onto the lower."""
    product = ids * MIX[0]
    return product ^ _upper(product)


def _upper(x: torch.Tensor) -> torch.Tensor:
    return (x >> 32) & 0xFFFFFFFF


def _owners(cache: RowCache, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """For each missed key the key that fetches its row: the first equal one, or itself.

    Where two ids share a claim, keys of the one that came later fetch for themselves.
    """
    first = cache.claims[claim_places(ids[positions])].long()
    return torch.where(ids[first] == ids[positions], first, positions)
