"""Starts worker processes by Ray: an actor on the chosen node owns a process and does no more.

A worker on GPUs asks Ray for them by a placement group, which Ray's autoscaler sees. All ranks are
on one node where a node has that many GPUs; else they take whole nodes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.core.config import PoolConfig
from tokenmill.core.gpus import VISIBLE
from tokenmill.workers.fronts.front_link import KEY_VARIABLE
from tokenmill.workers.link import LOOPBACK, WorkerProcess, WorkerStartError
from tokenmill.workers.local_ray import local_ray
from tokenmill.workers.placement import CommandSpawn, PlacementError, shared_machine

PLACE_TIMEOUT_S = 120.0  # for Ray to start a process of its own
POLL_S, TELL_S = 1.0, 30.0  # between two looks at what is free, and two lines about it
# Where ranks meet, their key, and how many of them have a GPU together.
RANKS_VARIABLES = ("TOKENMILL_RANK_ADDRESS", "TOKENMILL_RANK_KEY", "TOKENMILL_RANKS_PER_GPU")
# Each node has a Python of its own.
RANK_COMMAND = ("python", "-P", "-m", "tokenmill.engine.ranks.rank_process")
LOST = -1  # exit code of a worker whose node is gone

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundles:
    """The ranks that each bundle of a placement group holds, and how many share a GPU."""

    ranks: tuple[int, ...]
    strategy: str
    per_gpu: int = 1

    @property
    def gpus_of_rank(self) -> float:
        return math.floor(1e4 / self.per_gpu) / 1e4  # Ray counts in these

    def resources(self) -> list[dict[str, float]]:
        """What Ray is asked for, by bundle; beyond one GPU it takes whole ones."""
        return [
            {"GPU": n * self.gpus_of_rank if n < self.per_gpu else math.ceil(n / self.per_gpu)}
            for n in self.ranks
        ]


def plan_bundles(num_ranks: int, gpus: Sequence[int], per_gpu: int, spread: bool) -> Bundles:
    """How a worker's ranks lie on nodes with so many GPUs each.

    A cluster without any GPU yet is asked for one node that has all.
    """
    if spread:
        return Bundles((1,) * num_ranks, "SPREAD", per_gpu)
    rooms = sorted((count * per_gpu for count in gpus), reverse=True)
    if not rooms or num_ranks <= rooms[0]:
        return Bundles((num_ranks,), "STRICT_PACK", per_gpu)
    ranks: list[int] = []
    while (left := num_ranks - sum(ranks)) > 0:  # nodes that are missing are like the largest
        ranks.append(min(left, rooms[len(ranks)] if len(ranks) < len(rooms) else rooms[0]))
    return Bundles(tuple(ranks), "STRICT_SPREAD", per_gpu)


class RayPlacement:
    """Workers are processes of Ray actors; on CPUs they are spread over the nodes.

    A worker of several ranks is as many actors: the first one is the worker, whom the others call.
    """

    def __init__(self, host: str, config: PoolConfig) -> None:
        import ray

        self.host = host
        self._config = config
        self._host_of: Any = ray.remote(_WorkerHost).options
        self._on_gpu = config.device == "cuda" or (config.device == "auto" and bool(_gpus()))
        if config.device == "auto" and not self._on_gpu:
            _log.info(
                "no node of the Ray cluster has a GPU: workers run on CPUs; with --device cuda "
                "they wait for GPUs"
            )

    def spawner(self, argv: Sequence[str], num_ranks: int = 1) -> CommandSpawn:
        return CommandSpawn(argv, num_ranks, self._start)

    async def _start(self, argv: Sequence[str], address: str, num_ranks: int) -> WorkerProcess:
        plain, _, key = address.partition("#")
        command = [word for word in argv if word != "--device=auto"]  # it is decided
        command += ["--address", plain]
        group, bundles = await self._reserve(num_ranks) if self._on_gpu else (None, None)
        actors: list[Any] = []
        async with _placing(actors, group):
            if bundles is None:
                actors += await self._on_one_node(num_ranks)
                env, per_gpu = {VISIBLE: ""}, 0  # GPUs are for those that asked for them
            else:
                actors += self._in_bundles(group, bundles)
                env, per_gpu = {"TOKENMILL_DEVICE": "cuda"}, bundles.per_gpu
            if len(actors) > 1:
                address = await actors[0].free_address.remote(self.host == LOOPBACK)
                meeting = (address, secrets.token_hex(32), str(max(1, per_gpu)))
                env |= dict(zip(RANKS_VARIABLES, meeting, strict=True))
                for actor in actors[1:]:
                    await actor.start.remote([*RANK_COMMAND, address], env)
            share = (math.ceil(self._config.num_workers / _num_nodes()), per_gpu, self._on_gpu)
            await actors[0].start.remote(command, env | {KEY_VARIABLE: key}, *share)
        return _RayWorker(actors, group)

    def _actor(self, **options: Any) -> Any:
        # kill() comes while wait() waits
        return self._host_of(**({"num_cpus": 0, "max_concurrency": 4} | options)).remote()

    async def _on_one_node(self, num_ranks: int) -> list[Any]:
        """Actors without GPUs, all where Ray puts the first one unless they are to be spread."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        strategy: Any = "SPREAD"
        first = self._actor(scheduling_strategy=strategy)
        if num_ranks > 1 and not self._config.spread_ranks:
            node = await first.node.remote()
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        return [first, *(self._actor(scheduling_strategy=strategy) for _ in range(num_ranks - 1))]

    def _in_bundles(self, group: Any, bundles: Bundles) -> list[Any]:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        return [
            self._actor(
                num_gpus=bundles.gpus_of_rank,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, number),
            )
            for number, count in enumerate(bundles.ranks)
            for _ in range(count)
        ]

    async def _reserve(self, num_ranks: int) -> tuple[Any, Bundles]:
        """Wait for GPUs for a worker; WorkerStartError says what is free once that took too long.

        What is asked for follows the cluster: nodes join and leave.
        """
        from ray.exceptions import RayError
        from ray.util.placement_group import placement_group

        limit_s, began_s, told_s = self._config.wait_s, time.monotonic(), POLL_S - TELL_S
        group: Any = None
        bundles = None
        try:
            while True:
                wanted = await asyncio.to_thread(self._plan, num_ranks)
                if wanted != bundles:
                    _remove(group)
                    bundles = wanted
                    group = placement_group(bundles.resources(), bundles.strategy)
                elif await asyncio.to_thread(group.wait, POLL_S):
                    break
                passed_s = time.monotonic() - began_s
                if passed_s > limit_s:
                    raise WorkerStartError(
                        f"{_wanting(bundles)}: the worker had to wait for {limit_s:g} s (--wait-s)"
                    )
                if passed_s - told_s > TELL_S:
                    told_s = passed_s
                    _log.info("%s: waiting up to %g s (--wait-s)", _wanting(bundles), limit_s)
        except BaseException as error:
            _remove(group)
            if isinstance(error, RayError):
                raise WorkerStartError(f"Ray cannot place the worker: {error}") from None
            raise
        if bundles.strategy == "STRICT_SPREAD":
            sizes = " + ".join(map(str, bundles.ranks))
            _log.info("no node has %d GPUs: a worker's ranks lie on several, %s", num_ranks, sizes)
        return group, bundles

    def _plan(self, num_ranks: int) -> Bundles:
        config, gpus = self._config, [total for total, _ in _gpus().values()]
        per_gpu = 1
        if config.share_gpus and gpus:
            per_gpu = max(1, math.ceil(config.num_processes / sum(gpus)))
        return plan_bundles(num_ranks, gpus, per_gpu, config.spread_ranks)


def _gpus() -> dict[str, tuple[int, int]]:
    """The GPUs of each node that has some, and how many of them are whole and free."""
    import ray
    from ray._private.state import available_resources_per_node

    free = available_resources_per_node()
    return {
        f"{node['NodeManagerAddress']} ({node['NodeID'][:6]})": (
            int(node["Resources"]["GPU"]),
            int(free.get(node["NodeID"], {}).get("GPU", 0)),
        )
        for node in ray.nodes()
        if node["Alive"] and node["Resources"].get("GPU")
    }


def _num_nodes() -> int:
    import ray

    return sum(bool(node["Alive"]) for node in ray.nodes()) or 1


def _wanting(bundles: Bundles) -> str:
    counts = [f"{sum(bundle.values()):g}" for bundle in bundles.resources()]
    where = "on one node" if len(counts) == 1 else f"on {len(counts)} nodes"
    if bundles.strategy == "SPREAD":
        counts, where = [f"{sum(map(float, counts)):g}"], "on any nodes"
    what = "1 GPU" if counts == ["1"] else f"{' + '.join(counts)} GPUs"
    nodes = [f"{node} has {free} of {total} free" for node, (total, free) in _gpus().items()]
    have = ", ".join(nodes) or "no node has a GPU yet"
    return f"a worker needs {what} {where} of the Ray cluster, where {have}"


def _remove(group: Any) -> None:
    if group is not None:
        from ray.util.placement_group import remove_placement_group

        remove_placement_group(group)


@contextlib.asynccontextmanager
async def _placing(actors: list[Any], group: Any) -> AsyncIterator[None]:
    """Start processes at actors; WorkerStartError where Ray cannot, and nothing of it is left."""
    import ray

    try:
        async with asyncio.timeout(PLACE_TIMEOUT_S):
            yield
    except BaseException as error:
        for actor in actors:
            ray.kill(actor)
        _remove(group)
        if not isinstance(error, TimeoutError | ray.exceptions.RayError):
            raise
        reason = str(error) or f"no node had room for it within {PLACE_TIMEOUT_S:g} s"
        raise WorkerStartError(f"Ray cannot place the worker: {reason}") from None


class _WorkerHost:
    """The actor: one process of a worker on the node that Ray chose."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, argv: list[str], env: dict[str, str], *share: Any) -> int:
        """Start the command with this node's Python; returns its process id.

        `share` says how many workers this node has, how many share a GPU, and if any is used.
        """
        own = shared_machine(argv, *share) if share else {}
        self._process = subprocess.Popen(
            [sys.executable, *argv[1:]], stdin=subprocess.DEVNULL, env={**os.environ, **own, **env}
        )
        return self._process.pid

    def node(self) -> str:
        import ray

        return str(ray.get_runtime_context().get_node_id())

    def free_address(self, local: bool) -> str:
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


class _RayWorker:
    """A worker as the link sees it: when one of its processes ends, all do."""

    def __init__(self, actors: list[Any], group: Any) -> None:
        self._actors, self._group = actors, group
        self._code: asyncio.Task[int] = asyncio.create_task(self._run())

    async def wait(self) -> int:
        return await asyncio.shield(self._code)

    def kill(self) -> None:
        for actor in self._actors:
            actor.kill.remote()

    async def _run(self) -> int:
        ends = [asyncio.create_task(_end_of(actor)) for actor in self._actors]
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        self.kill()
        codes = await asyncio.gather(*ends)
        _remove(self._group)
        return codes[0]


async def _end_of(actor: Any) -> int:
    """The exit code of an actor's process; the actor ends with it."""
    import ray

    try:
        code: int = await actor.wait.remote()
    except ray.exceptions.RayError:  # its node or its actor is gone
        return LOST
    ray.kill(actor)
    return code


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[str]:
    """A connection to Ray, to a local one of our own without an address; gives our own address."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    os.environ.setdefault("RAY_COLOR_PREFIX", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # num_gpus=0 hides none
    # Without it actors start one after another, and Ray warns of more than three.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "64")
    with contextlib.ExitStack() as stack:
        local = stack.enter_context(local_ray()) if address is None else {}
        import ray

        try:
            ray.init(address or "local", logging_level=logging.ERROR, **local)
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            where = f"at {address}" if address else "on this machine"
            raise PlacementError(f"cannot reach Ray {where}: {error}") from None
        try:
            yield LOOPBACK if address is None else ray.util.get_node_ip_address()
        finally:
            ray.shutdown()
