"""Readers of bodies that another process can import."""

from __future__ import annotations

import asyncio
import os
import signal

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.prepare import Preparer


async def process_id(body: bytes, preparer: Preparer, model: str) -> int:
    preparer.ignored.note(["a field"])
    return os.getpid()


async def refuse(body: bytes, preparer: Preparer, model: str) -> int:
    raise ApiError(400, "no", "prompt", "a_code")


async def end_process(body: bytes, preparer: Preparer, model: str) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return 0


async def take_a_while(body: bytes, preparer: Preparer, model: str) -> int:
    await asyncio.sleep(1)
    return os.getpid()


async def hang(body: bytes, preparer: Preparer, model: str) -> int:
    await asyncio.Event().wait()
    return 0


async def count_here(body: bytes, preparer: Preparer, model: str) -> int:
    return len(body)
