"""KV of an engine whose ranks share requests: all move their blocks, rank 0 knows when.

Where ranks have a part of every block each, a rank reads from the rank of its number in the other
engine; where each has whole blocks, all read those of rank 0, which alone are known to be written.
Rank 0 tells the others over their connections, which answer each call when it is over; a read
counts when all ranks have theirs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection

import msgspec

from tokenmill.core.kv import KVAddress, KVWay
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.core.types import RanksLostError
from tokenmill.engine.model import KVCache
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.rank_messages import (
    CallOver,
    KVCall,
    KVReachable,
    RankMessage,
    TierCall,
    expect,
    send,
)
from tokenmill.kv.connectors import KVLink
from tokenmill.kv.transfer import KVTransfer, OwnConnector, Read, Run, TransferError
from tokenmill.sched.scheduler import Scheduler


class GroupLink:
    """Rank 0's link, whose connectors move the blocks of all ranks, or the parts they have."""

    def __init__(self, link: KVLink, calls: GroupCalls, in_parts: bool) -> None:
        self._link, self._calls, self._in_parts = link, calls, in_parts

    def open(
        self, scheduler: Scheduler, kv_cache: KVCache, spec: ModelSpec, dtype: str
    ) -> KVTransfer:
        pool = scheduler.pool
        connectors, own = self._link.reach(kv_cache, spec, dtype, pool.block_size, pool.num_blocks)
        others = tuple(message.address for message in self._calls.group.hear(KVReachable))
        moved = [GroupConnector(connector, self._calls) for connector in connectors]
        return KVTransfer(scheduler, moved, replace(own, others=others if self._in_parts else ()))


@dataclass(slots=True)
class PendingCall:
    missing: int  # answers
    error: str | None = None


class GroupCalls:
    """Calls to the other ranks and their answers, which come when they come."""

    def __init__(self, group: RankGroup) -> None:
        self.group, self._last, self.num_ranks = group, 0, group.size - 1
        self._open: dict[int, PendingCall] = {}

    def start(self, messages: Sequence[KVCall | TierCall]) -> PendingCall:
        self._last += 1
        call = self._open[self._last] = PendingCall(len(messages))
        self.group.tell_each(
            [msgspec.structs.replace(message, number=self._last) for message in messages]
        )
        return call

    def start_all(self, message: KVCall | TierCall) -> PendingCall:
        return self.start([message] * self.num_ranks)

    def over(self, call: PendingCall, wait: bool = False) -> bool:
        """True once all ranks have answered."""
        while call.missing:
            answers = self.group.take(wait)
            if not answers:
                return False
            for answer in answers:
                self._take(expect(answer, CallOver))
        return True

    def _take(self, answer: CallOver) -> None:
        call = self._open.get(answer.number)
        if call is None:
            raise RanksLostError(f"a rank answers call {answer.number}, which is not open")
        call.missing -= 1
        call.error = call.error or answer.error
        if not call.missing:
            del self._open[answer.number]


class GroupWork:
    """Something that all ranks do, as a Read, a PeerRead or what a disk does."""

    def __init__(self, own: Read, others: PendingCall, calls: GroupCalls) -> None:
        self._own, self._others, self._calls = own, others, calls

    def done(self) -> bool:
        """All parts are here, or will not come."""
        return self._calls.over(self._others) and self._own.done()

    def exception(self) -> BaseException | None:
        """Why a part did not come, once done."""
        if self._others.error is not None:
            return TransferError(self._others.error)
        return self._own.exception()

    def result(self) -> bool:
        """Whether this rank has read or written its part."""
        assert isinstance(self._own, Future)
        return bool(self._own.result())

    def add_done_callback(self, call: Callable[[Future[None]], object], /) -> None:
        assert isinstance(self._own, Future)
        self._own.add_done_callback(call)


class GroupConnector:
    """A connector of rank 0, and with it those of the same name of all ranks."""

    def __init__(self, own: OwnConnector, calls: GroupCalls) -> None:
        self.name, self.regions, self.endpoint = own.name, own.regions, own.endpoint
        self._own, self._calls = own, calls

    def connect(self, peer: KVAddress, way: KVWay) -> None:
        """Let each rank be ready to read from the peer's rank of its number, or its only one."""
        self._own.connect(peer, way)
        sources = peer.others or (peer,) * self._calls.num_ranks
        call = self._calls.start(
            [KVCall("connect", self.name, peer.engine_id, peer=source) for source in sources]
        )
        self._calls.over(call, wait=True)
        if call.error is not None:
            self.disconnect(peer.engine_id)
            raise TransferError(call.error)

    def disconnect(self, engine_id: str) -> None:
        self._own.disconnect(engine_id)
        self._calls.start_all(KVCall("disconnect", self.name, engine_id))

    def read(self, engine_id: str, runs: list[Run]) -> GroupWork:
        """Start to read runs of blocks on every rank."""
        call = self._calls.start_all(KVCall("read", self.name, engine_id, runs=runs))
        return GroupWork(self._own.read(engine_id, runs), call, self._calls)

    def close(self) -> None:
        self._own.close()  # the other ranks' end with their processes


class RankAnswers:
    """Another rank's answers to calls; any thread may send one."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._lock = connection, threading.Lock()

    def send(self, number: int, error: object) -> None:
        """Say that a call is over, or what went wrong."""
        with self._lock:
            send(CallOver(number, str(error) if error else None), self._connection)


class RankReader:
    """Another rank's connectors, which do what GroupConnector says."""

    def __init__(self, connectors: list[OwnConnector], answers: RankAnswers) -> None:
        self._connectors = {connector.name: connector for connector in connectors}
        self._peers: dict[str, str] = {}  # the engine's id: that of its rank which is read here
        self._answer = answers.send

    def do(self, call: RankMessage) -> bool:
        """Begin what rank 0 says, if it is about KV; its end is told from any thread."""
        if isinstance(call, KVCall):
            self._do(call)
        return isinstance(call, KVCall)

    def _do(self, call: KVCall) -> None:
        number, engine_id = call.number, call.engine_id
        connector = self._connectors[call.connector]
        error: str | None = None
        match call.do:
            case "connect":
                if call.peer is None:
                    raise RanksLostError("rank 0 says connect and not to whom")
                error = self._connect(connector, engine_id, call.peer)
            case "disconnect":
                connector.disconnect(self._peers.pop(engine_id, ""))
            case "read":
                read = connector.read(self._peers[engine_id], call.runs)
                read.add_done_callback(lambda read: self._answer(number, read.exception()))
                return
        self._answer(number, error)

    def _connect(self, connector: OwnConnector, engine_id: str, peer: KVAddress) -> str | None:
        (way,) = (way for way in peer.ways if way.connector == connector.name)
        self._peers[engine_id] = peer.engine_id
        try:
            connector.connect(peer, way)
        except TransferError as error:
            return str(error)
        return None
