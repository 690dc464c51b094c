"""Tiers of ranks that share requests: all copy their pages, rank 0 knows which blocks are where.

Slots of host memory have the same blocks on every rank, each with its own part or a copy. On disk
each rank has files of its part; a block is there if all ranks can read theirs.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import blake2b

from tokenmill.core.kv import TierSizes
from tokenmill.engine.model import KVCache
from tokenmill.engine.ranks.rank_messages import OpenTiers, RankMessage, TierCall
from tokenmill.engine.ranks.shared_kv import GroupCalls, GroupWork, RankAnswers
from tokenmill.kv.tiers.disk_tier import DiskTier
from tokenmill.kv.tiers.host_tier import Slots
from tokenmill.kv.tiers.offloading import DiskUse, use_disk
from tokenmill.kv.tiers.page_copies import PageCopies, open_copies, tensors_of
from tokenmill.kv.transfer import Read
from tokenmill.parallel import Layout

_POLL_S = 2e-4
_NUM_THREADS = 4  # of the disk, and again of loads that are waited for


class GroupCopies:
    """Rank 0's copies, and with them those of all ranks."""

    def __init__(self, own: PageCopies, calls: GroupCalls, root: bytes) -> None:
        self._own, self._calls, self.host = own, calls, own.host
        self.settle, self.close = own.settle, own.close  # the other ranks' end with their processes
        calls.group.tell(OpenTiers(len(own.host), root))

    def save(self, block_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Copy pages to slots; the other ranks are told before the step that writes to them."""
        self._calls.group.tell(TierCall("save", list(slots), list(block_ids)))
        self._own.save(block_ids, slots)

    def load(self, slots: Sequence[int], block_ids: Sequence[int]) -> Read:
        """Start to copy slots to pages on every rank."""
        call = self._calls.start_all(TierCall("load", list(slots), list(block_ids)))
        return GroupWork(self._own.load(slots, block_ids), call, self._calls)

    def on_disk(self, do: DiskUse, name: bytes, slots: Slots, own: Future[bool]) -> GroupWork:
        """What this rank has begun with its disk, begun by all."""
        return GroupWork(
            own, self._calls.start_all(TierCall(do, list(slots), name=name)), self._calls
        )


class RankTiers:
    """Another rank's copies and disk, which do what GroupCopies says."""

    def __init__(
        self, kv_cache: KVCache, sizes: TierSizes, layout: Layout, answers: RankAnswers
    ) -> None:
        self._kv_cache, self._sizes, self._layout = kv_cache, sizes, layout
        self._answer = answers.send
        self._disk_threads = ThreadPoolExecutor(_NUM_THREADS, "kv-disk-of-rank")
        self._load_threads = ThreadPoolExecutor(_NUM_THREADS, "kv-loads-of-rank")
        self._copies: PageCopies | None = None
        self._disk: DiskTier | None = None

    def do(self, message: RankMessage) -> bool:
        """Begin what rank 0 says, if it is about tiers; its end is told from any thread."""
        if isinstance(message, OpenTiers):
            self._open(message)
        elif isinstance(message, TierCall):
            self._do(message)
        return isinstance(message, OpenTiers | TierCall)

    def _open(self, told: OpenTiers) -> None:
        self._copies = open_copies(tensors_of(self._kv_cache), told.num_slots)
        if self._sizes.folder is not None:
            root = told.root
            if self._layout.split_heads:
                part = b"%d" % self._layout.ranks.rank
                root = blake2b(root + part, digest_size=len(root)).digest()
            self._disk = DiskTier(self._sizes.folder, self._sizes.disk_bytes, root)

    def _do(self, call: TierCall) -> None:
        assert self._copies is not None
        match call.do:
            case "save":
                self._copies.save(call.block_ids, call.slots)
            case "load":
                read = self._copies.load(call.slots, call.block_ids)
                self._load_threads.submit(self._end_load, read, call.number)
            case do:
                self._disk_threads.submit(self._use_disk, self._copies, do, call)

    def _end_load(self, read: Read, number: int) -> None:
        try:
            while not read.done():
                time.sleep(_POLL_S)
            error: object = read.exception()
        except Exception as problem:
            error = problem
        self._answer(number, error)

    def _use_disk(self, copies: PageCopies, do: DiskUse, call: TierCall) -> None:
        error: object = "there is no such block"
        try:
            assert self._disk is not None
            if use_disk(copies, self._disk, do, call.name, tuple(call.slots)):
                error = None
        except Exception as problem:
            error = problem
        self._answer(call.number, error)
