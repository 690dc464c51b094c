"""Runs made up for the report: records and summaries of a server that never was."""

from __future__ import annotations

import json
import random
import re
from typing import Any

import msgspec

from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.records import LoadRecord
from tokenmill.bench.client.summary import Price, summarize_point
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.results.reports import AuditReport, EndpointReport, Facts
from tokenmill.core.metrics import RequestTimes, Slo

NUM_TOKENS = 20
HOSTILE = '<script>document.title="owned"</script><img src=x onerror=alert(1)> & "quoted"'
CLIENT_WARNING = "a client process was busy 97% of the time: the client may be the limit"

FACTS = Facts(
    format=1,
    benchmark="endpoint",
    started_at="2026-11-15T10:00:00+00:00",
    ended_at="2026-11-15T10:01:00+00:00",
    software={"tokenmill": "0.1.0", "python": "3.11.7", "numpy": "2.4.6"},
    hardware={"cpu": "A CPU", "num_cores": 2, "memory_bytes": 8 * 2**30, "gpus": []},
    configuration={"num-requests": 40, "concurrency": [1, 4], "ignore-eos": True},
)


def page_data(text: str) -> Any:
    """What the script of a page draws."""
    found = re.search('<template id="page">(.*)</template>', text)
    assert found is not None
    return json.loads(found[1])


def records(point: int, concurrency: int, count: int, *, fails: bool = False) -> list[LoadRecord]:
    """Requests in `concurrency` slots, one after another; the more slots, the slower."""
    rng = random.Random(point)
    slots, found = [0.0] * concurrency, []
    for session in range(count):
        slot = session % concurrency
        sent_ns = round(slots[slot] * 1e6) + 1
        ttft_ms = rng.lognormvariate(3.4, 0.35) * (1 + concurrency / 12)
        gaps_ns = [round(rng.gauss(9 + concurrency / 6, 1.2) * 1e6) for _ in range(NUM_TOKENS - 1)]
        first_ns = sent_ns + round(ttft_ms * 1e6)
        last_ns = first_ns + sum(gaps_ns)
        record = LoadRecord(session, 0, sent_ns, point=point, sent_ns=sent_ns, status=200)
        record.end_ns = last_ns
        slots[slot] = last_ns / 1e6 + 0.2
        if fails and session % 9 == 5:
            record.error, record.detail, record.status = "http_500", HOSTILE, 500
            record.end_ns = first_ns
        else:
            record.first_ns, record.last_ns, record.gaps_ns = first_ns, last_ns, gaps_ns
            record.num_outputs, record.num_bytes = NUM_TOKENS, 5 * NUM_TOKENS
            record.prompt_tokens, record.completion_tokens = 128, NUM_TOKENS
            record.finish_reason = "length"
        found.append(record)
    return found


def audit_of(warnings: list[str]) -> AuditReport:
    report = {
        "num_processes": 1,
        "scheduled": False,
        "lag_ms": {"mean": 0.1, "p50": 0.08, "p90": 0.2, "p99": 0.4, "max": 1.1},
        "cpu_share": 0.97 if warnings else 0.12,
        "num_stalls": 0,
        "max_stall_ms": 3.0,
        "floor": {"request_s": 8000.0, "outputs_s": 120_000.0, "latency_ms": {"p50": 0.12}},
        "warnings": warnings,
        "client_limited": bool(warnings),
    }
    return msgspec.convert(report, AuditReport)


def endpoint_run(
    concurrencies: tuple[int, ...] = (8,),
    count: int = 120,
    *,
    fails: bool = False,
    slo: Slo | None = None,
    price: Price | None = None,
    warnings: tuple[str, ...] = (),
    stream: bool = True,
) -> tuple[EndpointReport, list[LoadRecord]]:
    """A report as `bench endpoint` makes it, and its records."""
    every, points = [], []
    for index, concurrency in enumerate(concurrencies):
        found = records(index, concurrency, count, fails=fails)
        load = ClientLoad(concurrency=concurrency, num_sessions=count)
        point = summarize_point(load, found, stream=stream, slo=slo, price=price)
        point.audit = audit_of(list(warnings))
        points.append(point)
        every += found
    report = EndpointReport(
        benchmark="endpoint",
        url="http://127.0.0.1:8000/v1/chat/completions",
        model="sample-8b",
        api="chat",
        stream=stream,
        points=points,
    )
    return report, every


def mlperf_times(count: int = 80) -> list[RequestTimes]:
    rng = random.Random(7)
    found = []
    for index in range(count):
        arrival_ns = index * 25_000_000
        first_ns = arrival_ns + round(rng.lognormvariate(4.6, 0.5) * 1e6)
        last_ns = first_ns + round(rng.gauss(12, 2) * 63 * 1e6)
        found.append(RequestTimes(arrival_ns, first_ns, last_ns, 1, 64))
    return found


def mlperf_run(*, valid: bool = True, quick: bool = True) -> MlperfReport:
    """A report as `bench mlperf` makes it."""
    notice = "This is a quick run and not a valid submission: query count is below the minimum."
    report = {
        "benchmark": "mlperf",
        "round": "v6.0",
        "num_samples": 80,
        "synthetic": True,
        "mlperf_benchmark": "llama3.1-8b",
        "scenario": "Interactive",
        "test_mode": "performance",
        "target_qps": 40.0,
        "model": "sample-8b",
        "dtype": "bf16",
        "device": "cuda",
        "quick": quick,
        "notices": [notice] if quick else [],
        "result": "VALID" if valid else "INVALID",
        "reasons": [] if valid else ["p90 TTFT is 612.0 ms, the limit is 500 ms"],
        "metric": {"name": "completed tokens per second", "value": 2431.5, "unit": "tokens/s"},
        "num_queries": 80,
        "num_output_tokens": 5120,
        "samples_per_s": 37.9,
        "ttft_ms": {"mean": 118.0, "p50": 101.0, "p90": 190.0 if valid else 612.0, "p99": 300.0},
        "tpot_ms": {"mean": 12.0, "p50": 12.1, "p90": 14.4, "p99": 16.0},
        "latency_ms": {"mean": 874.0, "p50": 870.0, "p90": 1010.0, "p99": 1100.0},
        "limits_ms": {"ttft": 500, "tpot": 30},
        "percentile": 90,
        "min_duration_s": 5.0,
    }
    return msgspec.convert(report, MlperfReport)
