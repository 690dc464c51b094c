"""Processes that read long bodies for a server, one body at a time each.

What a body needs is done by a function of a module, which gets bytes and returns bytes. A process
that does not come to its end, dies, or whose client goes is ended, and concerns that body alone.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.api.bodies.fair_share import FairShare
from tokenmill.api.errors import ApiError
from tokenmill.vision.work_process import Allowance, WorkEndedError, WorkProcess, WorkProcesses

LONG_BODY_BYTES = 65_536  # of token ids they take 20 ms
MAX_PROCESSES = 4
READ_S = 120.0  # that a process may take for a body, its start not included
MEMORY_BYTES = 2**32  # that it may take beside what it has: a tokenizer, and 100 bytes a byte
NICENESS = 10

T = TypeVar("T")


class NotElsewhereError(Exception):
    """The body needs what only the process of the server has, or no other process can be had."""


class BodyProcesses:
    """The processes of one server or front; they are started when they are needed."""

    def __init__(self, num_fronts: int) -> None:
        # One account may have as many as there are cores for, and there is one more for another.
        capacity = 2 * _num_processes(num_fronts) + 1
        self._places = FairShare(capacity)
        self._processes = WorkProcesses(NICENESS)
        self._threads = ThreadPoolExecutor(capacity, thread_name_prefix="body")

    @property
    def is_closed(self) -> bool:
        return self._processes.is_closed

    async def run(
        self, account: str, num_bytes: int, work: Callable[..., bytes], *args: Any
    ) -> bytes:
        """What `work` makes of a body and more; ApiError where its process came to no end.

        NotElsewhereError: there is no process, or `work` says that it needs this one.
        """
        await self._places.take(account, 1)
        try:
            return await self._in_process(work, *args)
        except WorkEndedError as ended:
            self._check_open()
            message = f"the process that read this body of {num_bytes} bytes was ended"
            if ended.is_late:
                message = f"this body of {num_bytes} bytes could not be read within {READ_S:g} s"
            raise ApiError(500, message, code="internal_error") from None
        except OSError as error:
            raise NotElsewhereError(f"no process can be started: {error}") from None
        finally:
            self._places.give(account, 1)

    def close(self) -> None:
        self._processes.close()
        self._threads.shutdown(wait=False)

    async def _in_process(self, work: Callable[..., bytes], body: bytes, *args: Any) -> bytes:
        self._check_open()
        running: list[WorkProcess | None] = []  # None: nobody wants the result any more

        def read() -> bytes:
            with self._processes.one() as process:
                running.append(process)
                if None in running:
                    raise WorkEndedError(is_late=False)
                allowed = Allowance(READ_S, MEMORY_BYTES)
                (made,) = process.run(allowed, _in_parts, body, work, *args)
                return made

        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, read)
        except asyncio.CancelledError:
            running.append(None)
            if running[0] is not None:
                running[0].end()
            raise

    def _check_open(self) -> None:
        if self.is_closed:
            raise ApiError(503, "the server is shutting down", code="shutdown")


def _num_processes(num_fronts: int) -> int:
    """Each front has processes of its own: together they are bounded by the cores."""
    return max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // num_fronts))


def _in_parts(body: bytes, work: Callable[..., bytes], *args: Any) -> list[bytes]:
    return [work(body, *args)]


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`; ClientDisconnect when the client goes first, which cancels it."""
    task, watcher = asyncio.create_task(work), asyncio.create_task(_until_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
