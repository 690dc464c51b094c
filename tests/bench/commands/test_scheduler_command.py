"""The scheduler benchmark measures what it says it does."""

from __future__ import annotations

import json

import pytest

from tokenmill.bench.commands.scheduler import decode_requests, measure_steps
from tokenmill.core.config import SchedulerConfig
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler


def scheduler(max_num_seqs: int) -> Scheduler:
    config = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=max_num_seqs)
    return Scheduler(config, BlockPool(256, 16), frozenset({0}))


def test_report_covers_every_step() -> None:
    target = scheduler(8)
    report = measure_steps(target, decode_requests(8, prompt_tokens=20), 20)
    assert report["num_running"] == 8 and report["num_steps"] == 20
    assert target.stats().num_running == 8 and target.stats().num_preemptions == 0
    for part in ("schedule_us", "update_us", "total_us"):
        assert 0 < report[part]["p50"] <= report[part]["p99"] <= report[part]["max"]
    assert report["limit_us"] == 1000.0
    assert json.loads(json.dumps(report)) == report


def test_too_small_a_scheduler_is_named() -> None:
    with pytest.raises(ValueError, match="does not run 8 requests at once"):
        measure_steps(scheduler(4), decode_requests(8, prompt_tokens=20), 5)
