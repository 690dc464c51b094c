"""A front's side: the connection to the owner, and the pool as this front sees it.

A front has links to all workers, routers and open requests of its own. It does not start workers:
to launch a slot is to bind a socket and to ask the owner for a worker that connects to it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any

import msgspec

from tokenmill.core.config import PoolConfig, RouterPolicy
from tokenmill.core.types import EngineStats
from tokenmill.routing.suspects import Trials
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.control import (
    Announced,
    Answer,
    Ask,
    AskTrial,
    Connect,
    Drain,
    DrainWorker,
    EndTrial,
    FromFront,
    FrontFailed,
    GetKept,
    GetTicket,
    GetTotals,
    GiveReport,
    Hello,
    Keep,
    Left,
    Listening,
    NewRouter,
    OpenCalls,
    OthersOpen,
    Question,
    Refused,
    RenewRouter,
    Reported,
    Scale,
    ToFront,
    Totals,
    Trial,
    Welcome,
    WorkerAdded,
    WorkerGone,
    WorkerLeaving,
    decode_to_front,
    encode,
)
from tokenmill.workers.fronts.control_socket import FrontSocket
from tokenmill.workers.fronts.kept_answers import KeptAnswer
from tokenmill.workers.fronts.owner import FrontError
from tokenmill.workers.fronts.report import AtWorker, FrontCounts, FrontReport, Ticket
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import Spawn, WorkerProcess, WorkerStartError
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.pool_view import PoolView, WorkerView
from tokenmill.workers.slot import Role

_log = logging.getLogger(__name__)

JOIN_TIMEOUT_S = 30.0
LINK_TIMEOUT_S = 30.0  # for workers to reach a front that joins
REPORT_S = 1.0
CALLS_S = 0.05  # between two looks at what is open
BEAT_TICKS = 10  # of these, after which the owner hears of us though nothing has changed
OWNER_SILENT_S = 30.0
NEVER_S = 1e9  # the owner watches and restarts workers


class OwnerLink:
    """The connection to the owner: questions and answers, and messages that are passed on."""

    def __init__(self, address: str, key: str = "") -> None:
        self._socket = FrontSocket(self._receive, address, key)
        self.gone = self._socket.gone
        self._on_message: Callable[[ToFront], None] | None = None
        self._messages: deque[ToFront] = deque()  # to be passed on
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[Answer]] = {}
        self._number = 0
        self.heard_s = time.monotonic()

    async def join(self, ticket: str, version: str, model: str | None) -> Welcome:
        """Say Hello; FrontError where the owner does not take this front."""
        self.send(Hello(ticket, version, model, os.getpid(), socket.gethostname()))
        gone = asyncio.ensure_future(self.gone.wait())
        try:
            async with asyncio.timeout(JOIN_TIMEOUT_S):
                await asyncio.wait((self._welcome, gone), return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            raise FrontError(f"the server did not answer within {JOIN_TIMEOUT_S:g} s") from None
        finally:
            gone.cancel()
        if not self._welcome.done():
            raise FrontError("the server closed the connection")
        return self._welcome.result()

    def fail(self, message: str) -> None:
        """Tell the owner why this front cannot start."""
        self.send(FrontFailed(message))

    def send(self, message: FromFront) -> None:
        self._socket.send(encode(message))

    async def ask(self, question: Question) -> Answer:
        """What the owner answers.

        PoolError or WorkerStartError where it cannot do it, FrontError where it failed.
        """
        self._number += 1
        number = self._number
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answered
        self.send(Ask(number, question))
        answer = await answered
        if answer.error_kind == "start":
            raise WorkerStartError(answer.error)
        if answer.error_kind == "internal":
            raise FrontError(answer.error)
        if answer.error:
            raise PoolError(answer.error)
        return answer

    def _receive(self, data: bytes) -> None:
        self.heard_s = time.monotonic()
        message = decode_to_front(data)
        match message:
            case Welcome() if not self._welcome.done():
                self._welcome.set_result(message)
            case Refused(message=why) if not self._welcome.done():
                self._welcome.set_exception(FrontError(why))
            case Answer(number=number):
                if (answered := self._answers.pop(number, None)) and not answered.done():
                    answered.set_result(message)
            case _:
                self._messages.append(message)
                self._pass_on()

    def pass_to(self, on_message: Callable[[ToFront], None]) -> None:
        """Pass messages on from the next turn of the event loop, those that came before first."""
        self._on_message = on_message
        asyncio.get_running_loop().call_soon(self._pass_on)

    def _pass_on(self) -> None:
        while self._messages and self._on_message is not None:
            self._on_message(self._messages.popleft())

    def close(self) -> None:
        self._socket.close()


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
        self.name = welcome.front
        self._trials = _SharedTrials(owner)
        router = replace(setup.router, seed=setup.router.seed + _number(welcome.front))
        super().__init__(
            config=_followed(setup.pool),
            router=router,
            host=host,
            spawn_of=self._spawner,
            trials=self._trials,
            front=welcome.link,
        )
        self._owner = owner
        self._host = host
        self._link_timeout_s = None if welcome.is_child else LINK_TIMEOUT_S
        self._workers = welcome.workers
        self._totals: Totals | None = None
        self._others = OpenCalls()
        self._tasks: set[asyncio.Task[None]] = set()
        self._followed: set[str] = set()
        self._parent = os.getppid() if welcome.is_child else None
        self.asked_to_drain: Callable[[], None] = lambda: None
        self.counts: Callable[[], FrontCounts] = FrontCounts
        self.calls: Callable[[], OpenCalls] = OpenCalls
        self.on_others: Callable[[OpenCalls], None] = lambda calls: None
        self.routers.announce = lambda told: owner.send(Announced(told, time.monotonic()))
        owner.pass_to(self._receive)

    async def start(self) -> ModelFacts:
        """Get a link to each worker that is there."""
        follows = [self._follow(name, role) for name, role in self._workers.items()]
        try:
            async with asyncio.timeout(self._link_timeout_s):
                ends = await asyncio.gather(*follows, return_exceptions=True)
        except TimeoutError:
            raise FrontError(self._unreached()) from None
        for ended in ends:
            if isinstance(ended, Exception):  # a CancelledError, which is none: the worker left
                raise ended
        await self.handovers.settled()
        while self.facts is None:  # all workers are being restarted
            await asyncio.sleep(CALLS_S)
        await self.stats()
        self._begin(self._tell())
        return self.facts

    def _unreached(self) -> str:
        late = ", ".join(slot.name for slot in self.slots.values() if not slot.ready)
        return (
            f"{late} did not connect to this front at {self._host} within {LINK_TIMEOUT_S:g} s: "
            "workers connect to random TCP ports here, so firewalls must let them through"
        )

    async def close(self, grace_s: float = 0.0) -> None:
        """Leave the workers; open requests end in ERROR."""
        for task in self._tasks:
            task.cancel()
        await super().close(0.0)

    def listening(self, url: str) -> None:
        """Clients can call this front."""
        self._owner.send(Listening(url))

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
            case GiveReport():
                self._owner.send(Reported(self.report(True), True))
            case Totals():
                self._totals = message
            case OthersOpen(calls=calls):
                self._others = calls
                self.on_others(calls)
            case Announced(told=told, sent_s=sent_s):
                self.routers.heard(told, sent_s)
            case Trial():
                self._trials.grant(self._requests.send_held)
            case NewRouter(policy=policy):
                super().renew_router(policy)
            case Drain(failure=failure):
                self._end(failure)

    def _end(self, failure: str) -> None:
        if failure:
            self.fail_open(failure, "worker_died")
        self.asked_to_drain()

    async def _leave(self, worker: str, timeout_s: float) -> None:
        await self._lifecycle.leave(worker, timeout_s)
        self._followed.discard(worker)
        self._owner.send(Left(worker))

    async def _tell(self) -> None:
        """Tell the owner what is open when that changes, and all counts now and then."""
        told, tick = OpenCalls(), 0
        while True:
            await asyncio.sleep(CALLS_S)
            if self._is_alone():
                self._owner.gone.set()
            tick += 1
            calls = self.calls()
            calls.num_pending = super().num_pending
            if calls != told or tick % BEAT_TICKS == 0:
                told = calls
                self._owner.send(calls)
            if tick * CALLS_S >= REPORT_S:
                tick = 0
                self._owner.send(Reported(self.report(False)))

    def _is_alone(self) -> bool:
        """The owner is gone, or says nothing, though it sends totals every second."""
        orphaned = self._parent is not None and os.getppid() != self._parent
        return orphaned or time.monotonic() - self._owner.heard_s > OWNER_SILENT_S

    # What concerns all fronts.

    @property
    def num_pending(self) -> int:
        """Open requests without a first token, of all fronts."""
        return super().num_pending + self._others.num_pending

    @property
    def num_restarts(self) -> int:
        return 0 if self._totals is None else self._totals.num_restarts

    async def refresh(self) -> None:
        """Ask for the sums of now."""
        answer = await self._owner.ask(GetTotals())
        self._totals = answer.totals or self._totals

    async def stats(self, timeout_s: float = 1.0) -> EngineStats:
        await self.refresh()
        return self.known_stats()

    def known_stats(self) -> EngineStats:
        return EngineStats() if self._totals is None else self._totals.stats

    async def scale(self, num_workers: int, role: Role = "both") -> None:
        await self._owner.ask(Scale(num_workers, role))
        await self.refresh()

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None:
        await self._owner.ask(DrainWorker(name, timeout_s))
        await self.refresh()

    async def renew_routers(self, policy: RouterPolicy | None = None) -> None:
        await self._owner.ask(RenewRouter(policy))

    async def kept(self, name: bytes) -> KeptAnswer | None:
        return (await self._owner.ask(GetKept(name))).kept

    def keep(self, name: bytes, answer: KeptAnswer) -> None:
        self._owner.send(Keep(name, answer))

    async def ticket(self, version: str, model: str | None) -> Ticket:
        answer = await self._owner.ask(GetTicket(version, model))
        assert answer.ticket is not None
        return answer.ticket

    def total_counts(self) -> FrontCounts | None:
        """The counters of all fronts, as they last told."""
        return None if self._totals is None else self._totals.report.counts

    def accounts(self) -> AccountsView:
        totals = self._totals
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
        own, totals = super().view(decisions), self._totals
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
        """What this front has counted."""
        view, accounts = super().view(decisions), self._accounts.view(EngineStats())
        return FrontReport(
            counts=self.counts(),
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
    return AtWorker(**{name: getattr(worker, name) for name in AtWorker.__struct_fields__})


def _summed(worker: WorkerView, report: FrontReport, own: WorkerView | None) -> WorkerView:
    """A worker as the owner sees it, with what all fronts sent there."""
    at = report.workers.get(worker.name, AtWorker())
    sums = {name: getattr(at, name) for name in AtWorker.__struct_fields__}
    cached = 0 if own is None else own.cached_blocks
    return msgspec.structs.replace(worker, cached_blocks=cached, **sums)


def _number(name: str) -> int:
    """The number in a front's name; fronts that joined come after those of the owner's host."""
    return int(name[1:]) + (1000 if name[0] == "j" else 0)
