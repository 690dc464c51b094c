"""`tokenmill bench mlperf` on the default model at tiny size, and its errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.sample_runs import page_data
from light_processes import light_processes
from tiny_configs import write_config
from tiny_tokenizers import byte_level, save_folder
from tokenmill.__main__ import run
from tokenmill.bench.commands import mlperf
from tokenmill.bench.commands.mlperf import PANELS
from tokenmill.bench.mlperf import loadgen_tests
from tokenmill.bench.mlperf.runs import MlperfRun
from tokenmill.bench.mlperf.submission import SYSTEM_FIELDS
from tokenmill.bench.results.manifest import verify
from tokenmill.bench.results.mlperf_reports import MetricReport, MlperfReport
from tokenmill.settings import Settings, defaults_of

TABLE = defaults_of(*PANELS.values())

SIZES = {"vocab_size": 422, "num_hidden_layers": 1, "num_attention_heads": 2}
DATASET = [
    {"input": "The capital of France is", "output": "Paris"},
    {"input": "Two and two make", "output": "four"},
]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def report_of(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[dict[str, Any], str]:
    """The JSON line and what stands above it."""
    status = run(["bench", "mlperf", *arguments])
    captured = capfd.readouterr()
    assert status == 0, captured.err
    *above, last = captured.out.splitlines()
    return json.loads(last), "\n".join(above)


def test_quick_offline_on_the_default_model(
    smollm2_path: Path, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    line = ["--quick", "--quick-samples", "6", "--length-scale", "0.02", "--num-threads", "1"]
    report, above = report_of(capfd, *line, "--submission-dir", "sub")
    assert report["result"] == "VALID" and report["reasons"] == []
    assert report["scenario"] == "Offline" and report["mlperf_benchmark"] == "llama3.1-8b"
    assert report["num_queries"] == 6 and report["num_output_tokens"] == 12
    assert report["metric"]["value"] > 0 and report["metric"]["unit"] == "tokens/s"
    assert report["ttft_ms"]["p99"] > 0 and report["tpot_ms"]["p99"] > 0
    assert report["synthetic"] and report["quick"] and report["length_scale"] == 0.02
    results = folder / "sub/open/tokenmill/results/system/llama3.1-8b/Offline"
    readme = (results / "README.md").read_text()
    measurements = (results / "measurements.json").read_text()
    for text in (above, readme, measurements, " ".join(report["notices"])):
        assert "not a valid submission" in text and "synthetic" in text
    assert "Result is : VALID" in (results / "performance/run_1/mlperf_log_summary.txt").read_text()
    assert (results / "user.conf").read_text().startswith("# This is a quick run")
    assert json.loads((results / "summary.json").read_text()) == report
    page = page_data((results / "report.html").read_text())
    assert page["title"].endswith(" under the load of MLPerf llama3.1-8b, Offline")
    assert page["verdict"] == ["good", "QUICK, complete"]
    assert page["notices"][0]["title"] == "Not a valid submission"
    charts = page["sections"][0]["blocks"][1]["charts"]
    assert charts[0]["title"] == "TTFT distribution"
    assert verify(results).ok


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are forks here; the test above starts processes as a user does."""
    monkeypatch.setattr(loadgen_tests, "SPAWN", light_processes())


@pytest.fixture
def tiny(folder: Path) -> list[str]:
    """Flags of a tiny model with random weights and a tokenizer."""
    path = save_folder(byte_level(), folder / "tiny", eos_token="<|im_end|>")
    write_config(path, **SIZES)
    return ["--model", str(path), "--random-weights", "--num-threads", "1", "--dtype", "fp32"]


@pytest.mark.usefixtures("light")
def test_accuracy_on_a_dataset(
    tiny: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "data.json").write_text(json.dumps(DATASET))
    line = ["--quick", "--dataset", "data.json", "--test-mode", "accuracy"]
    line += [*tiny, "--submission-dir", "sub", "--submitter", "me", "--benchmark", "llama2-70b"]
    report, _ = report_of(capfd, *line, "--max-model-len", "64")
    assert not report["synthetic"] and report["num_samples"] == 2
    assert report["accuracy"]["gen_num"] == 2 and report["accuracy"]["tokens_per_sample"] <= 64
    missed = [name for name, gate in report["accuracy_gates"].items() if not gate["passed"]]
    assert missed and report["result"] == "INVALID"
    assert report["reasons"] == [f"{name} misses the accuracy gate" for name in missed]
    accuracy = folder / "sub/open/me/results/system/llama2-70b-99/Offline/accuracy"
    assert f"'rouge1': {report['accuracy']['rouge1']}" in (accuracy / "accuracy.txt").read_text()
    answers = json.loads((accuracy / "mlperf_log_accuracy.json").read_text())
    assert {entry["qsl_idx"] for entry in answers} == {0, 1}


@pytest.mark.usefixtures("light")
@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_compliance_runs_beside_the_benchmark(
    scenario: str, tiny: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """LoadGen logs answers during the run, and the checker's files say that they pass."""
    line = ["--quick", "--quick-samples", "4", "--length-scale", "0.02", "--compliance", *tiny]
    line += ["--division", "closed", "--scenario", scenario, "--target-qps", "40"]
    report, above = report_of(capfd, *line, "--submission-dir", "sub")
    assert report["compliance"] == {"TEST06": True} and "TEST06: passed" in above
    test = folder / f"sub/closed/tokenmill/results/system/llama3.1-8b/{scenario}/TEST06"
    first = "Skipped" if scenario == "Offline" else "True"
    lines = (test / "verify_accuracy.txt").read_text().splitlines()
    assert lines[0] == f"First token check pass: {first}"
    assert lines[1:3] == ["EOS check pass: True", "Sample length check pass: True"]
    answers = json.loads((test / "accuracy/mlperf_log_accuracy.json").read_text())
    assert answers and all(len(a["data"]) == 8 * a["token_count"] for a in answers)
    detail = (test / "performance/run_1/mlperf_log_detail.txt").read_text()
    assert "Found Audit Config file" in detail
    plain = test.parent / "performance/run_1/mlperf_log_detail.txt"
    assert "Found Audit Config file" not in plain.read_text()


@pytest.mark.usefixtures("light")
def test_a_closed_folder_keeps_the_checker_s_rules(
    tiny: list[str], folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """What the official submission checker asks of files and fields, quick runs' sizes aside."""
    (folder / "data.json").write_text(json.dumps(DATASET))
    line = ["--quick", "--dataset", "data.json", "--test-mode", "submission", "--compliance"]
    line += [*tiny, "--max-model-len", "64", "--division", "closed", "--submitter", "me"]
    report_of(capfd, *line, "--submission-dir", "sub")
    results = folder / "sub/closed/me/results/system/llama3.1-8b/Offline"
    logs = ("mlperf_log_summary.txt", "mlperf_log_detail.txt")
    required = {f"performance/run_1/{name}" for name in logs}
    required |= {f"accuracy/{name}" for name in (*logs, "accuracy.txt", "mlperf_log_accuracy.json")}
    required |= {"TEST06/verify_accuracy.txt", "measurements.json", "user.conf", "README.md"}
    found = {str(path.relative_to(results)) for path in results.rglob("*") if path.stat().st_size}
    assert required <= found
    assert (results / "accuracy/mlperf_log_accuracy.json").stat().st_size <= 10 * 1024
    score = re.search(r"'rougeLsum': ([\d.]+)", (results / "accuracy/accuracy.txt").read_text())
    digest = re.search(r"hash=([0-9a-f]{64})", (results / "accuracy/accuracy.txt").read_text())
    assert score and digest
    measurements = json.loads((results / "measurements.json").read_text())
    fields = ("input_data_types", "retraining", "starting_weights_filename")
    assert all(measurements[f] for f in (*fields, "weight_data_types", "weight_transformations"))
    system = json.loads((folder / "sub/closed/me/systems/system.json").read_text())
    assert (system["division"], system["submitter"]) == ("closed", "me")
    assert all(name in system for name in SYSTEM_FIELDS)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--scenario", "MultiStream"], 2, "--scenario must be one of Offline, Server"),
        (["--benchmark", "bert"], 2, "--benchmark must be one of deepseek-r1, gpt-oss-120b"),
        (
            ["--benchmark", "wan-2.2"],
            2,
            "--benchmark must be one of deepseek-r1, gpt-oss-120b, llama3.1-8b, llama3.1-405b, "
            "llama2-70b, qwen3-vl-235b, dlrm-v3, wan-2.2-t2v-a14b, got 'wan-2.2'",
        ),
        (["--api", "chat"], 2, "--api goes with --url"),
        (["--url", "ftp://x"], 1, "--url must be http://HOST:PORT"),
        (["--target-qps", "0"], 2, "--target-qps must be a number of at least 1e-06, got '0'"),
        (["--length-scale", "0.5"], 2, "--length-scale shapes a quick run: add --quick"),
        (["--quick-samples", "5"], 2, "--quick-samples shapes a quick run: add --quick"),
        (["--find-peak"], 2, "--find-peak needs --scenario Server or Interactive"),
        (["--test-mode", "accuracy"], 2, "--test-mode accuracy needs --dataset"),
        (["--test-mode", "TEST09"], 2, "--test-mode TEST09 is not a test of llama3.1-8b"),
        (
            ["--benchmark", "gpt-oss-120b", "--compliance"],
            2,
            "TEST07 of gpt-oss-120b needs --compliance-dataset",
        ),
        (["--steps", "4"], 2, "--steps goes with --benchmark wan-2.2-t2v-a14b"),
        (["--compliance-dataset", "x"], 2, "--compliance-dataset goes with --compliance"),
        (["--compliance", "--url", "http://x"], 2, "compliance tests compare token ids"),
        (["--prefix-cache"], 2, "No such option: --prefix-cache"),
        (["--model", "./nowhere"], 1, "model './nowhere': tried it as a path"),
    ],
)
def test_errors_are_one_sentence(
    arguments: list[str], status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "mlperf", *arguments]) == status
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    assert captured.err.startswith(f"error: {message}")


def test_a_test_that_fails_says_why(tiny: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "mlperf", "--benchmark", "llama3.1-405b", *tiny]) == 1
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.splitlines()[-1].startswith(
        "error: the performance run failed: llama3.1-405b needs 20"
    )
    assert captured.err.strip().endswith("--quick scales the lengths down")


def test_peak_reports_the_highest_valid_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def answer(
        settings: Settings, run: MlperfRun, mode: str, folder: Path
    ) -> loadgen_tests.LoadGenResult:
        reasons = ["slow"] if run.target_qps > 3.1 else []
        report = MlperfReport(
            **{"mlperf_benchmark": "llama3.1-8b", "round": "v6.0", "scenario": "Server"},
            **{"test_mode": mode, "target_qps": run.target_qps, "notices": [], "reasons": reasons},
            **{"model": "m", "dtype": "fp32", "device": "cpu", "num_samples": 1},
            **{"synthetic": True, "quick": False, "result": "INVALID" if reasons else "VALID"},
            metric=MetricReport("rate", run.target_qps, "tokens/s"),
        )
        return loadgen_tests.LoadGenResult(str(folder), report)

    monkeypatch.setattr(loadgen_tests, "run_in_process", answer)
    monkeypatch.setattr(mlperf.throughput, "model_path", lambda config: Path("model"))
    settings = {"scenario": "Server", "find-peak": True, "target-qps": 1.0}
    mlperf.mlperf(Settings(settings, TABLE))
    captured = capsys.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert report["result"] == "VALID" and 2.95 < report["peak_qps"] <= 3.1
    assert report["metric"]["value"] == report["target_qps"] == report["peak_qps"]
    assert [r["target_qps"] for r in report["runs"][:3]] == [1, 2, 4]
    assert "highest valid rate" in captured.out
