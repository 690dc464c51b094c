"""How many tokens to draft: always as many, or as many as pay at the load of the moment."""

from __future__ import annotations

from typing import Protocol

from tokenmill.sched.sequence import Batch


class Drafting(Protocol):
    """Decides before each step how many tokens it drafts, and hears how the step went."""

    def choose(self) -> int: ...

    def record(self, batch: Batch, drafted: list[int], accepted: list[int], seconds: float) -> None:
        """A step took so long; drafted and accepted count by position, since the start."""


class FixedDrafting:
    """Always as many."""

    def __init__(self, count: int) -> None:
        self._count = count

    def choose(self) -> int:
        return self._count

    def record(self, batch: Batch, drafted: list[int], accepted: list[int], seconds: float) -> None:
        """Nothing changes its mind."""
