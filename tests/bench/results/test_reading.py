"""Results of every tool in the neutral form.

The files in external/ are trimmed from real runs of AIPerf 0.13.0, guidellm 0.8.1 and vLLM 0.32.0
against a simulated server (20 ms a token, concurrency 4); mlcommons/endpoints' is made up after
the result_summary.json of its version 0.1.0.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.sample_runs import mlperf_run
from tokenmill.bench.results.reading import read_round
from tokenmill.bench.results.result import flat

EXTERNAL = Path(__file__).parent / "external"
LATENCIES = ("ttft_ms.p50", "ttft_ms.p99", "tpot_ms.p50", "e2e_ms.p50")


@pytest.mark.parametrize(
    ("file", "tool"),
    [
        ("profile_export_aiperf.json", "AIPerf 0.13.0"),
        ("benchmarks.json", "guidellm 0.8.1"),
        ("result_summary.json", "mlcommons/endpoints 0.1.0"),
        ("vllm_bench.json", "vllm bench"),
        ("vllm_bench_detailed.json", "vllm bench"),
    ],
)
def test_external_results(file: str, tool: str) -> None:
    found = read_round(EXTERNAL / file)
    (point,) = found.points
    assert found.tool == tool and point.key == ("concurrency", 4.0)
    assert {"output_tok_s", "request_s", *LATENCIES} <= point.values.keys()
    # What the server does in truth: the names and the units were read right.
    assert 30 < point.values["ttft_ms.p50"] < 60
    assert point.values["tpot_ms.p50"] == pytest.approx(20, rel=0.1)
    assert point.values["e2e_ms.p50"] == pytest.approx(500, rel=0.1)
    assert 22 <= point.facts["output_tokens"] <= 24


def test_aiperf_by_hand(tmp_path: Path) -> None:
    data = json.loads((EXTERNAL / "profile_export_aiperf.json").read_text())
    data["request_latency"] |= {"unit": "sec", "avg": 1.5}
    data["error_request_count"] = {"unit": "requests", "avg": 3.0}
    data["input_config"]["phases"][-1] |= {"type": "poisson", "rate": 2.5}
    data["request_count"]["avg"] = 40.0
    (tmp_path / "profile_export_aiperf.json").write_text(json.dumps(data))
    records = [record(index) for index in reversed(range(40))]
    lines = "\n".join(json.dumps(r) for r in [*records, record(99, phase="warmup")])
    (tmp_path / "profile_export.jsonl").write_text(lines)
    found = read_round(tmp_path)
    (point,) = found.points
    assert point.key == ("rate", 2.5) and point.values["e2e_ms.mean"] == 1500
    assert found.notices == ["3 of 43 requests failed at 2.5 requests/s"]
    assert found.config["model"] == data["input_config"]["models"]["items"][0]["name"]
    assert point.samples["ttft_ms"] == [float(index) for index in range(40)]
    assert point.estimate("ttft_ms.p50") is None  # they rise from first to last: nothing is known
    point.samples["ttft_ms"] = [float(index * 7 % 40) for index in range(40)]
    estimate = point.estimate("ttft_ms.p50")
    assert estimate and estimate.value == 19.5
    assert point.estimate("request_s") is None


def record(start: int, phase: str = "profiling") -> dict[str, Any]:
    metrics = {"time_to_first_token": {"value": float(start), "unit": "ms"}}
    return {
        "metadata": {"benchmark_phase": phase, "request_start_ns": start},
        "metrics": metrics | {"inter_chunk_latency": {"value": [1.0], "unit": "ms"}},
    }


def test_guidellm_by_hand(tmp_path: Path) -> None:
    data = json.loads((EXTERNAL / "benchmarks.json").read_text())
    (first,) = data["benchmarks"]
    second = json.loads(json.dumps(first))
    second["config"]["strategy"] = {"type_": "constant", "rate": 3.0}
    second["metrics"]["request_totals"] |= {"errored": 2, "total": 62}
    second["requests"]["successful"].pop()  # not all of them were kept
    data["benchmarks"].append(second)
    (tmp_path / "benchmarks.json").write_text(json.dumps(data))
    found = read_round(tmp_path)
    assert [point.key for point in found.points] == [("concurrency", 4.0), ("rate", 3.0)]
    assert "2 of 62 requests failed at 3 requests/s" in found.notices
    kept, sampled = found.points
    assert len(kept.samples["e2e_ms"]) == 60 and not sampled.samples
    assert kept.values["e2e_ms.p50"] == pytest.approx(1e3 * median_latency(first), rel=1e-6)
    assert found.config["model"] == "simulated"


def test_guidellm_without_streams_has_no_ttft(tmp_path: Path) -> None:
    data = json.loads((EXTERNAL / "benchmarks.json").read_text())
    for name in ("time_to_first_token_ms", "inter_token_latency_ms"):
        data["benchmarks"][0]["metrics"][name]["successful"] = {"mean": 0.0, "max": 0.0}
    (tmp_path / "benchmarks.json").write_text(json.dumps(data))
    values = read_round(tmp_path).points[0].values
    assert "e2e_ms.p50" in values and "ttft_ms.mean" not in values and "tpot_ms.mean" not in values


def median_latency(benchmark: dict[str, Any]) -> float:
    return float(benchmark["metrics"]["request_latency"]["successful"]["percentiles"]["p50"])


def test_endpoints_by_hand() -> None:
    found = read_round(EXTERNAL / "result_summary.json")
    (point,) = found.points
    assert point.values["ttft_ms.p99"] == 80 and point.values["tpot_ms.p90"] == 22
    assert (point.values["output_tok_s"], point.values["request_s"]) == (480, 20)
    assert found.notices == ["2 of 1200 requests failed at concurrency 4"]


def test_vllm_details_are_its_summary() -> None:
    data = json.loads((EXTERNAL / "vllm_bench_detailed.json").read_text())
    (point,) = read_round(EXTERNAL / "vllm_bench_detailed.json").points
    for name in ("ttft", "tpot"):
        values = point.samples[f"{name}_ms"]
        assert sum(values) / len(values) == pytest.approx(data[f"mean_{name}_ms"], rel=0.01)
    (plain,) = read_round(EXTERNAL / "vllm_bench.json").points
    assert plain.estimate("ttft_ms.p50") is None and plain.estimate("e2e_ms.p50")


OURS: dict[str, dict[str, Any]] = {
    "throughput": {
        "device": "cuda",
        "dtype": "fp8",
        "cells": {
            "batch": {
                "tokenmill": {
                    "tok_s": 100.0,
                    "tok_s_runs": [90.0, 100.0, 110.0],
                    "output_tok_s": 100.0,
                    "total_tok_s": 300.0,
                    "num_prompts": 2,
                    "num_input_tokens": 40,
                    "num_output_tokens": 20,
                    "ttft_ms": {"p50": 5.0},
                }
            }
        },
    },
    "ladder": {
        "device": "cuda",
        "usd_per_hour": 3.0,
        "rungs": [
            {"rung": "fused", "name": "fused kernels", "tok_s": 10.0, "usd_per_million": 83.3},
            {"rung": "fp8", "name": "fp8", "skipped": "no"},
        ],
    },
    "mlperf": {
        **msgspec.to_builtins(mlperf_run()),
        "scenario": "Server",
        "metric": {"name": "rate", "value": 640.0, "unit": "tokens/s"},
        "result": "INVALID",
        "reasons": ["too short"],
        "notices": ["This is a quick run", "Prompts are synthetic"],
        "accelerator": {"accelerators_per_node": "1"},
        "tpot_ms": {"p99": 30.0},
    },
}


@pytest.mark.parametrize("name", OURS)
def test_our_last_lines(name: str, tmp_path: Path) -> None:
    path = tmp_path / "saved.txt"
    line = json.dumps({"benchmark": name} | OURS[name])
    path.write_text(f"engine  tok/s\nours 7\n{line}\n")
    found = read_round(path)
    (point,) = found.points
    expected: dict[str, tuple[Any, dict[str, float]]] = {
        "throughput": (("cell", "batch"), {"output_tok_s": 100.0, "ttft_ms.p50": 5.0}),
        "ladder": (("rung", "fused"), {"output_tok_s": 10.0}),
        "mlperf": (("scenario", "llama3.1-8b Server"), {"output_tok_s": 640.0}),
    }
    key, values = expected[name]
    assert point.key == key and values.items() <= point.values.items()
    if name == "mlperf":
        assert found.notices == ["This is a quick run", "INVALID: too short"] and found.gpus == 1
    if name == "throughput":
        estimate = point.estimate("total_tok_s")
        assert estimate and (estimate.value, estimate.degrees) == (300.0, 2) and found.gpus == 1


def test_loadgen_logs(tmp_path: Path) -> None:
    folder = tmp_path / "results" / "sys" / "llama2-70b-99" / "Interactive" / "performance/run_1"
    folder.mkdir(parents=True)
    values = {
        "effective_scenario": "Server",
        "effective_min_duration_ms": 1000,
        "result_validity": "VALID",
        "result_completed_tokens_per_second": 123.0,
        "result_first_token_99.00_percentile_latency_ns": 5_000_000,
    }
    lines = [f":::MLLOG {json.dumps({'key': k, 'value': v})}" for k, v in values.items()]
    (folder / "mlperf_log_detail.txt").write_text("\n".join(lines))
    found = read_round(tmp_path)
    (point,) = found.points
    assert point.key == ("scenario", "llama2-70b-99 Interactive")
    assert point.values == {"output_tok_s": 123.0, "ttft_ms.p99": 5.0}
    assert ["not a valid submission" in text for text in found.notices] == [True]


def test_flat() -> None:
    nested = {"a": {"b": 1, "c": None}, "d": [1, 2], "e": [{"f": 3}]}
    assert flat(nested) == {"a.b": 1, "d": [1, 2], "e.0.f": 3}
