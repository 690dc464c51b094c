"""Reads our own results into the neutral form: the JSON of bench commands, and LoadGen's logs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tokenmill.bench.client.audit import all_warnings
from tokenmill.bench.client.records import LoadRecord, read_records
from tokenmill.bench.client.summary import NUM_WINDOWS, num_tokens, times_of
from tokenmill.bench.mlperf import loadgen
from tokenmill.bench.offline import OURS
from tokenmill.bench.results.mlperf_reports import MlperfReport
from tokenmill.bench.results.reports import (
    LIMITS,
    CellReport,
    EndpointReport,
    LatencyName,
    PointReport,
    RungReport,
)
from tokenmill.bench.results.result import (
    Json,
    ResultPoint,
    ToolResult,
    flat,
    load_key,
    per_request,
    present,
)
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import NS_PER_MS

OWN, LOADGEN = "tokenmill", "LoadGen"
EVENTS = "events.jsonl"
LATENCIES: tuple[LatencyName, ...] = (
    "ttft_ms",
    "ttft_from_schedule_ms",
    "tpot_ms",
    "itl_ms",
    "e2e_ms",
)
NOT_CONFIG = {"output_dir", "gpus", "price_per_gpu_hour", "audit", "seed"}
MLPERF_CONFIG = (
    *("mlperf_benchmark", "scenario", "test_mode", "target_qps", "peak_qps", "model", "dtype"),
    *("kv_dtype", "device", "accelerator", "num_samples", "synthetic", "quick", "length_scale"),
)
MIN_DURATION_MS = 600_000  # of a valid run


def read_endpoint(data: Json, path: Path) -> ToolResult:
    """A report with points; with events.jsonl beside it every request counts."""
    report = msgspec.convert(data, EndpointReport)
    config, raws = report.config, report.points
    points = [_endpoint_point(raw) for raw in raws]
    notices = ["interrupted, so of what had finished"] if report.interrupted else []
    if report.quick:
        notices.append("a quick run, not a valid submission")
    notices += [n for raw in raws if (n := _failures(raw))]
    notices += [n for raw in raws for n in _doubts(raw)]
    notices += all_warnings([raw for raw in raws if raw.audit])
    events = path.parent / EVENTS
    if path.name == "summary.json" and events.is_file():
        notices += _add_events(events, report, points)
    facts = {key: data[key] for key in ("url", "model", "api", "stream") if key in data}
    given = config | report.settings
    kept = {key: value for key, value in given.items() if key not in NOT_CONFIG}
    price = next((raw.price for raw in raws if raw.price), None)
    return ToolResult(
        str(path),
        OWN,
        points,
        flat(kept | facts),
        config.get("gpus") or (price.gpus if price else None),
        config.get("price_per_gpu_hour") or (price.usd_per_gpu_hour if price else None),
        notices,
    )


def _endpoint_point(raw: PointReport) -> ResultPoint:
    load, key = load_key(raw.concurrency, raw.rate, raw.load)
    point = ResultPoint(load, key)
    rates = ("output_tok_s", "total_tok_s", "request_s")
    point.values = present({name: getattr(raw, name) for name in rates})
    for name in LATENCIES:
        point.add(name, getattr(raw, name) or None)
    if bounds := raw.output_tok_s_ci95:
        point.intervals["output_tok_s"] = (bounds[0], bounds[1])
    if good := raw.goodput:
        found = {"good_request_s": good.request_s, "good_output_tok_s": good.output_tok_s}
        point.values |= present(found)
        limits = {name: getattr(good, name) for name in LIMITS}
        point.slo = ", ".join(f"{name} {limit:g}" for name, limit in limits.items() if limit)
    count = raw.num_completed
    point.facts = present(
        {
            "requests": count,
            "input_tokens": per_request(raw.num_prompt_tokens, count),
            "output_tokens": per_request(raw.num_output_tokens, count),
            "prefix_hits": _prefix_hits(raw),
        }
    )
    return point


def _failures(raw: PointReport) -> str:
    failed = raw.num_failed
    sent = failed + raw.num_completed
    return f"{failed} of {sent} requests failed at {raw.load}" if failed else ""


def _doubts(raw: PointReport) -> list[str]:
    return [
        f"{entry.count} x {name} at {raw.load}: {entry.first}" for name, entry in raw.doubts.items()
    ]


def _prefix_hits(raw: PointReport) -> float | None:
    if (hits := raw.prefix_hits) and hits.share is not None:
        return hits.share
    server = raw.server
    return server.prefix_hit_rate if server else None


def _add_events(path: Path, report: EndpointReport, points: Sequence[ResultPoint]) -> list[str]:
    """The requests behind the figures, in the order they were sent."""
    try:
        records = read_records(path)
    except Exception as error:  # msgspec's, whatever is wrong with a line
        raise BenchError(f"{path}: broken events: {error}") from None
    stream = report.stream
    notices = []
    for index, (raw, point) in enumerate(zip(report.points, points, strict=True)):
        whole = [r for r in records if r.point == index and r.error is None]
        if len(whole) != raw.num_completed:
            notices.append(
                f"{path} has {len(whole)} whole answers at {point.load}, the summary "
                f"{raw.num_completed}: it is not used"
            )
            continue
        times = [times_of(record, stream) for record in whole]
        series = {"e2e_ms": [t.e2e_ms for t in times]}
        if stream:
            series |= {"ttft_ms": [t.ttft_ms for t in times], "tpot_ms": [t.tpot_ms for t in times]}
        point.samples = {n: [v for v in found if v is not None] for n, found in series.items()}
        point.samples |= _window_rates(whole, stream)
    return notices


def _window_rates(whole: Sequence[LoadRecord], stream: bool) -> dict[str, list[float]]:
    """Requests and tokens of equal parts of the run, by where an answer ends."""
    if not whole:
        return {}
    begin = min(r.sent_ns for r in whole)
    width = (max(r.last_ns or r.end_ns for r in whole) - begin) / NUM_WINDOWS or 1.0
    rates = {"request_s": [0.0] * NUM_WINDOWS, "total_tok_s": [0.0] * NUM_WINDOWS}
    for record in whole:
        window = min(int(((record.last_ns or record.end_ns) - begin) / width), NUM_WINDOWS - 1)
        rates["request_s"][window] += 1e9 / width
        tokens = num_tokens(record, stream) + (record.prompt_tokens or 0)
        rates["total_tok_s"][window] += tokens * 1e9 / width
    return rates


def read_mlperf(data: Json, path: Path) -> ToolResult:
    """The JSON line of `bench mlperf`."""
    report = msgspec.convert(data, MlperfReport)
    name = f"{report.mlperf_benchmark} {report.scenario}"
    point = ResultPoint(name, ("scenario", name))
    if report.metric and report.metric.unit == "tokens/s":
        point.values["output_tok_s"] = report.metric.value
    point.values |= present({"request_s": report.samples_per_s})
    point.add("ttft_ms", report.ttft_ms)
    point.add("tpot_ms", report.tpot_ms)
    point.add("e2e_ms", report.latency_ms)
    point.facts = present(
        {
            "requests": report.num_queries,
            "input_tokens": per_request(report.num_input_tokens, report.num_samples),
            "output_tokens": per_request(report.num_output_tokens, report.num_queries),
        }
    )
    gpus = int((report.accelerator or {}).get("accelerators_per_node") or 0)
    notices = report.notices[: 1 if report.quick else 0]
    if report.result == "INVALID":
        notices.append("INVALID: " + "; ".join(report.reasons))
    config = flat({key: data.get(key) for key in MLPERF_CONFIG})
    return ToolResult(str(path), OWN, [point], config, gpus or None, None, notices)


def read_throughput(data: Json, path: Path) -> ToolResult:
    """The JSON line of `bench throughput`: a point for every cell, several runs behind each."""
    points = []
    cells = msgspec.convert(data["cells"], dict[str, dict[str, CellReport]])
    for name, by_engine in cells.items():
        raw = by_engine[OURS]
        point = ResultPoint(name, ("cell", name))
        point.values = {"output_tok_s": raw.output_tok_s, "total_tok_s": raw.total_tok_s}
        point.runs = {
            n: [value * run / raw.tok_s for run in raw.tok_s_runs]
            for n, value in point.values.items()
        }
        point.add("ttft_ms", raw.ttft_ms or None)
        point.add("tpot_ms", raw.tpot_ms or None)
        count = raw.num_prompts
        point.facts = present(
            {
                "requests": count,
                "input_tokens": per_request(raw.num_input_tokens, count),
                "output_tokens": per_request(raw.num_output_tokens, count),
            }
        )
        points.append(point)
    keys = ("model", "dtype", "kv_dtype", "device", "num_threads", "max_num_seqs", "kv_tokens")
    config = flat({key: data.get(key) for key in (*keys, "machine")})
    gpus = 1 if data.get("device") == "cuda" else None
    return ToolResult(str(path), OWN, points, config, gpus)


def read_ladder(data: Json, path: Path) -> ToolResult:
    """The JSON line of `bench ladder`: a point for every rung that ran."""
    points = [
        ResultPoint(
            row.name,
            ("rung", row.rung),
            {"output_tok_s": row.tok_s, "usd_per_million_output": row.usd_per_million},
        )
        for row in msgspec.convert(data["rungs"], list[RungReport])
        if row.tok_s
    ]
    config = {key: data.get(key) for key in ("model", "device", "workload")}
    on_gpu = data.get("device") == "cuda"
    price = data.get("usd_per_hour") if on_gpu else None
    return ToolResult(str(path), OWN, points, config, 1 if on_gpu else None, price)


READERS: dict[str, Callable[[Any, Path], ToolResult]] = {
    "endpoint": read_endpoint,
    "campaign": read_endpoint,
    "mlperf": read_mlperf,
    "throughput": read_throughput,
    "ladder": read_ladder,
}


def read_loadgen(path: Path) -> ToolResult:
    """A folder with LoadGen's logs, such as a submission: a point for every scenario."""
    folders = sorted(log.parent for log in path.rglob(loadgen.DETAIL))
    folders = [folder for folder in folders if "accuracy" not in folder.parts]
    points, notices = [], []
    for folder in folders:
        values, errors = loadgen.read_detail(folder)
        name = _scenario(folder) or str(values["effective_scenario"])
        points.append(_loadgen_point(name, values))
        if errors or values.get("result_validity") != "VALID":
            notices.append(f"{name}: INVALID by LoadGen's log")
        if float(values.get("effective_min_duration_ms", 0)) < MIN_DURATION_MS:
            notices.append(f"{name}: shorter than the rules' ten minutes, not a valid submission")
    return ToolResult(str(path), LOADGEN, points, {}, None, None, notices)


def _scenario(folder: Path) -> str:
    """Benchmark and scenario as a submission's path has them: LoadGen knows no Interactive."""
    benchmark, scenario, performance, _ = ("", "", "", *folder.resolve().parts)[-4:]
    return f"{benchmark} {scenario}" if performance == "performance" else ""


def _loadgen_point(name: str, values: Json) -> ResultPoint:
    point = ResultPoint(name, ("scenario", name))
    found = {
        "output_tok_s": values.get("result_completed_tokens_per_second")
        or values.get("result_tokens_per_second"),
        "request_s": values.get("result_completed_samples_per_sec")
        or values.get("result_samples_per_second"),
    }
    point.values = present(found)
    for metric, start, end in (
        ("ttft_ms", "result_first_token_", "_percentile_latency_ns"),
        ("tpot_ms", "result_time_per_output_token_", "_percentile_ns"),
        ("e2e_ms", "result_", "_percentile_latency_ns"),
    ):
        ranks: dict[str, Any] = {
            f"p{rank}": values.get(f"{start}{rank}.00{end}") for rank in (50, 90, 99)
        }
        point.add(metric, ranks, 1 / NS_PER_MS)
    return point
