"""Keeps evicted KV blocks in host memory and on disk, and brings back those that requests need.

The engine's thread calls it: exchange() between the choice of a batch and its launch, poll() at the
start of a step. What was evicted is in host memory before the batch overwrites it. The least
recently used blocks of host memory move on to disk ahead of time; where the disk cannot keep up
they are dropped, and computed again if somebody asks for them. A block that cannot be read back is
computed, too: its request waits again, and does not find it any more.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

from tokenmill.core.kv import DISK, HOST
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.host_tier import HostTier, Slots
from tokenmill.kv.transfer import Read
from tokenmill.sched.cache.prefix import PrefixLoad, find_stored
from tokenmill.sched.cache.tiers import Page, hash_of, is_full
from tokenmill.sched.scheduler import Scheduler

if TYPE_CHECKING:
    from tokenmill.kv.tiers.page_copies import PageCopies

DiskUse = Literal["write", "read"]
_MOST_WRITES = 64  # blocks that are on their way to disk at a time
_CORES = os.cpu_count() or 1
# Threads: a checksum takes a core about a second for each GB.
_NUM_WRITERS, _NUM_READERS = min(4, _CORES), max(2, min(8, _CORES))
_FLUSH_S = 1e-3  # between two looks whether all is on disk
_UPCOMING = 8  # waiting requests that are looked at
_MOST_READS = 256  # blocks that are on their way from disk before a request asks for them
_SPARE = 8  # with a disk, one slot in so many is kept free
_COUNTERS = (
    "host_hit_tokens", "disk_hit_tokens", "saved_bytes", "save_s", "loaded_bytes", "load_s",
    "disk_written_bytes", "disk_read_bytes", "prefetched_bytes", "dropped",
)  # fmt: skip


class DiskWork(Read, Protocol):
    """A block on its way to disk or back, such as a Future."""

    def result(self) -> bool: ...


@dataclass(slots=True, eq=False)
class _Copy:
    """A load on its way: blocks come from disk to claimed slots first, then all to the device."""

    load: PrefixLoad
    began_ns: int
    slots: list[int] = field(default_factory=list)
    block_ids: list[int] = field(default_factory=list)
    pinned: list[bytes] = field(default_factory=list)  # in host memory
    reads: list[tuple[bytes, Slots, DiskWork]] = field(default_factory=list)
    copy: Read | None = None
    failed: bool = False  # a block was gone before its read began

    def add(self, slots: Slots, page: Page) -> None:
        self.slots += slots
        self.block_ids += page.block_ids

    def reading(self) -> bool:
        return not all(read.done() for _, _, read in self.reads)


class KVTiers:
    """Tiers behind the cache of one engine."""

    def __init__(
        self,
        scheduler: Scheduler,
        copies: PageCopies,
        disk: DiskTier | None,
        root: bytes,
        on_disk: Callable[[DiskUse, bytes, Slots, Future[bool]], DiskWork] | None = None,
    ) -> None:
        """`on_disk`: other ranks have a part of each block, and do what this one has begun."""
        self.root, self._on_disk = root, on_disk
        self.token_ms: dict[str, float] = {}  # in which a token comes back, by tier
        self._scheduler, self.copies, self._disk = scheduler, copies, disk
        self._page_bytes = int(copies.host.shape[1])
        self.host = HostTier(
            len(copies.host), self._left, lambda name, held: self._tell(HOST, name, held)
        )
        self._num_spare = max(1, self.host.num_slots // _SPARE)
        self._copying: list[_Copy] = []
        self._writes: list[tuple[bytes, Slots, DiskWork]] = []  # least recently used first
        self._prefetches: dict[bytes, tuple[Slots, DiskWork]] = {}  # from disk to host memory
        self._writers = ThreadPoolExecutor(_NUM_WRITERS, "kv-writer")
        self._readers = ThreadPoolExecutor(_NUM_READERS, "kv-reader")
        self._counts: dict[str, float] = dict.fromkeys(_COUNTERS, 0)
        scheduler.pool.tiers = self

    # What the scheduler asks.

    def holds(self, name: bytes) -> bool:
        """Whether a block is in host memory, on its way there, or on disk."""
        if name in self.host or self._scheduler.pool.is_leaving(name):
            return True
        return self._disk is not None and name in self._disk

    def num_loadable(self, sizes: Sequence[tuple[bytes, int]]) -> int:
        """How many of these (name, blocks), which are held, fit into one load, in order."""
        return self.host.num_loadable(sizes)

    # What the engine calls.

    @property
    def busy(self) -> bool:
        """True while something is on its way back."""
        return bool(self._copying or self._prefetches)

    def exchange(self) -> None:
        """Save what the next batch overwrites, and start the loads of admitted requests."""
        evicted = self._scheduler.take_evicted()
        if evicted:
            self._save(evicted)
        for load in self._scheduler.admission.take_loads():
            self._copying.append(self._start(load))
        if self._disk is not None:
            self._prefetch(self._disk)
            self._demote(self._disk)

    def poll(self) -> None:
        """Run the requests whose blocks have arrived, and free slots whose blocks are on disk."""
        if self._writes:
            self._writes = [entry for entry in self._writes if not self._end_write(*entry)]
        if self._disk is not None:
            while self._disk.changes:
                self._tell(DISK, *self._disk.changes.popleft())
        for name in [name for name, (_, read) in self._prefetches.items() if read.done()]:
            self._end_prefetch(name, *self._prefetches.pop(name))
        if self._copying:
            self._copying = [copy for copy in self._copying if not self._advance(copy)]

    def stats(self) -> dict[str, float]:
        """Counters since start, and how many blocks each tier holds."""
        held: dict[str, float] = {"host_blocks": len(self.host)}
        if self._disk is not None:
            held |= {"disk_blocks": len(self._disk), "disk_corrupt": self._disk.num_corrupt}
        return self._counts | held

    def hashes(self) -> dict[str, list[int]]:
        """The blocks of each tier, as routers know them."""
        names = {HOST: self.host.names(), DISK: [] if self._disk is None else self._disk.names()}
        return {tier: [hash_of(n) for n in some if is_full(n)] for tier, some in names.items()}

    def _tell(self, tier: str, name: bytes, held: bool) -> None:
        journal = self._scheduler.pool.journal
        if journal is None or not is_full(name):
            return
        if held:
            journal.stored(None, hash_of(name), tier)
        else:
            journal.removed(hash_of(name), tier)

    def flush(self) -> None:
        """Wait until the blocks that are on their way to disk are there."""
        while not all(write.done() for _, _, write in self._writes):
            time.sleep(_FLUSH_S)

    def close(self) -> None:
        self._writers.shutdown()
        self._readers.shutdown()
        self.copies.close()

    # To host memory.

    def _save(self, evicted: list[Page]) -> None:
        """Copy what is not in host memory to slots."""
        began_ns = time.perf_counter_ns()
        block_ids: list[int] = []
        slots: list[int] = []
        for page in evicted:
            if page.name in self.host:
                self.host.touch(page.name)
                continue
            claimed = self.host.claim(len(page.block_ids))
            if claimed is None:
                self._counts["dropped"] += 1
                continue
            self.host.put(page.name, claimed)
            block_ids += page.block_ids
            slots += claimed
        if slots:
            self.copies.save(block_ids, slots)
            self._counts["saved_bytes"] += len(slots) * self._page_bytes
            self._counts["save_s"] += (time.perf_counter_ns() - began_ns) * 1e-9

    def _left(self, name: bytes) -> None:
        """A block made room in host memory for others."""
        if self._disk is None or name not in self._disk:
            self._counts["dropped"] += 1

    # To disk.

    def _demote(self, disk: DiskTier) -> None:
        """Write the least recently used blocks to disk, so that some slots are always free."""
        host = self.host
        while (
            host.num_free + len(self._writes) < self._num_spare and len(self._writes) < _MOST_WRITES
        ):
            name = host.oldest()
            if name is None:
                return
            if name in disk:
                host.drop(name)
                continue
            slots = host.pin(name)
            write = self._use_disk(disk, "write", name, slots)
            self._writes.append((name, slots, write))

    def _use_disk(self, disk: DiskTier, do: DiskUse, name: bytes, slots: Slots) -> DiskWork:
        """Begin to write or read a block, on all ranks that have a part of it."""
        pool = self._writers if do == "write" else self._readers
        own = pool.submit(use_disk, self.copies, disk, do, name, slots)
        return own if self._on_disk is None else self._on_disk(do, name, slots, own)

    def _end_write(self, name: bytes, slots: Slots, write: DiskWork) -> bool:
        """Drop a block from host memory that was written or cannot be; False while it is not."""
        if not write.done():
            return False
        self.host.unpin(name)
        written = _succeeded(write)
        self._counts["disk_written_bytes"] += written * len(slots) * self._page_bytes
        if self.host.oldest() == name:  # else it was used meanwhile
            self.host.drop(name)
            self._counts["dropped"] += not written
        return True

    # Back from disk, for requests that wait.

    def _prefetch(self, disk: DiskTier) -> None:
        """Read what waiting requests will need to slots that are free: nothing leaves for it.

        Half of those that are kept free are left to what is evicted meanwhile.
        """
        for seq in self._scheduler.upcoming(_UPCOMING):
            room = self.host.num_free - self._num_spare // 2
            if room <= 0 or self._prefetches:
                return
            stored = find_stored(self._scheduler.pool, seq)
            missing = stored.missing if stored else []
            absent = [(name, n) for name, n in missing if name not in self.host and name in disk]
            for name, num_slots in absent:
                room -= num_slots
                if room < 0 or len(self._prefetches) >= _MOST_READS:
                    return
                self._prefetch_block(disk, name, num_slots)
            seq.near = True

    def _prefetch_block(self, disk: DiskTier, name: bytes, num_slots: int) -> None:
        slots = self.host.claim(num_slots)
        assert slots is not None
        read = self._use_disk(disk, "read", name, slots)
        self._prefetches[name] = slots, read

    def _end_prefetch(self, name: bytes, slots: Slots, read: DiskWork) -> None:
        if self._keep(name, slots, read):
            self._counts["disk_read_bytes"] += len(slots) * self._page_bytes
            self._counts["prefetched_bytes"] += len(slots) * self._page_bytes

    def _keep(self, name: bytes, slots: Slots, read: DiskWork) -> bool:
        """Hold what was read, unless it is here by now; False if it could not be read."""
        if _succeeded(read) and name not in self.host:
            self.host.put(name, slots)
        else:
            self.host.give_back(slots)
        if not _succeeded(read) and self._disk is not None:
            self._disk.forget(name)
        return _succeeded(read)

    # Back to the device.

    def _start(self, load: PrefixLoad) -> _Copy:
        """Pin what is in host memory, and read the rest from disk to slots."""
        copy = _Copy(load, time.perf_counter_ns())
        absent = []
        for page in load.pages:
            if page.name in self.host:
                copy.pinned.append(page.name)
                copy.add(self.host.pin(page.name), page)
                self.host.touch(page.name)
            else:
                absent.append(page)
        for page in absent:
            self._read(copy, page)
        if not copy.reads and not copy.failed:
            copy.copy = self.copies.load(copy.slots, copy.block_ids)
        return copy

    def _read(self, copy: _Copy, page: Page) -> None:
        """Read a block from disk; what was saved meanwhile may have taken its place or its room."""
        claimed = None
        if self._disk is not None and page.name in self._disk:
            claimed = self.host.claim(len(page.block_ids))
        if claimed is None or self._disk is None:
            copy.failed = True
            return
        read = self._use_disk(self._disk, "read", page.name, claimed)
        copy.reads.append((page.name, claimed, read))
        copy.add(claimed, page)

    def _advance(self, copy: _Copy) -> bool:
        """Take a load one step on; True if it is over."""
        if copy.copy is None:
            if copy.reading():
                return False
            if copy.failed or not all(_succeeded(read) for _, _, read in copy.reads):
                return self._end(copy, loaded=False)
            copy.copy = self.copies.load(copy.slots, copy.block_ids)
        if not copy.copy.done():
            return False
        return self._end(copy, loaded=copy.copy.exception() is None)

    def _end(self, copy: _Copy, loaded: bool) -> bool:
        """Keep what came from disk in host memory, and tell the scheduler."""
        for name in copy.pinned:
            self.host.unpin(name)
        for name, slots, read in copy.reads:
            self._keep(name, slots, read)
        if loaded:
            self._count_load(copy)
        self._scheduler.admission.end_load(copy.load, loaded)
        return True

    def _count_load(self, copy: _Copy) -> None:
        counts, size = self._counts, self._scheduler.pool.block_size
        for tier, names in ((HOST, copy.pinned), (DISK, [name for name, _, _ in copy.reads])):
            counts[f"{tier}_hit_tokens"] += size * sum(map(is_full, names))
        counts["disk_read_bytes"] += sum(len(s) for _, s, _ in copy.reads) * self._page_bytes
        counts["loaded_bytes"] += len(copy.slots) * self._page_bytes
        counts["load_s"] += (time.perf_counter_ns() - copy.began_ns) * 1e-9


def use_disk(copies: PageCopies, disk: DiskTier, do: DiskUse, name: bytes, slots: Slots) -> bool:
    """Write or read slots, once no save that is under way can still fill them."""
    copies.settle()
    action = disk.write if do == "write" else disk.read
    return action(name, [copies.host[slot] for slot in slots])


def _succeeded(action: DiskWork) -> bool:
    return action.exception() is None and action.result()
