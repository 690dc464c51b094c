"""Virtual time: actions in the order of their times, and nothing waits for a clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable

Action = Callable[[int], None]  # told the time


class VirtualTime:
    """What is to happen when; at one time by name, then in the order in which it was planned."""

    def __init__(self) -> None:
        self._planned: list[tuple[int, str, int, Action]] = []  # a heap
        self._num_planned = 0

    @property
    def next_ns(self) -> int | None:
        """When the next action is due; None: nothing is planned."""
        return self._planned[0][0] if self._planned else None

    def at(self, time_ns: int, name: str, action: Action) -> None:
        self._num_planned += 1
        heapq.heappush(self._planned, (time_ns, name, self._num_planned, action))

    def run_next(self) -> None:
        time_ns, _, _, action = heapq.heappop(self._planned)
        action(time_ns)

    def run(self, until_ns: int | None = None) -> None:
        """Take every action that is due by then; those that it plans, too."""
        while self._planned and (until_ns is None or self._planned[0][0] <= until_ns):
            self.run_next()
