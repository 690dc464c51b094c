"""MLPerf Inference: the samples of a benchmark, a run and its report, the peak search."""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.mlperf.compliance import AUDIT_CONFIG, audit_config
from tokenmill.bench.mlperf.loadgen import Sample, SystemUnderTest, Test, run_test
from tokenmill.bench.mlperf.presets import ROUNDS, Preset
from tokenmill.bench.results.mlperf_reports import LatencyMs, MetricReport, MlperfReport
from tokenmill.bench.workload import SHIPPED, BenchError, read_lengths
from tokenmill.core.metrics import NS_PER_MS, NS_PER_S, RequestTimes, summarize
from tokenmill.core.types import SamplingParams

MIN_DURATION_MS = 600_000
PERCENTILE, STREAM_PERCENTILE, QUICK_PERCENTILE = 99, 90, 90
QUICK_DURATION_MS = 5_000
QUICK_QUERIES = 64  # what LoadGen needs to be sure of the 90th percentile
MIN_OUTPUT = 2  # LoadGen counts a sample of one token as an error: it has no TPOT
SCENARIOS = ("Offline", "Server", "Interactive", "SingleStream")
LATENCY_BOUND = ("Server", "Interactive")
PERCENTILES = ("50.00", "90.00", "95.00", "97.00", "99.00", "99.90")
# LoadGen's keys of a mean and of a percentile.
TTFT = "result_first_token_mean_latency_ns", "result_first_token_{}_percentile_latency_ns"
TPOT = "result_time_to_output_token_mean", "result_time_per_output_token_{}_percentile_ns"
LATENCY = "result_mean_latency_ns", "result_{}_percentile_latency_ns"
MAX_PEAK_RUNS = 16
USER_CONF = "user.conf"
EARLY_STOPPING = (
    "too many queries over a limit for so few in all (early stopping)",
    f"too few queries to be sure of the 90th percentile; {QUICK_QUERIES} are enough",
)


@dataclass(frozen=True, slots=True)
class Run:
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
                least = QUICK_QUERIES if self.preset.tokens else 1
                values["min_query_count"] = max(num_samples, least)
            values["performance_sample_count_override"] = num_samples
            if self.scenario in LATENCY_BOUND:
                values["target_latency_percentile"] = QUICK_PERCENTILE
        prefix = f"{self.preset.key_of(self.scenario)}.{self.loadgen_scenario}"
        lines = [f"{prefix}.{name} = {value:.9g}\n" for name, value in values.items()]
        return "".join([f"# {QUICK_NOTICE}\n"] * self.quick + lines)


QUICK_NOTICE = (
    "This is a quick run and not a valid submission: query count, duration and percentile "
    "are below the rules' minimums."
)
SYNTHETIC_NOTICE = (
    "Prompts are synthetic: random tokens in the published lengths, not the benchmark's dataset."
)


SYNTHETIC_IMAGES = (
    "Prompts and images are synthetic: random tokens and noise in sizes like the benchmark's, not "
    "its dataset."
)


def notices(run: Run, synthetic: bool, scale: float) -> list[str]:
    """Sentences that every output of a run carries."""
    found = [QUICK_NOTICE] if run.quick else []
    if synthetic:
        found.append(SYNTHETIC_IMAGES if run.preset.images else SYNTHETIC_NOTICE)
    if scale != 1:
        found.append(f"Lengths are scaled by {scale:.4g}.")
    found.append(f"Only {run.preset.model} may be submitted in the closed division.")
    return found


def synthetic_lengths(run: Run, max_model_len: int) -> tuple[list[tuple[int, int]], float]:
    """(input, output) of every sample, and the scale that makes them fit a shorter context.

    Only a quick run has fewer samples or scaled lengths.
    """
    preset = run.preset
    rows = read_lengths(SHIPPED / f"{preset.name}.csv", preset.output_len)
    lengths = [(i, min(round(o * preset.output_scale), preset.max_output)) for i, o in rows]
    if run.quick_samples:
        rng = random.Random(run.seeds["qsl_rng_seed"])
        lengths = rng.sample(lengths, min(run.quick_samples, len(lengths)))
    longest = max(i + o for i, o in lengths)
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"{preset.name} needs {longest} tokens of context, but the model has {max_model_len}; "
            "--quick scales the lengths down"
        )
    # Room for the two tokens that an output has at least.
    scale = min(run.length_scale, (max_model_len - MIN_OUTPUT) / longest)
    if scale == 1:
        return [(i, max(o, MIN_OUTPUT)) for i, o in lengths], scale
    scaled = [(max(int(i * scale), 1), max(int(o * scale), MIN_OUTPUT)) for i, o in lengths]
    return scaled, scale


def synthetic_samples(
    run: Run, lengths: Sequence[tuple[int, int]], vocab_size: int
) -> list[Sample]:
    """Random tokens, away from the special ones at the ends of the vocabulary."""
    rng = random.Random(run.seeds["sample_index_rng_seed"])
    temperature = run.preset.temperature
    tokens = range(vocab_size // 32, vocab_size - vocab_size // 8)
    return [
        Sample(
            array("i", rng.choices(tokens, k=input_len)),
            SamplingParams(temperature=temperature, max_tokens=output_len, ignore_eos=True),
        )
        for input_len, output_len in lengths
    ]


def choose_samples(
    run: Run, input_lens: Sequence[int], max_model_len: int, test_mode: str
) -> list[int]:
    """Indices of the dataset's samples to run; a quick run takes the first that fit."""
    if run.quick_samples:
        fitting = [i for i, n in enumerate(input_lens) if n + MIN_OUTPUT <= max_model_len]
        if not fitting:
            raise BenchError(f"no prompt of the dataset fits a context of {max_model_len} tokens")
        return fitting[: run.quick_samples]
    own = {
        "accuracy": run.preset.accuracy_samples,
        "TEST07": run.preset.compliance_samples,
    }
    needed = own.get(test_mode) or run.preset.num_samples
    if len(input_lens) != needed:
        raise BenchError(
            f"the dataset has {len(input_lens)} samples, but {run.preset.name} has {needed}; "
            "--quick runs on the samples that there are"
        )
    return list(range(needed))


def dataset_samples(
    run: Run, prompts: Sequence[list[int]], max_model_len: int, accuracy: bool
) -> list[Sample]:
    """Samples of a dataset's prompts, with the benchmark's sampling and cap."""
    preset = run.preset
    cap = (accuracy and preset.accuracy_output) or preset.max_output
    longest = max(map(len, prompts)) + cap
    if longest > max_model_len and not run.quick:
        raise BenchError(
            f"the dataset needs {longest} tokens of context, but the model has {max_model_len}"
        )
    return [
        Sample(
            array("i", prompt),
            SamplingParams(
                temperature=preset.temperature,
                top_p=preset.top_p,
                top_k=preset.top_k,
                max_tokens=min(cap, max_model_len - len(prompt)),
                min_tokens=1 if accuracy else MIN_OUTPUT,
            ),
        )
        for prompt in prompts
    ]


def execute(
    sut: SystemUnderTest,
    num_samples: int,
    run: Run,
    folder: Path,
    accuracy: bool = False,
    compliance: str = "",
) -> None:
    """Run the test; `folder` then has its logs, its user.conf and maybe an audit.config."""
    conf = folder / USER_CONF
    conf.write_text(run.user_conf(num_samples), encoding="utf-8")
    audit = folder / AUDIT_CONFIG if compliance else None
    if audit is not None:
        audit.write_text(audit_config(compliance, num_samples), encoding="utf-8")
    test = Test(
        key=run.preset.key_of(run.scenario),
        scenario=run.loadgen_scenario,
        user_conf=conf,
        folder=folder,
        accuracy=accuracy,
        audit_config=audit,
        overrides={**run.seeds, "accuracy_sample_count_override": num_samples},
    )
    run_test(sut, num_samples, test)


def performance_report(
    run: Run, values: Mapping[str, Any], errors: Sequence[str], times: Sequence[RequestTimes]
) -> MlperfReport:
    """Figures of a performance run, from LoadGen's detail log.

    LoadGen has no token latencies in Offline; there they are the adapter's, from the issue.
    """
    ttft, tpot = _latencies(values, *TTFT), _latencies(values, *TPOT)
    if run.scenario == "Offline":
        ttft = summarize((t.ttft_ms for t in times), 3)
        tpot = summarize((t.tpot_ms for t in times), 3)
    reasons = invalid_reasons(run, values, errors, ttft, tpot)
    limits = run.preset.limits(run.scenario)
    return {
        "result": "INVALID" if reasons else "VALID",
        "reasons": reasons,
        "metric": metric(run, values),
        "num_queries": len(times),
        "num_output_tokens": sum(t.num_tokens for t in times),
        "samples_per_s": values.get("result_completed_samples_per_sec")
        or values.get("result_samples_per_second")
        or values.get("result_qps_without_loadgen_overhead"),
        "ttft_ms": ttft,
        "tpot_ms": tpot,
        "latency_ms": _latencies(values, *LATENCY),
        "limits_ms": {"ttft": limits.ttft_ms, "tpot": limits.tpot_ms} if limits else None,
        "percentile": run.percentile,
        "min_duration_s": run.min_duration_ms / 1000,
    }


def with_reasons(report: MlperfReport, reasons: Sequence[str]) -> MlperfReport:
    """The same figures, INVALID where there are reasons besides LoadGen's."""
    found = [*reasons, *report["reasons"]]
    return report | {"reasons": found, "result": "INVALID" if found else "VALID"}


def given_up_report(run: Run, why: str, times: Sequence[RequestTimes]) -> MlperfReport:
    """What is known of a test that was left before its end: LoadGen has given no figures."""
    return {
        "result": "INVALID",
        "reasons": [why],
        "given_up": True,
        "metric": None,
        "num_queries": len(times),
        "num_output_tokens": sum(t.num_tokens for t in times),
        "ttft_ms": summarize((t.ttft_ms for t in times), 3),
        "tpot_ms": summarize((t.tpot_ms for t in times), 3),
        "percentile": run.percentile,
    }


def metric(run: Run, values: Mapping[str, Any]) -> MetricReport:
    """The figure that is published for the scenario."""
    if run.scenario == "SingleStream" and not run.preset.tokens:
        return _video_latency(values)
    if run.scenario == "SingleStream":
        latency_ms = values["result_90.00_percentile_latency_ns"] / NS_PER_MS
        return {"name": "p90 latency", "value": round(latency_ms, 3), "unit": "ms"}
    offline = run.scenario == "Offline"
    if run.preset.latency_ms is not None or not run.preset.tokens:
        if offline:
            rate = values["result_samples_per_second"]
            return {"name": "samples per second", "value": rate, "unit": "samples/s"}
        rate = values["result_scheduled_samples_per_sec"]
        return {"name": "scheduled queries per second", "value": rate, "unit": "queries/s"}
    key = "result_tokens_per_second" if offline else "result_completed_tokens_per_second"
    name = "tokens per second" if offline else "completed tokens per second"
    return {"name": name, "value": values[key], "unit": "tokens/s"}


def _video_latency(values: Mapping[str, Any]) -> MetricReport:
    """The estimate of early stopping, which the checker reads; without one the measured p90."""
    estimate = values.get("early_stopping_latency_ss")
    found = estimate or values["result_90.00_percentile_latency_ns"]
    name = "p90 latency, early stopping estimate" if estimate else "p90 latency"
    return {"name": name, "value": round(found / NS_PER_S, 4), "unit": "s"}


def invalid_reasons(
    run: Run,
    values: Mapping[str, Any],
    errors: Sequence[str],
    ttft: Mapping[str, float],
    tpot: Mapping[str, float],
) -> list[str]:
    """Why a run is INVALID; empty where it is VALID. LoadGen decides, the sentences are ours."""
    reasons = [
        f"LoadGen error: {error}" + (f" ({count} times)" if count > 1 else "")
        for error, count in Counter(errors).items()
    ]
    if values.get("result_validity") == "VALID":
        return reasons
    limits = run.preset.limits(run.scenario)
    reasons += _slow_queries(run, values)
    if limits:
        percent = f"p{run.percentile}"
        for name, found, limit in (
            ("TTFT", ttft, limits.ttft_ms),
            ("TPOT", tpot, limits.tpot_ms),
        ):
            if found.get(percent, 0) > limit:
                reasons.append(
                    f"{percent} {name} is {found[percent]:.1f} ms, the limit is {limit} ms"
                )
    for key, sentence in (
        ("result_min_duration_met", "the run was shorter than the minimum duration"),
        ("result_min_queries_met", "there were fewer queries than the minimum"),
        ("early_stopping_met", EARLY_STOPPING[run.scenario == "SingleStream"]),
    ):
        if values.get(key) is False:
            reasons.append(sentence)
    hint = str(values.get("result_invalid_reason", "")).strip()
    return [*reasons, f"LoadGen: {hint}"] if hint or not reasons else reasons


def _slow_queries(run: Run, values: Mapping[str, Any]) -> list[str]:
    """Why a run under a limit of whole queries is INVALID."""
    limit, percent = run.preset.latency_ms, f"p{run.percentile}"
    found = _latencies(values, *LATENCY).get(percent, 0.0)
    if limit is None or run.scenario != "Server" or found <= limit:
        return []
    return [f"{percent} latency is {found:.1f} ms, the limit is {limit} ms"]


def _latencies(values: Mapping[str, Any], mean: str, percentile: str) -> LatencyMs:
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
