"""An engine in another process, called as if it were here."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from functools import partial, reduce
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gpu.setups import SETUPS, Checkpoints, Device
from kv.host_ipc import on_the_host
from scheduler_integrity import check_scheduler
from tokenmill.core.kv import KVAddress

START_S = 120.0


class Far:
    """An object of the other process: calls of its methods, and values of its fields."""

    def __init__(self, pipe: Connection, path: str = "") -> None:
        self._pipe, self._path = pipe, path

    def __getattr__(self, name: str) -> Far:
        return Far(self._pipe, f"{self._path}.{name}".lstrip("."))

    def __call__(self, *arguments: Any) -> Any:
        self._pipe.send((self._path, arguments))
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    @property
    def address(self) -> KVAddress:
        """Of the KV exchange."""
        found: KVAddress = self.__getattr__("address")()
        return found

    @property
    def num_used(self) -> int:
        """Of the block pool."""
        return int(self.__getattr__("num_used")())


@contextlib.contextmanager
def far_engine(name: str, folder: Path, device: Device) -> Iterator[tuple[Any, int]]:
    """An engine of setups.py and its process id; checkpoints that are not in the folder are made.

    On CPU its KV moves as it would between two processes on a GPU.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(name, folder, device, theirs), daemon=True)
    process.start()
    assert process.pid is not None
    try:
        assert ours.poll(START_S), "the other process did not start"
        assert ours.recv() == "ready"
        yield Far(ours), process.pid
    finally:
        process.kill()
        process.join()


def _serve(name: str, folder: Path, device: Device, pipe: Connection) -> None:
    with on_the_host() if device == "cpu" else contextlib.nullcontext():
        engine: Any = SETUPS[name].build(Checkpoints(folder), device).engine
    pipe.send("ready")
    while True:
        try:
            path, arguments = pipe.recv()
        except EOFError:
            return
        try:
            if path == "_scheduler.check":
                found = partial(check_scheduler, engine._scheduler)
            else:
                found = reduce(getattr, path.split("."), engine)
            pipe.send(found(*arguments) if callable(found) else found)
        except Exception as error:
            pipe.send(error)
