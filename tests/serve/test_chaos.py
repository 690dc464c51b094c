"""Workers die and hang at random under load; no token may be lost, repeated or changed."""

from __future__ import annotations

import pytest

from serve.chaos import Chaos
from serve.sim import MAX_MODEL_LEN
from serve.sim_server import sim_server, wait_until
from tokenmill.core.config import FloorConfig, SchedulerConfig, ServerConfig

FLOOR = FloorConfig(
    workers=3,
    placement="process",
    max_migrations=100,
    heartbeat_s=0.2,
    hang_timeout_s=1.0,
    start_timeout_s=6.0,
    max_restarts=1000,
    backoff_s=0.05,
    stable_s=0.0,
)


def test_chaos(request: pytest.FixtureRequest) -> None:
    duration_s = request.config.getoption("--chaos-s")
    limits = SchedulerConfig(max_model_len=MAX_MODEL_LEN)
    with sim_server(ServerConfig(port=0), limits, step_ms=5.0, floor=FLOOR) as server:
        report = Chaos(server, seed=1).run(duration_s, num_clients=8)
        print(report.line())
        assert report.faults == [] and report.lost == report.changed == 0
        assert report.requests > 5 and report.kills > 0 and report.migrations > 0
        wait_until(
            lambda: all(
                worker["state"] == "ready" and worker["num_requests"] == 0
                for worker in server.call("GET", "/floor").json["workers"]
            ),
            "all workers are back and idle",
        )
