"""The JSON line of `bench mlperf`; a latency is in milliseconds by statistic, {} for none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from tokenmill.bench.results.reports import Occurrence

Fields = dict[str, Any]  # some of the fields of a report
LatencyMs = dict[str, float]


class MetricReport(msgspec.Struct):
    """The figure that MLPerf publishes for a scenario."""

    name: str
    value: float
    unit: str


class GateReport(msgspec.Struct, omit_defaults=True):
    """One accuracy score beside what the round requires."""

    value: float
    min: float
    passed: bool
    max: float | None = None

    @property
    def required(self) -> str:
        if self.max is None:
            return f"at least {self.min:,.4f}"
        return f"{self.min:,.4f} to {self.max:,.4f}" if self.min else f"at most {self.max:,.4f}"


class PeakRun(msgspec.Struct):
    target_qps: float
    result: str
    reasons: list[str]


class MlperfReport(
    msgspec.Struct, kw_only=True, omit_defaults=True, tag_field="benchmark", tag="mlperf"
):
    """The JSON line, also summary.json of a result folder; what only some runs have may be None."""

    mlperf_benchmark: str
    round: str  # of the rules, such as "v6.0"
    scenario: str
    test_mode: str
    target_qps: float
    result: str  # "VALID" or "INVALID"
    reasons: list[str]
    notices: list[str]  # sentences that every output of the run carries
    # What was under test.
    model: str
    dtype: str
    kv_dtype: str | None = None
    device: str
    accelerator: dict[str, str] | None = None
    num_samples: int
    num_input_tokens: int | None = None
    synthetic: bool
    quick: bool
    length_scale: float | None = None
    # Of a server under test.
    url: str | None = None
    api: str | None = None
    prompts: str | None = None  # "token ids" or "text"
    num_failed: int | None = None
    errors: dict[str, Occurrence] | None = None
    doubts: dict[str, Occurrence] | None = None
    num_cached: int | None = None
    server_prefix_hit_rate: float | UnsetType | None = UNSET
    client_cpu_share: float | None = None
    # Of a performance test.
    given_up: bool = False  # the test was left before its end: LoadGen gave no figures
    metric: MetricReport | UnsetType | None = UNSET
    num_queries: int | None = None
    num_output_tokens: int | None = None
    samples_per_s: float | UnsetType | None = UNSET
    ttft_ms: LatencyMs | None = None
    tpot_ms: LatencyMs | None = None
    latency_ms: LatencyMs | None = None
    limits_ms: dict[str, float] | UnsetType | None = UNSET  # by "ttft" and "tpot", or "latency"
    percentile: int | UnsetType | None = UNSET
    min_duration_s: float | None = None
    # Of videos.
    video: dict[str, str | int] | None = None  # what a query asks for
    s_per_video: float | None = None
    usd_per_video: float | None = None
    usd_per_hour: float | None = None
    # Of a search for the peak.
    peak_qps: float | UnsetType | None = UNSET
    runs: list[PeakRun] | None = None
    # Of an accuracy test.
    accuracy: Mapping[str, float | None] | None = None  # a score of None is not defined
    accuracy_gates: dict[str, GateReport] | None = None
    sentences_by: str | None = None
    # Of compliance tests.
    compliance: dict[str, bool] | None = None

    @property
    def headline(self) -> str:
        load = f"MLPerf {self.mlperf_benchmark}, {self.scenario}"
        model = self.model.rstrip("/").rpartition("/")[2]
        return f"{model} under the load of {load}" if model else load

    @property
    def verdict(self) -> str:
        """VALID and INVALID are for runs by the rules; a quick run says what it shows."""
        if not self.quick:
            return self.result
        if self.result != "VALID":
            return "QUICK, not within the rules"
        return "QUICK, latency limits met" if self.limits_ms else "QUICK, complete"

    @property
    def limits(self) -> dict[str, float]:
        return self.limits_ms if isinstance(self.limits_ms, dict) else {}

    @property
    def latencies(self) -> dict[str, LatencyMs]:
        found = {"ttft": self.ttft_ms, "tpot": self.tpot_ms, "latency": self.latency_ms}
        return {name: summary for name, summary in found.items() if summary}


def fields_of(report: MlperfReport) -> Fields:
    """The fields that are set, for a report that joins several."""
    values = msgspec.structs.asdict(report)
    fields = msgspec.structs.fields(report)
    return {f.name: values[f.name] for f in fields if values[f.name] is not f.default}
