"""What a front has counted, as data that can be added up: calls, tokens, receipts and routing."""

from __future__ import annotations

from collections import Counter

import msgspec

from tokenmill.core.cost import Cost
from tokenmill.core.images import LoaderStats
from tokenmill.workers.accounts import NUM_RECEIPTS, AccountView, Receipt
from tokenmill.workers.pool_view import NUM_DECISIONS, DecisionView


class FrontCounts(msgspec.Struct):
    """Counters of any meaning: they are added by their names."""

    single: dict[str, float] = {}
    labelled: dict[str, dict[str, float]] = {}  # by labels, joined
    buckets: dict[str, list[float]] = {}  # of histograms, and last their sum
    recent: dict[str, list[float]] = {}  # the latest values

    def add(self, other: FrontCounts) -> None:
        self.single = dict(Counter(self.single) + Counter(other.single))
        for name, counts in other.labelled.items():
            self.labelled[name] = dict(Counter(self.labelled.get(name, {})) + Counter(counts))
        for name, values in other.buckets.items():
            own = self.buckets.get(name) or [0.0] * len(values)
            self.buckets[name] = [a + b for a, b in zip(own, values, strict=True)]
        for name, values in other.recent.items():
            self.recent[name] = [*self.recent.get(name, ()), *values]


class AtWorker(msgspec.Struct):
    """What a front, or all of them, sent to one worker."""

    num_requests: int = 0
    queued_tokens: int = 0
    routed: int = 0
    routed_tokens: int = 0
    overlap_tokens: int = 0
    output_tokens: int = 0
    tokens_per_s: float = 0.0
    num_pending: int = 0  # without a first token, where the worker does not say it itself

    def add(self, other: AtWorker) -> None:
        for name in self.__struct_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


IN_VIEW = tuple(name for name in AtWorker.__struct_fields__ if name != "num_pending")


class FrontReport(msgspec.Struct):
    """All that one front has counted since its start, or all fronts together."""

    counts: FrontCounts = msgspec.field(default_factory=FrontCounts)
    accounts: dict[str, AccountView] = {}
    latest: list[Receipt] = []
    charged_dead_s: float = 0.0  # of GPU time, for what workers did that have died since
    workers: dict[str, AtWorker] = {}
    num_open: int = 0
    num_held: int = 0
    num_pending: int = 0
    migrations: int = 0
    transfers: int = 0
    failed_transfers: int = 0
    decisions: list[DecisionView] = []
    image_loads: LoaderStats | None = None  # of a model that takes images

    def add(self, other: FrontReport) -> None:
        self.counts.add(other.counts)
        for name, account in other.accounts.items():
            own = self.accounts.get(name) or AccountView(name, 0, Cost())
            own.cost.add(account.cost)
            self.accounts[name] = AccountView(
                name, own.num_requests + account.num_requests, own.cost
            )
        self.latest = [*self.latest, *other.latest][-NUM_RECEIPTS:]
        for name, at in other.workers.items():
            self.workers.setdefault(name, AtWorker()).add(at)
        for name in ("charged_dead_s", "num_open", "num_held", "num_pending", *_COUNTERS):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.image_loads is not None:
            self.image_loads = self.image_loads or LoaderStats()
            self.image_loads.add(other.image_loads)
        decisions = [*self.decisions, *other.decisions]
        self.decisions = sorted(decisions, key=lambda each: each.time_s)[-NUM_DECISIONS:]

    def past(self) -> FrontReport:
        """What remains of a front that is gone: its counters."""
        gone = FrontReport()
        gone.add(self)
        gone.num_open = gone.num_held = gone.num_pending = 0
        gone.counts.recent, gone.decisions = {}, []
        if gone.image_loads is not None:
            gone.image_loads.cached_bytes = 0
        for at in gone.workers.values():
            at.num_requests = at.queued_tokens = at.num_pending = 0
            at.tokens_per_s = 0.0
        return gone


_COUNTERS = ("migrations", "transfers", "failed_transfers")
