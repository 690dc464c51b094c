"""KV of ranks with requests and caches of their own, as one engine's.

Each rank moves the KV of its requests by itself and is connected to every rank of a peer; a notice
names the rank that holds the blocks. Rank 0 passes on what the front says and what ranks answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tokenmill.core.kv import KVAddress, KVEvents, KVNotice
from tokenmill.engine.ranks.group import RankGroup
from tokenmill.engine.ranks.rank_messages import (
    ConnectPeer,
    DisconnectPeer,
    KVNews,
    KVReachable,
    KVTold,
    Message,
    PeerAnswer,
)
from tokenmill.kv.transfer import KVTransfer


class RankExchange:
    """One rank's side: does what rank 0 says between two steps, and tells what happened."""

    def __init__(self, kv: KVTransfer) -> None:
        self._kv = kv

    def answer(self, message: Message) -> PeerAnswer | None:
        """Connect or disconnect, where a message says that."""
        if isinstance(message, ConnectPeer):
            return PeerAnswer(self._kv.connect(message.peer))
        if isinstance(message, DisconnectPeer):
            self._kv.disconnect(message.engine_id)
            return PeerAnswer(None)
        return None

    def take(self, news: KVNews) -> None:
        """What the front has said of this rank's requests."""
        for notice in news.notices:
            self._kv.notice(notice)
        for request_id in news.releases:
            self._kv.release(request_id)

    def tell(self) -> KVTold:
        """What the front has to hear, and how long a rank without work may sleep."""
        events, engine_id = self._kv.take_events(), self._kv.address.engine_id
        events.notices = [replace(notice, engine_id=engine_id) for notice in events.notices]
        return KVTold(events, self._kv.wait_ms())


class RanksExchange:
    """A KVExchange over all ranks; rank 0's thread calls it."""

    def __init__(self, own: KVTransfer, group: RankGroup) -> None:
        self._own, self._group = own, group
        others = tuple(message.address for message in group.hear(KVReachable))
        self.address = replace(own.address, ranks=others)
        self._notices: list[KVNotice] = []  # their ranks are told in the next round
        self._releases: list[str] = []
        self._leases: dict[str, int] = {}  # request: the rank that holds its blocks
        self._events = KVEvents([], [], [])
        self._waits_ms: list[int | None] = [None] * group.size

    # What a worker calls.

    def connect(self, peer: KVAddress) -> str | None:
        """Let every rank be ready to read from every rank of a peer; returns why not."""
        problems = [self._own.connect(peer), *self._ask(ConnectPeer(peer))]
        return next((problem for problem in problems if problem is not None), None)

    def disconnect(self, engine_id: str) -> None:
        """Forget a peer; requests that wait for its KV end in ERROR."""
        self._own.disconnect(engine_id)
        self._ask(DisconnectPeer(engine_id))

    def _ask(self, message: Message) -> list[str | None]:
        self._group.tell(message)
        return [answer.problem for answer in self._group.hear(PeerAnswer)]

    def notice(self, notice: KVNotice) -> None:
        """Blocks of a request that waits here are ready to be read."""
        self._notices.append(notice)

    def release(self, request_id: str) -> None:
        """End a lease; unknown ids are ignored."""
        self._releases.append(request_id)

    def take_events(self) -> KVEvents:
        """What happened since the last call."""
        events, self._events = self._events, KVEvents([], [], [])
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

    def hand_out(self, rank_of: Mapping[str, int]) -> list[KVNews]:
        """What each rank has to hear; those of requests that have ended are dropped."""
        news = [KVNews() for _ in self._waits_ms]
        for notice in self._notices:
            if notice.request_id in rank_of:
                news[rank_of[notice.request_id]].notices.append(notice)
        for request_id in self._releases:
            if request_id in self._leases:
                news[self._leases.pop(request_id)].releases.append(request_id)
        self._notices, self._releases = [], []
        return news

    def heard(self, rank: int, told: KVTold) -> None:
        """Take what a rank has told after a round."""
        events = told.events
        self._leases |= dict.fromkeys((notice.request_id for notice in events.notices), rank)
        for request_id in events.expired:
            self._leases.pop(request_id, None)
        self._events.notices += events.notices
        self._events.received += events.received
        self._events.expired += events.expired
        self._waits_ms[rank] = told.wait_ms
