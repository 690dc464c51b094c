"""Waits until all that fronts have sent to their owner has come.

A client can ask one front for what another front has just sent to the owner, and the question may
come first. Messages of one front come in order, so its answer to a Sync follows all that it sent
before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

from tokenmill.workers.fronts.control import Sync

ROUND_S = 1.0  # that fronts have for their answers


class Receiver(Protocol):
    """A front."""

    def send(self, message: Sync) -> None: ...


F = TypeVar("F", bound=Receiver)


class SyncRounds(Generic[F]):
    """Rounds of Sync, one at a time; those who wait meanwhile share the next one."""

    def __init__(self, fronts: Callable[[], Sequence[F]]) -> None:
        self._fronts = fronts
        self._running = asyncio.Lock()
        self._number = 0
        self._waiting: dict[F, asyncio.Future[None]] = {}

    async def run(self) -> None:
        """Wait until all that fronts sent before this call has come; silent ones get ROUND_S.

        A round that began before this call does not count: a front may have sent more since it
        answered.
        """
        number = self._number + 1
        async with self._running:
            if self._number >= number:
                return
            self._number = number
            asked = self._fronts()
            loop = asyncio.get_running_loop()
            self._waiting = {front: loop.create_future() for front in asked}
            answers = list(self._waiting.values())
            for front in asked:
                front.send(Sync(number))
            if answers:
                await asyncio.wait(answers, timeout=ROUND_S)

    def answered(self, front: F, number: int) -> None:
        """A front has answered a round; an earlier one than the last does not count."""
        if number == self._number:
            self.left(front)

    def left(self, front: F) -> None:
        """Nothing more comes from a front that was sent before the last round."""
        if (answer := self._waiting.pop(front, None)) is not None:
            answer.set_result(None)
