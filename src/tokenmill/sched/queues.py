"""The requests that have not ended, each in one place by its status."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from tokenmill.sched.sequence import Key, Sequence, Status

_by_key = attrgetter("key")


class Queues:
    """Owns the status of every sequence: move() alone takes one from place to place.

    Ended sequences leave the running list at the next sweep(), and the heap of waiting ones when
    they come to its head.
    """

    def __init__(self) -> None:
        self.running: list[Sequence] = []  # sorted by key; the last one is preempted first
        self.outside: dict[str, Sequence] = {}  # others fill their blocks: RECEIVING or LOADING
        self.num_waiting = 0
        self._waiting: list[tuple[Key, Sequence]] = []  # a heap
        self._num_ended_running = 0
        self._by_id: dict[str, Sequence] = {}
        self._deadlines: list[tuple[int, int, Sequence]] = []  # a heap; ended ones are skipped

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def get(self, request_id: str) -> Sequence | None:
        return self._by_id.get(request_id)

    @property
    def num_running(self) -> int:
        return len(self) - self.num_waiting - len(self.outside)

    @property
    def has_deadlines(self) -> bool:
        return bool(self._deadlines)

    def add(self, seq: Sequence) -> None:
        self._by_id[seq.request_id] = seq
        self._push(seq)
        if seq.request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (seq.request.deadline_ns, seq.key[-1], seq))
        self._compact()

    def move(self, seq: Sequence, status: Status) -> None:
        """Take a sequence from where it is to where it belongs by its new status."""
        match seq.status:
            case Status.WAITING:
                self.num_waiting -= 1
                if status is not Status.ENDED:
                    self._take(seq)
            case Status.RUNNING if status is Status.ENDED:
                self._num_ended_running += 1
            case Status.RUNNING if self.running[-1] is seq:
                self.running.pop()
            case Status.RUNNING:
                self.running.remove(seq)
            case _:
                del self.outside[seq.request_id]
        seq.status = status
        match status:
            case Status.WAITING:
                self._push(seq)
            case Status.RUNNING:
                insort(self.running, seq, key=_by_key)
            case Status.ENDED:
                del self._by_id[seq.request_id]
            case _:
                self.outside[seq.request_id] = seq

    def _push(self, seq: Sequence) -> None:
        heapq.heappush(self._waiting, (seq.key, seq))
        self.num_waiting += 1

    def _take(self, seq: Sequence) -> None:
        if self._waiting[0][1] is seq:
            heapq.heappop(self._waiting)
        else:
            self._waiting.remove((seq.key, seq))
            heapq.heapify(self._waiting)

    def _compact(self) -> None:
        """Drop ended entries once they outnumber the requests that have not ended."""
        limit = 2 * len(self) + 64
        if len(self._waiting) > limit:
            self._waiting = [entry for entry in self._waiting if not entry[1].finished]
            heapq.heapify(self._waiting)
        if len(self._deadlines) > limit:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)

    def first_waiting(self) -> Sequence | None:
        while self._waiting and self._waiting[0][1].finished:
            heapq.heappop(self._waiting)
        return self._waiting[0][1] if self._waiting else None

    def next_waiting(self, count: int) -> list[Sequence]:
        """About so many of the next ones to start, the first among them."""
        return [seq for _, seq in sorted(self._waiting[:count]) if not seq.finished]

    def waiting(self) -> list[Sequence]:
        return [seq for _, seq in self._waiting if not seq.finished]

    def overdue(self, now_ns: int) -> list[Sequence]:
        """Return the sequences whose deadline has come, each once."""
        found: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.finished:
                found.append(seq)
        return found

    def started(self) -> list[Sequence]:
        """Return the sequences that were admitted once."""
        return [seq for seq in self._by_id.values() if seq.started]

    def sweep(self) -> None:
        """Drop the sequences that ended while they ran."""
        if self._num_ended_running:
            self.running = [seq for seq in self.running if not seq.finished]
            self._num_ended_running = 0
