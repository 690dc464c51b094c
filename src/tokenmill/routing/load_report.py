"""What the fronts of a pool have at a worker: its own account, and the report that all of them get.

Each front knows its own requests; a report tells it of the others'. It is made between two steps,
of what was sent to the worker and has not ended. A worker that is idle says so once, and reports
again when it has received something: silence after that means that nobody has sent anything.

Fronts that get prompts of one new prefix at once do not know of each other's, so that each counts
the prefix. The worker, which computes it once, tells how much was counted more than once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.routing.kv_index import num_led

REPORT_MS = 5.0  # at most one report in so long, but for the first and the last of a busy time


class FrontLoad(NamedTuple):
    """One front's open load at a worker, and what it sent since the worker started."""

    queued_tokens: int = 0  # uncached by the front's estimate, and not computed yet
    kv_tokens: int = 0
    num_requests: int = 0
    num_pending: int = 0  # of these, without a first token
    num_sent: int = 0
    sent_tokens: int = 0  # uncached
    sent_kv_tokens: int = 0


NOTHING = FrontLoad()


@dataclass(frozen=True, slots=True)
class LoadReport:
    fronts: dict[str, FrontLoad]
    shared_tokens: int = 0  # of all their queued tokens, those that a prompt ahead computes


@dataclass(frozen=True, slots=True)
class Announcement:
    """What a front tells the others when it sends a request: where, how much, which blocks."""

    front: str
    worker: str
    queued_tokens: int
    kv_tokens: int
    hashes: list[int]  # marks of the blocks that the worker will cache (kv_index.py)
    prefix: int | None  # the last block of the longest prefix that a worker had of it
    answers: list[int] = field(default_factory=list)  # tokens of those that ended since the last


def shared_tokens(
    queued_tokens: int, kv_tokens: int, block_size: int, known: Iterable[bool]
) -> int:
    """Of a prompt's queued tokens, those whose marks are known; one is always computed."""
    start = (kv_tokens - queued_tokens) // block_size  # blocks that are cached
    return max(min(block_size * num_led(start, known), queued_tokens - 1), 0)


@dataclass(slots=True)
class _Request:
    front: str
    queued_tokens: int
    kv_tokens: int
    hashes: list[int]  # marks of the blocks to be computed (kv_index.py)
    shared_tokens: int = 0  # of queued_tokens
    pending: bool = True


class LoadAccount:
    """A worker's account of its requests by front, from what it is sent and what it puts out."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._fronts: dict[str, FrontLoad] = {}
        self._requests: dict[str, _Request] = {}
        self._to_compute: Counter[int] = Counter()  # marks, by how many that are pending have them
        self._shared_tokens = 0
        self._reported_ms = float("-inf")

    def front_joined(self, front: str) -> None:
        """A front that may send requests; one that is known is left as it is."""
        self._fronts.setdefault(front, NOTHING)

    def front_gone(self, front: str) -> None:
        """Remove a front with its requests; unknown ones are ignored."""
        for request_id in [key for key, r in self._requests.items() if r.front == front]:
            self.ended(request_id)
        self._fronts.pop(front, None)

    def sent(
        self,
        front: str,
        request_id: str,
        queued_tokens: int,
        kv_tokens: int,
        hashes: Sequence[int] = (),
    ) -> None:
        """A front has sent a request; ids are unique over all fronts.

        `hashes` are marks of the blocks to be computed, as in an announcement.
        """
        self.ended(request_id)
        shared = shared_tokens(
            queued_tokens, kv_tokens, self._block_size, (h in self._to_compute for h in hashes)
        )
        request = _Request(front, queued_tokens, kv_tokens, [*hashes], pending=bool(queued_tokens))
        self._requests[request_id] = request
        self._share(request, shared)
        if request.pending:
            self._to_compute.update(request.hashes)
        queued, kv, count, pending, sent, tokens, kv_sent = self._fronts.get(front, NOTHING)
        self._fronts[front] = FrontLoad(
            queued + queued_tokens,
            kv + kv_tokens,
            count + 1,
            pending + request.pending,
            sent + 1,
            tokens + queued_tokens,
            kv_sent + kv_tokens,
        )

    def progress(self, request_id: str, num_tokens: int) -> None:
        """So many more tokens of a prompt are computed; unknown requests are ignored."""
        request = self._requests.get(request_id)
        if request is not None and request.pending:
            done = min(request.queued_tokens, num_tokens)
            request.queued_tokens -= done
            self._share(request, min(request.shared_tokens, request.queued_tokens))
            if not request.queued_tokens:
                self._computed(request)
            self._add(request.front, -done, 0, 0, -(not request.pending))

    def first_token(self, request_id: str) -> None:
        """A prompt is computed; unknown requests are ignored, and what is known already."""
        request = self._requests.get(request_id)
        if request is not None:
            self.progress(request_id, request.queued_tokens)

    def ended(self, request_id: str) -> None:
        """A request has ended, in whatever way; unknown ones are ignored."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            queued, pending = request.queued_tokens, request.pending
            self._computed(request)
            self._add(request.front, -queued, -request.kv_tokens, -1, -pending)

    def is_due(self, now_ms: float, at_once: bool) -> bool:
        """Whether a report is to be sent now, between two steps; it then counts as sent.

        `at_once`: the worker was idle and is about to begin, or nothing is left to do.
        """
        if now_ms - self._reported_ms < REPORT_MS and not at_once:
            return False
        self._reported_ms = now_ms
        return True

    def report(self) -> LoadReport:
        return LoadReport(self._fronts.copy(), self._shared_tokens)

    def _share(self, request: _Request, num_tokens: int) -> None:
        """Count tokens that an earlier prompt computes as well."""
        self._shared_tokens += num_tokens - request.shared_tokens
        request.shared_tokens = num_tokens

    def _computed(self, request: _Request) -> None:
        if request.pending:
            request.pending = False
            self._share(request, 0)
            self._to_compute.subtract(request.hashes)
            for block_hash in request.hashes:
                if not self._to_compute[block_hash]:
                    del self._to_compute[block_hash]

    def _add(self, front: str, queued: int, kv: int, count: int, pending: int) -> None:
        load = self._fronts[front]
        self._fronts[front] = FrontLoad(
            load.queued_tokens + queued,
            load.kv_tokens + kv,
            load.num_requests + count,
            load.num_pending + pending,
            *load[4:],
        )
