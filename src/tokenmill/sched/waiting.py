"""Sequences that wait to run, the best first."""

from __future__ import annotations

import heapq

from tokenmill.sched.sequence import Key, Sequence


class WaitingQueue:
    """A heap by key; a sequence that ends while it waits is dropped when it comes to the head."""

    def __init__(self) -> None:
        self._heap: list[tuple[Key, Sequence]] = []
        self._num_live = 0

    def __len__(self) -> int:
        """Return how many sequences wait; ended ones do not count."""
        return self._num_live

    def push(self, seq: Sequence) -> None:
        heapq.heappush(self._heap, (seq.key, seq))
        self._num_live += 1

    def first(self) -> Sequence | None:
        """The next one to run; it stays until pop()."""
        while self._heap and self._heap[0][1].finished:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def next_few(self, count: int) -> list[Sequence]:
        """About the next ones to run, the first among them; they stay."""
        return [seq for _, seq in sorted(self._heap[:count]) if not seq.finished]

    def take(self, seq: Sequence) -> None:
        """Take out a sequence that has not ended, wherever it stands."""
        self._heap.remove((seq.key, seq))
        heapq.heapify(self._heap)
        self._num_live -= 1

    def pop(self) -> None:
        """Take out first(): it runs now."""
        heapq.heappop(self._heap)
        self._num_live -= 1

    def forget(self) -> None:
        """Count one waiting sequence less: it has ended."""
        self._num_live -= 1

    def compact(self, limit: int) -> None:
        """Drop the ended sequences if there are more entries than `limit`."""
        if len(self._heap) > limit:
            self._heap = [entry for entry in self._heap if not entry[1].finished]
            heapq.heapify(self._heap)

    def sequences(self) -> list[Sequence]:
        return [seq for _, seq in self._heap if not seq.finished]
