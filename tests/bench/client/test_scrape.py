"""Prometheus text of tokenmill, vLLM and SGLang -> one set of figures, and doubts."""

from __future__ import annotations

import time
from typing import Any

import pytest
from msgspec.structs import replace

from bench.scripted_server import ScriptedServer, scripted_server
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.bench.client.records import Endpoint, LoadRecord
from tokenmill.bench.client.scrape import (
    REQUESTS_DIFFER,
    RESTARTED,
    TOKENS_DIFFER,
    Scraper,
    metrics_url,
    read_exposition,
    server_doubts,
    server_report,
)
from tokenmill.bench.report.tables import server_table
from tokenmill.bench.results.reports import Occurrence, PointReport, ServerReport, as_json
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import EngineStats
from tokenmill.workers.pool_view import PoolView

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 12.0
vllm:num_requests_running{engine="1",model_name="m"} 4.0
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.42
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.61
vllm:prefix_cache_queries_total{engine="0",model_name="m"} 200.0
vllm:prefix_cache_hits_total{engine="0",model_name="m"} 50.0
vllm:generation_tokens_total{engine="0",model_name="m"} 5.12e+04
vllm:generation_tokens_total{engine="0",model_name="another, \\"}quoted"} 7.0 1700000000000
vllm:request_success_total{engine="0",finished_reason="stop",model_name="m"} 7.0
vllm:request_success_total{engine="0",finished_reason="length",model_name="m"} 3.0
vllm:time_to_first_token_seconds_bucket{engine="0",le="0.1",model_name="m"} 5.0
vllm:time_to_first_token_seconds_count{engine="0",model_name="m"} 10.0
vllm:time_to_first_token_seconds_sum{engine="0",model_name="m"} 2.5
vllm:num_preemptions_total{engine="0",model_name="m"} NaN
not a metric at all
"""
SGLANG = """\
sglang:num_running_reqs{model_name="q"} 2.0
sglang:num_queue_reqs{model_name="q"} 1.0
sglang:token_usage{model_name="q"} 0.28
sglang:prompt_tokens_total{model_name="q"} 80.0
sglang:cached_tokens_total{model_name="q"} 20.0
sglang:generation_tokens_total{model_name="q"} 40.0
sglang:num_requests_total{model_name="q"} 4.0
"""


def ours(num_requests: int, running: int = 0) -> str:
    metrics = ServerMetrics("m")
    for _ in range(num_requests):
        times = RequestTimes(0)
        metrics.output(times, 250_000_000, 1)
        metrics.output(times, 300_000_000, 5)
        metrics.num_prompt_tokens += 30
        metrics.finish(times, 30, "length")
    stats = EngineStats(num_running=running, num_kv_blocks=10, num_kv_blocks_used=running)
    pool = PoolView("kv", 0, 0, 0, workers=[], decisions=[])
    return metrics.render(stats, 0, pool).decode()


def test_vllm() -> None:
    reading = read_exposition(VLLM, "m")
    assert reading["running"] == 16 and reading["waiting"] == 3
    assert reading["kv_cache_usage"] == 0.61
    assert reading["num_output_tokens"] == 51_200 and reading["num_requests"] == 10
    assert reading["ttft_sum"] == 2.5 and reading["ttft_count"] == 10
    assert "num_preemptions" not in reading and "queue_sum" not in reading
    assert read_exposition(VLLM, "unknown")["num_output_tokens"] == 51_207
    assert read_exposition("<html>no</html>") == {}


def test_sglang() -> None:
    report = reported([{}, read_exposition(SGLANG, "q")])
    assert report["num_requests"] == 4 and report["num_output_tokens"] == 40
    assert report["prefix_hit_rate"] == 0.25 and report["peak_kv_cache_usage"] == 0.28


def test_ours_over_a_point() -> None:
    readings = [read_exposition(text, "m") for text in (ours(2), ours(3, running=4), ours(6))]
    report = reported(readings)
    assert report["num_readings"] == 3
    assert report["num_requests"] == 4 and report["num_output_tokens"] == 4 * 6
    assert report["num_prompt_tokens"] == 4 * 30
    assert report["peak_running"] == 4 and report["peak_kv_cache_usage"] == 0.4
    assert report["ttft_mean_ms"] == pytest.approx(250)
    assert report["prefix_hit_rate"] is None and report["num_preemptions"] == 0


def test_accepted_drafts_are_summed_over_positions() -> None:
    texts = [
        f"""tokenmill_mtp_runs_total{{model_name="m"}} {runs}
tokenmill_mtp_accepted_tokens_total{{model_name="m",position="1"}} {first}
tokenmill_mtp_accepted_tokens_total{{model_name="m",position="2"}} {second}
tokenmill_mtp_drafted_tokens_total{{model_name="m",position="1"}} {runs}
tokenmill_mtp_drafted_tokens_total{{model_name="m",position="2"}} {runs - 4}
"""
        for runs, first, second in ((10, 6, 2), (30, 18, 10))
    ]
    readings = [read_exposition(text, "m") for text in texts]
    report = reported(readings)
    assert report["acceptance_length"] == 1 + 20 / 20
    assert report["acceptance_positions"] == [12 / 20, 8 / 20]
    assert (
        server_table([replace(point(0, 0), server=server_report(readings))])[1].count("60% 40%")
        == 1
    )
    assert reported([{}, {}])["acceptance_length"] is None
    theirs = read_exposition(
        """vllm:spec_decode_num_drafts_total{model_name="m"} 10
vllm:spec_decode_num_accepted_tokens_total{model_name="m"} 9
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="0"} 6
vllm:spec_decode_num_accepted_tokens_per_pos_total{model_name="m",position="1"} 3
"""
    )
    assert reported([{}, theirs])["acceptance_positions"] == [0.6, 0.3]


def reported(*args: Any) -> dict[str, Any]:
    return as_json(server_report(*args))


def point(tokens: int, requests: int) -> PointReport:
    return PointReport(load="x", num_output_tokens=tokens, num_completed=requests)


def counts(tokens: int | None, requests: int | None) -> ServerReport:
    nothing = server_report([{}, {}])
    return replace(nothing, num_output_tokens=tokens, num_requests=requests)


def test_disagreement_is_a_doubt() -> None:
    server = counts(1000, 10)
    assert server_doubts(server, point(1000, 10), []) == {}
    assert server_doubts(server, point(995, 10), []) == {}
    found = server_doubts(server, point(900, 9), [])
    assert set(found) == {TOKENS_DIFFER, REQUESTS_DIFFER}
    text = "the server generated 1,000 tokens, 900 came here: does somebody else use it?"
    assert found[TOKENS_DIFFER] == Occurrence(first=text)
    assert set(server_doubts(server, point(1100, 10), [])) == {TOKENS_DIFFER}
    cut = LoadRecord(0, 0, 0, max_tokens=100, num_outputs=3, error="cancelled")
    assert server_doubts(server, point(930, 9), [cut]) == {}
    assert set(server_doubts(counts(-5, 10), point(9, 9), [])) == {RESTARTED}
    unknown = counts(None, None)
    assert server_doubts(unknown, point(9, 9), []) == {}


def test_a_gauge_that_nobody_saw_is_unknown() -> None:
    idle = {"num_requests": 0.0, "running": 0.0, "waiting": 0.0, "kv_cache_usage": 0.0}
    after = idle | {"num_requests": 4.0}
    busy = idle | {"running": 3.0}
    short = reported([idle, after], 0)  # nothing was read while it ran
    assert short["peak_running"] is None and short["num_readings_during"] == 0
    assert reported([idle, idle, after], 1)["peak_running"] is None
    assert reported([idle, busy, after], 1)["peak_running"] == 3.0
    assert reported([idle, idle], 0)["num_requests"] == 0


def test_the_first_readings_come_soon() -> None:
    """A point of a third of a second is read while it runs, though readings are a second apart."""
    with scripted_server() as server:
        target = Endpoint(server.url + "/chat/completions", "ok")
        one = Scraper(metrics_url(target.url), target)
        one.begin()
        deadline_s = time.monotonic() + 30
        while len(one._readings) < 2 and time.monotonic() < deadline_s:
            time.sleep(0.01)
        readings = one.end()
        assert one.num_during >= 1 and len(readings) > 1 + one.num_during


def scraper(server: ScriptedServer, url: str | None = None, key: str | None = None) -> Scraper:
    target = Endpoint(server.url + "/chat/completions", "ok", api_key=key)
    return Scraper(url or metrics_url(target.url), target, every_s=0.05)


def test_scraper_reads_while_a_point_runs() -> None:
    with scripted_server() as server:
        one = scraper(server)
        one.begin()
        server.num_finished = 3
        readings = one.end()
        assert one.fault is None and len(readings) >= 2
        assert reported(readings)["num_requests"] == 3
        other = scraper(server, server.url + "/models")
        other.begin()
        assert other.fault is not None and other.fault.endswith("no metric that is known")
        assert other.end() == []
        assert "authorization" not in server.seen[-1].head.lower()
        keyed = scraper(server, server.url + "/models", key="secret")
        keyed.begin()
        assert "authorization: bearer secret" in server.seen[-1].head.lower()
    gone = scraper(server)
    gone.begin()
    assert gone.fault is not None and "refused" in gone.fault and gone.end() == []
