"""Processes that read long bodies for a server, one body at a time each.

What a body needs is done by a function of a module, which gets bytes and returns bytes. A process
that does not come to its end, dies, or whose client goes is ended, and concerns that body alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
from collections.abc import Callable, Coroutine
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from threading import Thread
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.api.bodies.fair_share import FairShare
from tokenmill.api.errors import ApiError

LONG_BODY_BYTES = 65_536  # of token ids they take 20 ms
MAX_PROCESSES = 4
READ_S = 120.0  # that a process may take for a body, its own start included
NICENESS = 10

T = TypeVar("T")


class NotElsewhereError(Exception):
    """The body needs what only the process of the server has, or no other process can be had."""


class BodyProcesses:
    """The processes of one server or front; they are started when they are needed."""

    def __init__(self, num_fronts: int) -> None:
        # Each pool has one process: what becomes of it concerns one body. One account may have as
        # many as there are cores for, and there is one more for another account.
        self._places = FairShare(2 * _num_processes(num_fronts) + 1)
        self._idle: list[ProcessPoolExecutor] = []
        self._busy: list[ProcessPoolExecutor] = []
        self.is_closed = False

    async def run(
        self, account: str, num_bytes: int, work: Callable[..., bytes], *args: Any
    ) -> bytes:
        """What `work` makes of a body; ApiError where its process did not come to an end.

        NotElsewhereError: there is no process, or `work` says that it needs this one.
        """
        await self._places.take(account, 1)
        try:
            return await self._in_process(work, *args)
        except TimeoutError:
            message = f"this body of {num_bytes} bytes could not be read within {READ_S:g} s"
            raise ApiError(500, message, code="internal_error") from None
        except BrokenProcessPool:
            self._check_open()
            message = f"the process that read this body of {num_bytes} bytes was ended"
            raise ApiError(500, message, code="internal_error") from None
        except OSError as error:
            raise NotElsewhereError(f"no process can be started: {error}") from None
        finally:
            self._places.give(account, 1)

    def close(self) -> None:
        self.is_closed = True
        for pool in (*self._idle, *self._busy):
            _end(pool)

    async def _in_process(self, work: Callable[..., bytes], *args: Any) -> bytes:
        self._check_open()
        self._idle = [pool for pool in self._idle if not pool._broken]
        pool = self._idle.pop() if self._idle else _new_pool()
        self._busy.append(pool)
        is_spent = False
        try:
            async with asyncio.timeout(READ_S):
                # On a thread: a process may have to be started for it.
                future = await asyncio.to_thread(pool.submit, work, *args)
                return await asyncio.wrap_future(future)
        except (BrokenProcessPool, OSError, asyncio.CancelledError):
            is_spent = True
            raise
        finally:
            self._busy.remove(pool)
            if is_spent:
                _end(pool)
            else:
                self._idle.append(pool)

    def _check_open(self) -> None:
        if self.is_closed:
            raise ApiError(503, "the server is shutting down", code="shutdown")


def _num_processes(num_fronts: int) -> int:
    """Each front has processes of its own: together they are bounded by the cores."""
    return max(1, min(MAX_PROCESSES, (os.cpu_count() or 1) // num_fronts))


def _new_pool() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin_process)


def _end(pool: ProcessPoolExecutor) -> None:
    processes = pool._processes
    pool.shutdown(wait=False, cancel_futures=True)
    for process in list((processes or {}).values()):
        process.kill()


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


# In the other process.


def _begin_process() -> None:
    """Leave the cores to streams and Ctrl-C to the server, and end with it, however it ends."""
    os.nice(NICENESS)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
