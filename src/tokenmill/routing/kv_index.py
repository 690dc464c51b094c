"""Which worker holds which KV blocks: told by events, or predicted from what was routed.

A block is known by its chained hash, so that whoever holds it holds its ancestors too: along a
prompt's chain the set of holders only shrinks, and a few probes find where it does. (A pool may
for a while keep a block whose parent it evicted; the overlap is then too long by that much.)
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Protocol

import numpy as np

from tokenmill.core.kv import DEVICE, DISK, HOST
from tokenmill.core.kv_events import Dump, Event, EventBatch, Removed, Stored
from tokenmill.sched.cache.blocks import U64

MAX_PENDING = 256  # batches kept while a dump is on its way
MAX_RETIRED = 16  # bits that wait to be cleaned up together
MAX_MASKS = 1 << 16  # distinct sets of holders that are shared
MAX_EXPIRED = 4  # predictions of one call
STRIDE = 8  # of predicted blocks after the first ones, one in so many is kept: to be quick


@dataclass(slots=True)
class _Worker:
    """A worker and its bit in the masks; a dump gives it a new bit."""

    bit: int
    sequence: int = 0  # the last batch applied
    num_blocks: int = 0
    pending: deque[EventBatch] | None = None  # after a gap, until the dump comes
    assumed: OrderedDict[int, float] = field(default_factory=OrderedDict)  # hash -> when, by age


class KVIndex:
    """Block hash -> the workers that hold it, as the bits of one integer."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}
        # The same of tiers behind the devices; together with them a worker holds whole prefixes.
        self._tiers: dict[str, dict[int, int]] = {HOST: {}, DISK: {}}
        self._masks: dict[int, int] = {}  # equal masks are one object
        self._workers: dict[str, _Worker] = {}
        self._names: dict[int, str] = {}  # by bit number
        self._live = 0
        self._retired = 0
        self._predicted: dict[int, int] = {}
        self._ends: deque[tuple[float, int, list[int]]] = deque()  # (when, bit, hashes)

    # Workers and their events.

    def add_worker(self, name: str) -> None:
        """Add a worker without blocks; a gap in its first batch asks for a dump."""
        self.remove_worker(name)
        self._workers[name] = _Worker(self._take_bit(name))

    def remove_worker(self, name: str) -> None:
        """Forget a worker and its blocks; unknown ones are ignored."""
        worker = self._workers.pop(name, None)
        if worker is not None:
            self._retire(worker.bit)

    def num_blocks(self, name: str) -> int:
        """How many blocks events say that a worker holds."""
        return self._workers[name].num_blocks

    def __len__(self) -> int:
        return len(self._holders)

    def apply(self, name: str, batch: EventBatch) -> bool:
        """Take a batch; False: one was missed, pull a dump. Batches meanwhile are kept for it.

        What comes late from a worker that has left is ignored.
        """
        worker = self._workers.get(name)
        if worker is None:
            return True
        if worker.pending is not None:
            worker.pending.append(batch)
            return False
        if batch.sequence <= worker.sequence:
            return True
        if batch.sequence != worker.sequence + 1:
            worker.pending = deque([batch], MAX_PENDING)
            return False
        worker.sequence = batch.sequence
        self.take(name, batch.events)
        return True

    def take(self, name: str, events: Iterable[Event]) -> None:
        """Take events of a worker that is known, of which none was missed."""
        worker = self._workers[name]
        for event in events:
            self._apply(name, worker, event)

    def load(self, name: str, dump: Dump) -> bool:
        """Replace a worker's state, then take the batches kept; False: pull another dump."""
        worker = self._workers.get(name)
        if worker is None:
            return True
        pending, worker.pending = worker.pending or (), None
        self._clear(name, worker)
        self._store(worker, dump.hashes)
        for tier, hashes in dump.tiers.items():
            self._store(worker, hashes, tier)
        worker.sequence = dump.sequence
        return all([self.apply(name, batch) for batch in pending])

    def _apply(self, name: str, worker: _Worker, event: Event) -> None:
        if isinstance(event, Stored):
            self._store(worker, event.hashes, event.tier)
        elif isinstance(event, Removed):
            self._remove(worker, event.hashes, event.tier)
        else:
            self._clear(name, worker)

    def _store(self, worker: _Worker, hashes: Iterable[int], tier: str = DEVICE) -> None:
        holders = self._holders if tier == DEVICE else self._tiers[tier]
        masks, bit = self._masks, worker.bit
        known = holders.get
        added = 0
        for block_hash in hashes:
            mask = known(block_hash, 0)
            if mask & bit:
                continue
            added += 1
            mask |= bit
            holders[block_hash] = masks.setdefault(mask, mask)
        worker.num_blocks += added if tier == DEVICE else 0
        if len(masks) > MAX_MASKS:
            masks.clear()

    def _remove(self, worker: _Worker, hashes: Iterable[int], tier: str = DEVICE) -> None:
        holders = self._holders if tier == DEVICE else self._tiers[tier]
        masks, bit, live = self._masks, worker.bit, self._live
        known = holders.get
        for block_hash in hashes:
            mask = known(block_hash, 0)
            if not mask & bit:
                continue
            worker.num_blocks -= tier == DEVICE
            mask = (mask ^ bit) & live
            if mask:
                holders[block_hash] = masks.setdefault(mask, mask)
            else:
                del holders[block_hash]

    def _clear(self, name: str, worker: _Worker) -> None:
        self._retire(worker.bit)
        worker.bit = self._take_bit(name)
        worker.num_blocks = 0

    # Bits: a retired one is cleaned up with others, so that to lose a worker costs nothing.

    def _take_bit(self, name: str) -> int:
        if self._retired.bit_count() >= MAX_RETIRED:
            self._sweep()
        used = self._live | self._retired
        bit = ~used & (used + 1)
        self._live |= bit
        self._names[bit.bit_length() - 1] = name
        return bit

    def _retire(self, bit: int) -> None:
        self._live &= ~bit
        self._retired |= bit

    def _sweep(self) -> None:
        """Drop the retired bits everywhere."""
        live, masks = self._live, self._masks
        masks.clear()
        self._holders = self._swept(self._holders)
        self._tiers = {tier: self._swept(holders) for tier, holders in self._tiers.items()}
        self._predicted = {h: mask & live for h, mask in self._predicted.items()}
        self._ends = deque(end for end in self._ends if end[1] & live)
        self._retired = 0

    def _swept(self, holders: dict[int, int]) -> dict[int, int]:
        live, masks = self._live, self._masks
        kept = ((block_hash, mask & live) for block_hash, mask in holders.items())
        return {h: masks.setdefault(mask, mask) for h, mask in kept if mask}

    # Without events, or before the first one.

    def predict(self, name: str, chain: U64, start: int, until_s: float) -> list[int]:
        """A prompt was sent to a worker: events will tell of its blocks from `start` on.

        `until_s` must not decrease from call to call. What is known already needs no prediction.
        Returns the marks that are kept, for others who predict the same.
        """
        hashes: list[int] = _marks(chain)[_first_mark(start) :].tolist()
        self.predict_marks(name, hashes, until_s)
        return hashes

    def predict_marks(self, name: str, hashes: list[int], until_s: float) -> None:
        bit, predicted = self._workers[name].bit, self._predicted
        for block_hash in hashes:
            predicted[block_hash] = predicted.get(block_hash, 0) | bit
        self._ends.append((until_s, bit, hashes))

    def known_marks(self, name: str, hashes: list[int]) -> Iterator[bool]:
        """Whether a worker has each of these blocks, or was sent it."""
        bit, holders, predicted = self._workers[name].bit, self._holders, self._predicted
        return (bool((holders.get(h, 0) | predicted.get(h, 0)) & bit) for h in hashes)

    def expire(self, now_s: float) -> None:
        """Drop predictions whose time is over, a few at a time: there is one more per decision."""
        ends, predicted = self._ends, self._predicted
        for _ in range(MAX_EXPIRED):
            if not ends or ends[0][0] > now_s:
                return
            _, bit, hashes = ends.popleft()
            for block_hash in hashes:
                mask = predicted.get(block_hash, 0) & ~bit
                if mask:
                    predicted[block_hash] = mask
                else:
                    predicted.pop(block_hash, None)

    def assume(self, name: str, chain: U64, now_s: float, capacity: int) -> None:
        """No events will come: a worker holds the blocks that it was sent last, as an LRU does."""
        worker = self._workers[name]
        assumed = worker.assumed
        hashes: list[int] = chain.tolist()
        for block_hash in reversed(hashes):  # as a pool releases them: prefixes go last
            if block_hash in assumed:
                assumed.move_to_end(block_hash)
            assumed[block_hash] = now_s
        self._store(worker, hashes)
        self._remove(worker, [assumed.popitem(False)[0] for _ in range(len(assumed) - capacity)])

    def forget(self, before_s: float) -> None:
        """Drop what was assumed before a time."""
        for worker in self._workers.values():
            assumed, gone = worker.assumed, []
            while assumed and next(iter(assumed.values())) <= before_s:
                gone.append(assumed.popitem(False)[0])
            self._remove(worker, gone)

    # Lookup.

    def overlaps(self, chain: U64) -> dict[str, int]:
        """How many leading blocks of a chain each worker holds or will; none: not in the dict."""
        found: dict[str, int] = {}
        left = self._live
        drops = list(by_depth(self._holders, chain, left))
        for depth, mask in drops:
            left ^= mask
            self._note(found, mask, depth)
        if self._predicted:
            marks = _marks(chain)
            for depth, mask in (*drops, (0, left)):  # a prediction begins where knowledge ended
                first = _num_marks(depth)
                for more, further in by_depth(self._predicted, marks[first:], mask):
                    self._note(found, further, _depth(first + more))
        return found

    def tier_overlaps(self, chain: U64) -> Iterator[tuple[str, dict[str, int]]]:
        """By tier, the nearest first: how many leading blocks a worker has there or nearer."""
        together = [self._holders]
        for tier, holders in self._tiers.items():
            if not holders:
                continue
            together = [*together, holders]
            found: dict[str, int] = {}
            for depth, mask in by_depth(_Together(together), chain, self._live):
                self._note(found, mask, depth)
            yield tier, found

    def _note(self, found: dict[str, int], mask: int, depth: int) -> None:
        names = self._names
        while mask:
            number = mask.bit_length() - 1
            found[names[number]] = depth
            mask ^= 1 << number


class _Holders(Protocol):
    """Block hash -> mask."""

    def get(self, key: int, default: int, /) -> int: ...


class _Together:
    """Holders of a block in any of several tiers."""

    def __init__(self, tiers: list[dict[int, int]]) -> None:
        self._tiers = tiers

    def get(self, key: int, default: int, /) -> int:
        mask = default
        for holders in self._tiers:
            mask |= holders.get(key, 0)
        return mask


def _marks(chain: U64) -> U64:
    """Sampled blocks of a chain: predictions are kept for these alone."""
    return np.concatenate((chain[: STRIDE - 1], chain[STRIDE - 1 :: STRIDE]))


def _num_marks(depth: int) -> int:
    """Number of sampled blocks among the first `depth`."""
    return depth if depth < STRIDE else STRIDE - 1 + depth // STRIDE


def _depth(num_marks: int) -> int:
    return num_marks if num_marks < STRIDE else STRIDE * (num_marks - STRIDE + 1)


def _first_mark(start: int) -> int:
    """Index of the first sampled block after the cached prefix."""
    return _num_marks(start) if start >= STRIDE else 0


def num_led(start: int, known: Iterable[bool]) -> int:
    """Blocks after `start` up to the last sampled block that is known."""
    num_known = sum(1 for _ in takewhile(bool, known))
    return max(_depth(_first_mark(start) + num_known) - start, 0) if num_known else 0


def by_depth(holders: _Holders, chain: U64, among: int) -> Iterator[tuple[int, int]]:
    """By bisection: (depth, mask of those `among` that hold exactly so many blocks, but some)."""
    known, item = holders.get, chain.item
    last = len(chain) - 1
    low_mask = known(item(0), 0) & among if last >= 0 else 0
    if not low_mask:
        return
    last_mask = known(item(last), 0) & low_mask
    if last_mask:
        yield last + 1, last_mask
    spans = [(0, low_mask, last, last_mask)] if low_mask != last_mask else []
    while spans:
        low, low_mask, high, high_mask = spans.pop()
        if high - low == 1:
            yield high, low_mask ^ high_mask
            continue
        middle = (low + high) // 2
        mask = (known(item(middle), 0) & low_mask) | high_mask
        if mask != low_mask:
            spans.append((low, low_mask, middle, mask))
        if mask != high_mask:
            spans.append((middle, mask, high, high_mask))
