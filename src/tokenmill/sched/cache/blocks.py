"""Paged KV blocks: chained block hash, ref-counts, LRU free list and prefix lookup."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from struct import error as struct_error
from struct import pack

import numpy as np
import numpy.typing as npt

from tokenmill.core.kv import DEVICE
from tokenmill.core.kv_events import EventJournal
from tokenmill.core.kv_groups import NONE_SLIDE, Sliding
from tokenmill.sched.cache.evictable import Evictable
from tokenmill.sched.cache.start_points import OWNERS, SHARE, StartPoints
from tokenmill.sched.cache.tiers import WINDOW, Page, Tiers

U64 = npt.NDArray[np.uint64]

_GOLDEN = 0x9E3779B97F4A7C15
_CHAIN_FACTOR = 0xBF58476D1CE4E5B9  # odd, so its powers never vanish modulo 2**64


def _mix(x: U64) -> U64:
    """Spread every input bit over the word, one to one, [n] -> [n]."""
    x = (x ^ (x >> np.uint64(32))) * np.uint64(0xD6E8FEB86659FD93)
    return x ^ (x >> np.uint64(29))


@lru_cache(maxsize=8)
def _multipliers(block_size: int) -> U64:
    """One odd word per position of a block, [block_size]; the same in every process."""
    positions = np.arange(1, block_size + 1, dtype=np.uint64)
    return _mix(positions * np.uint64(_GOLDEN)) | np.uint64(1)


@lru_cache(maxsize=32)
def _powers(count: int) -> U64:
    """_CHAIN_FACTOR ** i modulo 2**64 for i < count, [count]."""
    powers = np.full(count, _CHAIN_FACTOR, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def hash_input(token_ids: Sequence[int], before: U64 | None = None) -> U64:
    """Tokens as the words that are hashed, [n], behind others: to be hashed more than once."""
    words = _words(token_ids, len(token_ids))
    return words if before is None else np.concatenate([before, words])


def _words(token_ids: Sequence[int] | U64, count: int) -> U64:
    """The first tokens as words, [count]; an array is read where it lies."""
    if isinstance(token_ids, np.ndarray):
        return token_ids[:count]
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return np.frombuffer(token_ids, np.uint64, count)
    some = token_ids if len(token_ids) == count else token_ids[:count]
    try:  # 32-bit words are packed twice as fast
        return np.frombuffer(pack(f"{count}I", *some), np.uint32).astype(np.uint64)
    except struct_error:
        return np.frombuffer(pack(f"{count}q", *some), np.uint64)


def byte_tokens(data: bytes) -> array[int]:
    """Four bytes as one token each, for hashing a text whose tokens are not known."""
    words = np.frombuffer(data, np.uint32, len(data) // 4).astype(np.int64)
    return array("q", words.tobytes())


def _terms(tokens: U64, block_size: int, indices: slice | list[int]) -> U64:
    """What each block adds to the chain at its index, [blocks]."""
    words = tokens.reshape(-1, block_size)
    last = indices.stop if isinstance(indices, slice) else max(indices) + 1
    powers = _powers(1 << int(last).bit_length())[indices]
    sums: U64 = np.einsum("ij,j->i", words, _multipliers(block_size))  # quicker here than @
    return _mix(sums + np.uint64(_GOLDEN)) * powers


@lru_cache(maxsize=256)
def chain_seed(salt: str = "") -> int:
    """The hash that stands before the first block; every salt has its own."""
    return int.from_bytes(blake2b(salt.encode(), digest_size=8).digest(), "little")


def block_hashes(
    token_ids: Sequence[int],
    block_size: int,
    start: tuple[int, int] | None = None,
    salt: str = "",
) -> list[int]:
    """Hash each full block together with all before it; equal in every process.

    `start` continues a chain without rehashing: (hash of its last block, how many blocks it has).
    Without it the chain begins at the salt's seed.
    """
    hashes: list[int] = hash_chain(token_ids, block_size, start, salt).tolist()
    return hashes


def hash_chain(
    token_ids: Sequence[int] | U64,
    block_size: int,
    start: tuple[int, int] | None = None,
    salt: str = "",
) -> U64:
    """block_hashes() as an array, for those who look at few of them."""
    count = len(token_ids) // block_size
    if count == 0:
        return np.empty(0, np.uint64)
    chain, index = start if start is not None else (chain_seed(salt), 0)
    tokens = _words(token_ids, count * block_size)
    terms = _terms(tokens, block_size, slice(index, index + count))
    hashes: U64 = np.add.accumulate(terms) + np.uint64(chain)
    return hashes


def next_block_hashes(
    blocks: list[list[int]], block_size: int, starts: list[tuple[int, int]]
) -> list[int]:
    """Continue many chains by one full block each, in one pass."""
    tokens = array("q")
    for block in blocks:
        tokens.fromlist(block)
    chains, indices = zip(*starts, strict=True)
    terms = _terms(_words(tokens, len(tokens)), block_size, list(indices))
    hashes: list[int] = (terms + np.array(chains, dtype=np.uint64)).tolist()
    return hashes


class BlockPool:
    """Owns every KV block: each is referenced, or free; a free one may still hold a cached prefix.

    A cached block is found by its chained hash and trusted only if its own tokens and the identity
    of its parent agree. Identities are never reused, so agreement at each block from the root on
    means that the whole prefix is equal, whatever the hashes do.

    A salt's part before its first NUL is its owner: of several owners the one with the most cached
    blocks that are free loses some, so that nobody can push out the prefixes of the others.

    Where layers slide, a block is a page of one group of layers. Those of sliding layers are cached
    beside the full layers' block of the same tokens, under its identity, all together or not. Once
    nobody holds them they stay cached only where `points` keeps them, and are free otherwise.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_cache: bool = True,
        sliding: Sliding = NONE_SLIDE,
    ) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(
                f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}"
            )
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.sliding = sliding
        self._refs = [0] * num_blocks
        self._plain = list(range(num_blocks - 1, -1, -1))  # free, nothing cached: a stack
        self._evictable = Evictable()  # free, cached
        self._owners: dict[str, int] = {}
        self._by_hash: dict[int, int] = {}
        # Of a cached block; tokens are None where nothing is cached, () of sliding layers.
        self._tokens: list[tuple[int, ...] | None] = [None] * num_blocks
        self._hashes = [0] * num_blocks
        self._identities = [0] * num_blocks
        self._parents: list[int | str] = [""] * num_blocks  # an identity, or the salt at the root
        self._next_identity = 1
        self._beside: dict[int, tuple[int, ...]] = {}  # identity: blocks of sliding layers
        self.points = StartPoints(num_blocks // SHARE // max(1, sliding.num_groups))
        self._journal: EventJournal | None = None
        self.tiers: Tiers | None = None  # they hold what is evicted
        # With tiers: the names of cached blocks by identity, and what is evicted and still there.
        self._names: dict[int, bytes] = {}
        self._evicted: dict[bytes, Page] = {}

    def record_events(self) -> EventJournal:
        """The journal of what is cached and forgotten from now on; without one nobody listens."""
        if self._journal is None:
            self._journal = EventJournal()
        return self._journal

    @property
    def journal(self) -> EventJournal | None:
        return self._journal

    def cached_hashes(self) -> list[int]:
        return list(self._by_hash)

    @property
    def num_free(self) -> int:
        """Blocks that allocate() can hand out, cached ones included."""
        return len(self._plain) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_used_tokens(self) -> int:
        """Tokens whose KV in all layers is as large as what is used."""
        return self.num_used * self.block_size // self.sliding.pages_per_block

    def allocate(self, count: int) -> list[int]:
        """Take blocks for writing: plain ones first, then cached ones, the least recently used."""
        if count > self.num_free:
            raise ValueError(f"asked for {count} blocks, {self.num_free} are free")
        plain = self._plain
        taken = []
        for _ in range(count):
            while not plain and self.points.has_stale:
                self._drop_windows(self.points.take_stale())
            if plain:
                block_id = plain.pop()
            else:
                block_id = self._evictable.pop()
                if self._names:
                    self._note_evicted(block_id)
                self._refs[block_id] = 1
                self._forget(block_id)
            self._refs[block_id] = 1
            taken.append(block_id)
        return taken

    def _note_evicted(self, block_id: int) -> None:
        identity = self._identities[block_id]
        name = self._names.get(identity)
        if name is None:
            return
        if self._tokens[block_id]:
            self._evicted[name] = Page(name, (block_id,))
        self._note_window_evicted(identity)

    def _note_window_evicted(self, identity: int) -> None:
        name, beside = self._names.get(identity), self._beside.get(identity, ())
        # A block that is referenced may be written just now, for another block of equal content.
        if name is not None and beside and not any(self._refs[other] for other in beside):
            self._evicted[name + WINDOW] = Page(name + WINDOW, beside)

    def take_evicted(self) -> list[Page]:
        """What was evicted since the last call; the next batch may overwrite it."""
        evicted, self._evicted = self._evicted, {}
        return list(evicted.values())

    def is_leaving(self, name: bytes) -> bool:
        """Whether take_evicted() will have it."""
        return name in self._evicted

    def release(self, block_ids: Sequence[int]) -> None:
        """Give back one reference to each block, tail first so that prefixes are evicted last."""
        refs = self._refs
        for block_id in reversed(block_ids):
            left = refs[block_id] - 1
            if left < 0:
                raise ValueError(f"block {block_id} is released more often than it was taken")
            refs[block_id] = left
            if left == 0:
                tokens, identity = self._tokens[block_id], self._identities[block_id]
                if tokens is None:
                    self._plain.append(block_id)
                elif tokens or self.points.keeps(identity):
                    self._evictable.add(block_id, identity & OWNERS)
                else:
                    self._drop_window(block_id)

    def _drop_window(self, block_id: int) -> None:
        """Free a block of sliding layers that was just released, and those of the other groups."""
        for other in self._beside.pop(self._identities[block_id]):
            if other != block_id:
                self._uncache(other)
        self._tokens[block_id] = None
        self._plain.append(block_id)

    def _drop_windows(self, identities: Iterable[int]) -> None:
        """Free the blocks of sliding layers that stand beside these ones and that nobody holds."""
        for identity in identities:
            block_ids = self._beside.get(identity, ())
            if not any(self._refs[block_id] for block_id in block_ids):
                self._note_window_evicted(identity)
                self._beside.pop(identity, None)
                for block_id in block_ids:
                    self._uncache(block_id)

    def match(self, token_ids: Sequence[int], hashes: Sequence[int], salt: str = "") -> list[int]:
        """The cached blocks that hold the longest prefix of token_ids, at most len(hashes)."""
        size = self.block_size
        matched = []
        parent: int | str = salt
        for index, block_hash in enumerate(hashes):
            block_id = self._by_hash.get(block_hash)
            if block_id is None or self._parents[block_id] != parent:
                break
            if self._tokens[block_id] != tuple(token_ids[index * size : (index + 1) * size]):
                break
            matched.append(block_id)
            parent = self._identities[block_id]
        return matched

    def num_revived(self, block_ids: Iterable[int]) -> int:
        """How many of these blocks are free, so that acquire() takes them from the free ones."""
        refs = self._refs
        return sum(refs[block_id] == 0 for block_id in block_ids)

    def acquire(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each matched block; a free one leaves the free list."""
        refs = self._refs
        for block_id in block_ids:
            if refs[block_id] == 0:
                self._evictable.remove(block_id, self._identities[block_id] & OWNERS)
            refs[block_id] += 1

    def is_cached(self, block_id: int) -> bool:
        return self._tokens[block_id] is not None

    def identity(self, block_id: int) -> int:
        """The identity under which a cached block's children are stored."""
        return self._identities[block_id]

    def insert(
        self,
        block_id: int,
        block_hash: int,
        parent: int | str,
        tokens: tuple[int, ...],
        parent_hash: int | None = None,
        name: bytes | None = None,
    ) -> int:
        """Cache a full, referenced block; returns the identity that its child names as parent.

        Of two blocks with equal content the first stays cached, unless nobody holds it: it would
        leave before its children. Another block with the same hash is a collision or hangs on an
        evicted parent: the newcomer takes its place. `name` is that of the block in tiers, if there
        are any.
        """
        holder = self._by_hash.get(block_hash)
        if holder is not None:
            if self._parents[holder] == parent and self._tokens[holder] == tokens:
                if self._refs[holder] == 0:
                    self._hold(block_id, self._identities[holder], block_hash, parent, tokens)
                    self._uncache(holder)
                return self._identities[holder]
            self.forget((holder,))
        owner = parent & OWNERS if isinstance(parent, int) else self._owner_of(parent)
        identity = self._next_identity << 20 | owner
        self._next_identity += 1
        self._hold(block_id, identity, block_hash, parent, tokens)
        if name is not None:
            self._names[identity] = name
        if self._journal is not None:
            salt = parent if isinstance(parent, str) else None
            self._journal.stored(parent_hash, block_hash, DEVICE, tokens, salt)
        return identity

    def _hold(
        self,
        block_id: int,
        identity: int,
        block_hash: int,
        parent: int | str,
        tokens: tuple[int, ...],
    ) -> None:
        self._by_hash[block_hash] = block_id
        self._hashes[block_id] = block_hash
        self._tokens[block_id] = tokens
        self._parents[block_id] = parent
        self._identities[block_id] = identity

    def _owner_of(self, salt: str) -> int:
        owner, nul, _ = salt.partition("\0")
        return self._owners.setdefault(owner if nul else "", len(self._owners)) & OWNERS

    def put_beside(self, identity: int, block_ids: Sequence[int]) -> None:
        """Cache the blocks of sliding layers for the tokens of a cached block, unless some are."""
        if identity in self._beside:
            return
        self._beside[identity] = tuple(block_ids)
        for block_id in block_ids:
            self._tokens[block_id] = ()
            self._identities[block_id] = identity

    def beside(self, block_id: int) -> tuple[int, ...]:
        """The cached blocks of sliding layers for the tokens of a cached block; () if lost."""
        return self._beside.get(self._identities[block_id], ())

    def window(self, block_ids: Sequence[int], hashes: Sequence[int]) -> list[int]:
        """The identities of blocks, own or of equal content, if sliding layers have all of them."""
        found: list[int] = []
        for own, block_hash in zip(block_ids, hashes, strict=True):
            block_id = own if self._tokens[own] else self._by_hash.get(block_hash)
            if block_id is None or self._identities[block_id] not in self._beside:
                return []
            if found and self._parents[block_id] != found[-1]:
                return []
            found.append(self._identities[block_id])
        return found

    def keep_end(self, window: list[int]) -> None:
        """Keep sliding layers' blocks for a request that goes on where another has ended."""
        self._drop_windows(self.points.add_end(window))

    def keep_inside(self, window: list[int], branches: bool, guess: bool) -> None:
        """Keep sliding layers' blocks where a prompt ends, or a request branches or may."""
        self._drop_windows(self.points.add_inside(window, branches, guess))

    def pass_over(self, block_ids: Iterable[int]) -> None:
        """A request has these cached blocks in its prefix."""
        used, lost = self.points.passes([self._identities[block_id] for block_id in block_ids])
        self._drop_windows(lost)
        for identity in used:  # the newest of what is free
            self.acquire(self._beside[identity])
            self.release(self._beside[identity])

    def forget(self, block_ids: Iterable[int]) -> None:
        for block_id in block_ids:
            if self._tokens[block_id] is not None:
                self._forget(block_id)

    def clear(self) -> None:
        """Forget every cached block; whoever references one keeps it."""
        self.forget(list(self._by_hash.values()))
        if self._journal is not None:
            self._journal.cleared()

    def _forget(self, block_id: int) -> None:
        if self._tokens[block_id]:
            block_hash = self._hashes[block_id]
            del self._by_hash[block_hash]
            self._names.pop(self._identities[block_id], None)
            self._uncache(block_id)
            self.points.forget(self._identities[block_id])
            if self._journal is not None:
                self._journal.removed(block_hash)
        if self._beside:
            identity = self._identities[block_id]
            for other in self._beside.pop(identity, ()):
                self._uncache(other)
            self._drop_windows(self.points.lose(identity))

    def _uncache(self, block_id: int) -> None:
        if self._refs[block_id] == 0:
            self._evictable.remove(block_id, self._identities[block_id] & OWNERS)
            self._plain.append(block_id)
        self._tokens[block_id] = None
