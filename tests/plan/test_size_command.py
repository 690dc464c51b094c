"""plan size and plan calibrate as a user runs them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from tokenmill.__main__ import run
from tokenmill.cli.serve import SERVED
from tokenmill.core.config import ParallelConfig, PoolConfig, SchedulerConfig
from tokenmill.plan.fit.calibration import CalibrationTarget, closed_loop_tok_s
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.benchmarks import benchmark_lengths
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.predict.efficiencies import find_fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.search import SearchSpace
from tokenmill.settings import by_key, load

DEEPSEEK = ("--model", "deepseek-r1", "--gpu", "gb300", "--lengths", "deepseek-r1")
LLAMA70 = ("--model", "llama2-70b", "--gpu", "h200", "--lengths", "llama2-70b")
FLAGS = ("input-len", "shared-prefix")
LLAMA = ("--model", "llama3.1-8b", "--gpu", "h200", "--lengths", "llama3.1-8b")


def size_of(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, Any]:
    assert run(["plan", "size", *words, "--write", str(folder / "plan.toml")]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return found


def test_a_rack_is_sized_within_its_limits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = size_of(capsys, tmp_path, *DEEPSEEK, "--rate", "60", "--ttft", "2000", "--tpot", "80")
    assert report["ttft_ms"]["p99"] <= 2000 and report["tpot_ms"]["p99"] <= 80
    assert report["max_rate"] >= 60 and report["headroom"] >= 0
    assert report["usd_per_hour"] == pytest.approx(3.76 * report["gpus"], abs=0.01)
    # What all requests of an hour pay for their tokens is the price of the hour.
    spent = report["usd_per_million_input"] * 60 * 3600 * _mean_input() / 1e6
    spent += report["usd_per_million_output"] * report["output_tok_s"] * 3600 / 1e6
    assert spent == pytest.approx(report["usd_per_hour"], rel=0.01)
    case = report["what_if"]["twice the context"]
    assert not case["holds"] and case["needs_gpus"] > report["gpus"]
    assert "no cache hits were assumed" in report["what_if"]["half the cache hits"]["note"]
    lost = report["what_if"]["one node lost"]
    assert lost["gpus"] == report["gpus"] - max(4, report["configuration"]["gpus"])
    assert lost["needs_gpus"] > report["gpus"] and lost["max_rate"] < report["max_rate"]
    for name, (low, high) in report["intervals"].items():
        value = report[name]
        value = value if isinstance(value, float) else next(iter(value.values()))
        assert low < value < high, name
    for other in report["alternatives"]:
        assert other["gpus"] >= report["gpus"]


def _mean_input() -> float:
    return benchmark_lengths("deepseek-r1").mean_input


def test_what_it_writes_is_what_serve_takes(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    report = size_of(capsys, tmp_path, *DEEPSEEK, "--rate", "60", "--precision", "fp8")
    settings = load({}, by_key(*SERVED.values()), config=tmp_path / "plan.toml", environ={})
    shape = report["configuration"]
    parallel, pool = settings.build(ParallelConfig), settings.build(PoolConfig)
    assert (parallel.ep, parallel.attention_dp) == (shape["attention_dp"], True)
    assert max(pool.workers, pool.decode) == shape["replicas"]
    assert settings.get("dtype") == "fp8"
    assert (settings.build(SchedulerConfig).max_num_seqs or 0) >= shape["sequences_per_gpu"]
    assert settings.get("model") == "deepseek-ai/DeepSeek-R1"
    assert "--rate 60 --duration 600 --lengths deepseek-r1 --goodput" in report["bench"]


def test_what_is_written_for_models_that_the_engine_takes_as_they_are(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """bf16 needs no flag, gpt-oss is published in MXFP4, and a shape alone has no weights."""
    written = {}
    for model, more in (
        ("gpt-oss-120b", ()),
        ("qwen3-14b", ("--precision", "bf16")),
        ("llama3.1-8b", ("--precision", "fp8", "--cache-hits", "0.5")),
    ):
        words = ("--model", model, "--gpu", "h200", "--lengths", "llama3.1-8b", "--rate", "9")
        report = size_of(capsys, tmp_path, *words, *more)
        written[model] = (tmp_path / "plan.toml").read_text(encoding="utf-8")
    assert 'model = "openai/gpt-oss-120b"\nkv-cache-dtype = "fp8"\n' in written["gpt-oss-120b"]
    assert "dtype" not in written["qwen3-14b"]
    assert "folder or hub name of its checkpoint" in written["qwen3-14b"]
    assert 'dtype = "fp8"\nkv-cache-dtype = "fp8"\n' in written["llama3.1-8b"]
    own, shared = (int(re.findall(f"--{f} (\\d+)", report["bench"])[0]) for f in FLAGS)
    assert own + shared == round(benchmark_lengths("llama3.1-8b").mean_input) and own == shared + 1


def test_too_few_gpus_bear_less(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    report = size_of(capsys, tmp_path, *LLAMA, "--rate", "400", "--gpus", "2")
    assert not report["within_gpus"] and report["gpus"] > 2
    assert 0 < report["max_rate_within_gpus"] < 400
    starting = report["while_a_worker_starts"]
    assert 0 < starting["max_rate"] < report["max_rate"]


def test_more_traffic_longer_contexts_and_fewer_hits_cost_more(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    gpus = [
        size_of(capsys, tmp_path, *LLAMA, *words)["gpus"]
        for words in (
            ("--rate", "400", "--cache-hits", "0.8"),
            ("--rate", "400"),
            ("--rate", "800"),
        )
    ]
    assert gpus[0] < gpus[1] < gpus[2]


def test_a_trace_brings_rate_lengths_and_hits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [
        {"timestamp": 100 * n, "input_length": 1024, "output_length": 50, "hash_ids": [1, n + 2]}
        for n in range(51)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    words = ("--model", "llama3.1-8b", "--gpu", "h200", "--trace", str(trace))
    report = size_of(capsys, tmp_path, *words)
    assert report["rate"] == pytest.approx(51 / 5.0)
    assert report["cache_hits"] == pytest.approx(50 / 102)
    assert f"--trace {trace} --trace-block-tokens 512 --goodput" in report["bench"]
    lines[7]["timestamp"] = 590
    trace.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    assert run(["plan", "size", *words, "--write", str(tmp_path / "plan.toml")]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert "line 8: timestamp 590 lies 10 ms before that of the line above; sort the lines" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            (*LLAMA, "--rate", "9", "--tpot", "0.5"),
            r"--tpot 0.5: no configuration of .*times these",
        ),
        (
            # bf16 does not fit on so few; what is said is about fp8, which does.
            (*LLAMA70, "--gpus", "1", "--rate", "1", "--tpot", "1"),
            r"--tpot 1: no configuration of .*times these",
        ),
        (LLAMA, "--rate is needed"),
        (("--rate", "9"), "--model is needed"),
        (("--model", "llama9", "--rate", "9", "--lengths", "llama3.1-8b"), "--model llama9: neith"),
        (
            (*DEEPSEEK, "--rate", "1", "--precision", "fp8", "--tp", "1"),
            "too large; use --gpus 4",
        ),
    ],
)
def test_wrong_demands_say_what_would_work(
    words: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert run(["plan", "size", *words, "--write", str(tmp_path / "plan.toml")]) != 0
    text = " ".join(capsys.readouterr().err.split())
    assert re.search(message, text), text


def test_a_file_of_the_users_stays(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    mine = tmp_path / "plan.toml"
    mine.write_text("port = 1\n", encoding="utf-8")
    assert run(["plan", "size", *LLAMA, "--rate", "9", "--write", str(mine)]) != 0
    assert mine.read_text(encoding="utf-8") == "port = 1\n"
    assert "was not written by plan size" in " ".join(capsys.readouterr().err.split())


def test_calibrate_finds_the_efficiencies_behind_a_result(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A result of vllm bench, made by known efficiencies: they are found again and stored."""
    base = find_fit("tokenmill").efficiency
    true = base.scaled(products=0.7, layer_us=1.5)
    lengths = Lengths("equal", ((500, 100),))
    gpu = find_gpu("h200").as_measured()  # what tokenmill's efficiencies are shares of
    target = CalibrationTarget(
        find_model("llama3.1-8b"), gpu, 1, SearchSpace(precision="bf16"), None
    )
    paths = []
    for concurrency in (1, 16, 256):
        rate = closed_loop_tok_s(target, lengths, concurrency, true)
        result = {
            "backend": "vllm",
            "model_id": "llama3.1-8b",
            "num_prompts": 1000,
            "completed": 1000,
            "max_concurrency": concurrency,
            "request_rate": "inf",
            "duration": 1000 * 100 / rate,
            "total_input_tokens": 500_000,
            "total_output_tokens": 100_000,
            "request_throughput": rate / 100,
            "output_throughput": rate,
            "total_token_throughput": 6 * rate,
            "mean_ttft_ms": 10.0,
            "mean_tpot_ms": 10.0,
        }
        paths.append(tmp_path / f"c{concurrency}.json")
        paths[-1].write_text(json.dumps(result), encoding="utf-8")
    file = tmp_path / "mine.toml"
    words = ["--model", "llama3.1-8b", "--precision", "bf16", "--write", str(file)]
    assert run(["plan", "calibrate", *map(str, paths), *words]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for row in report["rows"]:
        assert row["predicted"] == pytest.approx(row["measured"], rel=0.05)
    stored = find_fit("tokenmill", file)
    assert stored.efficiency.products == pytest.approx(true.products, rel=0.15)
    assert stored.date and "c16.json" in stored.source and len(stored.fitted_on) == 3
