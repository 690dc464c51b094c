"""Starts worker processes: on this machine, or by Ray on the nodes of a cluster.

A placement starts a worker's command and lets the pool wait for its end; requests and tokens do not
pass through it. A worker that computes on GPUs has its own, or is not started.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import math
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from tokenmill.core.config import (
    GPU_MEMORY_SHARE,
    KV_CACHE_SHARE,
    MEMORY_SHARE,
    PROGRESS,
    SILENT,
    PoolConfig,
)
from tokenmill.core.gpus import VISIBLE, seen_first, visible_gpus
from tokenmill.core.installation import install_command
from tokenmill.core.types import TokenmillError
from tokenmill.workers.link import WorkerProcess, WorkerStartError

Start = Callable[[Sequence[str], str, int], Awaitable[WorkerProcess]]  # of a command

_log = logging.getLogger(__name__)


class PlacementError(TokenmillError):
    """Workers cannot be placed as asked; the message says why."""


@dataclass(frozen=True, slots=True)
class CommandSpawn:
    """Starts a worker of `num_ranks` processes by `argv` followed by "--address ADDRESS"."""

    argv: Sequence[str]
    num_ranks: int
    start: Start

    def __call__(self, address: str) -> Awaitable[WorkerProcess]:
        return self.start(self.argv, address, self.num_ranks)


class WorkerPlacement(Protocol):
    """Starts workers; `host` is the address of this machine that they connect to, if by TCP."""

    @property
    def host(self) -> str | None: ...

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> CommandSpawn:
        """What starts a worker and its further ranks."""


@contextlib.contextmanager
def open_placement(config: PoolConfig) -> Iterator[WorkerPlacement]:
    if not wants_ray(config):
        yield ProcessPlacement(config)
        return
    from tokenmill.workers.ray_placement import RayPlacement, connected

    with connected(config.ray_address) as host:
        yield RayPlacement(host, config)


def wants_ray(config: PoolConfig) -> bool:
    """Whether Ray is asked for; that it is installed starts nothing."""
    wanted = config.placement == "ray" or config.ray_address is not None
    if wanted and importlib.util.find_spec("ray") is None:
        raise PlacementError(f"ray is not installed: {install_command('ray')}")
    return wanted


def shared_machine(
    argv: Sequence[str], together: int, per_gpu: int, on_gpu: bool
) -> dict[str, str]:
    """Settings of one of several workers of this machine, as variables: flags of `argv` win."""
    own: dict[str, str] = {}
    if together > 1:
        own["TOKENMILL_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // together))
    if any(word.startswith("--kv-cache-memory=") for word in argv):
        return own
    if not on_gpu and together > 1:
        own[KV_CACHE_SHARE] = str(round(MEMORY_SHARE / together, 4))
    if on_gpu and per_gpu > 1:
        own["TOKENMILL_GPU_MEMORY_UTILIZATION"] = str(round(GPU_MEMORY_SHARE / per_gpu, 4))
    return own


@dataclass(slots=True, eq=False)
class _OnGpus:
    """A worker that starts or runs, and the GPUs that it has."""

    gpus: list[str]
    process: asyncio.subprocess.Process | None = None

    @property
    def lives(self) -> bool:
        return self.process is None or self.process.returncode is None


class ProcessPlacement:
    """Workers are child processes, each in a session of its own: Ctrl-C is for the server."""

    host = None

    def __init__(self, config: PoolConfig, gpus: list[str] | None = None) -> None:
        """`gpus` are those of this machine, unless told otherwise."""
        self._config = config
        self._gpus = visible_gpus() if gpus is None else gpus
        if config.device == "cpu":
            self._gpus = []
        self._workers: list[_OnGpus] = []

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> CommandSpawn:
        """What starts a worker, which starts its further ranks itself."""
        return CommandSpawn(argv, num_ranks, self.start)

    async def start(self, argv: Sequence[str], address: str, num_ranks: int) -> WorkerProcess:
        worker = self._place(num_ranks)
        env = os.environ | self._environment(argv, worker.gpus) | self._progress()
        try:
            worker.process = await asyncio.create_subprocess_exec(
                *argv,
                "--address",
                address,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=env,
            )
        except BaseException:
            self._workers.remove(worker)
            raise
        return worker.process

    def _progress(self) -> dict[str, str]:
        """Of workers that start together the first shows its progress, for all of them."""
        first, number = len(self._workers) == 1, self._config.num_workers
        together = f" (first of {number} workers)" if number > 1 else ""
        return {PROGRESS: together if first else SILENT}

    def _environment(self, argv: Sequence[str], own: list[str]) -> dict[str, str]:
        num_gpus, config = len(self._gpus), self._config
        on_gpus = config.prefill * min(config.prefill_ranks, num_gpus)
        on_gpus += (config.decode or config.workers) * min(config.ranks, num_gpus)
        per_gpu = math.ceil(on_gpus / max(1, num_gpus))
        visible = {VISIBLE: seen_first(own, self._gpus)} if num_gpus > 1 else {}
        return shared_machine(argv, config.num_workers, per_gpu, num_gpus > 0) | visible

    def _place(self, num_ranks: int) -> _OnGpus:
        """Choose the GPUs of a worker: free ones, or where GPUs are shared those of the fewest."""
        self._workers = [worker for worker in self._workers if worker.lives]
        load = Counter(gpu for worker in self._workers for gpu in worker.gpus)
        chosen = sorted(self._gpus, key=lambda gpu: load[gpu])[:num_ranks]
        num_free = sum(not load[gpu] for gpu in self._gpus)
        if self._gpus and num_free < num_ranks:
            self._share(num_ranks, num_free, chosen)
        worker = _OnGpus(chosen)
        self._workers.append(worker)
        return worker

    def _share(self, num_ranks: int, num_free: int, chosen: list[str]) -> None:
        """Raise WorkerStartError unless GPUs may be shared."""
        if self._config.share_gpus:
            _log.warning("a worker shares GPU %s (--share-gpus): slow", " and ".join(chosen))
            return
        needs = "a GPU" if num_ranks == 1 else f"{num_ranks} GPUs, one for each rank"
        raise WorkerStartError(
            f"a worker needs {needs}, and {num_free} of the {len(self._gpus)} of this machine "
            "are free: start fewer, or try the layout with --share-gpus"
        )
