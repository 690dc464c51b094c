"""A run of given requests that are all there at the start, as `bench throughput` measures it.

Between two events (a prompt is computed, a request ends, the cache is full) the batch stays the
same, so that its steps are priced together.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from tokenmill.core.kv_groups import plan_groups
from tokenmill.core.specs.spec import ModelSpec
from tokenmill.plan.hardware import PlanError
from tokenmill.plan.predict.step_cost import StepCost, Work

ROOM_TOKENS = 64  # that each running request still has room for, where one is admitted


@dataclass(order=True, slots=True)
class _Running:
    end: float  # step in which the last token comes
    number: int
    offset: float = field(compare=False)  # its context is this plus the number of steps done
    is_out: bool = field(default=False, compare=False)


class FiniteRun:
    """Requests in order, admitted while slots and room last; the youngest gives way."""

    def __init__(
        self, cost: StepCost, lengths: Sequence[tuple[int, int]], max_num_seqs: int, budget: int
    ) -> None:
        self._cost, self._spec = cost, cost.spec
        self._waiting: deque[tuple[float, float]] = deque((i, o) for i, o in lengths)
        self._max_num_seqs, self._budget = max_num_seqs, budget
        self._positions = cost.max_sequences(1)  # whose KV fits, a layer each
        self._full, self._kept = _kept_positions(cost.spec)
        self._heap: list[_Running] = []
        self._order: list[_Running] = []
        self._count, self._offsets, self._number = 0, 0.0, 0
        self._steps, self.seconds = 0.0, 0.0
        longest = max(i + o for i, o in lengths)
        if longest > self._room(1):
            raise PlanError(
                f"a request of {longest:,} tokens does not fit: "
                f"the cache holds {self._room(1):,.0f}"
            )

    def run(self) -> float:
        while self._waiting or self._count:
            if self._admits():
                self._prefill(*self._waiting.popleft())
            else:
                self._decode()
            self._finish()
        return self.seconds

    def _room(self, count: int) -> float:
        return (self._positions - count * self._kept) / self._full

    @property
    def _held(self) -> float:
        return self._offsets + self._count * self._steps

    def _admits(self) -> bool:
        if not self._waiting or self._count >= self._max_num_seqs:
            return False
        wanted = self._waiting[0][0] + self._count * ROOM_TOKENS
        return not self._count or self._held + wanted <= self._room(self._count + 1)

    def _work(self, prompt: float, seen: float) -> Work:
        count = self._count
        mean = self._held / count if count else 0.0
        each = self._spec.attended_positions(int(mean) + 1) - self._spec.attended_positions(
            int(mean)
        )
        return Work(count, count, count * each, prompt, seen, count + (prompt > 0))

    def _prefill(self, prompt: float, output: float) -> None:
        """A prompt's share of steps that are filled up to the budget, beside all that decode."""
        chunk = max(1.0, self._budget - self._count)
        seen = self._spec.attended_positions(round(prompt))
        steps = prompt / chunk
        self.seconds += steps * self._cost.step_s(self._work(chunk, seen / steps))
        self._steps += steps
        self._number += 1
        one = _Running(self._steps + output - 1, self._number, prompt + 1 - self._steps)
        heapq.heappush(self._heap, one)
        self._order.append(one)
        self._count += 1
        self._offsets += one.offset

    def _decode(self) -> None:
        """Steps until a request ends or the cache is full; then the youngest starts over."""
        until_end = self._heap[0].end - self._steps
        until_full = (self._room(self._count) - self._held) / self._count
        steps = max(0.0, min(until_end, until_full))
        self._steps += steps / 2
        step_s = self._cost.step_s(self._work(0, 0))
        self._steps += steps / 2
        self.seconds += steps * step_s
        if until_full < until_end and self._count > 1:
            self._preempt()

    def _preempt(self) -> None:
        while self._order[-1].is_out:
            self._order.pop()
        one = self._order.pop()
        self._leave(one)
        context = one.offset + self._steps
        self._waiting.appendleft((context, one.end - self._steps + 1))

    def _leave(self, one: _Running) -> None:
        one.is_out = True
        self._count -= 1
        self._offsets -= one.offset

    def _finish(self) -> None:
        while self._heap and (self._heap[0].is_out or self._heap[0].end <= self._steps + 1e-9):
            one = heapq.heappop(self._heap)
            if not one.is_out:
                self._leave(one)


def _kept_positions(spec: ModelSpec) -> tuple[int, int]:
    """Layers that keep every token, and positions that those with a window keep of a sequence."""
    windows = spec.layer_windows
    if not plan_groups(windows).sliding.num_groups:
        return len(windows), 0
    return windows.count(None), sum(window or 0 for window in windows)
