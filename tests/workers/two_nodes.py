"""A prefill and a decode worker on two nodes of a Ray cluster; both nodes are this machine.

Run as a script: a process has one Ray. It prints what became of a request, and of calls at two
fronts, one of which Ray has placed.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import urllib.request
from pathlib import Path

from ray.cluster_utils import Cluster

from tokenmill import __version__
from tokenmill.api.front_server import fingerprint, reserve
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig
from tokenmill.workers.fronts import owner as owner_module
from tokenmill.workers.fronts.control import FrontSetup
from tokenmill.workers.fronts.front_process import front_spawner
from tokenmill.workers.fronts.owner import FrontOwner
from tokenmill.workers.placement import OBJECT_STORE_BYTES, Placement, open_placement
from tokenmill.workers.pool import WorkerPool

SIM = Path(__file__).parents[1] / "api" / "sim.py"


async def ask(pool: WorkerPool, placement: Placement) -> dict[str, object]:
    from api.streams import read
    from workers.pools import request

    try:
        await pool.start()
        (output,) = await read(pool.submit([request("r", 20, [5] * 300)]))
        answer = {"tokens": len(output.token_ids), "transfers": pool.view().transfers}
        return answer | await call_fronts(pool, placement)
    finally:
        await pool.close()


async def call_fronts(pool: WorkerPool, placement: Placement) -> dict[str, object]:
    """What two fronts answer, and who started them."""
    from api.sim import MODEL, make_tokenizer

    argv = [sys.executable, str(SIM), "front", "--options", json.dumps({"sees": False})]
    with reserve("0.0.0.0", 0) as (listener, _):
        server = ServerConfig(host="0.0.0.0", port=listener.getsockname()[1])
        tokens = fingerprint(make_tokenizer())
        setup = FrontSetup(
            __version__, MODEL, "", "", tokens, server, pool.config, link_host=placement.host
        )
        far = placement.front_spawner(argv)
        owner = FrontOwner(pool, setup, front_spawner(argv), 2, None, far)
        try:
            await owner.start()
            views = owner._totals(False).fronts
            parents = [Path(f"/proc/{v.pid}/stat").read_text().split()[3] for v in views]
            texts = {await asyncio.to_thread(complete, server.port) for _ in range(8)}
            owner_module.GATHER_S = 60.0  # the sums below are exact
            await owner._gather()
            at = [
                front.report.counts.single["num_output_tokens"] for front in owner._fronts.values()
            ]
        finally:
            await owner.close()
    return {"children": [int(p) == os.getpid() for p in parents], "texts": len(texts), "at": at}


def complete(port: int) -> str:
    body = json.dumps({"prompt": "count: 5", "max_tokens": 5}).encode()
    url, headers = f"http://127.0.0.1:{port}/v1/completions", {"Content-Type": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, body, headers)) as answer:
        text: str = json.load(answer)["choices"][0]["text"]
        return text


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1]))
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
            print(json.dumps({"host": placement.host, **answer}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
