"""MLPerf by LoadGen: figures of an engine with known latencies, the rules as data, the search."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench.mlperf.known_latencies import about, drive, near, report_of
from tokenmill.bench.commands.mlperf import PANELS, run_of
from tokenmill.bench.mlperf import runs as mlperf
from tokenmill.bench.mlperf import under_test
from tokenmill.bench.mlperf.presets import BENCHMARKS, PRESETS, ROUNDS, Preset
from tokenmill.bench.mlperf.samples import (
    choose_samples,
    dataset_samples,
    notices_of,
    synthetic_lengths,
    synthetic_samples,
)
from tokenmill.bench.workload import SHIPPED, BenchError, read_lengths
from tokenmill.core.types import SamplingParams
from tokenmill.settings import Settings, SettingsError, by_key, defaults_of

TABLE = by_key(*PANELS.values())

NUM_TOKENS = 5
LIMITS = """
import json, sys, tempfile
import mlperf_loadgen
settings = mlperf_loadgen.TestSettings()
with tempfile.NamedTemporaryFile() as empty:
    assert settings.FromConfig(empty.name, sys.argv[1], "Server") == 0
print(json.dumps([settings.ttft_latency, settings.tpot_latency, settings.use_token_latencies,
                  settings.performance_sample_count_override, settings.min_duration_ms,
                  settings.server_target_latency_percentile]))
"""


def test_server_has_the_latencies_of_the_engine(tmp_path: Path) -> None:
    report = report_of(tmp_path, "Server")
    assert report["result"] == "VALID" and report["reasons"] == []
    assert near(report["ttft_ms"]["p50"], 40) and about(report["tpot_ms"]["p50"], 10)
    assert near(report["latency_ms"]["p50"], 80)
    # Whole multiples of the samples, for a second at a hundred queries each.
    assert report["num_queries"] == report["log"]["result_query_count"] == 128
    assert report["num_output_tokens"] == 128 * NUM_TOKENS
    assert report["issued"] == list(range(64))
    assert report["log"]["effective_target_qps"] == 100
    for name, seed in ROUNDS["v6.0"].seeds.items():
        assert report["log"][f"effective_{name}"] == seed
    rate = report["log"]["result_completed_samples_per_sec"]
    assert report["metric"]["value"] == pytest.approx(NUM_TOKENS * rate, rel=0.02)
    assert (tmp_path / "mlperf_log_trace.json").stat().st_size < 100


def test_offline_issues_all_at_once(tmp_path: Path) -> None:
    report = report_of(tmp_path, "Offline", num_samples=40)
    assert report["result"] == "VALID" and report["num_queries"] == 40
    assert report["issued"] == list(range(40))
    seconds = report["log"]["result_max_latency_ns"] / 1e9
    assert report["metric"]["value"] == pytest.approx(40 * NUM_TOKENS / seconds, rel=1e-3)
    assert near(report["ttft_ms"]["p50"], 40) and about(report["tpot_ms"]["p50"], 10)
    assert report["limits_ms"] is None


def test_single_stream_waits_for_each_answer(tmp_path: Path) -> None:
    report = report_of(tmp_path, "SingleStream", ttft_s=0.01, tpot_s=0.002)
    assert report["result"] == "VALID" and report["num_queries"] >= 64
    assert near(report["latency_ms"]["p50"], 18) and report["metric"]["unit"] == "ms"
    assert near(report["ttft_ms"]["p50"], 10) and about(report["tpot_ms"]["p50"], 2)


@pytest.mark.parametrize(
    ("latencies", "reason"),
    [
        ({"ttft_s": 0.6, "tpot_s": 0.001}, "p90 TTFT is 6"),
        ({"ttft_s": 0.01, "tpot_s": 0.06}, "p90 TPOT is 6"),
    ],
)
def test_too_slow_for_interactive_but_not_for_server(
    latencies: dict[str, float], reason: str, tmp_path: Path
) -> None:
    for scenario in ("Server", "Interactive"):
        (tmp_path / scenario).mkdir()
    options = latencies | {"qps": 250, "duration_ms": 200}
    assert report_of(tmp_path / "Server", "Server", **options)["result"] == "VALID"
    report = report_of(tmp_path / "Interactive", "Interactive", **options)
    assert report["result"] == "INVALID"
    assert report["reasons"][0].startswith(reason) and len(report["reasons"]) > 1
    limit = report["limits_ms"]["ttft" if "TTFT" in reason else "tpot"]
    assert report["reasons"][0].endswith(f"the limit is {limit} ms")


def test_accuracy_runs_every_sample_once(tmp_path: Path) -> None:
    report = report_of(tmp_path, "Offline", num_samples=9, accuracy=True)
    assert report["answers"] == {
        str(index): ["07000000" * NUM_TOKENS, NUM_TOKENS] for index in range(9)
    }


def test_an_unanswered_query_ends_the_test(tmp_path: Path) -> None:
    result = drive(tmp_path, "Server", end="error")
    assert result.returncode == 1
    assert result.stderr == "error: query-0 was not answered: as told\n"


@pytest.mark.parametrize("scenario", mlperf.LATENCY_BOUND)
@pytest.mark.parametrize("preset", PRESETS.values(), ids=lambda preset: preset.name)
def test_limits_are_those_of_loadgen(preset: Preset, scenario: str) -> None:
    command = [sys.executable, "-c", LIMITS, preset.key_of(scenario)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    limits = preset.limits_ms(scenario)
    assert limits is not None
    expected = [limits["ttft"] * 10**6, limits["tpot"] * 10**6, True, preset.num_samples]
    found = json.loads(result.stdout.splitlines()[-1])
    assert found == [*expected, mlperf.MIN_DURATION_MS, mlperf.PERCENTILE / 100]


def test_presets_are_offered_and_have_lengths() -> None:
    assert TABLE["benchmark"].kind.choices == tuple(BENCHMARKS)
    assert TABLE["scenario"].kind.choices == mlperf.SCENARIOS
    for preset in PRESETS.values():
        rows = read_lengths(SHIPPED / f"{preset.name}.csv", preset.output_len)
        assert len(rows) == preset.num_samples


def test_rounds_differ_in_seeds_benchmarks_and_gates() -> None:
    assert TABLE["round"].kind.choices == tuple(ROUNDS)
    seeds = [set(each.seeds.values()) for each in ROUNDS.values()]
    assert not seeds[0] & seeds[1]
    assert PRESETS["llama3.1-8b"].of_round("v6.1") == PRESETS["llama3.1-8b"]
    stricter = PRESETS["llama2-70b"].of_round("v6.1")
    assert (stricter.folder, stricter.accuracy_share) == ("llama2-70b-99.9", 0.999)
    with pytest.raises(ValueError, match=r"llama3\.1-405b is not a benchmark of v6\.1"):
        PRESETS["llama3.1-405b"].of_round("v6.1")


def test_a_run_has_the_seeds_of_its_round(tmp_path: Path) -> None:
    report = report_of(tmp_path, "Offline", num_samples=8, round="v6.1")
    for name, seed in ROUNDS["v6.1"].seeds.items():
        assert report["log"][f"effective_{name}"] == seed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            {"round": "v6.1", "benchmark": "llama3.1-405b"},
            "--benchmark with --round: llama3.1-405b",
        ),
        ({"candidate-chunk": 5}, "--candidate-chunk goes with --benchmark dlrm-v3"),
        ({"mtp": 3, "division": "closed"}, "speculative decoding .* for deepseek-r1 Interactive o"),
        (
            {
                "mtp": 3,
                "division": "closed",
                "benchmark": "gpt-oss-120b",
                "scenario": "Interactive",
            },
            "not for gpt-oss-120b Interactive",
        ),
    ],
)
def test_what_a_round_does_not_have_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        run_of(Settings(given, defaults_of(*PANELS.values())))


def test_drafts_are_accepted_where_the_round_has_them() -> None:
    closed = {"mtp": 3, "division": "closed", "scenario": "Interactive"}
    assert (
        run_of(Settings(closed | {"benchmark": "deepseek-r1"}, defaults_of(*PANELS.values()))).round
        == "v6.0"
    )
    newer = closed | {"benchmark": "gpt-oss-120b", "round": "v6.1"}
    assert run_of(Settings(newer, defaults_of(*PANELS.values()))).round == "v6.1"
    assert (
        run_of(Settings({"mtp": 3, "division": "open"}, defaults_of(*PANELS.values()))).preset.name
        == "llama3.1-8b"
    )


def run_with(benchmark: str = "llama3.1-8b", **options: Any) -> mlperf.MlperfRun:
    return mlperf.MlperfRun(PRESETS[benchmark], "Server", 4.0, **options)


def mean(values: list[int]) -> float:
    return sum(values) / len(values)


@pytest.mark.parametrize(
    ("benchmark", "mean_output"),
    [("deepseek-r1", 3886.2274), ("llama3.1-405b", 684.68), ("llama2-70b", 294.45)],
)
def test_synthetic_outputs_have_the_reference_mean(benchmark: str, mean_output: float) -> None:
    lengths, scale = synthetic_lengths(run_with(benchmark), 10**6)
    assert scale == 1 and len(lengths) == PRESETS[benchmark].num_samples
    assert mean([o for _, o in lengths]) == pytest.approx(mean_output, rel=0.02)


def test_a_short_context_scales_quick_runs_only() -> None:
    with pytest.raises(BenchError, match=r"llama3\.1-8b needs 2668 tokens of context"):
        synthetic_lengths(run_with(), 512)
    lengths, scale = synthetic_lengths(run_with(quick_samples=64), 512)
    assert len(lengths) == 64 and 0 < scale < 1
    assert max(i + o for i, o in lengths) <= 512 and min(o for _, o in lengths) >= 2
    again, smaller = synthetic_lengths(run_with(quick_samples=64, length_scale=0.01), 512)
    assert smaller == 0.01 and {o for _, o in again} == {2}
    notices = notices_of(run_with(quick_samples=64), True, scale)
    assert "not a valid submission" in notices[0] and "synthetic" in notices[1]
    assert notices[2] == f"Lengths are scaled by {scale:.4g}."


def test_synthetic_prompts_are_reproducible_and_differ() -> None:
    run = run_with("gpt-oss-120b")
    samples = synthetic_samples(run, [(20, 3), (20, 4)], 1000)
    assert samples == synthetic_samples(run, [(20, 3), (20, 4)], 1000)
    assert samples != synthetic_samples(replace(run, round="v6.1"), [(20, 3)] * 2, 1000)
    assert samples[0].prompt_token_ids != samples[1].prompt_token_ids
    assert samples[1].sampling == SamplingParams(temperature=1.0, max_tokens=4, ignore_eos=True)


def test_a_dataset_is_whole_unless_the_run_is_quick() -> None:
    with pytest.raises(BenchError, match=r"has 3 samples, but llama3\.1-8b has 13368"):
        choose_samples(run_with(), [5, 90, 7], 50, False)
    quick = run_with(quick_samples=2)
    assert choose_samples(quick, [5, 90, 7, 8], 50, False) == [0, 2]
    with pytest.raises(BenchError, match="no prompt of the dataset fits"):
        choose_samples(quick, [90], 50, False)
    (sample,) = dataset_samples(quick, [[1, 2, 3]], 50, False)
    assert (sample.sampling.max_tokens, sample.sampling.min_tokens) == (47, 2)


def test_only_quick_runs_go_below_the_minimums() -> None:
    assert run_with().user_conf(13368) == "llama3_1-8b.Server.target_qps = 4\n"
    quick = run_with(quick_samples=8).user_conf(8)
    assert quick.startswith(f"# {mlperf.QUICK_NOTICE}\n")
    assert "llama3_1-8b.Server.min_query_count = 64\n" in quick
    offline = mlperf.MlperfRun(PRESETS["gpt-oss-120b"], "Offline", 2.0)
    assert "gpt-oss-120b.Offline.min_query_count = 6396\n" in offline.user_conf(6396)
    interactive = mlperf.MlperfRun(PRESETS["deepseek-r1"], "Interactive", 2.0)
    assert interactive.user_conf(4388) == "deepseek-r1-interactive.Server.target_qps = 2\n"


@pytest.mark.parametrize(("capacity", "start"), [(37.0, 1.0), (0.3, 8.0), (5.0, 5.0)])
def test_peak_is_bracketed_then_bisected(capacity: float, start: float) -> None:
    tried: list[float] = []

    def is_valid(qps: float) -> bool:
        tried.append(qps)
        return qps <= capacity

    peak = mlperf.find_peak(is_valid, start)
    assert peak is not None and peak in tried
    assert capacity / 1.05 <= peak <= capacity and len(tried) <= mlperf.MAX_PEAK_RUNS


def test_no_rate_is_valid() -> None:
    assert mlperf.find_peak(lambda qps: False, 1.0) is None


class OneByOne:
    """Takes what comes and answers one request a step."""

    def __init__(self) -> None:
        self.waiting: list[str] = []
        self.most = 0

    def has_work(self) -> bool:
        return bool(self.waiting)

    def submit(self, request: str) -> None:
        self.waiting.append(request)

    def step(self) -> list[SimpleNamespace]:
        self.most = max(self.most, len(self.waiting))
        return [SimpleNamespace(request_id=self.waiting.pop(0))]


class AtOnce:
    """Samples whose answers never are whole."""

    def __init__(self) -> None:
        self.issued, self.answered = list[under_test.Query](), list[str]()
        self.system: under_test.EngineUnderTest

    def request(self, name: str, query: under_test.Query) -> str:
        self.issued.append(query)
        return name

    def take(self, query: under_test.Query, output: SimpleNamespace) -> tuple[int, bool]:
        self.answered.append(output.request_id)
        if len(self.answered) == 5:
            self.system.end()
        return 0, False

    def data(self, query: under_test.Query) -> Any:
        raise AssertionError("no answer is whole here")


def test_samples_that_come_at_once_are_submitted_while_the_engine_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(under_test, "SUBMITTED_PER_STEP", 2)
    engine, samples = OneByOne(), AtOnce()
    samples.system = system = under_test.EngineUnderTest(engine, samples)
    system.issue([SimpleNamespace(id=i, index=i) for i in range(5)])
    system.drive()
    assert samples.answered == [f"query-{i}" for i in range(5)]
    assert engine.most == 3  # two, then one and two, then two and the last
    assert len({query.times.arrival_ns for query in samples.issued}) == 1
