"""Finds the request that makes workers die: suspects run one at a time.

When a worker dies, its requests continue on other workers. A request that was on `max_deaths` dying
workers without progress in between is a suspect, and only one suspect runs at any time. If its
worker dies as well, the suspect is the cause and fails; if it makes progress, it is cleared. So a
request fails only for what it does itself, and the other requests wait a short time at worst.
"""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Generic, Protocol, TypeVar

PROOF_TOKENS = 4  # beyond the earlier progress: a death may have lost a step or two


class OpenEntry(Protocol):
    """A request that has not ended, as far as it concerns suspicion."""

    num_deaths: int  # deaths in a row without a new token
    num_tokens_at_death: int

    @property
    def token_ids(self) -> Sized: ...


Entry = TypeVar("Entry", bound=OpenEntry)


class Trials:
    """Whether a suspect may run now: always, as far as one process is concerned."""

    def begin(self) -> bool:
        """True: a suspect may run until end() is called."""
        return True

    def end(self) -> None:
        """The suspect has ended, or is none any more."""


class Suspects(Generic[Entry]):
    """Counts deaths per request; one suspect runs at a time."""

    def __init__(self, max_deaths: int, trials: Trials | None = None) -> None:
        self._max_deaths = max_deaths
        self._trials = trials or Trials()
        self._running: Entry | None = None

    def died(self, entries: Iterable[Entry]) -> list[Entry]:
        """A worker died with these requests; returns those that it died of."""
        causes = []
        for entry in entries:
            if entry.num_deaths >= self._max_deaths:
                causes.append(entry)
            entry.num_deaths += 1
            entry.num_tokens_at_death = len(entry.token_ids)
            self.ended(entry)
        return causes

    def may_go(self, entry: Entry) -> bool:
        """False while the request must wait because another suspect runs."""
        if entry.num_deaths < max(self._max_deaths, 1):
            return True
        if self._running is None and self._trials.begin():
            self._running = entry
        return self._running is entry

    def got_on(self, entry: Entry) -> bool:
        """A request has new tokens; True: another suspect may be tried now."""
        if len(entry.token_ids) <= entry.num_tokens_at_death + PROOF_TOKENS:
            return False
        entry.num_deaths = 0
        return self.ended(entry)

    def ended(self, entry: Entry) -> bool:
        """A request has ended; True: another suspect may be tried now."""
        if self._running is not entry:
            return False
        self._running = None
        self._trials.end()
        return True
