"""Workers and fronts die at random under load; no token may be lost, repeated or changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace

import pytest

from api.sim import MAX_MODEL_LEN
from api.sim_server import sim_server, wait_until
from tokenmill.core.config import PoolConfig, SchedulerConfig, ServerConfig
from workers.chaos import Chaos

POOL = PoolConfig(
    workers=3,
    remote_prefill_tokens=40,
    kv_lease_s=2.0,  # a slow transfer does not end in time
    max_migrations=100,  # the dice may fall on one request's workers again and again
    heartbeat_s=0.2,
    hang_timeout_s=1.0,
    start_timeout_s=30.0,
    max_restarts=1000,
    backoff_s=0.05,
    stable_s=0.0,
)
LIMITS = SchedulerConfig(max_model_len=MAX_MODEL_LEN, max_num_batched_tokens=64)
STEP_MS = 20.0  # streams last, and the machine has little to do
NUM_BLOCKS = 48  # two long requests fill a worker's KV


ROLES = replace(POOL, prefill=1, decode=2)


@pytest.mark.parametrize(
    ("pool", "fronts"),
    [(POOL, 1), (ROLES, 1), (ROLES, 2)],
    ids=["aggregated", "disaggregated", "fronts"],
)
def test_chaos(
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    pool: PoolConfig,
    fronts: int,
) -> None:
    duration_s = request.config.getoption("--chaos-s") / 3
    config = ServerConfig(port=0, fronts=fronts)
    with sim_server(
        config, LIMITS, STEP_MS, pool, num_blocks=NUM_BLOCKS, fault_rate=0.03
    ) as server:
        report = Chaos(server, seed=1).run(duration_s, num_clients=8)
        record_property("figures", asdict(report))
        assert report.faults == []
        assert report.lost == report.duplicated == report.changed == 0
        assert report.requests > 5 and report.kills + report.front_kills > 0
        assert (report.transfers > 0) == (pool.prefill > 0)
        if fronts == 1:
            assert report.kills > 0 and report.migrations > 0
        wait_until(
            lambda: all(
                worker["state"] == "ready" and worker["num_requests"] == 0
                for worker in server.call("GET", "/workers").json["workers"]
            ),
            "all workers are back and idle",
        )
        wait_until(
            lambda: all(
                server.metric(name) == 0
                for name in ("kv_cache_usage", "kv_leases", "num_requests_receiving")
            ),
            "nothing is held any more",
        )
