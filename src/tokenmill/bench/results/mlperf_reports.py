"""The JSON reports of `bench mlperf` and the files of a submission, field by field.

A latency is in milliseconds by statistic: mean, p50, p90, p99 and the like; {} where there is none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NotRequired, TypedDict

from tokenmill.bench.results.reports import Occurrence

LatencyMs = dict[str, float]
LoadGenLatency = Literal["ttft_ms", "tpot_ms", "latency_ms"]


class MetricReport(TypedDict):
    """The figure that MLPerf publishes for a scenario."""

    name: str
    value: float
    unit: str


class GateReport(TypedDict):
    """One accuracy score beside what the round requires."""

    value: float
    min: float
    max: NotRequired[float]
    passed: bool


def required(gate: GateReport) -> str:
    """The bounds of a gate in words."""
    if "max" not in gate:
        return f"at least {gate['min']:,.4f}"
    if not gate["min"]:
        return f"at most {gate['max']:,.4f}"
    return f"{gate['min']:,.4f} to {gate['max']:,.4f}"


class PeakRun(TypedDict):
    """One rate that a search for the peak tried."""

    target_qps: float
    result: str
    reasons: list[str]


class MlperfReport(TypedDict, total=False):
    """The JSON line of `bench mlperf`, and summary.json of its result folder.

    The process of a single test reports a part of it; which fields there are depends on the mode.
    """

    benchmark: str
    mlperf_benchmark: str
    round: str  # of the rules, such as "v6.0"
    scenario: str
    test_mode: str
    target_qps: float
    result: str  # "VALID" or "INVALID"
    reasons: list[str]
    notices: list[str]  # sentences that every output of the run carries
    logs: str  # the folder of LoadGen's logs
    # What was under test.
    model: str
    dtype: str
    kv_dtype: str
    device: str
    accelerator: dict[str, str]
    num_samples: int
    num_input_tokens: int
    synthetic: bool
    quick: bool
    length_scale: float
    # Of a server under test.
    url: str
    api: str
    prompts: str  # "token ids" or "text"
    num_failed: int
    errors: dict[str, Occurrence]
    doubts: dict[str, Occurrence]
    num_cached: int
    server_prefix_hit_rate: float | None
    client_cpu_share: float
    # Of a performance test.
    given_up: bool  # the test was left before its end: LoadGen gave no figures
    metric: MetricReport | None
    num_queries: int
    num_output_tokens: int
    samples_per_s: float | None
    ttft_ms: LatencyMs
    tpot_ms: LatencyMs
    latency_ms: LatencyMs
    limits_ms: dict[str, float] | None  # by "ttft" and "tpot"
    percentile: int | None
    min_duration_s: float
    # Of videos.
    video: dict[str, str | int]  # what a query asks for
    s_per_video: float
    usd_per_video: float
    usd_per_hour: float
    # Of a search for the peak.
    peak_qps: float | None
    runs: list[PeakRun]
    # Of an accuracy test.
    accuracy: Mapping[str, float | None]  # None: not defined
    accuracy_gates: dict[str, GateReport]
    sentences_by: str
    # Of compliance tests.
    compliance: dict[str, bool]
    passed: bool
    verified: str


class SeriesReport(TypedDict):
    """One series of values in result_summary.json; without values it has a total only."""

    total: float
    percentiles: dict[str, float]
    min: NotRequired[float]
    max: NotRequired[float]
    median: NotRequired[float]
    avg: NotRequired[float]
    std_dev: NotRequired[float]


class ResultSummary(TypedDict):
    """result_summary.json of one point, as the reference client of MLPerf Endpoints has it."""

    n_samples_issued: int
    n_samples_completed: int
    n_samples_failed: int
    duration_ns: int
    qps: float
    tps: float
    system_tps: float
    tps_per_user: float | None
    ttft: SeriesReport
    tpot: SeriesReport
    latency: SeriesReport
    output_sequence_lengths: SeriesReport
    input_sequence_lengths: SeriesReport
    finish_reason_counts: dict[str, int]


class WarmupReport(TypedDict):
    """The warm-up of one point, as point.yaml declares it."""

    duration_s: float
    requests_issued: int
    requests_completed: int
    data_source: str
    concurrency: int
    logs_retained: bool
    link_logs: NotRequired[str]
