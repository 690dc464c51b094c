"""Starts worker processes: directly on this machine, or by Ray on this machine or a cluster.

A placement starts a worker's command and lets the pool wait for its end; requests and tokens do not
pass through it. With Ray, an actor on the chosen node owns the process and does nothing else.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import logging
import os
import secrets
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tokenmill.core.config import PoolConfig
from tokenmill.core.gpus import VISIBLE, seen_first, visible_gpus
from tokenmill.core.types import TokenmillError
from tokenmill.workers.fronts.front_link import KEY_VARIABLE
from tokenmill.workers.fronts.front_process import TICKET_VARIABLE, FrontProcess, SpawnFar
from tokenmill.workers.fronts.report import Ticket
from tokenmill.workers.link import LOOPBACK, Spawn, WorkerProcess, WorkerStartError

PLACE_TIMEOUT_S = 120.0  # for Ray to find room and start a process of its own
OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing is stored there
RANKS_VARIABLES = (
    "TOKENMILL_RANK_ADDRESS",
    "TOKENMILL_RANK_KEY",
)  # where ranks meet, and their key
RANK_COMMAND = (
    "python",
    "-P",
    "-m",
    "tokenmill.engine.ranks.rank_process",
)  # each node has a Python of its own
LOST = -1  # exit code of a worker whose node is gone


class PlacementError(TokenmillError):
    """Workers cannot be placed as asked; the message says why."""


class Placement(Protocol):
    """Starts workers; `host` is the address of this machine that they connect to, if by TCP."""

    @property
    def host(self) -> str | None: ...

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> Spawn:
        """What starts a worker of so many ranks: `argv` followed by "--address ADDRESS"."""

    def front_spawner(self, argv: Sequence[str]) -> SpawnFar | None:
        """What starts a front on any host: `argv` followed by "--join ADDRESS"; None: this one."""


@contextlib.contextmanager
def open_placement(config: PoolConfig) -> Iterator[Placement]:
    """The placement that the config asks for."""
    if not wants_ray(config):
        yield ProcessPlacement()
        return
    with _connected(config.ray_address) as host:
        yield RayPlacement(host, config.num_processes)


def wants_ray(config: PoolConfig) -> bool:
    installed = importlib.util.find_spec("ray") is not None
    wanted = config.placement == "ray" or config.ray_address is not None
    if wanted and config.placement == "process":
        raise PlacementError("--ray-address needs --placement ray, got --placement process")
    if wanted and not installed:
        raise PlacementError("ray is not installed: pip install 'tokenmill[ray]'")
    return wanted or (config.placement == "auto" and config.num_processes > 1 and installed)


@dataclass(slots=True, eq=False)
class _OnGpus:
    """A worker that starts or runs, and the GPUs that it has."""

    gpus: list[str]
    process: asyncio.subprocess.Process | None = None


class ProcessPlacement:
    """Workers are child processes, each in a session of its own: Ctrl-C is for the server.

    Where there are several GPUs, a worker has those that the fewest others have.
    """

    host = None

    def __init__(self, gpus: list[str] | None = None) -> None:
        """`gpus` are those of this machine, unless told otherwise."""
        self._gpus = visible_gpus() if gpus is None else gpus
        self._workers: list[_OnGpus] = []

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> Spawn:
        """What starts a worker, which starts its further ranks itself."""

        async def spawn(address: str) -> WorkerProcess:
            worker = self._place(num_ranks)
            own = {VISIBLE: seen_first(worker.gpus, self._gpus)} if len(self._gpus) > 1 else {}
            try:
                worker.process = await asyncio.create_subprocess_exec(
                    *argv,
                    "--address",
                    address,
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env=os.environ | own,
                )
            except BaseException:
                self._workers.remove(worker)
                raise
            return worker.process

        return spawn

    def _place(self, num_ranks: int) -> _OnGpus:
        """Choose GPUs for a worker; those of workers that have ended count no more."""
        self._workers = [
            worker
            for worker in self._workers
            if worker.process is None or worker.process.returncode is None
        ]
        load = Counter(gpu for worker in self._workers for gpu in worker.gpus)
        worker = _OnGpus(sorted(self._gpus, key=lambda gpu: load[gpu])[:num_ranks])
        self._workers.append(worker)
        return worker

    def front_spawner(self, argv: Sequence[str]) -> SpawnFar | None:
        """Fronts are processes of this host, and their owner starts them."""
        return None


class RayPlacement:
    """Workers are processes of Ray actors, spread over the nodes; each has a GPU if there are.

    A worker of several ranks is as many actors: the first one is the worker, whom the others call.
    """

    def __init__(self, host: str, num_processes: int) -> None:
        import ray

        self.host = host
        num_gpus = ray.cluster_resources().get("GPU", 0.0)
        host_of = ray.remote(_WorkerHost).options
        # kill() comes while wait() waits
        common = {"num_cpus": 0, "max_concurrency": 4, "scheduling_strategy": "SPREAD"}
        share = min(1.0, int(1000 * num_gpus / num_processes) / 1000)
        self._actor: Any = host_of(num_gpus=share, **common)
        self._front_actor: Any = host_of(num_gpus=0, **common)

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> Spawn:
        """What starts a worker and its further ranks."""
        return lambda address: self._spawn(list(argv), address, num_ranks)

    def front_spawner(self, argv: Sequence[str]) -> SpawnFar | None:
        """What starts a front on a node that Ray chooses."""

        async def spawn(ticket: Ticket) -> FrontProcess:
            env = {TICKET_VARIABLE: ticket.ticket, KEY_VARIABLE: ticket.key}
            actor = self._front_actor.remote()
            async with _placing([actor], "front"):
                await actor.start.remote([*argv, "--join", ticket.address], env)
            return _RayProcess(actor)

        return spawn

    async def _spawn(self, argv: list[str], address: str, num_ranks: int) -> WorkerProcess:
        plain, _, key = address.partition("#")
        actors: list[Any] = [self._actor.remote() for _ in range(num_ranks)]
        command, env = [*argv, "--address", plain], {KEY_VARIABLE: key}
        async with _placing(actors, "worker"):
            if len(actors) > 1:
                address = await actors[0].free_address.remote(self.host == LOOPBACK)
                meeting = (address, secrets.token_hex(32))
                ranks_env = dict(zip(RANKS_VARIABLES, meeting, strict=True))
                env |= ranks_env
                for actor in actors[1:]:
                    await actor.start.remote([*RANK_COMMAND, address], ranks_env)
            await actors[0].start.remote(command, env)
        first, *rest = map(_RayProcess, actors)
        return _RayRanks(first, rest) if rest else first


@contextlib.asynccontextmanager
async def _placing(actors: list[Any], what: str) -> AsyncIterator[None]:
    """Start processes at actors; WorkerStartError where Ray cannot, and the actors are gone."""
    import ray

    try:
        async with asyncio.timeout(PLACE_TIMEOUT_S):
            yield
    except (TimeoutError, ray.exceptions.RayError) as error:
        for actor in actors:
            ray.kill(actor)
        reason = str(error) or f"no node had room for it within {PLACE_TIMEOUT_S:g} s"
        raise WorkerStartError(f"Ray cannot place the {what}: {reason}") from None


class _WorkerHost:
    """The actor: one process of a worker, or a front, on the node that Ray chose."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str], env: dict[str, str]) -> int:
        """Start the command with this node's Python; returns its process id."""
        self._process = subprocess.Popen(
            [sys.executable, *argv[1:]], stdin=subprocess.DEVNULL, env={**os.environ, **env}
        )
        return self._process.pid

    def free_address(self, local: bool) -> str:
        """An address of this node that nobody listens at."""
        import ray

        host = LOOPBACK if local else ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def wait(self) -> int:
        """The exit code, once there is one."""
        assert self._process is not None
        return self._process.wait()

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()


class _RayProcess:
    """A worker's process as the link sees it."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._code: asyncio.Task[int] = asyncio.create_task(self._wait())

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        self._actor.kill.remote()

    async def _wait(self) -> int:
        import ray

        try:
            code: int = await self._actor.wait.remote()
        except ray.exceptions.RayError:  # its node or its actor is gone
            return LOST
        ray.kill(self._actor)
        return code


class _RayRanks:
    """A worker of several processes: when one ends, all do."""

    def __init__(self, first: _RayProcess, others: list[_RayProcess]) -> None:
        self._first, self._others = first, others
        self._watching = [asyncio.create_task(self._end_with(other)) for other in others]

    async def wait(self) -> int:
        code = await self._first.wait()
        for other in self._others:
            other.kill()
        await asyncio.gather(*(other.wait() for other in self._others))
        return code

    def kill(self) -> None:
        for process in (self._first, *self._others):
            process.kill()

    async def _end_with(self, other: _RayProcess) -> None:
        await other.wait()
        self._first.kill()


@contextlib.contextmanager
def _connected(address: str | None) -> Iterator[str]:
    """A connection to Ray, to a local one of our own without an address; gives our own address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # num_gpus=0 hides none
    # Without it actors start one after another, and Ray warns of more than three.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "64")
    # The ports of our own Ray are open to the network: only we know the token.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    if address is None:
        os.environ.update(token)
    import ray

    local: dict[str, Any] = {
        "num_cpus": 0,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        ray.init(address or "local", logging_level=logging.ERROR, **({} if address else local))
    except (ConnectionError, ValueError, RuntimeError, OSError) as error:
        where = f"at {address}" if address else "on this machine"
        raise PlacementError(f"cannot reach Ray {where}: {error}") from None
    try:
        yield LOOPBACK if address is None else ray.util.get_node_ip_address()
    finally:
        ray.shutdown()
        for name in token if address is None else ():
            os.environ.pop(name, None)
