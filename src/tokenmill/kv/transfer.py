"""Transfers KV between engines: requests wait for blocks, and reads fetch them.

The engine that decodes reads from the one that computed the prompt. A front passes messages: the
source's notices say which blocks are ready, chunk by chunk, and the last notice has the first
token. Blocks that the target already caches are not read. A read starts only when no batch in
flight can touch the blocks that it fills; an ended request keeps its blocks until its reads end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Protocol

from tokenmill.core.kv import (
    LEASE_S,
    KVAddress,
    KVNotice,
    KVTransferEvents,
    KVWay,
    common_ways,
    mismatch,
)
from tokenmill.core.requests import Request
from tokenmill.core.types import TokenmillError
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Sequence

# Without news for this share of a lease a request gives up: long before the lease can expire.
_PATIENCE = 0.5
_READING_MS, _WATCHING_MS = 1, 50  # how often a worker without other work looks

Run = tuple[int, int, int]  # (first block there, first block here, how many)

_log = logging.getLogger(__name__)


class TransferError(TokenmillError):
    """A peer's blocks cannot be read; the message says why."""


class Read(Protocol):
    """A running read, such as a Future."""

    def done(self) -> bool: ...
    def exception(self) -> BaseException | None: ...


class PeerRead(Read, Protocol):
    """A running read of a peer's blocks."""

    def add_done_callback(self, call: Callable[[Future[None]], object], /) -> None:
        """Call when the blocks of this process are here, from whichever thread."""


class Connector(Protocol):
    """Moves blocks between the caches of two engines."""

    name: str
    regions: tuple[int, ...]  # where a peer finds keys and values of each layer
    endpoint: bytes

    def connect(self, peer: KVAddress, way: KVWay) -> None: ...
    def disconnect(self, engine_id: str) -> None: ...
    def read(self, engine_id: str, runs: list[Run]) -> PeerRead: ...
    def close(self) -> None: ...


class OwnConnector(Connector, Protocol):
    """Moves blocks of this process's cache."""

    def read(self, engine_id: str, runs: list[Run]) -> Future[None]: ...


@dataclass(slots=True, eq=False)
class _Incoming:
    """A request that waits for KV; `seq` has blocks once it is set."""

    request_id: str
    engine_id: str
    give_up_ns: int = 0
    seq: Sequence | None = None
    source: list[int] = field(default_factory=list)  # blocks announced, by index in the sequence
    num_started: int = 0  # of these, blocks that are cached here or read
    window: list[int] = field(default_factory=list)  # blocks of sliding layers, not read yet
    reads: list[Read] = field(default_factory=list)
    token_id: int | None = None  # known once all blocks are announced

    def wait(self, now_ns: int, hold_s: float) -> None:
        """Wait for another half of a lease, because a notice arrived."""
        self.give_up_ns = now_ns + round(_PATIENCE * hold_s * 1e9)

    def reading(self) -> bool:
        return not all(read.done() for read in self.reads)


class KVTransfer:
    """A KVExchange over a scheduler and a connector; the engine's thread calls it."""

    def __init__(
        self, scheduler: Scheduler, connectors: Iterable[Connector], address: KVAddress
    ) -> None:
        self.address = address
        self._scheduler, self._leases = scheduler, scheduler.leases
        self._connectors = {connector.name: connector for connector in connectors}
        self._peers: dict[str, Connector] = {}
        self._ranks: dict[str, list[str]] = {}  # the ranks of an engine, by its id
        self._incoming: dict[str, _Incoming] = {}
        self._ended: list[_Incoming] = []  # their reads are not over
        self._received: list[str] = []
        self._now_ns = 0
        self.read_s, self._read_end_s = 0.0, 0.0  # time in which reads ran; the last one's end

    # What a worker calls.

    def connect(self, peer: KVAddress) -> str | None:
        """Connect to all ranks of a peer, once; returns the reason if that fails."""
        ranks = (peer, *peer.ranks)
        for rank in ranks:
            if (problem := mismatch(rank, self.address)) is not None:
                return problem
        if peer.engine_id in self._ranks:
            return None
        self._ranks[peer.engine_id] = [rank.engine_id for rank in ranks]
        try:
            for rank in ranks:
                self._connect(rank)
        except TransferError as error:
            self.disconnect(peer.engine_id)
            return str(error)
        return None

    def _connect(self, peer: KVAddress) -> None:
        """Take the quickest way that works: memory may be of a GPU that this process cannot see."""
        problems = []
        for way in common_ways(peer, self.address):
            connector = self._connectors[way.connector]
            try:
                connector.connect(peer, way)
            except TransferError as error:
                problems.append(f"{way.connector}: {error}")
                continue
            self._peers[peer.engine_id] = connector
            return
        raise TransferError("; ".join(problems))

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; the next poll() ends the requests that wait for its KV."""
        for rank in self._ranks.pop(engine_id, ()):
            connector = self._peers.pop(rank, None)
            if connector is not None:
                connector.disconnect(rank)

    def notice(self, notice: KVNotice) -> None:
        """Blocks of a request are ready; requests that have ended are ignored."""
        entry = self._incoming.get(notice.request_id)
        if entry is None:
            return
        if notice.first == len(entry.source):  # else it is out of turn, and time ends it
            entry.source += notice.block_ids
            entry.window = notice.window_ids
            entry.engine_id = notice.engine_id or entry.engine_id
            entry.token_id = notice.token_id
            entry.wait(self._now_ns, notice.hold_s)

    def release(self, request_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self._leases.release(request_id)

    def take_events(self) -> KVTransferEvents:
        leases = self._leases
        received, self._received = self._received, []
        return KVTransferEvents(leases.take_notices(), received, leases.take_expired())

    def wait_ms(self) -> int | None:
        """How long a worker without other work may sleep; None: until a message comes."""
        if self._ended or any(entry.reading() for entry in self._incoming.values()):
            return _READING_MS
        return _WATCHING_MS if self._incoming or self._leases else None

    def close(self) -> None:
        for connector in self._connectors.values():
            connector.close()

    # What the engine calls.

    def refusal(self, request: Request) -> tuple[str, str] | None:
        """Why a request that sends or needs KV is not taken: (stop_reason, a sentence)."""
        if request.task.kv_from is None:
            return None
        if request.task.hold_kv_s is not None:
            return "invalid_request", "a request takes kv_from or hold_kv_s, not both"
        if request.task.kv_from not in self._peers:
            return "kv_transfer", f"this engine is not connected to engine {request.task.kv_from!r}"
        if request.request_id in self._incoming:
            return "duplicate_id", f"request_id {request.request_id!r} is already in use"
        return None

    def expect(self, request: Request, now_ns: int) -> None:
        assert request.task.kv_from is not None
        self._now_ns = now_ns
        entry = _Incoming(request.request_id, request.task.kv_from)
        entry.wait(now_ns, LEASE_S)
        self._incoming[request.request_id] = entry

    def forget(self, request_id: str) -> None:
        """Stop expecting the KV of a request that has ended."""
        entry = self._incoming.pop(request_id, None)
        if entry is not None and entry.seq is not None:
            self._ended.append(entry)

    def poll(self, now_ns: int, abort_receive: Callable[[str, str, str], None]) -> None:
        """Start reads, run what is complete, and abort what cannot be completed.

        To be called when all batches are over that were in flight at the last schedule().
        """
        self._now_ns = now_ns
        for seq in self._scheduler.admission.take_to_receive():
            entry = self._incoming.get(seq.request_id)
            if entry is not None and not seq.finished:
                entry.seq, entry.num_started = seq, seq.num_inserted_blocks
            else:
                self._scheduler.release(seq)
        for entry in list(self._incoming.values()):
            problem = self._advance(entry)
            if problem is not None:
                message = f"KV of the prompt did not arrive: {problem}"
                abort_receive(entry.request_id, "kv_transfer", message)
        self._reap()

    def _advance(self, entry: _Incoming) -> str | None:
        """Take a request one step on; returns why it cannot go on."""
        if self._now_ns >= entry.give_up_ns:
            return "its engine has announced nothing for half a lease"
        if entry.engine_id not in self._peers:
            return f"engine {entry.engine_id!r} is gone"
        seq = entry.seq
        if seq is None or seq.finished:  # forget() follows
            return None
        if len(entry.source) > entry.num_started or entry.window:
            runs = _runs(entry.source, seq.block_ids, entry.num_started)
            runs += _runs(entry.window, seq.window_ids, 0)
            entry.num_started, entry.window = len(entry.source), []
            entry.reads.append(self._read(entry.engine_id, runs))
        return self._finish_reads(entry, seq)

    def _read(self, engine_id: str, runs: list[Run]) -> Read:
        begin_s = time.perf_counter()
        read = self._peers[engine_id].read(engine_id, runs)
        read.add_done_callback(lambda _: self._count_seconds(begin_s))
        return read

    def _count_seconds(self, begin_s: float) -> None:
        """A read is over; it had to wait for the one before it."""
        end_s = time.perf_counter()
        self.read_s += end_s - max(begin_s, self._read_end_s)
        self._read_end_s = end_s

    def _finish_reads(self, entry: _Incoming, seq: Sequence) -> str | None:
        while entry.reads and entry.reads[0].done():
            error = entry.reads.pop(0).exception()
            if error is not None:
                _log.error("KV of %s was not read: %s", entry.request_id, error)
                return str(error)
        if entry.token_id is not None and not entry.reads:
            num_blocks = -(-seq.num_tokens // self.address.geometry.block_size)
            if len(entry.source) != num_blocks:
                return f"{len(entry.source)} blocks were announced, {num_blocks} are needed"
            del self._incoming[entry.request_id]
            self._scheduler.receive(seq, entry.token_id)
            self._received.append(entry.request_id)
        return None

    def _reap(self) -> None:
        """Give back the blocks of ended requests that nothing writes to any more."""
        over = [entry for entry in self._ended if not entry.reading()]
        if over:
            self._ended = [entry for entry in self._ended if entry not in over]
        for entry in over:
            assert entry.seq is not None
            self._scheduler.release(entry.seq)


def _runs(source: list[int], target: list[int], first: int) -> list[Run]:
    """Pairs of blocks from index `first` on, neighbours on both sides joined."""
    runs: list[Run] = []
    for there, here in zip(source[first:], target[first:], strict=False):
        if runs and (there, here) == (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + 1)
        else:
            runs.append((there, here, 1))
    return runs
