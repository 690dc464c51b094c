"""Workers placed by Ray: started, killed, restarted, and gone with the server."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from api.sim import MAX_MODEL_LEN, worker_argv
from api.sim_server import wait_until
from api.streams import read, until
from tokenmill.core.config import (
    KV_CACHE_SHARE,
    CacheConfig,
    ModelConfig,
    PoolConfig,
    SchedulerConfig,
    default_share,
)
from tokenmill.core.gpus import visible_gpus
from tokenmill.core.types import FinishReason
from tokenmill.settings import settings_of, unknown_variables
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.placement import (
    ProcessPlacement,
    open_placement,
    wants_ray,
)
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.ray_placement import Bundles, RayPlacement, plan_bundles
from workers.pools import request, states, told

LIMITS = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=32)
ARGV = worker_argv(LIMITS, step_ms=10.0)
RANK = "tokenmill.engine.ranks.rank_process"


def workers() -> list[int]:
    """Processes of workers that talk by TCP, as Ray's do."""
    return processes(str(Path(ARGV[1])), "tcp://")


def engine_process(pool: WorkerPool, name: str) -> int:
    """The process of a worker: its shared memory is reached by it."""
    facts = pool.slots[name].facts
    assert facts is not None and facts.kv is not None
    return int(facts.kv.ways[0].endpoint.partition(b":")[0])


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


def test_workers_have_gpus_of_their_own_or_share_those_of_the_fewest(tmp_path: Path) -> None:
    """They see all of them, their own first, so that they can read each other's memory."""
    code = (
        "import os, sys; open(sys.argv[2], 'w').write(os.environ.get('CUDA_VISIBLE_DEVICES', ''))"
    )

    async def seen(placement: ProcessPlacement, ranks: list[int]) -> list[str]:
        starts = [placement.spawner([sys.executable, "-c", code], n) for n in ranks]
        files = [str(tmp_path / str(i)) for i in range(len(ranks))]
        pairs = zip(starts, files, strict=True)
        processes = await asyncio.gather(*(start(file) for start, file in pairs))
        await asyncio.gather(*(process.wait() for process in processes))
        return [Path(file).read_text() for file in files]

    shared = PoolConfig(device="auto", share_gpus=True)
    several = ProcessPlacement(shared, ["0", "GPU-a", "2"])
    assert asyncio.run(seen(several, [1, 1, 1, 2])) == [
        *("0,GPU-a,2", "GPU-a,0,2", "2,0,GPU-a", "0,GPU-a,2")
    ]
    own = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    for few in (["0"], []):
        assert asyncio.run(seen(ProcessPlacement(shared, few), [1, 2])) == [own, own]
    on_cpu = ProcessPlacement(PoolConfig(), ["0", "1"])
    assert asyncio.run(seen(on_cpu, [1, 1, 1])) == [own] * 3
    each = ProcessPlacement(PoolConfig(device="cuda"), ["0", "GPU-a", "2"])
    assert asyncio.run(seen(each, [2, 1])) == ["0,GPU-a,2", "2,0,GPU-a"]
    assert asyncio.run(seen(each, [1, 1])) == ["0,GPU-a,2", "GPU-a,0,2"]  # the others have ended
    with pytest.raises(WorkerStartError, match="2 GPUs, one for each rank, and 1 of the 3 of this"):
        asyncio.run(seen(each, [2, 2]))


def test_workers_show_one_progress_and_their_processes(
    capfd: pytest.CaptureFixture[str],
) -> None:
    code = (
        "import sys\nfrom tokenmill import console\n"
        "with console.progress('Loading') as update:\n    update(1, 1)\n"
    )

    async def main() -> None:
        placement = ProcessPlacement(PoolConfig(workers=2), [])
        started = [await placement.start([sys.executable, "-c", code], "x", 1) for _ in range(2)]
        for process in started:
            await process.wait()
        pool = WorkerPool(ProcessPlacement(PoolConfig(), []).spawner(ARGV), PoolConfig(workers=2))
        await pool.start()
        try:
            pids = [worker.pid for worker in pool.view().workers]
            assert len(set(pids)) == 2 and set(pids) <= set(processes(str(Path(ARGV[1]))))
        finally:
            await pool.close()

    asyncio.run(main())
    assert capfd.readouterr().err == "Loading (first of 2 workers): 100%\n"


@pytest.mark.parametrize(
    ("workers", "ranks", "gpus", "share"),
    [
        *((2, 1, 4, None), (2, 2, 4, None), (2, 4, 4, "0.475"), (2, 2, 1, "0.475")),
        *((8, 1, 4, "0.475"), (1, 4, 1, None), (2, 1, 0, None)),
    ],
)
def test_workers_of_a_machine_share_its_cores_and_memory(
    workers: int, ranks: int, gpus: int, share: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of one worker divide its GPU's memory themselves."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(16))
    config = PoolConfig(workers=workers, ranks=ranks, device="auto", share_gpus=True)
    placement = ProcessPlacement(config, [str(gpu) for gpu in range(gpus)])
    own = placement._environment(ARGV, ["0"])
    threads = None if workers == 1 else str(16 // workers)
    assert own.get("TOKENMILL_NUM_THREADS") == threads
    assert own.get("TOKENMILL_GPU_MEMORY_UTILIZATION") == share
    assert own.get(KV_CACHE_SHARE) == (None if gpus else "0.25")
    for name, value in own.items():
        monkeypatch.setenv(name, value)
    assert (default_share("cpu"), default_share("cuda")) == (0.5 if gpus else 0.25, 0.95)
    assert not list(unknown_variables(own, (*settings_of(CacheConfig), *settings_of(ModelConfig))))
    sized = placement._environment(["tokenmill", "worker", "--kv-cache-memory=1GiB"], ["0"])
    assert not {"TOKENMILL_GPU_MEMORY_UTILIZATION", KV_CACHE_SHARE} & sized.keys()


@pytest.mark.parametrize(
    ("named", "found"),
    [(None, ["0", "1"]), ("1", ["1"]), ("GPU-a, 0", ["GPU-a", "0"]), ("", []), ("0,-1,1", ["0"])],
)
def test_gpus_that_processes_see(
    named: str | None, found: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "glob", lambda *_: iter([Path("/dev/nvidia3"), Path("/dev/nvidia5")]))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if named is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", named)
    assert visible_gpus() == found


def test_ray_starts_only_where_it_is_asked_for() -> None:
    """It is installed here; a flag or an address asks, several workers or ranks do not."""
    for config in (PoolConfig(), PoolConfig(workers=3), PoolConfig(prefill=1, decode=1, ranks=2)):
        with open_placement(config) as placement:
            assert isinstance(placement, ProcessPlacement) and placement.host is None
    for asked in (PoolConfig(placement="ray"), PoolConfig(ray_address="127.0.0.1:1")):
        assert wants_ray(asked)


def test_ray_places_workers_and_their_streams_go_on() -> None:
    """Killed, hung, and lost while KV moves."""
    config = PoolConfig(
        prefill=1,
        decode=1,
        remote_prefill_tokens=40,
        placement="ray",
        backoff_s=0.05,
        heartbeat_s=0.2,
        hang_timeout_s=1.5,
    )

    async def disturbed(pool: WorkerPool, tag: str, role: str, number: int) -> None:
        """Streams go on while a worker of a role gets a signal."""
        await until(lambda: states(pool) == ["ready"] * 2 and pool.handovers.num_connecting == 0)
        prompts = [[ord(tag) + i] * 300 for i in range(3)]
        before, received = pool.num_restarts, pool.view().transfers
        streams = [pool.submit([request(f"{tag}{i}", 90, p)]) for i, p in enumerate(prompts)]
        reading = [asyncio.create_task(read(stream)) for stream in streams]
        if role == "prefill":
            await until(lambda: any(told(pool, name) for name in pool.open_requests))
        else:
            await until(lambda: pool.view().transfers > received)
        name = next(w.name for w in pool.view().workers if w.role == role)
        os.kill(engine_process(pool, name), number)
        for task in reading:
            (output,) = await task
            assert len(output.token_ids) == 90 and output.finish_reason is FinishReason.LENGTH
        await until(lambda: pool.num_restarts == before + 1)

    async def main(pool: WorkerPool) -> None:
        try:
            await pool.start()
            await disturbed(pool, "k", "decode", signal.SIGKILL)
            await disturbed(pool, "t", "prefill", signal.SIGKILL)
            await disturbed(pool, "h", "decode", signal.SIGSTOP)
            assert pool.num_migrations > 0
        finally:
            await pool.close()

    with open_placement(config) as placement:
        assert placement.host == "127.0.0.1"
        spawn = placement.spawner(ARGV)
        asyncio.run(main(WorkerPool(spawn, config, host=placement.host, prefill_spawn=spawn)))
        assert workers() == []
        assert placement.host is not None
        one = PoolConfig(placement="ray", backoff_s=0.05)
        spawn = RayPlacement(placement.host, one).spawner(ARGV, num_ranks=2)
        asyncio.run(end_with_a_rank(WorkerPool(spawn, one, host=placement.host)))
        wait_until(lambda: processes(RANK, "127.0.0.1:") == workers() == [], "all are gone")


async def end_with_a_rank(pool: WorkerPool) -> None:
    """A worker is restarted, with ranks of its own, when one of them dies."""
    try:
        await pool.start()
        (rank,) = processes(RANK, "127.0.0.1:")
        (worker,) = workers()
        os.kill(rank, signal.SIGKILL)
        async with asyncio.timeout(180):
            while pool.num_restarts == 0:
                await asyncio.sleep(0.05)
        assert states(pool) == ["ready"] and workers() != [worker]
        assert processes(RANK, "127.0.0.1:") not in ([], [rank])
    finally:
        await pool.close()


def test_roles_and_fronts_on_two_nodes_of_a_cluster() -> None:
    """Workers of another node reach fronts by their address, with the key that they were given."""
    script = str(Path(__file__).with_name("two_nodes.py"))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert (
        "needs 2 GPUs on one node of the Ray cluster, where no node has a GPU yet: waiting up"
        in (done.stderr)
    )
    answer = json.loads(done.stdout.splitlines()[-1])
    assert answer["tokens"] == 20 and answer["transfers"] == 1
    assert answer["host"] != "127.0.0.1"
    assert answer["texts"] == 1
    assert sum(answer["at"]) == 8 * 5
    assert answer["asked"] == [{"GPU": 2.0}]  # the autoscaler saw it before there was a GPU
    (first, *_), second = placed = answer["placed"]
    for nodes, gpus in placed:
        assert len(set(nodes)) == 1 and sorted(gpus) == ["0", "1"]
    assert first != second[0][0]
    for node in ("has 0 of 2 free, ", "has 0 of 2 free: the worker had to wait for 1 s (--wait-s)"):
        assert node in answer["no_room"]
    assert sorted(answer["whole"][0].count(node) for node in set(answer["whole"][0])) == [2, 2]


@pytest.mark.parametrize(
    ("num_ranks", "gpus", "per_gpu", "ranks", "strategy"),
    [
        (4, [4, 4], 1, (4,), "STRICT_PACK"),
        (4, [], 1, (4,), "STRICT_PACK"),
        (12, [8, 2, 4], 1, (8, 4), "STRICT_SPREAD"),
        (16, [4], 1, (4, 4, 4, 4), "STRICT_SPREAD"),  # three nodes are missing yet
        (4, [1, 1], 2, (2, 2), "STRICT_SPREAD"),
        (2, [1, 1], 2, (2,), "STRICT_PACK"),
    ],
)
def test_ranks_are_on_one_node_where_one_could_hold_them(
    num_ranks: int, gpus: list[int], per_gpu: int, ranks: tuple[int, ...], strategy: str
) -> None:
    bundles = plan_bundles(num_ranks, gpus, per_gpu, False)
    assert bundles == Bundles(ranks, strategy, per_gpu)
    assert sum(bundle["GPU"] for bundle in bundles.resources()) == num_ranks / per_gpu
    assert plan_bundles(num_ranks, gpus, per_gpu, True).ranks == (1,) * num_ranks
