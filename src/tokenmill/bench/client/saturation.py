"""Searches the highest load that a server takes: it doubles the load, then bisects.

With a limit the load is the highest at which the required share of requests is good. Without one
it is the knee: the lowest load whose throughput is within KNEE of the best.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.results.reports import TriedLoad

TOLERANCE = 0.05  # width of the bracket of a limit, as a share of the load
KNEE = 0.05  # throughput that may be left on the table
KNEE_TOLERANCE = 0.15
MAX_FAILED = 0.01  # of the requests; more: the load is too much, limit or not
MAX_PROBES = 20
Z_95 = 1.96


@dataclass(frozen=True, slots=True)
class Probe:
    load: float
    tok_s: float
    num_answered: int  # failures included
    num_good: int  # without a limit: those answered without an error
    client_limited: bool = False


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """The goal of a search: `share` of the requests must be good; None: the knee of throughput."""

    share: float | None = None
    start: float = 1.0
    lowest: float = 1.0
    highest: float = 4096.0
    is_whole: bool = True  # the load is a number of users, not a rate


@dataclass(slots=True)
class Tried:
    """All probes of one load, pooled."""

    probes: list[Probe] = field(default_factory=list)

    @property
    def num_answered(self) -> int:
        return sum(probe.num_answered for probe in self.probes)

    @property
    def num_good(self) -> int:
        return sum(probe.num_good for probe in self.probes)

    @property
    def good_share(self) -> float:
        return self.num_good / self.num_answered if self.num_answered else 0.0

    @property
    def tok_s(self) -> float:
        return sum(probe.tok_s for probe in self.probes) / len(self.probes)

    @property
    def client_limited(self) -> bool:
        return any(probe.client_limited for probe in self.probes)


@dataclass(frozen=True, slots=True)
class SearchOutcome:
    """`found` is None where even the lowest load was too much; `stopped` says why it ended."""

    found: float | None
    stopped: str
    above: float | None  # the lowest load tried above it
    client_limited: bool  # where the server's limit should have been
    tried: dict[float, Tried]

    def fields(self) -> dict[str, Any]:
        tried = [
            TriedLoad(
                load=load,
                num_points=len(tried.probes),
                output_tok_s=tried.tok_s,
                good_share=tried.good_share,
                client_limited=tried.client_limited,
            )
            for load, tried in sorted(self.tried.items())
        ]
        return {
            "found": self.found,
            "above": self.above,
            "stopped": self.stopped,
            "client_limited": self.client_limited,
            "tried": tried,
        }


def wilson(num_good: int, num_all: int) -> tuple[float, float]:
    """A 95 % interval of a share."""
    if not num_all:
        return 0.0, 1.0
    share, z2 = num_good / num_all, Z_95**2 / num_all
    middle = (share + z2 / 2) / (1 + z2)
    half = Z_95 / (1 + z2) * math.sqrt(share * (1 - share) / num_all + z2 / (4 * num_all))
    return middle - half, middle + half


class Interrupted(Exception):
    """Raised by `measure` to end the search with what there is."""


def find_saturation(measure: Callable[[float], Probe], goal: SearchGoal) -> SearchOutcome:
    """The load that `goal` asks for."""
    search = _Search(measure, goal)
    try:
        stopped = search.to_limit() if goal.share is not None else search.to_knee()
    except Interrupted:
        stopped = "interrupted"
    return search.outcome(stopped)


class _Search:
    def __init__(self, measure: Callable[[float], Probe], goal: SearchGoal) -> None:
        self._measure = measure
        self._goal = goal
        self._tried: dict[float, Tried] = {}
        self._num_probes = 0

    def to_limit(self) -> str:
        """Search until no load is left between the highest good and the lowest bad one."""
        while self._num_probes < MAX_PROBES:
            load, stopped = self._next_to_limit()
            if load is None:
                return stopped
            self._probe(load)
        return f"{MAX_PROBES} points are the most that a search takes"

    def _next_to_limit(self) -> tuple[float | None, str]:
        """The load to try next, or None and why there is none."""
        goal, (low, high) = self._goal, self._bracket()
        doubtful = self._doubtful(low, high)
        if doubtful is not None:
            return doubtful, ""
        if low is None and high is None:
            return goal.start, ""
        if low is None:
            assert high is not None
            below = high // 2 if goal.is_whole else high / 2
            return (None, f"even {high:g} is too much") if below < goal.lowest else (below, "")
        if high is None:
            best = f"{low:g} is the highest load allowed, and it is good"
            return (None, best) if low >= goal.highest else (min(2 * low, goal.highest), "")
        return self._middle(low, high, TOLERANCE), f"{low:g} is good and {high:g} is too much"

    def to_knee(self) -> str:
        """Double until two doublings in a row bring nothing, then narrow the knee down."""
        stopped = self._double()
        while self._num_probes < MAX_PROBES:
            low, knee = self._around_knee()
            middle = None if low is None else self._middle(low, knee, KNEE_TOLERANCE)
            if middle is None:
                break
            self._probe(middle)
        return stopped

    def _double(self) -> str:
        load, best, num_flat = self._goal.start, 0.0, 0
        while True:
            self._probe(load)
            tok_s = self._tried[load].tok_s
            num_flat = 0 if tok_s > best * (1 + KNEE) else num_flat + 1
            best = max(best, tok_s)
            if not self._is_good(load):
                return f"at {load:g} requests fail"
            if num_flat == 2:
                return "two doublings in a row brought no more throughput"
            if load >= self._goal.highest:
                grows = "" if num_flat else ", and throughput still grows"
                return f"{load:g} is the highest load allowed{grows}"
            load = min(2 * load, self._goal.highest)

    def outcome(self, stopped: str) -> SearchOutcome:
        """With the client's part: it counts at the load found and at the next one tried."""
        found, above = self._bracket()
        if self._goal.share is None and found is not None:
            found = self._around_knee()[1]
            above = min((load for load in self._tried if load > found), default=None)
        limited = any(
            self._tried[load].client_limited for load in (found, above) if load is not None
        )
        return SearchOutcome(found, stopped, above, limited, dict(sorted(self._tried.items())))

    def _probe(self, load: float) -> None:
        self._num_probes += 1
        probe = self._measure(load)
        self._tried.setdefault(load, Tried()).probes.append(probe)

    def _is_good(self, load: float) -> bool:
        needed = 1 - MAX_FAILED if self._goal.share is None else self._goal.share
        return self._tried[load].good_share >= needed

    def _bracket(self) -> tuple[float | None, float | None]:
        """The highest good load below all bad ones, and the lowest bad one."""
        high = min((load for load in self._tried if not self._is_good(load)), default=None)
        good = [load for load in self._tried if self._is_good(load)]
        return max((load for load in good if high is None or load < high), default=None), high

    def _doubtful(self, low: float | None, high: float | None) -> float | None:
        """A load that decides, and that chance may have decided: it is measured once more.

        A bad one at once, since it ends the way up; a good one when nothing is left between.
        """
        if high is not None and self._by_chance(high):
            return high
        at_end = high is not None and low is not None and not self._middle(low, high, TOLERANCE)
        return low if at_end and low is not None and self._by_chance(low) else None

    def _by_chance(self, load: float) -> bool:
        tried = self._tried[load]
        lower, upper = wilson(tried.num_good, tried.num_answered)
        share = self._goal.share or 1.0
        some_bad = tried.num_good < tried.num_answered
        return len(tried.probes) == 1 and some_bad and lower < share < upper

    def _middle(self, low: float, high: float, tolerance: float) -> float | None:
        """A load between; None where the bracket is narrow enough."""
        if self._goal.is_whole:
            return None if high - low <= max(1, tolerance * low) else (low + high) // 2
        return None if high <= low * (1 + tolerance) else (low + high) / 2

    def _around_knee(self) -> tuple[float | None, float]:
        """(the highest load below the knee, the knee): within KNEE of the best throughput."""
        usable = {k: t.tok_s for k, t in self._tried.items() if self._is_good(k)}
        if not usable:
            return None, min(self._tried)
        enough = (1 - KNEE) * max(usable.values())
        knee = min(load for load, tok_s in usable.items() if tok_s >= enough)
        return max((load for load in usable if load < knee), default=None), knee
