"""How the owner starts the process of a front."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

TICKET_VARIABLE = "TOKENMILL_FRONT_TICKET"  # not for the process list


class FrontProcess(Protocol):
    """The part of asyncio.subprocess.Process that the owner uses."""

    async def wait(self) -> int: ...

    def kill(self) -> None: ...


SpawnFront = Callable[[str, str], Awaitable[FrontProcess]]  # of the owner's address and a ticket


def front_spawner(argv: Sequence[str], listener: int | None = None) -> SpawnFront:
    """What starts a front: `argv` followed by "--address ADDRESS"; its ticket is in a variable."""

    async def spawn(address: str, ticket: str) -> FrontProcess:
        fds = () if listener is None else (listener,)
        return await asyncio.create_subprocess_exec(
            *(*argv, "--address", address),
            stdin=asyncio.subprocess.DEVNULL,
            env={**os.environ, TICKET_VARIABLE: ticket},
            start_new_session=True,
            pass_fds=fds,
        )

    return spawn
