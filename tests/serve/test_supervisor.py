"""Workers placed by Ray: started, killed, restarted, and gone with the server."""

from __future__ import annotations

import asyncio
import os
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest

from serve.sim import MAX_MODEL_LEN, worker_argv
from serve.test_floor import read, request, states
from tokenmill.core.config import FloorConfig, SchedulerConfig
from tokenmill.serve.floor import Floor
from tokenmill.serve.supervisor import (
    PlacementError,
    ProcessPlacement,
    RayPlacement,
    open_placement,
)

ARGV = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0)
RANK = "tokenmill.engine.rank"


def workers() -> list[int]:
    """Processes of workers that talk by TCP, as Ray's do."""
    return processes(str(Path(ARGV[1])), "tcp://")


def processes(word: str, start: str = "") -> list[int]:
    """Those with a word on the command line, and one that starts so."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if word.encode() in words and any(w.startswith(start.encode()) for w in words):
            found.append(int(folder.name))
    return found


def test_one_worker_and_plain_processes_need_no_ray() -> None:
    for config in (FloorConfig(), FloorConfig(workers=3, placement="process")):
        with open_placement(config) as placement:
            assert isinstance(placement, ProcessPlacement) and placement.host is None
    with (
        pytest.raises(PlacementError, match="ray-address"),
        open_placement(FloorConfig(placement="process", ray_address="127.0.0.1:1")),
    ):
        pass


@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed")
def test_ray_places_workers_and_their_streams_go_on() -> None:
    config = FloorConfig(workers=1, placement="ray", backoff_s=0.05)

    async def main(floor: Floor) -> None:
        try:
            await floor.start()
            streams = [floor.submit([request(f"r{i}", 200)]) for i in range(4)]
            reading = [asyncio.create_task(read(stream)) for stream in streams]
            await asyncio.sleep(0.2)
            os.kill(workers()[0], signal.SIGKILL)
            for task in reading:
                (output,) = await task
                assert len(output.token_ids) == 200
            assert floor.num_migrations > 0
            assert states(floor) == ["ready"] and floor.num_restarts == 1
        finally:
            await floor.close()

    with open_placement(config) as placement:
        assert placement.host == "127.0.0.1"
        asyncio.run(main(Floor(placement.spawner(ARGV), config, host=placement.host)))
        assert workers() == []
        assert placement.host is not None
        ranks = RayPlacement(placement.host, 1, num_ranks=2)
        asyncio.run(end_with_a_rank(Floor(ranks.spawner(ARGV), config, host=placement.host)))
        assert processes(RANK, "127.0.0.1:") == workers() == []


async def end_with_a_rank(floor: Floor) -> None:
    """A worker is restarted, with ranks of its own, when one of them dies."""
    try:
        await floor.start()
        (rank,) = processes(RANK, "127.0.0.1:")
        (worker,) = workers()
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(60):
            while floor.num_restarts == 0:
                await asyncio.sleep(0.05)
        assert states(floor) == ["ready"] and workers() != [worker]
        assert processes(RANK, "127.0.0.1:") not in ([], [rank])
    finally:
        await floor.close()
