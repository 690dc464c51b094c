"""plan predict and plan validate as a user runs them, and the bars that the predictions keep."""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.__main__ import run
from tokenmill.plan.fit.fitting import FitRow, Prior, fit
from tokenmill.plan.fit.own_runs import TABLE as RUNS
from tokenmill.plan.fit.own_runs import own_runs
from tokenmill.plan.fit.validation import BEST, OURS, Checked, markdown, summary, validate
from tokenmill.plan.hardware import PlanError, find_gpu
from tokenmill.plan.predict.benchmarks import BENCHMARKS, benchmark_lengths, find_benchmark
from tokenmill.plan.predict.efficiencies import Fit, find_fit, load_fits, write_fits
from tokenmill.plan.predict.jobs import JOBS, dlrm_job, wan_job
from tokenmill.plan.predict.prediction import Question, predict
from tokenmill.plan.predict.step_cost import Efficiency

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"


def report_of(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, object]:
    assert run(["plan", *words]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


@pytest.mark.parametrize("scenario", ["Offline", "Server"])
def test_the_last_line_has_what_was_promised(
    capsys: pytest.CaptureFixture[str], scenario: str
) -> None:
    words = ("--benchmark", "gpt-oss-120b", "--scenario", scenario, "--gpu", "h200", "--gpus", "8")
    report = report_of(capsys, "predict", *words)
    keys = "output_tok_s samples_s tok_s_per_gpu ttft_ms tpot_ms interval configuration"
    assert {*keys.split(), "bottleneck", "fitted_on"} <= report.keys()
    low, high = report["interval"]  # type: ignore[misc]
    assert low < report["output_tok_s"] < high
    if scenario == "Server":
        assert report["ttft_ms"]["p99"] <= 3000 and report["tpot_ms"]["p99"] <= 80  # type: ignore[index]


def test_a_round_without_results_stands_on_the_one_before(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """v6.1 lets gpt-oss-120b draft in Interactive; its efficiencies are those of v6.0."""
    words = ("predict", "--benchmark", "gpt-oss-120b", "--gpu", "b200", "--scenario", "Interactive")
    before = report_of(capsys, *words)
    assert run(["plan", *words, "--round", "v6.1"]) == 0
    text = capsys.readouterr().out
    after = json.loads(text.splitlines()[-1])
    assert (after["round"], after["efficiencies_of"]) == ("v6.1", "v6.0")
    assert "v6.0's, since v6.1 has no results to fit on yet" in " ".join(text.split())
    assert after["efficiencies"] == before["efficiencies"]
    assert before["configuration"]["mtp"] == 0 < after["configuration"]["mtp"]  # type: ignore[index]
    offline = [
        report_of(capsys, *words[:-1], "Offline", "--round", name)["output_tok_s"]
        for name in ("v6.0", "v6.1")
    ]
    assert offline[0] == offline[1]


def test_a_configuration_may_be_given(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ("predict", "--benchmark", "deepseek-r1", "--gpu", "gb300", "--gpus", "72")
    file = tmp_path / "given.toml"
    file.write_text('ep = 4\nattention-dp = true\nprecision = "fp8"\n', encoding="utf-8")
    given = report_of(capsys, *words, "--config", str(file))["configuration"]
    assert isinstance(given, dict)
    assert (given["attention_dp"], given["precision"], given["replicas"]) == (4, "fp8", 18)
    found = report_of(capsys, *words)["output_tok_s"]
    worse = report_of(capsys, *words, "--config", str(file))["output_tok_s"]
    assert worse < found  # type: ignore[operator]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--gpu", "b100"], "--gpu b100: not known"),
        (["--benchmark", "bert"], "--benchmark bert: expected one of deepseek-r1"),
        (["--round", "v4.0"], "--round v4.0: expected one of v5.1, v6.0, v6.1"),
        (
            ["--round", "v6.1", "--benchmark", "llama3.1-405b"],
            "v6.1 has no longer this benchmark, which --round v6.0 has",
        ),
        (["--benchmark", "mixtral-8x7b", "--scenario", "Interactive"], "has Offline, Server"),
        (
            ["--benchmark", "llama3.1-405b", "--gpus", "1", "--gpu", "h100"],
            r"--gpus 1: fp8 on 1 x NVIDIA H100 SXM .* too large; use --gpus 8",
        ),
        (["--tp", "3"], "--tp 3 .* no such configuration"),
        (["--model", "smollm2"], "--lengths is needed"),
        (["--model", "smollm2", "--benchmark", "llama3.1-8b"], "--model and --benchmark do not go"),
        (["--lengths", "uniform:1-2"], "--lengths needs --model: a benchmark has its own"),
        (["--model", "nothing", "--lengths", "uniform:1-2"], "--model nothing: neither a config"),
    ],
)
def test_wrong_input_says_what_would_work(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    gpus = [] if "--gpus" in words else ["--gpus", "16"]
    assert run(["plan", "predict", *words, *gpus]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(message, text), text


PHI = {
    "architectures": ["Phi3ForCausalLM"],
    "model_type": "phi3",
    "vocab_size": 32064,
    "hidden_size": 3072,
    "intermediate_size": 8192,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}


def test_any_config_json_by_our_own_efficiencies(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Of a family that the engine does not know, too; one GPU does less than two."""
    (tmp_path / "config.json").write_text(json.dumps(PHI), encoding="utf-8")
    words = ("predict", "--lengths", "uniform:100-1024", "--round", "tokenmill", "--precision")
    words = (*words, "bf16", "--model", str(tmp_path), "--gpus")
    one, two = (report_of(capsys, *words, gpus) for gpus in ("1", "2"))
    assert one["benchmark"] == str(tmp_path) and one["efficiencies_of"] == "tokenmill"
    assert 0 < 1.9 * one["output_tok_s"] < two["output_tok_s"]  # type: ignore[operator]
    fast, slow = (
        report_of(capsys, *words, "1", "--scenario", "Server", "--ttft", "1000", "--tpot", limit)
        for limit in ("10", "40")
    )
    assert fast["tpot_ms"]["p99"] <= 10 < slow["tpot_ms"]["p99"] <= 40  # type: ignore[index]
    assert fast["output_tok_s"] < slow["output_tok_s"] < one["output_tok_s"]  # type: ignore[operator]


def test_our_own_efficiencies_predict_what_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Llama-3.1-8B on one H200: 8,302 tok/s (README) beside what the best submission reaches."""
    words = ("predict", "--benchmark", "llama3.1-8b", "--gpus", "1")
    ours, best = report_of(capsys, *words, "--round", "tokenmill"), report_of(capsys, *words)
    assert ours["output_tok_s"] == pytest.approx(8302, rel=0.1)
    assert best["output_tok_s"] > ours["output_tok_s"]  # type: ignore[operator]


def test_limits_that_nothing_holds_name_those_that_something_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "slow.toml"
    keys = "memory-gb = 96\nmemory-tb-s = 0.2\nbf16-tflops = 250\nnode-gpus = 1\n"
    file.write_text(f"[slow]\n{keys}", encoding="utf-8")
    words = ["--benchmark", "llama3.1-8b", "--scenario", "Interactive", "--gpu", "slow"]
    assert run(["plan", "predict", *words, "--hardware", str(file), "--gpus", "1"]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(r"no configuration of 1 x slow holds 500 ms .* [\d.]+ times these", text), text


def test_no_torch_is_imported() -> None:
    code = """
import sys
from tokenmill.__main__ import run
assert run(["plan", "predict", "--benchmark", "deepseek-r1", "--gpu", "gb300", "--gpus", "72"]) == 0
print("torch" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.splitlines()[-1] == "False"


def test_the_lengths_are_what_runs_emit() -> None:
    means = {name: round(benchmark_lengths(name).mean_output) for name in BENCHMARKS}
    assert means["deepseek-r1"] == pytest.approx(3886, rel=0.01)
    assert means["gpt-oss-120b"] == pytest.approx(1309, rel=0.02)
    assert means["llama2-70b"] == pytest.approx(294, rel=0.03)  # some are cut at 1,024
    assert means["llama3.1-8b"] == 128


def test_video_by_its_flops() -> None:
    """A forward of Wan 2.2 has 6.523 PFLOP by torch's own counter, and a video forty of them."""
    job = wan_job(find_gpu("h200"))
    assert job.linear_flops + job.attention_flops == pytest.approx(40 * 6.523e15, rel=1e-3)


def test_recommender_by_its_flops() -> None:
    """551 GFLOP a sample, by hand: 231 and 141 attend, 92 and 69 project, 17 are the rest."""
    job = dlrm_job(find_gpu("h200"))
    assert job.linear_flops + job.attention_flops == pytest.approx(551e9, rel=0.01)
    assert job.attention_flops == pytest.approx((231 + 141) * 1e9, rel=0.01)


def test_every_mlperf_model_can_be_predicted_and_sized(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in JOBS:
        words = ("--gpu", "b200", "--gpus", "8")
        report = report_of(capsys, "predict", "--benchmark", name, *words)
        low, high = report["interval"]  # type: ignore[misc]
        rate = report["samples_s"]
        assert low < rate < high  # type: ignore[operator]
        sized = report_of(capsys, "size", "--model", name, "--gpu", "b200", "--rate", str(rate))
        assert sized["gpus"] >= 8 and sized["max_rate"] >= 0.999 * rate  # type: ignore[operator]
        lost = sized["what_if"]["one node lost"]  # type: ignore[index]
        assert lost["gpus"] < sized["gpus"] < lost["needs_gpus"]


@pytest.fixture(scope="module")
def checked() -> list[Checked]:
    return validate()


def test_the_page_is_what_validate_writes(checked: list[Checked]) -> None:
    assert PAGE.read_text(encoding="utf-8") == markdown(checked), "run make docs"


def test_our_own_runs_are_within_a_tenth(checked: list[Checked]) -> None:
    own = [row for row in checked if row.kind == OURS]
    assert len(own) >= 5 and 2 * sum(row.fitted for row in own) <= len(own)
    assert max(abs(row.error) for row in own) <= 0.10


def test_a_measured_run_is_one_line_more(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    line = "a 20b mxfp4,gpt-oss-20b,mxfp4,bf16,uniform:100-1024,64,,256,8192,9000,2026-11-16"
    table.write_text(RUNS.read_text(encoding="utf-8") + line + "\n", encoding="utf-8")
    found, last = own_runs(table), len(own_runs()) + 2
    assert len(found) == len(own_runs()) + 1
    assert found[0].name == "a 20b mxfp4" and not found[0].fitted and found[1].fitted
    assert found[0].predict(find_fit("tokenmill").efficiency) > 1000
    for right, wrong, message in (
        (",mxfp4,bf16,", ",mxfp4,int4,", rf"runs\.csv:{last}: kv int4: expected one of bf16, fp8"),
        (",9000,", ",fast,", rf"runs\.csv:{last}: output_tok_s fast: expected a positive number"),
        (",2026-11-16", "", rf"runs\.csv:{last}: date is needed"),
    ):
        text = RUNS.read_text(encoding="utf-8") + line.replace(right, wrong) + "\n"
        table.write_text(text, encoding="utf-8")
        with pytest.raises(PlanError, match=message):
            own_runs(table)


def test_published_rows_keep_the_bars(checked: list[Checked]) -> None:
    best = [row for row in checked if row.kind == BEST]
    unseen = [abs(row.error) for row in best if not row.fitted]
    for round in ("v5.1", "v6.0"):
        rows = [row for row in best if row.set == round]
        assert 4 * sum(row.fitted for row in rows) <= len(rows)
    assert statistics.median(unseen) <= 0.15
    assert sum(error <= 0.3 for error in unseen) >= 0.8 * len(unseen)
    assert summary(checked)["disordered"] == []


def test_the_stored_fit_is_on_the_rows_of_the_rule(checked: list[Checked]) -> None:
    for name, stored in load_fits().items():
        assert len(stored.fitted_on) == sum(r.fitted for r in checked if r.set == name)


def test_a_fit_finds_what_made_the_rows(tmp_path: Path) -> None:
    """Rates made with known efficiencies, from a start a quarter off."""
    true = find_fit("v6.0").efficiency.scaled(products=0.9, memory=1.05)
    gpu, benchmark = find_gpu("h200"), find_benchmark("llama3.1-8b")

    def rate(efficiency: Efficiency) -> float:
        own = Fit("x", efficiency, "", "", (), 0.1)
        question = Question(benchmark, "Offline", gpu, 8, "v6.0")
        return float(predict(question, own)["output_tok_s"])

    start = true.scaled(products=1.25)
    rows = [FitRow("one", rate(true), rate)]
    found = fit(rows, Prior(start, {"products": 1.0}, row_sigma=0.02))
    assert found.products == pytest.approx(true.products, rel=0.03)
    stored = Fit("x", found, "2026-11-16", "made up", ("one",), 0.02)
    write_fits(tmp_path / "x.toml", {"x": stored}, "a note")
    assert find_fit("x", tmp_path / "x.toml").efficiency.products == pytest.approx(
        found.products, rel=1e-3
    )
    with pytest.raises(PlanError, match="no efficiencies; known are"):
        find_fit("v4.0")
