"""/metrics: what is counted as what, and that the docs and the benchmarks know it."""

from __future__ import annotations

from pathlib import Path

from tokenmill.api.server import StatsLog
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.videos.video_metrics import VideoMetrics
from tokenmill.bench.client.scrape import COUNTERS, SHARES, SUMMED_GAUGES, read_exposition
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import EngineStats
from tokenmill.proxy.proxy_metrics import RouteMetrics
from tokenmill.workers.pool_view import PoolView
from tokenmill.workers.slot import add_stats


def test_drafts_are_counted_by_position_over_all_workers() -> None:
    one = EngineStats(num_drafted=[10, 8], num_accepted=[6, 2])
    other = EngineStats(num_drafted=[10], num_accepted=[4], num_steps=3)
    total = add_stats(add_stats(EngineStats(), one), other)
    assert (total.num_drafted, total.num_accepted) == ([20, 8], [10, 2])
    text = ServerMetrics("m").render(total, 0, PoolView("kv", 0, 0, 0, [], [])).decode()
    for line in (
        'tokenmill_mtp_drafted_tokens_total{model_name="m",position="1"} 20.0',
        'tokenmill_mtp_accepted_tokens_total{model_name="m",position="2"} 2.0',
        'tokenmill_mtp_runs_total{model_name="m"} 20.0',
        'tokenmill_mtp_acceptance_length{model_name="m"} 1.6',
    ):
        assert line in text.splitlines(), text


def test_tiers() -> None:
    one = {"host_blocks": 3, "disk_blocks": 5, "host_hit_tokens": 32, "load_s": 0.5}
    other = {"host_blocks": 4, "disk_blocks": 6, "disk_hit_tokens": 16, "disk_corrupt": 1}
    total = add_stats(EngineStats(tiers=one), EngineStats(tiers=other))
    text = ServerMetrics("m").render(total, 0, PoolView("kv", 0, 0, 0, [], [])).decode()
    for line in (
        'tokenmill_kv_tier_blocks{model_name="m",tier="host"} 7.0',
        'tokenmill_kv_tier_blocks{model_name="m",tier="disk"} 6.0',  # of a folder that both share
        'tokenmill_kv_tier_hit_tokens_total{model_name="m",tier="disk"} 16.0',
        'tokenmill_kv_tier_copy_seconds_total{model_name="m",way="load"} 0.5',
        'tokenmill_kv_tier_lost_blocks_total{model_name="m",why="corrupt"} 1.0',
    ):
        assert line in text.splitlines(), text


def exported(metrics: ServerMetrics) -> set[tuple[str, str, str]]:
    """(name, type, labels but for the model's name) of every family."""
    metrics.render(EngineStats(), 0, PoolView("kv", 0, 0, 0, [], []))
    found = set()
    for family in metrics.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = [label for label in family._labelnames if label != "model_name"]
        found.add((name, family.type, ", ".join(labels)))
    return found


def test_the_table_in_the_docs_is_what_is_exported() -> None:
    lines = (Path(__file__).parents[2] / "docs/metrics.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines]
    documented = {
        (row[1].strip("`"), row[2], row[3])
        for row in rows
        if len(row) == 6 and row[1].startswith(("`tok", "`vllm:"))
    }
    both = exported(ServerMetrics("m")) | exported(RouteMetrics()) | exported(VideoMetrics("m"))
    assert documented - both == set(), "documented and not exported"
    assert both - documented == set(), "exported and not documented"


def test_names_of_vllm_have_the_values_of_ours() -> None:
    metrics = ServerMetrics("m")
    metrics.output(RequestTimes(1), 2, 30)
    stats = EngineStats(num_running=3, num_kv_blocks=4, num_kv_blocks_used=1)
    lines = metrics.render(stats, 0, PoolView("kv", 0, 0, 0, [], [])).decode().splitlines()
    for line in (
        'vllm:num_requests_running{model_name="m"} 3.0',
        'vllm:kv_cache_usage_perc{model_name="m"} 0.25',
        'vllm:generation_tokens_total{model_name="m"} 30.0',
        'vllm:time_to_first_token_seconds_count{model_name="m"} 1.0',
    ):
        assert line in lines, (line, lines)
    assert not any("vllm:" in line for line in RouteMetrics().exposition().decode().splitlines())


def test_what_the_benchmarks_read_is_exported() -> None:
    text = ServerMetrics("m").render(EngineStats(), 0, PoolView("kv", 0, 0, 0, [], [])).decode()
    read = read_exposition(text)
    positions = ("accepted_", "drafted_", "drafts_accepted")  # once there are drafts
    wanted = {*COUNTERS, *SUMMED_GAUGES, *SHARES}
    missing = {name for name in wanted - set(read) if not name.startswith(positions)}
    assert missing == set()


def test_success_is_a_whole_answer_and_refusals_have_a_reason() -> None:
    metrics = ServerMetrics("m")
    times = RequestTimes(1)
    metrics.output(times, 2, 30)
    metrics.finish(times, 700, "stop")
    for reason in ("abort", "error", "reject"):
        metrics.finish(RequestTimes(1), 5, reason)
    metrics.count_call("/v1/completions", 429, "queue_full")
    metrics.count_call("/v1/completions", 200, None)
    metrics.count_call("/v1/completions", 500, "worker_died")
    lines = metrics.render(EngineStats(), 0, PoolView("kv", 0, 0, 0, [], [])).decode().splitlines()
    own = 'model_name="m"'
    for line in (
        f'tokenmill_request_success_total{{finished_reason="stop",{own}}} 1.0',
        f'tokenmill_request_success_total{{finished_reason="length",{own}}} 0.0',
        f'tokenmill_request_failure_total{{finished_reason="reject",{own}}} 1.0',
        f'tokenmill_requests_total{{endpoint="/v1/completions",{own},status="429"}} 1.0',
        f'tokenmill_requests_rejected_total{{{own},reason="queue_full"}} 1.0',
        f'tokenmill_request_prompt_tokens_bucket{{le="500.0",{own}}} 0.0',
        f'tokenmill_request_prompt_tokens_bucket{{le="1000.0",{own}}} 1.0',
        f"tokenmill_request_generation_tokens_sum{{{own}}} 30.0",
    ):
        assert line in lines, (line, lines)
    assert not any('finished_reason="abort"' in line for line in lines if "success" in line)
    assert not any("worker_died" in line for line in lines)


def test_the_line_of_throughput_is_of_what_was_done_since() -> None:
    metrics, stats = ServerMetrics("m"), EngineStats(num_kv_blocks=100)
    log = StatsLog(metrics, lambda: stats)
    assert log.line() is None
    metrics.num_prompt_tokens, metrics.num_output_tokens = 1000, 500
    stats.num_running, stats.num_waiting, stats.num_kv_blocks_used = 3, 2, 25
    stats.prefix_query_tokens, stats.prefix_hit_tokens = 200, 50
    line = log.line()
    assert line is not None
    assert "running 3, waiting 2" in line and "KV cache 25.0% used" in line
    assert "prefix hits 25.0%" in line and "prompt 0.0" not in line and "output 0.0" not in line
    stats.num_running = stats.num_waiting = 0
    assert log.line() is None
