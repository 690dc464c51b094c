"""The pool as one of several fronts sees it.

A front has links to all workers, routers and open requests of its own. It does not start workers:
to launch a slot is to bind a socket and to ask the owner for a worker that connects to it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from tokenmill.core.config import PoolConfig, RouterPolicy, ServerConfig
from tokenmill.core.types import EngineStats
from tokenmill.routing.suspects import Trials
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.control import (
    Announced,
    AskTrial,
    Connect,
    DeleteResponse,
    DrainWorker,
    EndTrial,
    FindItem,
    GetResponse,
    KeepResponse,
    Left,
    NewRouter,
    RenewRouter,
    Scale,
    ToFront,
    TrialGranted,
    Welcome,
    WorkerAdded,
    WorkerGone,
    WorkerLeaving,
)
from tokenmill.workers.fronts.owner_link import CALLS_S, FrontMembership, OwnerLink, front_number
from tokenmill.workers.fronts.report import IN_VIEW, AtWorker, FrontCounts, FrontReport
from tokenmill.workers.fronts.stored_responses import ResponseKeeper
from tokenmill.workers.link import Spawn, WorkerProcess
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.pool_view import PoolView, WorkerView
from tokenmill.workers.slot import Role

_log = logging.getLogger(__name__)

NEVER_S = 1e9  # the owner watches and restarts workers


class _LinkedWorker:
    """A worker's process as a link of this front sees it: others end it."""

    def __init__(self) -> None:
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def kill(self) -> None:
        if not self._ended.done():
            self._ended.set_result(0)


class _SharedTrials(Trials):
    """One suspect at a time over all fronts: the owner says when."""

    def __init__(self, owner: OwnerLink) -> None:
        self._owner = owner
        self._state = "none"  # none, asked, granted or running

    def begin(self) -> bool:
        if self._state == "granted":
            self._state = "running"
            return True
        if self._state == "none":
            self._state = "asked"
            self._owner.send(AskTrial())
        return False

    def end(self) -> None:
        self._state = "none"
        self._owner.send(EndTrial())

    def grant(self, send_held: Callable[[], None]) -> None:
        """It is our turn; it passes on where the suspect has ended by itself."""
        self._state = "granted"
        send_held()
        if self._state == "granted":
            self.end()


class _OwnersResponses:
    """The stored responses of all fronts, which the owner keeps."""

    def __init__(self, owner: OwnerLink, membership: FrontMembership) -> None:
        self._owner = owner
        self._membership = membership

    def put(self, response_id: str, account: str, item_ids: list[str], payload: bytes) -> None:
        self._owner.send(KeepResponse(response_id, account, item_ids, payload))

    async def get(self, response_id: str, account: str) -> bytes | None:
        return (await self._owner.ask(GetResponse(response_id, account))).response

    async def find_item(self, item_id: str, account: str) -> bytes | None:
        return (await self._owner.ask(FindItem(item_id, account))).response

    async def delete(self, response_id: str, account: str) -> bool:
        return (await self._owner.ask(DeleteResponse(response_id, account))).is_deleted

    def size(self) -> tuple[int, int]:
        totals = self._membership.totals
        return (0, 0) if totals is None else totals.stored


def _followed(config: PoolConfig) -> PoolConfig:
    """The config of a pool whose workers are started, watched and restarted elsewhere."""
    return replace(
        config,
        start_timeout_s=NEVER_S,
        hang_timeout_s=NEVER_S,
        max_restarts=int(NEVER_S),
        backoff_s=0.0,
    )


class MemberPool(WorkerPool):
    """The pool as one of several fronts sees it; what concerns all of them goes to the owner."""

    def __init__(self, welcome: Welcome, owner: OwnerLink, host: str | None) -> None:
        setup = welcome.setup
        self.membership = FrontMembership(
            welcome, owner, self.report, lambda: super(MemberPool, self).num_pending
        )
        self.membership.on_drain = self._end
        self._trials = _SharedTrials(owner)
        router = replace(setup.router, seed=setup.router.seed + front_number(welcome.front))
        super().__init__(
            config=_followed(setup.pool),
            router=router,
            host=host,
            spawn_of=self._spawner,
            trials=self._trials,
            front=welcome.link,
        )
        self._owner = owner
        self._workers = welcome.workers
        self._tasks: set[asyncio.Task[None]] = set()
        self._followed: set[str] = set()
        self.asked_to_drain: Callable[[], None] = lambda: None
        self.routers.announce = lambda told: owner.send(Announced(told, time.monotonic()))
        owner.pass_to(self._receive)

    async def start(self) -> ModelFacts:
        follows = [self._follow(name, role) for name, role in self._workers.items()]
        for ended in await asyncio.gather(*follows, return_exceptions=True):
            if isinstance(ended, Exception):  # a CancelledError, which is none: the worker left
                raise ended
        await self.handovers.settled()
        while self.facts is None:  # all workers are being restarted
            await asyncio.sleep(CALLS_S)
        await self.stats()
        self._begin(self.membership.tell())
        return self.facts

    async def close(self, grace_s: float = 0.0) -> None:
        """Leave the workers; open requests end in ERROR."""
        for task in self._tasks:
            task.cancel()
        await super().close(0.0)

    def _follow(self, name: str, role: Role) -> asyncio.Task[None]:
        self._followed.add(name)
        return self._begin(self._lifecycle.follow(name, role))

    def _spawner(self, name: str, role: Role) -> Spawn:
        async def spawn(address: str) -> WorkerProcess:
            self._owner.send(Connect(name, address))
            return _LinkedWorker()

        return spawn

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Messages of the owner.

    def _receive(self, message: ToFront) -> None:
        match message:
            case WorkerAdded(worker=worker, role=role) if worker not in self._followed:
                self._follow(worker, role)
            case WorkerGone(worker=worker, address=address, reason=reason):
                if (slot := self.slots.get(worker)) is not None:
                    slot.lost(address, reason, message.worker_lives)
            case WorkerLeaving(worker=worker, timeout_s=timeout_s):
                self._begin(self._leave(worker, timeout_s))
            case Announced(told=told, sent_s=sent_s):
                self.routers.heard(told, sent_s)
            case TrialGranted():
                self._trials.grant(self._requests.send_held)
            case NewRouter(policy=policy):
                super().renew_router(policy)
            case _:
                self.membership.receive(message)

    def _end(self, failure: str) -> None:
        if failure:
            self.fail_open(failure, "worker_died")
        self.asked_to_drain()

    async def _leave(self, worker: str, timeout_s: float) -> None:
        await self._lifecycle.leave(worker, timeout_s)
        self._followed.discard(worker)
        self._owner.send(Left(worker))

    # What concerns all fronts.

    @property
    def num_pending(self) -> int:
        """Open requests without a first token, of all fronts."""
        return super().num_pending + self.membership.others.num_pending

    @property
    def num_restarts(self) -> int:
        totals = self.membership.totals
        return 0 if totals is None else totals.num_restarts

    async def refresh(self) -> None:
        await self.membership.refresh()

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        await self.refresh()
        return self.known_stats()

    def known_stats(self) -> EngineStats:
        totals = self.membership.totals
        return EngineStats() if totals is None else totals.stats

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        await self._owner.ask(Scale(num_workers, role))
        await self.refresh()

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        await self._owner.ask(DrainWorker(name, timeout_s))
        await self.refresh()

    async def renew_routers(self, policy: RouterPolicy | None = None) -> None:
        await self._owner.ask(RenewRouter(policy))

    def response_keeper(self, limits: ServerConfig) -> ResponseKeeper:
        return _OwnersResponses(self._owner, self.membership)

    def total_counts(self) -> FrontCounts | None:
        return self.membership.total_counts()

    def accounts(self) -> AccountsView:
        totals = self.membership.totals
        if totals is None:
            return super().accounts()
        time, report = totals.accounts, totals.report
        return AccountsView(
            num_gpus=time.num_gpus,
            gpu_s=time.gpu_s,
            idle_s=time.idle_s - report.charged_dead_s,
            accounts=[report.accounts[name] for name in sorted(report.accounts)],
            latest=report.latest,
        )

    def view(self, decisions: bool = True) -> PoolView:
        own, totals = super().view(decisions), self.membership.totals
        if totals is None:
            return own
        report = totals.report
        known = {worker.name: worker for worker in own.workers}
        return msgspec.structs.replace(
            totals.pool,
            router=own.router,
            policy=own.policy,
            num_open=report.num_open,
            num_held=report.num_held,
            migrations=report.migrations,
            transfers=report.transfers,
            failed_transfers=report.failed_transfers,
            workers=[_summed(w, report, known.get(w.name)) for w in totals.pool.workers],
            decisions=(report.decisions or own.decisions) if decisions else [],
            fronts=totals.fronts,
            images=self._images_view(report.image_loads),
        )

    def report(self, decisions: bool) -> FrontReport:
        view, accounts = super().view(decisions), self._accounts.view(EngineStats())
        return FrontReport(
            counts=self.membership.counts(),
            accounts={account.name: account for account in accounts.accounts},
            latest=accounts.latest,
            charged_dead_s=self._accounts.charged_dead_s,
            workers={worker.name: _at(worker) for worker in view.workers},
            num_open=view.num_open,
            num_held=view.num_held,
            num_pending=super().num_pending,
            migrations=view.migrations,
            transfers=view.transfers,
            failed_transfers=view.failed_transfers,
            decisions=view.decisions,
            image_loads=self.image_loads,
        )


def _at(worker: WorkerView) -> AtWorker:
    return AtWorker(**{name: getattr(worker, name) for name in IN_VIEW})


def _summed(worker: WorkerView, report: FrontReport, own: WorkerView | None) -> WorkerView:
    at = report.workers.get(worker.name, AtWorker())
    sums = {name: getattr(at, name) for name in IN_VIEW}
    cached = 0 if own is None else own.cached_blocks
    return msgspec.structs.replace(worker, cached_blocks=cached, **sums)
