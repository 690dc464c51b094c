"""The requests that have not ended, by where they are: they wait, receive their KV, or run."""

from __future__ import annotations

import heapq
from bisect import insort
from operator import attrgetter

from tokenmill.sched.sequence import Sequence
from tokenmill.sched.waiting import WaitingQueue

_by_key = attrgetter("key")


class RequestQueues:
    """A sequence that has not ended is in one of `waiting`, `receiving` and `running`."""

    def __init__(self) -> None:
        self.waiting = WaitingQueue()
        # They hold blocks that another engine or a tier fills.
        self.receiving: dict[str, Sequence] = {}
        self.running: list[Sequence] = []  # sorted by key; the last one is preempted first
        self._num_ended_running = 0  # of `running`; dropped in one pass by sweep()
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
        return len(self) - len(self.waiting) - len(self.receiving)

    @property
    def has_deadlines(self) -> bool:
        return bool(self._deadlines)

    def add(self, seq: Sequence) -> None:
        """Let a new request wait."""
        self._by_id[seq.request_id] = seq
        self.waiting.push(seq)
        if seq.request.deadline_ns is not None:
            heapq.heappush(self._deadlines, (seq.request.deadline_ns, seq.key[-1], seq))
        self._compact()

    def _compact(self) -> None:
        """Drop ended entries once they outnumber the requests that have not ended."""
        limit = 2 * len(self) + 64
        self.waiting.compact(limit)
        if len(self._deadlines) > limit:
            self._deadlines = [entry for entry in self._deadlines if not entry[2].finished]
            heapq.heapify(self._deadlines)

    def overdue(self, now_ns: int) -> list[Sequence]:
        """Return the sequences whose deadline has come, each once."""
        found: list[Sequence] = []
        while self._deadlines and self._deadlines[0][0] <= now_ns:
            seq = heapq.heappop(self._deadlines)[2]
            if not seq.finished:
                found.append(seq)
        return found

    def started(self) -> list[Sequence]:
        """Return the sequences that were admitted once and have not ended."""
        return [seq for seq in self._by_id.values() if seq.started]

    def run(self, seq: Sequence) -> None:
        """Let a sequence run that has waited or received its KV."""
        insort(self.running, seq, key=_by_key)

    def leave(self, seq: Sequence) -> bool:
        """Take out an ended request; True if it was receiving. A running one holds blocks."""
        del self._by_id[seq.request_id]
        if self.receiving.pop(seq.request_id, None) is not None:
            return True
        if seq.block_ids:
            self._num_ended_running += 1
        else:
            self.waiting.forget()
        return False

    def sweep(self) -> None:
        """Drop the sequences that ended while they ran."""
        if self._num_ended_running:
            self.running = [seq for seq in self.running if not seq.finished]
            self._num_ended_running = 0

    def check_integrity(self) -> None:
        """Raise AssertionError where a sequence is lost, queued twice or out of order."""
        running = [seq for seq in self.running if not seq.finished]
        waiting = self.waiting.sequences()
        assert sorted(running, key=_by_key) == running, "running sequences are out of order"
        assert len(self.running) - len(running) == self._num_ended_running
        num_waiting = len(self.waiting)
        assert len(waiting) == num_waiting, f"{len(waiting)} wait, not {num_waiting}"
        queued = [*running, *waiting, *self.receiving.values()]
        assert {seq.request_id for seq in queued} == set(self._by_id)
        assert len(queued) == len(self), "a sequence is queued twice"
        assert not any(seq.block_ids or seq.num_computed_tokens for seq in waiting)
