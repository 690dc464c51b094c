"""The owner of a pool's fronts: it starts and restarts them, and connects them with the workers.

The process that owns the workers takes no calls where there are several fronts. It keeps the stored
responses, which every front must find. When a front dies, its requests are ended at the workers
that decode first and at those that hold KV for them after that, because a worker that still reads
must not read blocks that are others' by then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.core.types import EngineStats, TokenmillError
from tokenmill.workers.accounts import AccountsView
from tokenmill.workers.fronts.control import (
    Announced,
    AskOwner,
    AskTrial,
    Connect,
    DeleteResponse,
    Drain,
    DrainWorker,
    EndTrial,
    FindItem,
    FromFront,
    FrontFailed,
    FrontHello,
    FrontRefused,
    FrontSetup,
    GetResponse,
    GetTotals,
    GiveReport,
    KeepResponse,
    Left,
    Listening,
    NewKeys,
    NewRouter,
    OpenCalls,
    OthersOpen,
    OwnerAnswer,
    Question,
    RenewRouter,
    Reported,
    Scale,
    Synced,
    ToFront,
    Totals,
    TrialGranted,
    Welcome,
    WorkerAdded,
    WorkerGone,
    WorkerLeaving,
    decode_from_front,
    encode,
)
from tokenmill.workers.fronts.control_socket import OwnerSocket
from tokenmill.workers.fronts.front_process import FrontProcess, SpawnFront
from tokenmill.workers.fronts.report import FrontReport
from tokenmill.workers.fronts.shared_responses import SharedResponses
from tokenmill.workers.fronts.sync_rounds import SyncRounds
from tokenmill.workers.lifecycle import PoolError, WorkerWatcher
from tokenmill.workers.link import MAX_MESSAGES, WorkerStartError
from tokenmill.workers.messages import AddFront, DropFront, FromWorker, FrontDropped, FrontLost
from tokenmill.workers.pool_view import FrontView, PoolView
from tokenmill.workers.slot import OnMessage, Role, WorkerSlot

_log = logging.getLogger(__name__)

START_TIMEOUT_S = 120.0
EVERY_S = 1.0  # between two totals
LINK_S = 1.2  # after which a front whose process lives gets another link to a worker
GATHER_S = 1.0  # that fronts have for their reports
LATE_S = 10.0  # after the end of a front what it sent before may still be read
BACKOFF_S, MAX_BACKOFF_S, STABLE_S = 0.1, 10.0, 10.0


class FrontError(TokenmillError):
    """A front cannot start; the message says why."""


class OwnedPool(Protocol):
    """What fronts share: the part of WorkerPool that their owner uses."""

    @property
    def slots(self) -> Mapping[str, WorkerSlot]: ...

    @property
    def num_restarts(self) -> int: ...

    def watch(self, watcher: WorkerWatcher, on_front: OnMessage) -> None: ...

    async def stats(self, timeout_s: float = 1.0) -> EngineStats: ...

    def known_stats(self) -> EngineStats: ...

    def view(self, decisions: bool = True) -> PoolView: ...

    def accounts(self) -> AccountsView: ...

    async def scale(self, num_workers: int, role: Role = "both") -> None: ...

    async def drain_worker(self, name: str, timeout_s: float = 30.0) -> None: ...


@dataclass(slots=True, eq=False)
class _Front:
    """One front after another of the same name."""

    name: str
    socket: OwnerSocket
    state: str = "starting"
    link: str = ""  # its name at the workers: another one after each restart
    peer: bytes | None = None  # its identity at the owner's socket
    process: FrontProcess | None = None
    pid: int = 0
    url: str = ""
    problem: str = ""
    num_restarts: int = 0
    wanted: dict[str, str] = field(default_factory=dict)  # addresses of links, by worker
    left: set[str] = field(default_factory=set)  # leaving workers that it has left
    report: FrontReport = field(default_factory=FrontReport)
    calls: OpenCalls = field(default_factory=OpenCalls)
    reported: asyncio.Future[None] | None = None

    @property
    def has_started(self) -> bool:
        return self.state in ("ready", "draining")

    def end_gather(self) -> None:
        """Nobody waits for the report any more: it has come, or is late."""
        if self.reported is not None:
            self.reported.set_result(None)
            self.reported = None

    def send(self, message: ToFront) -> None:
        self.send_bytes(encode(message))

    def send_bytes(self, data: bytes) -> None:
        if self.peer is not None:
            self.socket.send(self.peer, data)


class FrontOwner:
    """Starts fronts, links them to workers, and adds up what they report."""

    def __init__(
        self,
        pool: OwnedPool,
        setup: FrontSetup,
        spawn: SpawnFront,
        num_fronts: int,
        on_totals: Callable[[Totals], None] | None = None,
    ) -> None:
        self._pool = pool
        self._setup = setup
        self._spawn = spawn
        self._on_totals = on_totals
        self._socket = OwnerSocket(self._receive, self._stuck)
        names = [f"f{i}" for i in range(num_fronts)]
        self._fronts = {name: _Front(name, self._socket) for name in names}
        self._by_peer: dict[bytes, _Front] = {}
        self._tickets: dict[str, str] = {}  # names of fronts that are expected
        self._past = FrontReport()  # of fronts that are gone
        self._dropping: dict[tuple[str, str], asyncio.Future[None]] = {}  # by worker and link
        self._trial_of: _Front | None = None
        self._trials: list[_Front] = []  # who waits
        self._changed = False  # open calls
        self._num_started = 0
        self._stopping = False
        self._syncs = SyncRounds(self._who_may_have_sent)
        self._responses = SharedResponses(setup.server, self._syncs.run)
        self._tasks: set[asyncio.Task[None]] = set()
        pool.watch(self, self._on_worker)

    # The fronts' processes.

    async def start(self) -> None:
        """Start all fronts; FrontError when one does not come up."""
        keepers = [self._begin(self._keep(front)) for front in self._fronts.values()]
        self._begin(self._beat())
        deadline_s = time.monotonic() + START_TIMEOUT_S
        fronts = list(self._fronts.values())
        while any(front.state != "ready" for front in fronts):
            await asyncio.sleep(0.01)
            for front in fronts:
                if front.problem:
                    raise FrontError(front.problem)
            if time.monotonic() > deadline_s:
                raise FrontError(f"the fronts were not ready within {START_TIMEOUT_S:g} s")
            for keeper in keepers:
                if keeper.done():
                    keeper.result()

    def replace_keys(self, keys: KeyRing) -> None:
        """Have all fronts check calls by these keys, those of later, too."""
        self._setup = msgspec.structs.replace(self._setup, keys=keys)
        for front in self._fronts.values():
            front.send(NewKeys(keys))

    async def drain(self, failure: str = "") -> None:
        """Let all fronts finish what they have, or fail it, and wait for their ends."""
        self._stopping = True
        for front in self._fronts.values():
            front.state = "draining"
            front.send(Drain(failure))
        while any(front.peer is not None for front in self._fronts.values()):
            await asyncio.sleep(0.02)

    def hurry(self) -> None:
        for front in self._fronts.values():
            front.send(Drain())

    async def close(self) -> None:
        self._stopping = True
        for front in self._fronts.values():
            if front.process is not None:
                with contextlib.suppress(ProcessLookupError):
                    front.process.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def _keep(self, front: _Front) -> None:
        """Start a front again whenever it ends."""
        backoff_s = BACKOFF_S
        while not self._stopping:
            began_s, ticket = time.monotonic(), self._issue(front.name)
            try:
                front.process = await self._spawn(self._socket.address, ticket)
            except (TokenmillError, OSError) as error:
                self._tickets.pop(ticket, None)
                front.problem = f"front {front.name} cannot start: {error}"
                if front.state == "starting":
                    return
                _log.error("front %s cannot start again: %s", front.name, error)
                await asyncio.sleep(MAX_BACKOFF_S)
                continue
            code = await front.process.wait()
            front.process = None
            self._tickets.pop(ticket, None)
            await self._gone(front)
            if self._stopping:
                return
            if front.state == "starting":
                front.problem = front.problem or f"front {front.name} ended with code {code}"
                return
            front.state = "restarting"
            _log.error("front %s stopped with code %s; a new one starts", front.name, code)
            lived_s = time.monotonic() - began_s
            backoff_s = BACKOFF_S if lived_s > STABLE_S else min(2 * backoff_s, MAX_BACKOFF_S)
            await asyncio.sleep(backoff_s)
            front.num_restarts += 1

    def _issue(self, name: str) -> str:
        ticket = secrets.token_hex(32)
        self._tickets[ticket] = name
        return ticket

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _beat(self) -> None:
        last_s = 0.0
        while True:
            await asyncio.sleep(0.05)
            self._spread_calls()
            now_s = time.monotonic()
            if now_s - last_s >= EVERY_S:
                last_s = now_s
                self._spread_totals()

    # Messages of fronts.

    def _receive(self, identity: bytes, data: bytes) -> None:
        message = decode_from_front(data)
        front = self._by_peer.get(identity)
        if isinstance(message, FrontHello):
            self._welcome(identity, message)
        elif front is not None and isinstance(message, KeepResponse):  # of one that has ended, too
            kept = message
            self._responses.put(kept.response_id, kept.account, kept.item_ids, kept.payload)
        elif front is not None and front.peer == identity:
            self._apply(front, message)

    def _stuck(self, identity: bytes) -> None:
        """A front takes no messages: it is ended, and another one starts."""
        front = self._by_peer.get(identity)
        if front is not None and front.peer == identity and front.process is not None:
            waiting = f"{MAX_MESSAGES} wait, the most that may"
            _log.error("front %s takes no messages (%s) and is ended", front.name, waiting)
            with contextlib.suppress(ProcessLookupError):
                front.process.kill()

    def _welcome(self, identity: bytes, hello: FrontHello) -> None:
        name, version = self._tickets.pop(hello.ticket, None), self._setup.version
        problem = ""
        if hello.version != version:
            problem = f"the server runs tokenmill {version} and this front {hello.version}: "
            problem += "start the server again after an update"
        if name is None:
            problem = "a front is started by its server alone, by --fronts"
        if problem or name is None:
            self._socket.send(identity, encode(FrontRefused(problem)))
            return
        front = self._fronts[name]
        self._num_started += 1
        front.link = f"{front.name}.{self._num_started}"
        front.peer, front.pid = identity, hello.pid
        self._by_peer[identity] = front
        workers = {slot.name: slot.role for slot in self._slots() if _takes_fronts(slot)}
        front.send(Welcome(front.name, front.link, self._setup, workers))
        if self._stopping:
            front.send(Drain())

    def _apply(self, front: _Front, message: FromFront) -> None:
        match message:
            case Connect(worker=worker, address=address):
                front.wanted[worker] = address
                self._link(front, worker)
            case Listening(url=url):
                front.state, front.url = "ready", url
            case FrontFailed(message=problem):
                front.problem = problem
            case Left(worker=worker):
                front.left.add(worker)
            case Reported(report=report, asked=asked):
                front.report = report
                if asked:
                    front.end_gather()
            case OpenCalls():
                front.calls, self._changed = message, True
            case Announced():
                self._tell_others(front, message)
            case AskOwner(number=number, question=question):
                self._begin(self._answer(front, number, question))
            case _:
                self._apply_rare(front, message)

    def _apply_rare(self, front: _Front, message: FromFront) -> None:
        match message:
            case Synced(number=number):
                self._syncs.answered(front, number)
            case AskTrial():
                self._trials.append(front)
                self._next_trial()
            case EndTrial():
                self._end_trial(front)

    def _tell_others(self, front: _Front, message: Announced) -> None:
        data = encode(message)
        for other in self._fronts.values():
            if other is not front:
                other.send_bytes(data)

    async def _answer(self, front: _Front, number: int, question: Question) -> None:
        answer = OwnerAnswer(number)
        try:
            match question:
                case GetTotals():
                    await self._gather()
                    answer.totals = self._totals(decisions=True)
                case GetResponse() | FindItem() | DeleteResponse():
                    await self._responses.answer(question, answer)
                case RenewRouter(policy=policy):
                    for each in self._fronts.values():
                        each.send(NewRouter(policy))
                case Scale(num_workers=num_workers, role=role):
                    await self._pool.scale(num_workers, role)
                case DrainWorker(worker=worker, timeout_s=timeout_s):
                    await self._pool.drain_worker(worker, timeout_s)
        except PoolError as error:
            answer.error, answer.error_kind = str(error), "pool"
        except WorkerStartError as error:
            answer.error, answer.error_kind = str(error), "start"
        except Exception as error:  # whoever asked must hear of it
            _log.exception("a question of front %s failed", front.name)
            answer.error, answer.error_kind = f"{type(error).__name__}: {error}", "internal"
        front.send(answer)

    def _who_may_have_sent(self) -> list[_Front]:
        """Fronts with links, too: they may answer calls before they say that they listen."""
        return [f for f in self._fronts.values() if f.peer and (f.has_started or f.wanted)]

    # Fronts and workers.

    def _slots(self) -> list[WorkerSlot]:
        return list(self._pool.slots.values())

    def _link(self, front: _Front, worker: str) -> None:
        slot = self._pool.slots.get(worker)
        if slot is None or slot.state == "draining":
            del front.wanted[worker]
            front.send(WorkerLeaving(worker, 0.0))
        elif slot.ready:
            slot.send(AddFront(front.link, front.wanted[worker]))

    def worker_ready(self, slot: WorkerSlot) -> None:
        """Tell all fronts of a worker; those that wait for it are linked."""
        if not _takes_fronts(slot):
            return
        for front in self._fronts.values():
            front.left.discard(slot.name)
            front.send(WorkerAdded(slot.name, slot.role))
            if slot.name in front.wanted:
                self._link(front, slot.name)

    def worker_down(self, slot: WorkerSlot) -> None:
        for front in self._fronts.values():
            self._unlink(front, slot.name, slot.last_failure)
        self.worker_stopped(slot)

    def worker_stopped(self, slot: WorkerSlot) -> None:
        for (worker, _), dropped in self._dropping.items():
            if worker == slot.name and not dropped.done():
                dropped.set_result(None)

    def _unlink(self, front: _Front, worker: str, reason: str, worker_lives: bool = False) -> None:
        if (address := front.wanted.pop(worker, None)) is not None:
            front.send(WorkerGone(worker, address, reason, worker_lives))

    async def worker_leaving(self, slot: WorkerSlot, timeout_s: float) -> None:
        timeout_s = max(timeout_s, 0.0)
        for front in self._fronts.values():
            front.send(WorkerLeaving(slot.name, timeout_s))
        deadline_s = time.monotonic() + timeout_s + GATHER_S
        while time.monotonic() < deadline_s and any(
            front.peer is not None and slot.name in front.wanted and slot.name not in front.left
            for front in self._fronts.values()
        ):
            await asyncio.sleep(0.01)
        for front in self._fronts.values():
            front.wanted.pop(slot.name, None)

    def _on_worker(self, slot: WorkerSlot, message: FromWorker) -> None:
        match message:
            case FrontDropped(front=link):
                if (dropped := self._dropping.get((slot.name, link))) and not dropped.done():
                    dropped.set_result(None)
            case FrontLost(front=link):
                self._begin(self._lost(slot, link))

    async def _lost(self, slot: WorkerSlot, link: str) -> None:
        """A link broke: the front is gone, or it makes another one."""
        await asyncio.sleep(LINK_S)
        front = next((f for f in self._fronts.values() if f.link == link), None)
        if front is None or front.peer is None:
            return
        if slot.name in front.wanted and slot.ready:
            slot.send(DropFront(link))
            self._unlink(front, slot.name, "the link to the worker broke", worker_lives=True)

    async def _gone(self, front: _Front) -> None:
        """A front is gone: end its requests, and keep what it has counted."""
        if front.peer is None:
            return
        asyncio.get_running_loop().call_later(LATE_S, self._by_peer.pop, front.peer, None)
        front.peer, link = None, front.link
        front.end_gather()
        self._syncs.left(front)
        self._past.add(front.report.past())
        front.report, front.calls, self._changed = FrontReport(), OpenCalls(), True
        linked = set(front.wanted)
        front.wanted = {}
        self._end_trial(front)
        slots = [slot for slot in self._slots() if slot.name in linked]
        await self._drop(link, [slot for slot in slots if slot.role != "prefill"])
        await self._drop(link, [slot for slot in slots if slot.role == "prefill"])

    async def _drop(self, link: str, slots: list[WorkerSlot]) -> None:
        """End a front's requests at workers, and wait until they have done so."""
        loop = asyncio.get_running_loop()
        there = [slot for slot in slots if slot.ready]
        waiting = {(slot.name, link): loop.create_future() for slot in there}
        self._dropping.update(waiting)
        for slot in there:
            slot.send(DropFront(link))
        if waiting:
            await asyncio.wait(waiting.values())
        for key in waiting:
            del self._dropping[key]

    # Suspects: one at a time, over all fronts.

    def _next_trial(self) -> None:
        while self._trial_of is None and self._trials:
            front = self._trials.pop(0)
            if front.peer is not None:
                self._trial_of = front
                front.send(TrialGranted())

    def _end_trial(self, front: _Front) -> None:
        if self._trial_of is front:
            self._trial_of = None
            self._next_trial()

    # Sums.

    def _spread_calls(self) -> None:
        if not self._changed:
            return
        self._changed = False
        for front in self._fronts.values():
            others = OpenCalls()
            for other in self._fronts.values():
                if other is not front:
                    others.num_open += other.calls.num_open
                    others.num_pending += other.calls.num_pending
                    for who, count in other.calls.by_account.items():
                        others.by_account[who] = others.by_account.get(who, 0) + count
            front.send(OthersOpen(others))

    def _spread_totals(self) -> None:
        totals = self._totals(decisions=False)
        if self._on_totals is not None:
            self._on_totals(totals)
        for front in self._fronts.values():
            front.send(totals)

    async def _gather(self) -> None:
        """Have every front report now; the last report stands where that takes too long."""
        there = [f for f in self._fronts.values() if f.peer and f.has_started]
        for front in there:
            if front.reported is None:
                front.reported = asyncio.get_running_loop().create_future()
                front.send(GiveReport())
        waiting = [front.reported for front in there if front.reported is not None]
        refresh = asyncio.ensure_future(self._pool.stats(GATHER_S))
        if waiting:
            await asyncio.wait(waiting, timeout=GATHER_S)
        for front in there:
            front.end_gather()
        await refresh

    def _totals(self, decisions: bool) -> Totals:
        total = FrontReport()
        total.add(self._past)
        for front in self._fronts.values():
            total.add(front.report)
        if not decisions:
            total.decisions = []
        pool = self._pool
        return Totals(
            report=total,
            fronts=[_view(front) for front in self._fronts.values()],
            stats=pool.known_stats(),
            pool=pool.view(False),
            accounts=pool.accounts(),
            num_restarts=pool.num_restarts,
            stored=self._responses.size(),
        )


def _takes_fronts(slot: WorkerSlot) -> bool:
    return slot.ready and slot.state == "ready"


def _view(front: _Front) -> FrontView:
    return FrontView(
        name=front.name,
        state=front.state,
        url=front.url,
        pid=front.pid,
        num_open=front.calls.num_open,
        restarts=front.num_restarts,
    )
