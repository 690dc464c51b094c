"""Drafts in /metrics: counters by position, summed over workers."""

from __future__ import annotations

from tokenmill.core.types import EngineStats
from tokenmill.serve.floor_view import FloorView
from tokenmill.serve.metrics import ServerMetrics
from tokenmill.serve.place import add_stats


def test_drafts_are_counted_by_position_over_all_workers() -> None:
    one = EngineStats(num_drafted=[10, 8], num_accepted=[6, 2], num_relaxed=1)
    other = EngineStats(num_drafted=[10], num_accepted=[4], num_steps=3)
    total = add_stats(add_stats(EngineStats(), one), other)
    assert (total.num_drafted, total.num_accepted, total.num_relaxed) == ([20, 8], [10, 2], 1)
    text = ServerMetrics("m").render(total, 0, FloorView("kv", 0, 0, 0, [], [])).decode()
    for line in (
        'tokenmill_mtp_drafted_tokens_total{model_name="m",position="1"} 20.0',
        'tokenmill_mtp_accepted_tokens_total{model_name="m",position="2"} 2.0',
        'tokenmill_mtp_runs_total{model_name="m"} 20.0',
        'tokenmill_mtp_relaxed_tokens_total{model_name="m"} 1.0',
        'tokenmill_mtp_acceptance_length{model_name="m"} 1.6',
    ):
        assert line in text.splitlines(), text
