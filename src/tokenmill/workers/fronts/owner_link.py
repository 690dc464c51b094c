"""A front's connection to the owner, and its part in what concerns all fronts.

Each front tells what it has open and what it has counted, and hears the sums and of the others.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import deque
from collections.abc import Callable

from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.workers.fronts.control import (
    AskOwner,
    Drain,
    FromFront,
    FrontFailed,
    FrontHello,
    FrontRefused,
    GetTotals,
    GiveReport,
    Listening,
    NewKeys,
    OpenCalls,
    OthersOpen,
    OwnerAnswer,
    Question,
    Reported,
    Sync,
    Synced,
    ToFront,
    Totals,
    Welcome,
    decode_to_front,
    encode,
)
from tokenmill.workers.fronts.control_socket import FrontSocket
from tokenmill.workers.fronts.owner import FrontError
from tokenmill.workers.fronts.report import FrontCounts, FrontReport
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerStartError

JOIN_TIMEOUT_S = 30.0
REPORT_S = 1.0
CALLS_S = 0.05  # between two looks at what is open
BEAT_TICKS = 10  # of these, after which the owner hears of us though nothing has changed
OWNER_SILENT_S = 30.0


class OwnerLink:
    """The connection to the owner: questions and answers, and messages that are passed on."""

    def __init__(self, address: str) -> None:
        self._socket = FrontSocket(self._receive, address)
        self.gone = self._socket.gone
        self._on_message: Callable[[ToFront], None] | None = None
        self._messages: deque[ToFront] = deque()  # to be passed on
        self._welcome: asyncio.Future[Welcome] = asyncio.get_running_loop().create_future()
        self._answers: dict[int, asyncio.Future[OwnerAnswer]] = {}
        self._number = 0
        self.heard_s = time.monotonic()

    async def join(self, ticket: str, version: str) -> Welcome:
        """Say Hello; FrontError where the owner does not take this front."""
        self.send(FrontHello(ticket, version, os.getpid()))
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

    async def ask(self, question: Question) -> OwnerAnswer:
        """What the owner answers.

        PoolError or WorkerStartError where it cannot do it, FrontError where it failed.
        """
        self._number += 1
        number = self._number
        answered: asyncio.Future[OwnerAnswer] = asyncio.get_running_loop().create_future()
        self._answers[number] = answered
        self.send(AskOwner(number, question))
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
            case FrontRefused(message=why) if not self._welcome.done():
                self._welcome.set_exception(FrontError(why))
            case OwnerAnswer(number=number):
                if (answered := self._answers.pop(number, None)) and not answered.done():
                    answered.set_result(message)
            case Sync(number=number):
                self.send(Synced(number))
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


class FrontMembership:
    """One of several fronts: what it tells, and what it hears of all of them.

    `report` is called with whether decisions are wanted; `num_pending` counts open requests without
    a first token.
    """

    def __init__(
        self,
        welcome: Welcome,
        owner: OwnerLink,
        report: Callable[[bool], FrontReport],
        num_pending: Callable[[], int],
    ) -> None:
        self.name = welcome.front
        self.totals: Totals | None = None
        self.others = OpenCalls()
        self.counts: Callable[[], FrontCounts] = FrontCounts
        self.calls: Callable[[], OpenCalls] = OpenCalls
        self.on_others: Callable[[OpenCalls], None] = lambda calls: None
        self.on_drain: Callable[[str], None] = lambda failure: None
        self.on_keys: Callable[[KeyRing], object] = lambda keys: None
        self._owner = owner
        self._report = report
        self._num_pending = num_pending
        self._parent = os.getppid()

    def listening(self, url: str) -> None:
        self._owner.send(Listening(url))

    def receive(self, message: ToFront) -> None:
        """Take a message of the owner, if it is about sums or the end."""
        match message:
            case GiveReport():
                self._owner.send(Reported(self._report(True), True))
            case Totals():
                self.totals = message
            case OthersOpen(calls=calls):
                self.others = calls
                self.on_others(calls)
            case NewKeys(keys=keys):
                self.on_keys(keys)
            case Drain(failure=failure):
                self.on_drain(failure)

    async def refresh(self) -> None:
        answer = await self._owner.ask(GetTotals())
        self.totals = answer.totals or self.totals

    def total_counts(self) -> FrontCounts | None:
        return None if self.totals is None else self.totals.report.counts

    async def tell(self) -> None:
        """Tell the owner what is open when that changes, and all counts now and then."""
        told, tick = OpenCalls(), 0
        while True:
            await asyncio.sleep(CALLS_S)
            if self._is_alone():
                self._owner.gone.set()
            tick += 1
            calls = self.calls()
            calls.num_pending = self._num_pending()
            if calls != told or tick % BEAT_TICKS == 0:
                told = calls
                self._owner.send(calls)
            if tick * CALLS_S >= REPORT_S:
                tick = 0
                self._owner.send(Reported(self._report(False)))

    def _is_alone(self) -> bool:
        """The owner is gone, or says nothing, though it sends totals every second."""
        orphaned = os.getppid() != self._parent
        return orphaned or time.monotonic() - self._owner.heard_s > OWNER_SILENT_S


def front_number(name: str) -> int:
    return int(name[1:])
