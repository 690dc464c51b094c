"""Workers on the nodes of a Ray cluster, which all are this machine, with GPUs that are none.

Run as a script: a process has one Ray. It prints what became of a request, and of calls at two
fronts, which the workers reach by TCP; then where the ranks of workers on GPUs were placed.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table

from tokenmill import __version__
from tokenmill.api.front_server import fingerprint, reserve
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig
from tokenmill.core.keys.key_ring import KeyRing
from tokenmill.workers import ray_placement
from tokenmill.workers.fronts import owner as owner_module
from tokenmill.workers.fronts.control import FrontSetup
from tokenmill.workers.fronts.front_process import front_spawner
from tokenmill.workers.fronts.owner import FrontOwner
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.local_ray import OBJECT_STORE_BYTES
from tokenmill.workers.placement import WorkerPlacement, open_placement
from tokenmill.workers.pool import WorkerPool

Placed = tuple[list[Any], list[Any], list[Any]]
SIM = Path(__file__).parents[1] / "api" / "sim.py"


async def ask(pool: WorkerPool, placement: WorkerPlacement) -> dict[str, object]:
    from api.streams import read
    from workers.pools import request

    try:
        await pool.start()
        (output,) = await read(pool.submit([request("r", 20, [5] * 300)]))
        answer = {"tokens": len(output.token_ids), "transfers": pool.view().transfers}
        return answer | await call_fronts(pool, placement)
    finally:
        await pool.close()


async def call_fronts(pool: WorkerPool, placement: WorkerPlacement) -> dict[str, object]:
    """What two fronts answer."""
    from api.sim import MODEL, make_tokenizer

    argv = [sys.executable, str(SIM), "front", "--options", json.dumps({"sees": False})]
    with reserve("0.0.0.0", 0) as (listener, _):
        server = ServerConfig(host="0.0.0.0", port=listener.getsockname()[1])
        tokens = fingerprint(make_tokenizer())
        setup = FrontSetup(
            __version__,
            MODEL,
            "",
            tokens,
            server,
            KeyRing(b"", b""),
            pool.config,
            link_host=placement.host,
        )
        owner = FrontOwner(pool, setup, front_spawner(argv), 2)
        try:
            await owner.start()
            texts = {await asyncio.to_thread(complete, server.port) for _ in range(8)}
            owner_module.GATHER_S = 60.0  # the sums below are exact
            await owner._gather()
            at = [
                front.report.counts.single["num_output_tokens"] for front in owner._fronts.values()
            ]
        finally:
            await owner.close()
    return {"texts": len(texts), "at": at}


def complete(port: int) -> str:
    body = json.dumps({"prompt": "count: 5", "max_tokens": 5}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


async def place_ranks(cluster: Cluster, host: str | None, argv: list[str]) -> dict[str, object]:
    """Where ranks are, of workers that began to wait before there was a GPU."""
    assert host is not None
    ray_placement.RANK_COMMAND = ("python", "-c", "import time; time.sleep(600)")
    config = PoolConfig(ranks=2, device="cuda", wait_s=120.0)
    pool = _pool(host, config, argv)
    starting = asyncio.create_task(pool.start())
    try:
        while not (asked := [g["bundles"] for g in placement_group_table().values()]):
            await asyncio.sleep(0.05)
        await asyncio.sleep(2.0)  # the server says what it waits for
        for _ in range(2):
            cluster.add_node(num_gpus=2, num_cpus=0, object_store_memory=OBJECT_STORE_BYTES)
        await starting
        before = _placed(cluster)
        await pool.scale(2)
        placed = [before, _placed(cluster, before[2])]
        third = _pool(host, replace(config, wait_s=1.0), argv)
        no_room = ""
        try:
            await third.start()
        except WorkerStartError as error:
            no_room = str(error)
    finally:
        await pool.close()
    whole = _pool(host, replace(config, ranks=4), argv)
    try:
        await whole.start()
        over_nodes = _placed(cluster)
    finally:
        await whole.close()
    return {
        "asked": [dict(bundle) for bundle in asked[0].values()],
        "placed": [found[:2] for found in placed],
        "no_room": no_room,
        "whole": over_nodes[:2],
    }


def _pool(host: str, config: PoolConfig, argv: list[str]) -> WorkerPool:
    spawn = ray_placement.RayPlacement(host, config).spawner(argv, config.ranks)
    return WorkerPool(spawn, config, host=host)


def _placed(cluster: Cluster, others: Sequence[int] = ()) -> Placed:
    """The nodes, GPUs and processes of all ranks that run, but for some."""
    raylets = {n.all_processes["raylet"][0].process.pid for n in cluster.list_all_nodes()}
    found: Placed = ([], [], [])
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (folder / "environ").read_text().split("\0")
            env = dict(word.split("=", 1) for word in words if "=" in word)
            node = int(env.get("RAY_RAYLET_PID", 0))
            is_rank = "TOKENMILL_RANK_ADDRESS" in env and node in raylets
            if is_rank and int(folder.name) not in others:
                for column, value in zip(
                    found, (node, env["CUDA_VISIBLE_DEVICES"], int(folder.name)), strict=True
                ):
                    column.append(value)
    return found


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
    logging.basicConfig(level="INFO", format="%(message)s")
    from api.sim import MAX_MODEL_LEN, worker_argv

    node = {"num_cpus": 0, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(initialize_head=True, head_node_args={"include_dashboard": False, **node})
    cluster.add_node(**node)
    config = PoolConfig(prefill=1, decode=1, remote_prefill_tokens=40, ray_address=cluster.address)
    argv = worker_argv(SchedulerConfig(max_model_len=MAX_MODEL_LEN), step_ms=5.0)
    try:
        with open_placement(config) as placement:
            spawn = placement.spawner(argv)
            pool = WorkerPool(spawn, config, host=placement.host, prefill_spawn=spawn)
            answer = asyncio.run(ask(pool, placement))
            answer |= asyncio.run(place_ranks(cluster, placement.host, argv))
            print(json.dumps({"host": placement.host, **answer}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
