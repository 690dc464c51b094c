"""A prefill and a decode worker on two nodes of a Ray cluster; both nodes are this machine.

Run as a script: a process has one Ray. It prints what became of a request.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from ray.cluster_utils import Cluster

from tokenmill.core.config import PoolConfig, SchedulerConfig
from tokenmill.workers.placement import OBJECT_STORE_BYTES, open_placement
from tokenmill.workers.pool import WorkerPool


async def ask(pool: WorkerPool) -> dict[str, object]:
    from api.streams import read
    from workers.pools import request

    try:
        await pool.start()
        (output,) = await read(pool.submit([request("r", 20, [5] * 300)]))
        return {"tokens": len(output.token_ids), "transfers": pool.view().transfers}
    finally:
        await pool.close()


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
            answer = asyncio.run(ask(pool))
            print(json.dumps({"host": placement.host, **answer}))
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    main()
