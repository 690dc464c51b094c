"""MLPerf Inference: what a run asks for, its figures in LoadGen's words, and the peak search."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenmill.bench.mlperf.presets import ROUNDS, Preset
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import NS_PER_MS, NS_PER_S

MIN_DURATION_MS = 600_000
PERCENTILE, STREAM_PERCENTILE, QUICK_PERCENTILE = 99, 90, 90
QUICK_DURATION_MS = 5_000
QUICK_QUERIES = 64  # what LoadGen needs to be sure of the 90th percentile
SCENARIOS = ("Offline", "Server", "Interactive", "SingleStream")
LATENCY_BOUND = ("Server", "Interactive")
MAX_PEAK_RUNS = 16
PERCENTILES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")
# By latency LoadGen's keys of its mean and of a percentile.
KEYS = {
    "ttft": ("result_first_token_mean_latency_ns", "result_first_token_{}_percentile_latency_ns"),
    "tpot": ("result_time_to_output_token_mean", "result_time_per_output_token_{}_percentile_ns"),
    "latency": ("result_mean_latency_ns", "result_{}_percentile_latency_ns"),
}
NAMES = {"ttft": "TTFT", "tpot": "TPOT", "latency": "latency"}
EARLY_STOPPING = (
    "too many queries over a limit for so few in all (early stopping)",
    f"too few queries to be sure of the 90th percentile; {QUICK_QUERIES} are enough",
)
QUICK_NOTICE = (
    "This is a quick run and not a valid submission: query count, duration and percentile "
    "are below the rules' minimums."
)


@dataclass(frozen=True, slots=True)
class MlperfRun:
    """One run: a benchmark in a scenario at a rate; `quick_samples` makes it a quick one."""

    preset: Preset
    scenario: str
    target_qps: float
    quick_samples: int | None = None
    length_scale: float = 1.0
    round: str = "v6.0"

    @property
    def seeds(self) -> Mapping[str, int]:
        return ROUNDS[self.round].seeds

    @property
    def quick(self) -> bool:
        return self.quick_samples is not None

    @property
    def is_video_stream(self) -> bool:
        return self.scenario == "SingleStream" and self.preset.task == "video"

    @property
    def loadgen_scenario(self) -> str:
        """LoadGen has no Interactive: it is Server under other limits."""
        return "Server" if self.scenario == "Interactive" else self.scenario

    @property
    def percentile(self) -> int | None:
        """At which the limits hold, or a single stream's latency is reported."""
        if self.scenario in LATENCY_BOUND:
            return QUICK_PERCENTILE if self.quick else PERCENTILE
        return STREAM_PERCENTILE if self.scenario == "SingleStream" else None

    @property
    def min_duration_ms(self) -> int:
        if not self.quick:
            return MIN_DURATION_MS
        return QUICK_DURATION_MS if self.scenario in LATENCY_BOUND else 0

    def notices(self, of_samples: Sequence[str]) -> list[str]:
        """Sentences that every output of a run carries."""
        model = f"Only {self.preset.model} may be submitted in the closed division."
        return [*([QUICK_NOTICE] if self.quick else []), *of_samples, model]

    def check_count(self, where: str, found: int, what: str, needed: int | None = None) -> None:
        """Only a quick run may have fewer samples than the benchmark, or `needed` of them."""
        needed = needed or self.preset.num_samples
        if not self.quick and found != needed:
            raise BenchError(
                f"{where} has {found} {what}, but {self.preset.name} has {needed}; --quick runs "
                f"on the {what} that there are"
            )

    def user_conf(self, num_samples: int) -> str:
        """The file that LoadGen reads after its own; only a quick one goes below the rules."""
        values: dict[str, float] = {"target_qps": self.target_qps}
        if self.scenario == "SingleStream":  # what LoadGen expects decides how many it prepares
            values = {"target_latency": 1000 / self.target_qps}
        if self.scenario == "Offline":  # LoadGen's own file has it for some benchmarks only
            values["min_query_count"] = num_samples
        if self.quick:
            values["min_duration"] = self.min_duration_ms
            if self.scenario != "Offline":  # 64 videos would take hours at full size
                least = 1 if self.preset.task == "video" else QUICK_QUERIES
                values["min_query_count"] = max(num_samples, least)
            values["performance_sample_count_override"] = num_samples
            if self.scenario in LATENCY_BOUND:
                values["target_latency_percentile"] = QUICK_PERCENTILE
        prefix = f"{self.preset.key_of(self.scenario)}.{self.loadgen_scenario}"
        lines = [f"{prefix}.{name} = {value:.9g}\n" for name, value in values.items()]
        return "".join([f"# {QUICK_NOTICE}\n"] * self.quick + lines)


def metric(run: MlperfRun, values: Mapping[str, Any]) -> tuple[str, float, str]:
    """(name, value, unit) of the figure that is published for the scenario."""
    offline = run.scenario == "Offline"
    if run.is_video_stream:  # the estimate of early stopping, which the checker reads
        estimate = values.get("early_stopping_latency_ss")
        found = estimate or values["result_90.00_percentile_latency_ns"]
        name = "p90 latency, early stopping estimate" if estimate else "p90 latency"
        return (name, round(found / NS_PER_S, 4), "s")
    if run.scenario == "SingleStream":
        latency_ms = values["result_90.00_percentile_latency_ns"] / NS_PER_MS
        return ("p90 latency", round(latency_ms, 3), "ms")
    if run.preset.task != "language":
        if offline:
            rate = values["result_samples_per_second"]
            return ("samples per second", rate, "samples/s")
        rate = values["result_scheduled_samples_per_sec"]
        return ("scheduled queries per second", rate, "queries/s")
    if offline:
        return ("tokens per second", values["result_tokens_per_second"], "tokens/s")
    rate = values["result_completed_tokens_per_second"]
    return ("completed tokens per second", rate, "tokens/s")


def invalid_reasons(
    run: MlperfRun,
    values: Mapping[str, Any],
    errors: Sequence[str],
    latencies: Mapping[str, Mapping[str, float]],
) -> list[str]:
    """Why a run is INVALID; empty where it is VALID. LoadGen decides, the sentences are ours."""
    reasons = [
        f"LoadGen error: {error}" + (f" ({count} times)" if count > 1 else "")
        for error, count in Counter(errors).items()
    ]
    if values.get("result_validity") == "VALID":
        return reasons
    percent = f"p{run.percentile}"
    for name, limit in (run.preset.limits_ms(run.scenario) or {}).items():
        found = latencies[name].get(percent, 0)
        if found > limit:
            reasons.append(f"{percent} {NAMES[name]} is {found:.1f} ms, the limit is {limit} ms")
    for key, sentence in (
        ("result_min_duration_met", "the run was shorter than the minimum duration"),
        ("result_min_queries_met", "there were fewer queries than the minimum"),
        ("early_stopping_met", EARLY_STOPPING[run.scenario == "SingleStream"]),
    ):
        if values.get(key) is False:
            reasons.append(sentence)
    hint = str(values.get("result_invalid_reason", "")).strip()
    return [*reasons, f"LoadGen: {hint}"] if hint or not reasons else reasons


def latencies_of(values: Mapping[str, Any], mean: str, percentile: str) -> dict[str, float]:
    """Milliseconds by statistic under LoadGen's keys; {} where it logged none."""
    keys = {"mean": mean} | {f"p{float(p):g}": percentile.format(p) for p in PERCENTILES}
    found = {name: values.get(key) for name, key in keys.items()}
    return {name: round(ns / NS_PER_MS, 3) for name, ns in found.items() if ns is not None}


def find_peak(
    is_valid: Callable[[float], bool], start_qps: float, tolerance: float = 0.05
) -> float | None:
    """The highest rate found valid: doubled or halved to a bracket, then bisected.

    None where no rate was valid within MAX_PEAK_RUNS runs.
    """
    low, high, qps = None, None, start_qps
    for _ in range(MAX_PEAK_RUNS):
        if is_valid(qps):
            low = qps
        else:
            high = qps
        if low is None:
            qps /= 2
        elif high is None:
            qps *= 2
        elif high / low <= 1 + tolerance:
            break
        else:
            qps = (low + high) / 2
    return low
