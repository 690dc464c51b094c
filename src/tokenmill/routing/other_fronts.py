"""What other fronts have at the workers: told by load reports, and estimated since the last one.

A front announces what it sends, and a report replaces all announcements from before it was made. On
the way are those that neither has told of yet; they are estimated.

How many requests others send is learnt from their announcements, or else from the reports: so many
in a millisecond, and so many with each request of one's own (requests that come at once come to all
fronts). Where those that no report has told of went is unknown; each front chooses by the same
rule, so that they are assumed where a request of mean size costs least. A report ends what was
assumed before it was made; so does the silence of a worker that was idle, for it would have
reported.

As long as others' requests are unknown, all fronts see the same worker as the best one. Each then
takes the workers that cost little more by turns (`own_turns`), beginning with another one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import NamedTuple

from tokenmill.routing.load_report import REPORT_MS, Announcement, FrontLoad, LoadReport
from tokenmill.routing.prices import WorkerLoad

DECAY = 1.0 - 1 / 16384  # of what was learnt, with each report
PRIOR_MS = 100.0  # prior: time per worker without requests of other fronts
PRIOR_REQUESTS = 1.0  # prior: own requests without another at once, per worker
MAX_OWN = 4096  # latest requests of one's own whose times are kept
LAG_SHARE = 1 / 16  # of the latest report in the mean time that reports take to come
SILENCE_MS = 1.0  # beyond that time, after which no report is expected any more
AT_ONCE_MS = 0.5  # between requests that come at once
OWN_SHARE = 1 / 64  # of the latest request of one's own in what announcements teach
TOLD_SHARE = 1 / 64  # of the latest announcement in the mean request
MAX_AT_ONCE = 4  # estimated requests that are placed one by one before a decision


class Share(NamedTuple):
    """Load of other fronts at a worker, or its change."""

    queued_tokens: int = 0
    kv_tokens: int = 0
    num_requests: int = 0
    num_pending: int = 0

    def plus(self, other: Share, times: int = 1) -> Share:
        return Share(*(a + times * b for a, b in zip(self, other, strict=True)))


NOTHING = Share()

LEAST_TOKEN_MS = 1e-6  # steps of which prompts take no time at all are fitted as such


@dataclass(slots=True)
class _Worker:
    """Load of other fronts at one worker: last report, and estimate since."""

    reported: Share = NOTHING
    queued_tokens: int = 0  # of all fronts, when the last report was made
    made_ms: float = 0.0
    num_sent: int | None = None  # by others, when the last report was made
    idle: bool = True  # when the last report was made
    heard: deque[tuple[float, Share]] = field(default_factory=deque)
    assumed: deque[tuple[float, Share]] = field(default_factory=deque)
    counted: Share = NOTHING  # in the router's account
    began_ms: float = -1.0  # the step that the last report began

    def told_until(self, until_ms: float) -> None:
        while self.heard and self.heard[0][0] <= until_ms:
            self.heard.popleft()

    def known_until(self, until_ms: float) -> None:
        """Drop estimates up to a time at which the real load is known."""
        while self.assumed and self.assumed[0][0] <= until_ms:
            self.assumed.popleft()

    def recount(self, now_ms: float, token_ms: float) -> Share:
        """Estimate what others have there now; returns how the router's account changes."""
        before, total = self.counted, self.reported
        token_ms = max(token_ms, LEAST_TOKEN_MS)
        queue, put, last_ms = float(self.queued_tokens), self.queued_tokens, self.made_ms
        for sent_ms, share in sorted([*self.heard, *self.assumed]):  # computed while others come
            queue = max(queue - (sent_ms - last_ms) / token_ms, 0.0) + share.queued_tokens
            put += share.queued_tokens
            last_ms, total = sent_ms, total.plus(share)
        left = max(queue - (now_ms - last_ms) / token_ms, 0.0) / max(put, 1)
        self.counted = Share(
            math.ceil(left * total.queued_tokens),
            total.kv_tokens,
            total.num_requests,
            math.ceil(left * total.num_pending),
        )
        return self.counted.plus(before, -1)


class OtherFronts:
    """Load of all other fronts, as a router counts it."""

    def __init__(self, front: str, seed: int) -> None:
        self.front = front
        self._workers: dict[str, _Worker] = {}
        self._rng = random.Random(f"{front}:{seed}")
        self._own_ms: list[float] = []  # when requests were routed here
        self._sums = [0.0] * 5  # over reports: of ms * ms, ms * own, own * own, and with others'
        self._by_ms = self._by_own = 0.0  # requests of others
        self._part = 0.0  # of the next request of others, which has come so far
        self._after = 0.0  # requests that came with the last of one's own
        self._last_ms = 0.0  # when that one came
        self._lag_ms = 0.0  # of reports, a moving mean
        self._told_ms: float | None = None  # of announcements; None: there are none
        self._mean = Share(0, 0, 1, 1)  # request of others
        self._mean_tokens = [0.0, 0.0]  # of announcements: queued, of KV
        # Latest requests of one's own, the milliseconds between them, announcements in that time,
        # and of these the ones that came at once with a request of one's own.
        self._num_own = self._own_span_ms = self._num_told = self._num_with_own = 0.0
        self._turns: deque[tuple[float, str]] = deque(maxlen=MAX_OWN)  # of one's own
        self._fronts: list[str] = []  # by name
        self.known = False  # there are other fronts

    def add_worker(self, name: str) -> None:
        self._workers[name] = _Worker()

    def remove_worker(self, name: str) -> None:
        self._workers.pop(name, None)

    # What reports tell.

    def report(
        self, name: str, report: LoadReport, made_ms: float, now_ms: float, token_ms: float
    ) -> Share:
        """Take a worker's report; returns what changes by it. A prompt token takes `token_ms`."""
        worker = self._workers[name]
        others = [load for front, load in report.fronts.items() if front != self.front]
        total = FrontLoad(*(sum(column) for column in zip(*others, strict=True)))
        own = report.fronts.get(self.front, FrontLoad())
        self.known = self.known or bool(others)
        if len(report.fronts) != len(self._fronts):
            self._fronts = sorted({*report.fronts, self.front})
        self._lag_ms += LAG_SHARE * (now_ms - made_ms - self._lag_ms)
        self._learn(worker, total, made_ms)
        worker.idle = not total.num_requests + own.num_requests
        worker.reported = Share(total.queued_tokens - report.shared_tokens, *total[1:4])
        worker.queued_tokens = max(worker.reported.queued_tokens + own.queued_tokens, 0)
        worker.told_until(made_ms)
        worker.known_until(self._seen_ms(worker, now_ms))
        return worker.recount(now_ms, token_ms)

    def heard(self, told: Announcement, sent_ms: float, now_ms: float) -> Share:
        """Take what another front has sent; returns what changes by it."""
        worker = self._workers[told.worker]
        lag_ms = now_ms - sent_ms
        self._told_ms = lag_ms if self._told_ms is None else self._told_ms
        self._told_ms += LAG_SHARE * (lag_ms - self._told_ms)
        self._learn_told(told, sent_ms)
        if sent_ms <= worker.made_ms:
            return NOTHING
        share = Share(told.queued_tokens, told.kv_tokens, 1, bool(told.queued_tokens))
        worker.heard.append((sent_ms, share))
        worker.counted = worker.counted.plus(share)
        return share

    def _learn_told(self, told: Announcement, sent_ms: float) -> None:
        """Update mean size of other fronts' requests, and how many come with an own one."""
        mean = self._mean_tokens
        for i, tokens in enumerate((told.queued_tokens, told.kv_tokens)):
            mean[i] += (TOLD_SHARE if self._mean.kv_tokens else 1.0) * (tokens - mean[i])
        self._mean = Share(round(mean[0]), round(mean[1]), 1, 1)
        before, until = sent_ms - AT_ONCE_MS, sent_ms + AT_ONCE_MS
        own = bisect_right(self._own_ms, until) - bisect_right(self._own_ms, before)
        if self._own_ms:  # the time that they came in is measured from there on
            self._num_told += 1.0
            self._num_with_own += bool(own)

    def _learn_own(self, now_ms: float) -> None:
        """Update the expected number of requests per own request."""
        if self._own_ms:
            self._own_span_ms += now_ms - self._own_ms[-1]
        self._num_own += 1.0
        if self._told_ms is not None:
            self._by_ms = self._num_told / (self._own_span_ms + PRIOR_MS)
            at_once = self._num_with_own / (self._num_own + 0.5)
            self._by_own = max(at_once - 2 * AT_ONCE_MS * self._by_ms, 0.0)
        for name in ("_num_own", "_own_span_ms", "_num_told", "_num_with_own"):
            setattr(self, name, (1.0 - OWN_SHARE) * getattr(self, name))

    def begins(self, name: str, made_ms: float, now_ms: float, began_ms: float) -> bool:
        """Whether a report tells of a later step than the one that was known to begin."""
        worker = self._workers[name]
        if began_ms not in (worker.began_ms, 0.0) and made_ms < began_ms:
            return False
        worker.began_ms = now_ms
        return True

    def _learn(self, worker: _Worker, total: FrontLoad, made_ms: float) -> None:
        """Fit what all workers got from others by time and by requests of one's own."""
        num_sent = total.num_sent
        if num_sent and self._told_ms is None:
            mean = total.sent_tokens // num_sent, total.sent_kv_tokens // num_sent
            self._mean = Share(*mean, 1, 1)
        if worker.num_sent is not None and made_ms > worker.made_ms:
            own = bisect_right(self._own_ms, made_ms) - bisect_right(self._own_ms, worker.made_ms)
            got = max(num_sent - worker.num_sent, 0) * len(self._workers)
            ms = made_ms - worker.made_ms
            weight = 1.0 / (ms + REPORT_MS)  # counts vary as their means do
            row = (ms * ms, ms * own, own * own, ms * got, own * got)
            self._sums = [DECAY * s + weight * x for s, x in zip(self._sums, row, strict=True)]
        worker.num_sent, worker.made_ms = num_sent, made_ms
        if self._told_ms is None:
            self._by_ms, self._by_own = self._fit()

    def _fit(self) -> tuple[float, float]:
        aa, ab, bb, ay, by = self._sums
        aa += PRIOR_MS * len(self._workers)
        bb += PRIOR_REQUESTS / REPORT_MS * len(self._workers)
        det = aa * bb - ab * ab
        by_ms, by_own = (ay * bb - by * ab) / det, (by * aa - ay * ab) / det
        if by_ms < 0.0:
            return 0.0, by / bb
        return (ay / aa, 0.0) if by_own < 0.0 else (by_ms, by_own)

    # What is estimated.

    def sent_before(self, now_ms: float) -> list[tuple[float, Share]]:
        """What others are taken to have sent, and when, since a request last came here.

        What all workers would have told of by now is left out. Of those that come together with a
        request of one's own some come before it: how many is drawn, or all fronts choose alike.
        """
        self._learn_own(now_ms)
        seen_ms = min(self._seen_ms(worker, now_ms) for worker in self._workers.values())
        since_ms = max(self._last_ms, seen_ms)
        before = self._rng.random() * self._by_own
        since = self._by_ms * max(now_ms - since_ms, 0.0)
        parts = since + before
        if self._last_ms > seen_ms:
            parts += self._part + self._after
        self._last_ms, self._after = now_ms, self._by_own - before
        self._own_ms.append(now_ms)
        if len(self._own_ms) > 2 * MAX_OWN:
            del self._own_ms[:MAX_OWN]
        num = int(parts)
        self._part = parts - num
        num_since = min(round(since), num)
        # A report of this very moment may not tell yet of what comes with a request of one's own.
        at_once_ms = now_ms + SILENCE_MS
        return [
            *self._groups(num_since, since_ms, now_ms),
            *self._groups(num - num_since, at_once_ms, at_once_ms),
        ]

    def _groups(self, num: int, since_ms: float, until_ms: float) -> list[tuple[float, Share]]:
        """So many requests of mean size, spread over a time."""
        groups = min(num, MAX_AT_ONCE)
        sizes = [num * (i + 1) // groups - num * i // groups for i in range(groups)]
        each_ms = (until_ms - since_ms) / max(groups, 1)
        return [
            (since_ms + (i + 1) * each_ms, NOTHING.plus(self._mean, size))
            for i, size in enumerate(sizes)
        ]

    def num_unknown(self) -> float:
        return self._by_own + self._by_ms * self._unknown_ms()

    def _unknown_ms(self) -> float:
        lag_ms = self._lag_ms + REPORT_MS if self._told_ms is None else self._told_ms
        return lag_ms + SILENCE_MS

    def own_turns(self, now_ms: float) -> Counter[str]:
        """What each worker got of one's own since then."""
        while self._turns and self._turns[0][0] < now_ms - self._unknown_ms():
            self._turns.popleft()
        return Counter(name for _, name in self._turns)

    def took_turn(self, name: str, now_ms: float) -> None:
        """A request of one's own went to a worker."""
        self._turns.append((now_ms, name))

    @property
    def rank(self) -> int:
        return self._fronts.index(self.front) if self._fronts else 0

    def one_more(self, load: WorkerLoad) -> WorkerLoad:
        """A worker's load with one more request of mean size."""
        mean = self._mean
        return load._replace(
            queued_tokens=load.queued_tokens + mean.queued_tokens,
            kv_tokens=load.kv_tokens + mean.kv_tokens,
            num_requests=load.num_requests + 1,
            num_pending=load.num_pending + 1,
        )

    def assume(self, name: str, share: Share, sent_ms: float, now_ms: float) -> Share:
        """Others are taken to have sent this to a worker; returns what changes by it."""
        worker = self._workers[name]
        if sent_ms <= self._seen_ms(worker, now_ms):
            return NOTHING
        worker.assumed.append((sent_ms, share))
        worker.counted = worker.counted.plus(share)
        return share

    def silenced(self, now_ms: float, token_ms: float) -> list[tuple[str, Share]]:
        """What changes by silence: idle workers would have reported, fronts have announced."""
        changes = []
        for name, worker in self._workers.items():
            if worker.assumed and worker.assumed[0][0] <= (seen := self._seen_ms(worker, now_ms)):
                worker.known_until(seen)
                changes.append((name, worker.recount(now_ms, token_ms)))
        return changes

    def _seen_ms(self, worker: _Worker, now_ms: float) -> float:
        lags = [self._lag_ms] if worker.idle else []
        if self._told_ms is not None:
            lags.append(self._told_ms)
        return max(worker.made_ms, now_ms - min(lags) - SILENCE_MS) if lags else worker.made_ms
