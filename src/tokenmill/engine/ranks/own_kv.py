"""KV of ranks with requests and caches of their own, as one engine's.

Each rank moves the KV of its requests by itself and is connected to every rank of a peer; a notice
names the rank that holds the blocks. Rank 0 passes on what the front says and what ranks answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenmill.core.kv import KVAddress, KVNotice, KVTransferEvents
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.rank_messages import CallOver, KVCall, KVReachable, RankMessage
from tokenmill.kv.transfer import KVTransfer


def answer_call(kv: KVTransfer, message: RankMessage) -> CallOver | None:
    """Connect another rank to a peer or disconnect it, where a message says that."""
    if not isinstance(message, KVCall):
        return None
    if message.peer is not None:
        return CallOver(error=kv.connect(message.peer))
    kv.disconnect(message.engine_id)
    return CallOver()


def own_events(kv: KVTransfer) -> KVTransferEvents:
    """What the front has to hear of a rank, whose notices name it."""
    events, engine_id = kv.take_events(), kv.address.engine_id
    events.notices = [replace(notice, engine_id=engine_id) for notice in events.notices]
    return events


class RanksExchange:
    """A KVExchange over all ranks; rank 0's thread calls it."""

    def __init__(self, own: KVTransfer, group: RankGroup) -> None:
        self._own, self._group = own, group
        others = tuple(message.address for message in group.hear(KVReachable))
        self.address = replace(own.address, ranks=others)
        self._notices: list[KVNotice] = []  # their ranks are told in the next round
        self._releases: list[str] = []
        self._leases: dict[str, int] = {}  # request: the rank that holds its blocks
        self._events = KVTransferEvents([], [], [])
        self._waits_ms: list[int | None] = [None] * group.size

    # What a worker calls.

    def connect(self, peer: KVAddress) -> str | None:
        """Let every rank be ready to read from every rank of a peer; returns why not."""
        call = KVCall("connect", "", peer.engine_id, peer)
        problems = [self._own.connect(peer), *self._ask(call)]
        return next((problem for problem in problems if problem is not None), None)

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; requests that wait for its KV end in ERROR."""
        self._own.disconnect(engine_id)
        self._ask(KVCall("disconnect", "", engine_id))

    def _ask(self, call: KVCall) -> list[str | None]:
        self._group.tell(call)
        return [over.error for over in self._group.hear(CallOver)]

    def notice(self, notice: KVNotice) -> None:
        """Blocks of a request that waits here are ready to be read."""
        self._notices.append(notice)

    def release(self, request_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self._releases.append(request_id)

    def take_events(self) -> KVTransferEvents:
        events, self._events = self._events, KVTransferEvents([], [], [])
        return events

    def wait_ms(self) -> int | None:
        """How long a worker without other work may sleep; None: until a message comes."""
        return min((wait for wait in self._waits_ms if wait is not None), default=None)

    def close(self) -> None:
        self._own.close()  # the other ranks' end with their processes

    # What the engine calls.

    def has_news(self) -> bool:
        """True while ranks have to be told something."""
        return bool(self._notices or self._releases)

    def hand_out(self, rank_of: Mapping[str, int]) -> list[tuple[list[KVNotice], list[str]]]:
        """What each rank has to hear; notices of requests that have ended are dropped."""
        news: list[tuple[list[KVNotice], list[str]]] = [([], []) for _ in self._waits_ms]
        for notice in self._notices:
            if notice.request_id in rank_of:
                news[rank_of[notice.request_id]][0].append(notice)
        for request_id in self._releases:
            if request_id in self._leases:
                news[self._leases.pop(request_id)][1].append(request_id)
        self._notices, self._releases = [], []
        return news

    def heard(self, rank: int, events: KVTransferEvents, wait_ms: int | None) -> None:
        """Take what a rank has told after a round."""
        self._leases |= dict.fromkeys((notice.request_id for notice in events.notices), rank)
        for request_id in events.expired:
            self._leases.pop(request_id, None)
        self._events.notices += events.notices
        self._events.received += events.received
        self._events.expired += events.expired
        self._waits_ms[rank] = wait_ms
