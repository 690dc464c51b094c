"""Streams of outputs read to their end, and processes of workers that can be killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from light_processes import LightProcess
from tokenmill.core.requests import RequestOutput
from tokenmill.workers.output_stream import OutputStream

GENEROUS_S = 180.0


async def read(stream: OutputStream) -> list[RequestOutput]:
    """Read a stream until each of its requests has ended; each ends once."""
    merged: dict[int, RequestOutput] = {}
    while len([o for o in merged.values() if o.finish_reason]) < len(stream.request_ids):
        for index, output in (await stream.get()).items():
            assert output.request_id == stream.request_ids[index]
            if index in merged:
                assert merged[index].finish_reason is None
                output.token_ids[:0] = merged[index].token_ids
            merged[index] = output
    return [merged[i] for i in range(len(stream.request_ids))]


async def until(condition: Callable[[], bool]) -> None:
    """Poll often: what is waited for may be over soon."""
    async with asyncio.timeout(GENEROUS_S):
        while not condition():
            await asyncio.sleep(0.001)


class Spawner:
    """Starts worker processes of one command and remembers them."""

    def __init__(self, argv: list[str]) -> None:
        self.argv = argv
        self.processes: list[asyncio.subprocess.Process | LightProcess] = []

    async def __call__(self, address: str) -> asyncio.subprocess.Process | LightProcess:
        process = await asyncio.create_subprocess_exec(*self.argv, "--address", address)
        self.processes.append(process)
        return process

    @property
    def live(self) -> list[int]:
        return [p.pid for p in self.processes if p.returncode is None]
