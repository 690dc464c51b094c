"""What requests took, in GPU-seconds, by who pays: told by the workers, kept by the front.

A worker says what a request took when it ends there, whatever the end, and with every sign of life
what those take that have not ended. So a request that moved pays what all its workers spent; of a
worker that dies, what it did since its last sign of life counts as idle.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from tokenmill.core.cost import Cost
from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import EngineStats
from tokenmill.workers.open_request import OpenRequest
from tokenmill.workers.slot import WorkerSlot

NUM_RECEIPTS = 1000  # that are remembered


class Receipt(msgspec.Struct, frozen=True):
    """What one request took, on all workers together."""

    request_id: str
    account: str
    cost: Cost


class AccountView(msgspec.Struct, frozen=True):
    """Who pays, for how many requests, and how much; requests that run are included."""

    name: str
    num_requests: int  # that have ended
    cost: Cost


class AccountsView(msgspec.Struct, frozen=True):
    """All GPU time so far: that of the accounts, idle time, and what no worker has told yet."""

    num_gpus: int
    gpu_s: float
    idle_s: float
    accounts: list[AccountView]
    latest: list[Receipt]

    @property
    def untold_s(self) -> float:
        """What steps took that no request has been charged yet."""
        return self.gpu_s - self.idle_s - sum(each.cost.spent_s for each in self.accounts)


@dataclass(slots=True)
class _Account:
    num_requests: int = 0
    cost: Cost = field(default_factory=Cost)


@dataclass(slots=True)
class _AtWorker:
    """The requests at one worker, by their ids there, and what it told of them."""

    requests: dict[str, OpenRequest] = field(default_factory=dict)
    costs: Mapping[str, Cost] = field(default_factory=dict)
    charged_s: float = 0.0  # by this process


class Accounts:
    """Charges accounts for what workers spent on their requests."""

    def __init__(self) -> None:
        self._accounts: dict[str, _Account] = {}
        self._at: dict[WorkerSlot, _AtWorker] = {}
        self._latest: deque[Receipt] = deque(maxlen=NUM_RECEIPTS)
        self._gone_s = self._gone_idle_s = 0.0  # of workers that have left
        self.charged_dead_s = 0.0  # by this process, for what workers did that have died or left

    def sent(self, slot: WorkerSlot, entry: OpenRequest) -> None:
        """A worker has got a request; it will say how it ended there."""
        self._at.setdefault(slot, _AtWorker()).requests[entry.sent_as] = entry
        entry.num_workers += 1

    def ended(self, slot: WorkerSlot, output: RequestOutput) -> None:
        at = self._at.get(slot)
        entry = at.requests.pop(output.request_id, None) if at is not None else None
        if at is not None and entry is not None:
            self._charge(at, entry, output.cost)

    def told(self, slot: WorkerSlot, costs: Mapping[str, Cost]) -> None:
        """A worker says what its requests have taken so far."""
        self._at.setdefault(slot, _AtWorker()).costs = costs

    def died(self, slot: WorkerSlot) -> None:
        """A worker is gone; the slot's next one starts anew."""
        at = self._at.pop(slot, _AtWorker())
        for sent_as, entry in at.requests.items():
            self._charge(at, entry, at.costs.get(sent_as))
        self.charged_dead_s += at.charged_s
        slot.end_account(at.charged_s)

    def left(self, slot: WorkerSlot) -> None:
        slot.end_stats()
        self.died(slot)
        stats = slot.stats()
        self._gone_s += stats.gpu_s
        self._gone_idle_s += stats.gpu_idle_s

    def closed(self, entry: OpenRequest) -> None:
        """A request has ended for its client; workers may still have to say what it took."""
        entry.closed = True
        self._finish(entry)

    def _charge(self, at: _AtWorker, entry: OpenRequest, cost: Cost | None) -> None:
        if cost is not None:
            entry.cost.add(cost)
            at.charged_s += cost.spent_s
            self._accounts.setdefault(entry.account, _Account()).cost.add(cost)
        entry.num_workers -= 1
        self._finish(entry)

    def _finish(self, entry: OpenRequest) -> None:
        if entry.closed and not entry.num_workers:
            self._accounts.setdefault(entry.account, _Account()).num_requests += 1
            self._latest.append(Receipt(entry.request.request_id, entry.account, entry.cost))
            entry.stream.settle(entry.index, entry.cost)

    def view(self, stats: EngineStats) -> AccountsView:
        """All accounts, with what `stats` of the workers say of time that passed."""
        costs = {name: Cost() for name in self._accounts}
        for name, account in self._accounts.items():
            costs[name].add(account.cost)
        for entry, cost in self._running():
            costs.setdefault(entry.account, Cost()).add(cost)
        accounts = self._accounts
        return AccountsView(
            num_gpus=stats.num_gpus,
            gpu_s=stats.gpu_s + self._gone_s,
            idle_s=stats.gpu_idle_s + self._gone_idle_s,
            accounts=[
                AccountView(name, accounts[name].num_requests if name in accounts else 0, cost)
                for name, cost in sorted(costs.items())
            ],
            latest=list(self._latest),
        )

    def _running(self) -> Iterable[tuple[OpenRequest, Cost]]:
        for at in self._at.values():
            for sent_as, entry in at.requests.items():
                if (cost := at.costs.get(sent_as)) is not None:
                    yield entry, cost
