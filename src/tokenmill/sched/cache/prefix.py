"""The prefix cache and a sequence: what it starts from, on the device and in tiers, and adds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from struct import pack
from typing import NamedTuple

from tokenmill.core.images import content_ids
from tokenmill.sched.cache.blocks import BlockPool, block_hashes, next_block_hashes
from tokenmill.sched.cache.tiers import (
    WINDOW,
    Page,
    Tiers,
    block_name,
    next_digest,
    root_digest,
)
from tokenmill.sched.sequence import Item, Sequence


def match_prefix(pool: BlockPool, seq: Sequence) -> list[int]:
    """The cached blocks of full layers that a waiting sequence can start from.

    One token is left to compute, unless another engine does it. Then blocks of sliding layers come
    from there, too; else they must be cached, as far as the next token sees.
    """
    matched = match_full(pool, seq)
    seq.num_found = len(matched)
    if pool.sliding.num_groups and not seq.remote:
        del matched[num_seen(pool, len(matched), lambda i: bool(pool.beside(matched[i]))) :]
    return matched


def match_full(pool: BlockPool, seq: Sequence) -> list[int]:
    """The cached blocks of full layers, whatever is cached of sliding ones."""
    if not pool.prefix_cache:
        return []
    chain, size = seq.chain, pool.block_size
    num_hashed = len(chain) - 1
    if seq.num_tokens // size > num_hashed:
        unhashed = _contents(seq, num_hashed * size)
        chain += block_hashes(unhashed, size, (chain[-1], num_hashed))
    if seq.prompt_logprobs is not None:  # each prompt position has to be computed
        return []
    limit = (seq.num_tokens - (not seq.remote)) // size
    return pool.match(_contents(seq), chain[1 : limit + 1], seq.request.task.cache_salt)


def num_seen(pool: BlockPool, end: int, has_window: Callable[[int], bool]) -> int:
    """The most of these blocks after which sliding layers find all that the next token sees."""
    sliding, size = pool.sliding, pool.block_size
    first = sliding.first_block(end * size, size)
    for index in range(end - 1, -1, -1):
        if index < first:
            break
        if not has_window(index):
            end, first = index, sliding.first_block(index * size, size)
    return end


class StoredPrefix(NamedTuple):
    """A prefix of which tiers hold what the device does not."""

    matched: list[int]  # its first blocks, of full layers, that the device caches
    end: int  # how many blocks it has
    missing: list[tuple[bytes, int]]  # (name, blocks) of what is to be loaded, full layers first


@dataclass(slots=True, eq=False)
class PrefixLoad:
    """What is to be copied to the device for a sequence that holds the blocks for it."""

    seq: Sequence
    end: int
    pages: list[Page]
    ahead: bool = False  # there is no place for the sequence yet: it waits on, its prefix cached
    spoilt: bool = False  # a step that failed was to write what the sequence has matched


def find_stored(pool: BlockPool, seq: Sequence) -> StoredPrefix | None:
    """The longest prefix on the device and in tiers, if some of it has to be loaded."""
    if pool.tiers is None or seq.remote or seq.prompt_logprobs is not None:
        return None
    found = _StoredSearch(pool, pool.tiers, seq).longest()
    return found if found.missing else None


class _StoredSearch:
    """What the device and tiers have of a waiting sequence."""

    def __init__(self, pool: BlockPool, tiers: Tiers, seq: Sequence) -> None:
        self._pool, self._tiers, self._seq = pool, tiers, seq
        self._matched = match_full(pool, seq)

    def longest(self) -> StoredPrefix:
        limit = (self._seq.num_tokens - 1) // self._pool.block_size
        end = len(self._matched)
        while end < limit and self._tiers.holds(self._name(end)):
            end += 1
        self._seq.num_found = end
        while True:
            if self._pool.sliding.num_groups:
                end = num_seen(self._pool, end, self._has_window)
            missing = self._missing(end)
            num_loadable = self._tiers.num_loadable(missing)
            if num_loadable == len(missing):
                return StoredPrefix(self._matched[:end], end, missing)
            end = min(end - 1, len(self._matched) + num_loadable)

    def _missing(self, end: int) -> list[tuple[bytes, int]]:
        missing = [(self._name(index), 1) for index in range(len(self._matched), end)]
        sliding, size = self._pool.sliding, self._pool.block_size
        if groups := sliding.num_groups:
            seen = range(sliding.first_block(end * size, size), end)
            absent = [index for index in seen if not self._has_window_here(index)]
            missing += [(self._name(index) + WINDOW, groups) for index in absent]
        return missing

    def _name(self, index: int) -> bytes:
        return name_in_tiers(self._pool, self._seq, index)

    def _has_window(self, index: int) -> bool:
        return self._has_window_here(index) or self._tiers.holds(self._name(index) + WINDOW)

    def _has_window_here(self, index: int) -> bool:
        return index < len(self._matched) and bool(self._pool.beside(self._matched[index]))


def cache_loaded(pool: BlockPool, seq: Sequence, end: int) -> None:
    """Let others find the blocks up to `end` of a sequence, which tiers have filled."""
    size, groups = pool.block_size, pool.sliding.num_groups
    seq.num_computed_tokens = end * size
    for index in range(seq.window_first, seq.num_inserted_blocks if groups else 0):
        first = (index - seq.window_first) * groups
        block_id = seq.block_ids[index]
        if pool.is_cached(block_id):  # a step that failed may have made it unfindable
            pool.put_beside(pool.identity(block_id), seq.window_ids[first : first + groups])
    cache_blocks(pool, [(seq, end * size)])


def name_in_tiers(pool: BlockPool, seq: Sequence, index: int) -> bytes:
    """The name of one of a sequence's full blocks, of which the chain is hashed."""
    assert pool.tiers is not None
    digests, size = seq.digests, pool.block_size
    above = digests[-1] if digests else root_digest(pool.tiers.root, seq.request.task.cache_salt)
    for number in range(len(digests), index + 1):
        contents = pack(f"<{size}q", *_contents(seq, number * size, (number + 1) * size))
        above = next_digest(above, contents)
        digests.append(above)
    return block_name(digests[index], seq.chain[index + 1])


def cache_blocks(pool: BlockPool, filled: list[Item]) -> None:
    """Cache the blocks that each (sequence, end) completes in this step."""
    size, groups = pool.block_size, pool.sliding.num_groups
    _hash([(seq, end) for seq, end in filled if len(seq.chain) <= end // size], size)
    for seq, end in filled:
        parent = seq.parent
        for index in range(seq.num_inserted_blocks, end // size):
            tokens = tuple(_contents(seq, index * size, (index + 1) * size))
            above, own = seq.chain[index : index + 2]
            name = None if pool.tiers is None else name_in_tiers(pool, seq, index)
            parent = pool.insert(seq.block_ids[index], own, parent, tokens, above, name)
            if groups and index >= seq.window_first:
                first = (index - seq.window_first) * groups
                pool.put_beside(parent, seq.window_ids[first : first + groups])
        seq.parent = parent
        seq.num_inserted_blocks = end // size


def cache_computed(pool: BlockPool, seq: Sequence) -> None:
    """Cache the full blocks of known tokens whose keys and values are computed."""
    end = min(seq.num_computed_tokens, seq.num_tokens)
    if pool.prefix_cache and end // pool.block_size > seq.num_inserted_blocks:
        cache_blocks(pool, [(seq, end)])


def _contents(seq: Sequence, first: int = 0, end: int | None = None) -> list[int]:
    """What tells the tokens from `first` to `end` apart from others: their ids, or an image."""
    known = seq.token_ids if end is None and not first else seq.token_ids[first:end]
    return content_ids(known, seq.request.task.images, first)


def _hash(unhashed: list[Item], size: int) -> None:
    """Extend the hash chain of each (sequence, end) to `end`, one block of all at a time."""
    while unhashed:
        starts = [(seq.chain[-1], len(seq.chain) - 1) for seq, _ in unhashed]
        blocks = [
            _contents(seq, index * size, (index + 1) * size)
            for (seq, _), (_, index) in zip(unhashed, starts, strict=True)
        ]
        hashes = next_block_hashes(blocks, size, starts)
        for (seq, _), block_hash in zip(unhashed, hashes, strict=True):
            seq.chain.append(block_hash)
        unhashed = [(seq, end) for seq, end in unhashed if len(seq.chain) <= end // size]
