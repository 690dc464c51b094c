"""Which worker holds which KV blocks: told by events, or predicted from what was routed.

A block is known by its chained hash, so that whoever holds it holds its ancestors too: along a
prompt's chain the set of holders only shrinks, and a few probes find where it does. (A pool may
for a while keep a block whose parent it evicted; the overlap is then too long by that much.)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from tokenmill.sched.kv_events import Dump, Event, EventBatch, Removed, Stored

MAX_PENDING = 256  # batches kept while a dump is on its way
MAX_RETIRED = 16  # bits that wait to be cleaned up together
MAX_MASKS = 1 << 16  # distinct sets of holders that are shared
NUM_AGES = 2  # spans into which the lifetime of a prediction is cut
NUM_BOUNDED_AGES = 8  # the same where a worker's memory bounds them too
STRIDE = 4  # beside events one block in so many stands for all of them: a decision must be quick
MAX_AGES = 32  # beyond them the oldest goes, whatever it holds


@dataclass(slots=True)
class _Worker:
    """A worker has one bit in every mask; a dump gives it a fresh one."""

    bit: int
    sequence: int = 0  # the last batch applied
    num_blocks: int = 0
    pending: deque[EventBatch] | None = None  # after a gap, until the dump comes


@dataclass(slots=True)
class _Age:
    """What was routed in a span of time."""

    began_s: float
    holders: dict[int, int] = field(default_factory=dict)  # hash -> mask of bits
    counts: dict[int, int] = field(default_factory=dict)  # blocks by bit
    live: int = -1  # bits that still count


class KVIndex:
    """Block hash -> the workers that hold it, as the bits of one integer."""

    def __init__(self, predict_s: float = 0.0, capacity_blocks: int | None = None) -> None:
        """Predictions live `predict_s` at most, the newest `capacity_blocks` of each worker."""
        self._holders: dict[int, int] = {}
        self._masks: dict[int, int] = {}  # equal masks are one object
        self._workers: dict[str, _Worker] = {}
        self._names: dict[int, str] = {}  # by bit number
        self._live = 0
        self._retired = 0
        self._predict_s = predict_s
        self._capacity = capacity_blocks
        self._num_ages = NUM_AGES if capacity_blocks is None else NUM_BOUNDED_AGES
        self._stride = STRIDE if capacity_blocks is None else 1
        self._ages: deque[_Age] = deque()

    # Workers and their events.

    def add_worker(self, name: str) -> None:
        """A worker without blocks; one that runs already shows a gap at its first batch."""
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
        """Distinct blocks that events have told of."""
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
        for event in batch.events:
            self._apply(name, worker, event)
        return True

    def load(self, name: str, dump: Dump) -> bool:
        """Replace a worker's state, then take the batches kept; False: pull another dump."""
        worker = self._workers.get(name)
        if worker is None:
            return True
        pending, worker.pending = worker.pending or (), None
        self._clear(name, worker)
        self._store(worker, dump.hashes)
        worker.sequence = dump.sequence
        return all([self.apply(name, batch) for batch in pending])

    def _apply(self, name: str, worker: _Worker, event: Event) -> None:
        if isinstance(event, Stored):
            self._store(worker, event.hashes)
        elif isinstance(event, Removed):
            self._remove(worker, event.hashes)
        else:
            self._clear(name, worker)

    def _store(self, worker: _Worker, hashes: Iterable[int]) -> None:
        holders, masks, bit = self._holders, self._masks, worker.bit
        known = holders.get
        added = 0
        for block_hash in hashes:
            mask = known(block_hash, 0)
            if mask & bit:
                continue
            added += 1
            mask |= bit
            holders[block_hash] = masks.setdefault(mask, mask)
        worker.num_blocks += added
        if len(masks) > MAX_MASKS:
            masks.clear()

    def _remove(self, worker: _Worker, hashes: Iterable[int]) -> None:
        holders, masks, bit, live = self._holders, self._masks, worker.bit, self._live
        known = holders.get
        for block_hash in hashes:
            mask = known(block_hash, 0)
            if not mask & bit:
                continue
            worker.num_blocks -= 1
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
        kept = ((block_hash, mask & live) for block_hash, mask in self._holders.items())
        self._holders = {h: masks.setdefault(mask, mask) for h, mask in kept if mask}
        for age in self._ages:
            age.live &= ~self._retired
            age.holders = {h: mask & age.live for h, mask in age.holders.items()}
            age.live |= self._retired
            age.counts = {bit: n for bit, n in age.counts.items() if bit & live}
        self._retired = 0

    # Predictions.

    def predict(self, name: str, chain: Sequence[int], now_s: float, start: int = 0) -> None:
        """A prompt was sent to a worker: it will soon hold the blocks from `start` on."""
        stride = self._stride
        hashes = chain[start + (stride - 1 - start) % stride :: stride]
        if not self._predict_s or not hashes:
            return
        bit = self._workers[name].bit
        age = self._current_age(bit, now_s)
        holders = age.holders
        if holders.keys().isdisjoint(hashes):
            holders.update(dict.fromkeys(hashes, bit))
            added = len(hashes)
        else:
            added = 0
            for block_hash in hashes:
                mask = holders.get(block_hash, 0)
                if not mask & bit:
                    holders[block_hash] = mask | bit
                    added += 1
        age.counts[bit] = age.counts.get(bit, 0) + added
        if self._capacity is not None:
            self._bound(bit, self._capacity)

    def _current_age(self, bit: int, now_s: float) -> _Age:
        """The age to write to: a new one when the last is over, or full of this worker's blocks."""
        ages = self._ages
        while ages and now_s - ages[0].began_s >= self._predict_s:
            ages.popleft()
        if ages:
            last, full = ages[-1], False
            if self._capacity is not None:
                full = last.counts.get(bit, 0) * self._num_ages >= self._capacity
            if not full and (now_s - last.began_s) * self._num_ages < self._predict_s:
                return last
        if len(ages) == MAX_AGES:
            ages.popleft()
        ages.append(_Age(now_s))
        return ages[-1]

    def _bound(self, bit: int, capacity: int) -> None:
        """Let go of the oldest ages of a worker, as far as its blocks exceed its memory."""
        total = 0
        for age in reversed(self._ages):
            total += age.counts.get(bit, 0)
            if total > capacity and age is not self._ages[-1]:
                age.counts.pop(bit, None)
                age.live &= ~bit
        if not all(age.counts for age in self._ages):
            self._ages = deque(age for age in self._ages if age.counts)

    # Lookup.

    def overlaps(self, hashes: Sequence[int], now_s: float = 0.0) -> dict[str, int]:
        """How many leading blocks of a chain each worker holds or will; none: not in the dict."""
        names = self._names
        found: dict[str, int] = {}
        for depth, mask in self._drops(hashes, now_s):
            while mask:
                number = mask.bit_length() - 1
                found[names[number]] = depth
                mask ^= 1 << number
        return found

    def _drops(self, hashes: Sequence[int], now_s: float) -> Iterator[tuple[int, int]]:
        """(depth, mask of the workers that hold exactly so many blocks), by bisection."""
        if not hashes:
            return
        live = self._live
        known = self._holders.get
        ages = [
            (age.holders.get, age.live & live)
            for age in self._ages
            if now_s - age.began_s < self._predict_s
        ]

        stride, count = self._stride, len(hashes)

        def probe(index: int) -> int:
            mask = known(hashes[index], 0) & live
            index += stride - 1 - index % stride
            if index < count:
                block_hash = hashes[index]
                for predicted, counted in ages:
                    mask |= predicted(block_hash, 0) & counted
            return mask

        last = count - 1
        first_mask = probe(0)
        last_mask = probe(last) & first_mask
        if last_mask:
            yield last + 1, last_mask
        spans = [(0, first_mask, last, last_mask)] if first_mask != last_mask else []
        while spans:
            low, low_mask, high, high_mask = spans.pop()
            if high - low == 1:
                yield high, low_mask ^ high_mask
                continue
            middle = (low + high) // 2
            mask = (probe(middle) & low_mask) | high_mask
            if mask != low_mask:
                spans.append((low, low_mask, middle, mask))
            if mask != high_mask:
                spans.append((middle, mask, high, high_mask))
