"""Reads the results of other load generators into the neutral form.

The fields are taken from the sources of AIPerf 0.13 (profile_export_aiperf.json), guidellm 0.8
(benchmarks.json), mlcommons/endpoints 0.1 (result_summary.json) and vLLM 0.32
(`vllm bench serve --save-result`). What they call by other names: AIPerf's and guidellm's
inter-token latency is our TPOT, AIPerf's inter-chunk latency our ITL.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenmill.bench.results.result import (
    Json,
    ResultPoint,
    ToolResult,
    flat,
    load_key,
    per_request,
    present,
)
from tokenmill.core.metrics import summarize

MS_OF = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3, "sec": 1e3}
AIPERF_RECORDS = "profile_export.jsonl"
AIPERF_LATENCIES = {
    "ttft_ms": "time_to_first_token",
    "tpot_ms": "inter_token_latency",
    "itl_ms": "inter_chunk_latency",
    "e2e_ms": "request_latency",
}
VLLM_LATENCIES = {"ttft_ms": "ttft", "tpot_ms": "tpot", "itl_ms": "itl", "e2e_ms": "e2el"}
VLLM_CONFIG = (
    *("backend", "label", "model_id", "tokenizer_id", "num_prompts"),
    *("request_rate", "burstiness", "max_concurrency", "ramp_up_strategy"),
)


def is_aiperf(data: Json) -> bool:
    return "aiperf_version" in data or ("input_config" in data and "request_throughput" in data)


def read_aiperf(data: Json, path: Path) -> ToolResult:
    """One run; with profile_export.jsonl beside it every request counts."""

    def average(name: str) -> float | None:
        return (data.get(name) or {}).get("avg")

    config = data.get("input_config") or {}
    phases = [p for p in config.get("phases", ()) if p.get("kind") == "profiling"]
    phase = phases[-1] if phases else {}
    rate = phase.get("rate")
    load, key = load_key(None if rate else phase.get("concurrency"), rate, phase.get("type", "run"))
    point = ResultPoint(load, key)
    seconds = average("benchmark_duration")
    tokens = (average("total_isl") or 0) + (average("total_osl") or 0)
    point.values = present(
        {
            "output_tok_s": average("output_token_throughput"),
            "total_tok_s": average("total_token_throughput") or per_request(tokens, seconds),
            "request_s": average("request_throughput"),
        }
    )
    for name, theirs in AIPERF_LATENCIES.items():
        if summary := data.get(theirs):
            point.add(name, {**summary, "mean": summary.get("avg")}, MS_OF[summary["unit"]])
    count = average("request_count")
    point.facts = present(
        {
            "requests": count,
            "input_tokens": average("input_sequence_length"),
            "output_tokens": average("output_sequence_length"),
        }
    )
    if path.with_name(AIPERF_RECORDS).is_file():
        point.samples = _aiperf_samples(path.with_name(AIPERF_RECORDS), int(count or 0))
    notices = []
    if failed := average("error_request_count"):
        notices.append(f"{failed:.0f} of {failed + (count or 0):.0f} requests failed at {load}")
    if data.get("was_cancelled") or data.get("is_complete") is False:
        notices.append(f"incomplete: {data.get('incomplete_reason') or 'the run was cancelled'}")
    kept = {name: value for name, value in config.items() if name != "artifacts"}
    return ToolResult(
        str(path),
        f"AIPerf {data.get('aiperf_version', '')}".strip(),
        [point],
        _with_model(flat(kept), _first(config.get("models", {}).get("items"), "name")),
        _aiperf_gpus(data),
        None,
        notices,
    )


def _aiperf_samples(path: Path, count: int) -> dict[str, list[float]]:
    """Values of every request in the order of their starts; {} where some are missing."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line]
    records = [r for r in records if r["metadata"].get("benchmark_phase") == "profiling"]
    records = [r for r in records if not r.get("error")]
    if len(records) != count:
        return {}
    records.sort(key=lambda record: record["metadata"]["request_start_ns"])
    found: dict[str, list[float]] = {}
    for name in ("ttft_ms", "tpot_ms", "e2e_ms"):
        entries = [r["metrics"].get(AIPERF_LATENCIES[name]) for r in records]
        found[name] = [entry["value"] * MS_OF[entry["unit"]] for entry in entries if entry]
    return {name: values for name, values in found.items() if values}


def _aiperf_gpus(data: Json) -> int | None:
    endpoints = (data.get("telemetry_data") or {}).get("endpoints") or {}
    return sum(len(endpoint.get("gpus") or {}) for endpoint in endpoints.values()) or None


def is_guidellm(data: Json) -> bool:
    return isinstance(data.get("benchmarks"), list) and "metadata" in data


def read_guidellm(data: Json, path: Path) -> ToolResult:
    """A point for every benchmark of the report."""
    version = data["metadata"].get("guidellm_version", "")
    notices: list[str] = []
    points = []
    for raw in data["benchmarks"]:
        point = _guidellm_point(raw)
        points.append(point)
        totals = raw["metrics"].get("request_totals") or {}
        if failed := totals.get("errored"):
            notices.append(f"{failed} of {totals.get('total')} requests failed at {point.load}")
        warnings = raw.get("warnings") or []
        notices += [f"{point.load}: {_text(warning)}" for warning in warnings]
    config = (data.get("config") or {}).get("spec") or {}
    backend = config.get("backend") or {}
    kept = {name: value for name, value in config.items() if name != "outputs"}
    own = _with_model(flat(kept), backend.get("model"))
    return ToolResult(str(path), f"guidellm {version}".strip(), points, own, None, None, notices)


def _guidellm_point(raw: Json) -> ResultPoint:
    strategy = raw["config"]["strategy"]
    kind = strategy.get("type_", "")
    streams = 1 if kind == "synchronous" else strategy.get("streams")
    load, key = load_key(streams, strategy.get("rate"), kind)
    point, metrics = ResultPoint(load, key), raw["metrics"]

    def summary(name: str) -> dict[str, Any]:
        found = (metrics.get(name) or {}).get("successful") or {}
        return found | (found.get("percentiles") or {})

    rates = {"output_tok_s": "output_tokens_per_second", "total_tok_s": "tokens_per_second"}
    rates["request_s"] = "requests_per_second"
    point.values = present({name: summary(theirs).get("mean") for name, theirs in rates.items()})
    if summary("time_to_first_token_ms").get("max"):  # all 0 where nothing was streamed
        point.add("ttft_ms", summary("time_to_first_token_ms"))
        point.add("tpot_ms", summary("inter_token_latency_ms"))
    point.add("e2e_ms", summary("request_latency"), 1e3)
    count = (metrics.get("request_totals") or {}).get("successful")
    point.facts = present(
        {
            "requests": count,
            "input_tokens": summary("prompt_token_count").get("mean"),
            "output_tokens": summary("output_token_count").get("mean"),
        }
    )
    requests = (raw.get("requests") or {}).get("successful") or []
    if len(requests) == count:  # it may keep only some of them
        requests = sorted(requests, key=lambda request: request["request_start_time"])
        point.samples = {
            "ttft_ms": _values(requests, "time_to_first_token_ms"),
            "tpot_ms": _values(requests, "inter_token_latency_ms"),
            "e2e_ms": [1e3 * value for value in _values(requests, "request_latency")],
        }
    return point


def is_endpoints(data: Json) -> bool:
    """The summary of mlcommons/endpoints."""
    return "n_samples_issued" in data and "duration_ns" in data


def read_endpoints(data: Json, path: Path) -> ToolResult:
    """One run of the MLPerf Endpoints client; its times are in ns."""
    config = data.get("run_config") or {}
    pattern = config.get("load_pattern") or {}
    kind = str(pattern.get("type") or "run")
    concurrency = pattern.get("target_concurrency") if kind == "concurrency" else None
    rate = pattern.get("target_qps") if kind == "poisson" else None
    load, key = load_key(concurrency, rate, kind)
    point = ResultPoint(load, key)
    point.values = present({"output_tok_s": data.get("tps"), "request_s": data.get("qps")})
    for name, theirs in (("ttft_ms", "ttft"), ("tpot_ms", "tpot"), ("e2e_ms", "latency")):
        block = data.get(theirs) or {}
        ranks = {f"p{float(p):g}": v for p, v in (block.get("percentiles") or {}).items()}
        point.add(name, {"mean": block.get("avg")} | ranks, MS_OF["ns"])
    point.facts = present(
        {
            "requests": data.get("n_samples_completed"),
            "input_tokens": (data.get("input_sequence_lengths") or {}).get("avg"),
            "output_tokens": (data.get("output_sequence_lengths") or {}).get("avg"),
        }
    )
    notices = []
    if failed := data.get("n_samples_failed"):
        notices.append(f"{failed} of {data['n_samples_issued']} requests failed at {load}")
    if data.get("complete") is False:
        notices.append(f"incomplete: state {data.get('state')}")
    tool = f"mlcommons/endpoints {data.get('version', '')}".strip()
    return ToolResult(str(path), tool, [point], flat(config), None, None, notices)


def is_vllm(data: Json) -> bool:
    """What `vllm bench serve --save-result` writes."""
    return "request_throughput" in data and "output_throughput" in data and "duration" in data


def read_vllm(data: Json, path: Path) -> ToolResult:
    """One run; with --save-detailed every request counts."""
    rate = data.get("request_rate")
    finite = rate if isinstance(rate, int | float) else None
    concurrency = data.get("max_concurrency") if finite is None else None
    load, key = load_key(concurrency, finite, "burst")
    point = ResultPoint(load, key)
    point.values = present(
        {
            "output_tok_s": data["output_throughput"],
            "total_tok_s": data.get("total_token_throughput"),
            "request_s": data["request_throughput"],
        }
    )
    for name, theirs in VLLM_LATENCIES.items():
        ranks = {f"p{rank}": data.get(f"p{rank}_{theirs}_ms") for rank in (50, 90, 99)}
        ranks["p50"] = data.get(f"median_{theirs}_ms", ranks["p50"])
        point.add(name, {"mean": data.get(f"mean_{theirs}_ms")} | ranks)
    count, failed = data["completed"], data.get("failed") or 0
    point.facts = present(
        {
            "requests": count,
            "input_tokens": per_request(data.get("total_input_tokens"), count),
            "output_tokens": per_request(data.get("total_output_tokens"), count),
        }
    )
    if "ttfts" in data and "itls" in data:
        point.samples = _vllm_samples(data)
    elif data.get("latencies") and not failed:
        point.samples = {"e2e_ms": [1e3 * seconds for seconds in data["latencies"]]}
    if "e2e_ms.mean" not in point.values:  # printed only where asked for
        point.add("e2e_ms", summarize(point.samples.get("e2e_ms", ())))
    notices = [f"{failed} of {failed + count} requests failed at {load}"] if failed else []
    config = {name: data.get(name) for name in VLLM_CONFIG}
    tool = "vllm bench"
    model = data.get("model_id")
    return ToolResult(
        str(path), tool, [point], _with_model(flat(config), model), None, None, notices
    )


def _vllm_samples(data: Json) -> dict[str, list[float]]:
    """Per request; the latency is its TTFT and all gaps after it, as vLLM itself counts."""
    errors = data.get("errors") or [""] * len(data["ttfts"])
    starts = data.get("start_times") or range(len(errors))
    columns = (starts, data["ttfts"], data["itls"], data["output_lens"], errors)
    rows = sorted((row for row in zip(*columns, strict=True) if not row[4]), key=lambda r: r[0])
    found: dict[str, list[float]] = {"ttft_ms": [], "tpot_ms": [], "e2e_ms": []}
    for _, ttft, gaps, tokens, _ in rows:
        found["ttft_ms"].append(1e3 * ttft)
        found["e2e_ms"].append(1e3 * (ttft + sum(gaps)))
        if tokens > 1:
            found["tpot_ms"].append(1e3 * sum(gaps) / (tokens - 1))
    return {name: values for name, values in found.items() if values}


def _values(rows: Iterable[Json], name: str) -> list[float]:
    return [row[name] for row in rows if row.get(name) is not None]


def _first(rows: Sequence[Json] | None, name: str) -> Any:
    return rows[0].get(name) if rows else None


def _with_model(config: dict[str, Any], model: Any) -> dict[str, Any]:
    return config | ({"model": model} if model else {})


def _text(warning: Any) -> str:
    return str(warning.get("message", warning) if isinstance(warning, dict) else warning)


READERS = (
    (is_aiperf, read_aiperf, "AIPerf (profile_export_aiperf.json)"),
    (is_guidellm, read_guidellm, "guidellm (benchmarks.json)"),
    (is_endpoints, read_endpoints, "mlcommons/endpoints (result_summary.json)"),
    (is_vllm, read_vllm, "vllm bench serve (--save-result)"),
)
