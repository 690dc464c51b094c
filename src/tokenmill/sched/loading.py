"""Requests whose prefix tiers hold: they wait outside the batch until it is on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tokenmill.sched.cache.block_ledger import BlockLedger
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.cache.prefix import cache_blocks, match_full, name_in_tiers, num_seen
from tokenmill.sched.cache.tiers import WINDOW, Page
from tokenmill.sched.request_queues import RequestQueues
from tokenmill.sched.sequence import Sequence


class StoredPrefix(NamedTuple):
    """A prefix of which tiers hold what the device does not."""

    matched: list[int]  # its first blocks, of full layers, that the device caches
    end: int  # how many blocks it has


@dataclass(slots=True, eq=False)
class Load:
    """What is to be copied to the device for a sequence that holds the blocks for it."""

    seq: Sequence
    end: int
    pages: list[Page]
    ahead: bool = False  # there is no place for the sequence yet: it waits on, its prefix cached
    spoilt: bool = False  # a step that failed was to write what the sequence has matched


class _Lookup:
    """What the device and tiers have of a waiting sequence."""

    def __init__(self, pool: BlockPool, seq: Sequence) -> None:
        self._pool, self._seq = pool, seq
        self.matched = match_full(pool, seq)
        self.groups = pool.sliding.num_groups

    def longest(self) -> int:
        """Blocks of the longest prefix from which the sequence can start."""
        limit = (self._seq.num_tokens - 1) // self._pool.block_size
        end = len(self.matched)
        while end < limit and self._holds(end):
            end += 1
        while True:
            if self.groups:
                end = num_seen(self._pool, end, self._sees)
            missing = self.missing(end)
            assert self._pool.tiers is not None
            num_loadable = self._pool.tiers.num_loadable(missing)
            if num_loadable == len(missing):
                return end
            end = min(end - 1, len(self.matched) + num_loadable)

    def missing(self, end: int) -> list[tuple[bytes, int]]:
        """(name, blocks) of what is to be loaded of a prefix, full layers first."""
        full = [(self._name(index), 1) for index in range(len(self.matched), end)]
        size = self._pool.block_size
        first = self._pool.sliding.first_block(end * size, size) if self.groups else end
        windows = [i for i in range(first, end) if not self._sees_on_device(i)]
        return full + [(self._name(index) + WINDOW, self.groups) for index in windows]

    def _name(self, index: int) -> bytes:
        return name_in_tiers(self._pool, self._seq, index)

    def _holds(self, index: int) -> bool:
        assert self._pool.tiers is not None
        return self._pool.tiers.holds(self._name(index))

    def _sees_on_device(self, index: int) -> bool:
        return index < len(self.matched) and bool(self._pool.beside(self.matched[index]))

    def _sees(self, index: int) -> bool:
        assert self._pool.tiers is not None
        return self._sees_on_device(index) or self._pool.tiers.holds(self._name(index) + WINDOW)


def find_stored(pool: BlockPool, seq: Sequence) -> StoredPrefix | None:
    """The longest prefix on the device and in tiers, if some of it has to be loaded."""
    if pool.tiers is None or seq.remote or seq.prompt_logprobs is not None:
        return None
    lookup = _Lookup(pool, seq)
    end = lookup.longest()
    if not lookup.missing(end):
        return None
    return StoredPrefix(lookup.matched[:end], end)


def names_to_load(pool: BlockPool, seq: Sequence) -> list[tuple[bytes, int]]:
    """(name, blocks) of what tiers would have to load now for a waiting sequence."""
    if pool.tiers is None or seq.remote or seq.prompt_logprobs is not None:
        return []
    lookup = _Lookup(pool, seq)
    return lookup.missing(lookup.longest())


class Loading:
    """What tiers and the scheduler tell each other.

    Admission starts a sequence on its blocks; take_started() tells the tiers, which fill them
    outside the batch, and tell the scheduler when that is over(). Blocks of a sequence that ends
    meanwhile are kept until then. A sequence that is loaded ahead of its place waits on after
    that: nobody holds its blocks, so that running ones can have them, but they are cached.
    """

    def __init__(self, queues: RequestQueues, ledger: BlockLedger) -> None:
        self._queues, self._ledger, self._pool = queues, ledger, ledger.pool
        self._started: list[Load] = []
        self._loads: dict[Sequence, Load] = {}

    def __len__(self) -> int:
        return len(self._loads)

    @property
    def num_live(self) -> int:
        """Loads of sequences that have not ended."""
        return sum(not seq.finished for seq in self._loads)

    @property
    def num_ahead(self) -> int:
        """Loads of sequences that have no place yet."""
        return sum(load.ahead and not seq.finished for seq, load in self._loads.items())

    def reserve(self) -> None:
        """Keep blocks for the rest of the prompts that are loaded."""
        size = self._pool.block_size
        for seq, load in self._loads.items():
            if not seq.finished and not load.ahead:
                self._ledger.reserve(max(0, -(-seq.num_tokens // size) - len(seq.block_ids)))

    def start(self, seq: Sequence, stored: StoredPrefix, ahead: bool = False) -> None:
        """Take blocks for a prefix, and note that they are to be filled."""
        absent = self._ledger.occupy_stored(seq, stored.matched, stored.end)
        pages = [
            Page(name_in_tiers(self._pool, seq, index), (seq.block_ids[index],))
            for index in range(len(stored.matched), stored.end)
        ]
        pages += [
            Page(name_in_tiers(self._pool, seq, index) + WINDOW, tuple(ids))
            for index, ids in absent
        ]
        load = Load(seq, stored.end, pages, ahead)
        self._loads[seq] = load
        self._started.append(load)
        self._queues.receiving[seq.request_id] = seq

    def take_started(self) -> list[Load]:
        """Return the loads that are new, each once."""
        started, self._started = self._started, []
        return started

    def spoil(self, seq: Sequence) -> None:
        """What a sequence has matched was not written: it has to start anew after its load."""
        self._loads[seq].spoilt = True

    def over(self, load: Load, loaded: bool) -> bool:
        """A load has ended; True if its sequence runs now, else it waits again or has ended."""
        seq = load.seq
        del self._loads[seq]
        if seq.finished:
            self._ledger.release_abandoned(seq)
            return False
        del self._queues.receiving[seq.request_id]
        if loaded and not load.spoilt:
            self._cache(seq, load.end)
            if not load.ahead:
                self._ledger.take_slot(seq)
                self._queues.run(seq)
                return True
        self._ledger.release(seq)
        seq.num_computed_tokens = 0
        self._queues.waiting.push(seq)
        return False

    def _cache(self, seq: Sequence, end: int) -> None:
        """Let others find the blocks that have come."""
        pool, size = self._pool, self._pool.block_size
        num_matched, groups = seq.num_inserted_blocks, pool.sliding.num_groups
        seq.num_computed_tokens = end * size
        for index in range(seq.window_first, num_matched if groups else 0):
            first = (index - seq.window_first) * groups
            block_id = seq.block_ids[index]
            if pool.is_cached(block_id):  # a step that failed may have made it unfindable
                pool.put_beside(pool.identity(block_id), seq.window_ids[first : first + groups])
        cache_blocks(pool, [(seq, end * size)])
