"""DLRMv3 under LoadGen: an accuracy run from end to end, its metric, its limit, what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples import rank_train
from light_processes import light_processes
from tokenmill.__main__ import run
from tokenmill.bench.commands.mlperf import PANELS, run_of
from tokenmill.bench.mlperf import loadgen_tests, ranking, runs
from tokenmill.bench.mlperf.presets import DLRM_V3
from tokenmill.bench.results.mlperf_reports import GateReport
from tokenmill.bench.workload import BenchError
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.ranking.metrics import rank_metrics
from tokenmill.ranking.model import RankingModel
from tokenmill.ranking.model_files import load_model
from tokenmill.ranking.requests import request_of
from tokenmill.settings import Settings, defaults_of

TABLE = defaults_of(*PANELS.values())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rank")
    flags = ["--users", "12", "--items", "256", "--candidates", "16", "--steps", "1"]
    rank_train.main([str(path), *flags])
    return path


def test_accuracy_run_has_the_models_own_metrics(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LoadGen's log of answers gives the same three figures as the model without LoadGen."""
    monkeypatch.setattr(loadgen_tests, "SPAWN", light_processes())
    values = {"benchmark": "dlrm-v3", "test-mode": "accuracy", "quick": True, "quick-samples": 8}
    values |= {"model": str(folder / "model"), "dataset": str(folder / "requests.jsonl")}
    settings = Settings(values, TABLE)
    logs = tmp_path / "logs"
    report = loadgen_tests.run_in_process(settings, run_of(settings), "accuracy", logs).report
    model = load_model(folder / "model")
    samples = ranking.read_samples(folder / "requests.jsonl", model.spec)[:8]
    scores = [
        found[:, 0] for found in model.score([request_of(sample.request) for sample in samples])
    ]
    expected = rank_metrics(scores, [sample.labels for sample in samples])
    found = report.accuracy
    assert found is not None
    assert [found["ne"], found["accuracy"], found["gauc"]] == pytest.approx(expected, abs=1e-3)
    assert report.num_samples == 8 and report.accuracy_gates == {}
    told = "The item table has 256 rows of 32 columns; the benchmark's has 1,000,000,000 of 512."
    assert told in report.notices and ranking.smaller_table(HstuSpec()) == []


def test_a_warm_up_that_fails_ends_the_run(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_kernel(*_: object) -> None:
        raise MemoryError("no tile fits")

    monkeypatch.setattr(RankingModel, "launch", no_kernel)
    values = {"benchmark": "dlrm-v3", "model": str(folder / "model"), "device": "cpu"}
    values |= {"submission-dir": str(tmp_path), "dataset": str(folder / "requests.jsonl")}
    with pytest.raises(BenchError, match=r"warm-up was not answered: .*no tile fits"):
        ranking.EngineRanking(
            Settings(values, TABLE),
            runs.MlperfRun(DLRM_V3, "Offline", 1.0, 8),
            "performance",
            tmp_path,
        )


def report_of(scenario: str, latency_ms: float) -> Any:
    values = {
        "result_validity": "VALID" if latency_ms <= 80 else "INVALID",
        "result_samples_per_second": 12.5,
        "result_scheduled_samples_per_sec": 11.5,
        "result_99.00_percentile_latency_ns": latency_ms * 1e6,
    }
    return loadgen_tests.performance_fields(runs.MlperfRun(DLRM_V3, scenario, 1.0), values, [], [])


def test_metrics_and_the_limit_of_80_ms() -> None:
    assert report_of("Offline", 900)["metric"].value == 12.5
    good, slow = report_of("Server", 79), report_of("Server", 81)
    assert good["reasons"] == [] and good["metric"].value == 11.5
    assert slow["reasons"][0] == "p99 latency is 81.0 ms, the limit is 80 ms"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--scenario", "Interactive"], "Offline and Server only"),
        (["--test-mode", "TEST06"], "has performance, accuracy only: a submission needs TEST08"),
        (["--submission-dir", "x"], "--submission-dir does not go with --benchmark dlrm-v3: a sub"),
        (["--compliance"], "dlrm-v3: its audit, TEST08, needs"),
        (["--url", "http://127.0.0.1:1", "--model", "m", "--dtype", "bf16"], "not for --url"),
        (["--max-num-seqs", "8"], "--max-num-seqs is for language models"),
        (["--num-threads", "1"], "--num-threads is for language models"),
        ([], "needs --model DIR"),
    ],
)
def test_what_the_benchmark_does_not_have_is_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "mlperf", "--benchmark", "dlrm-v3", *flags]) == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_gates_say_their_bounds() -> None:
    run = runs.MlperfRun(DLRM_V3, "Offline", 1.0)
    gates = {name: ranking.gate_of(run, name, 87.9) for name in ("ne", "gauc")}
    assert gates["ne"].required == "at most 86.7738" and not gates["ne"].passed
    assert gates["gauc"].required == "at least 78.5843" and gates["gauc"].passed
    assert GateReport(5.0, 4.5, True, 5.5).required == "4.5000 to 5.5000"


def test_a_wrong_line_of_the_dataset_is_named(folder: Path, tmp_path: Path) -> None:
    line = json.loads((folder / "requests.jsonl").read_text(encoding="utf-8").splitlines()[0])
    file = tmp_path / "wrong.jsonl"
    text = json.dumps(line) + "\n" + json.dumps(line | {"user_id": 12})
    file.write_text(text, encoding="utf-8")
    with pytest.raises(BenchError, match=r"line 2: user_id: 12 is unknown"):
        ranking.read_samples(file, load_model(folder / "model").spec)
