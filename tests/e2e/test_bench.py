"""The benchmarks on a tiny model, with all packages and with few."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from bench.scripted_server import scripted_server
from light_processes import run_benchmark
from tiny_configs import write_config
from tokenmill.__main__ import run
from tokenmill.bench.commands import ladder
from tokenmill.bench.commands.throughput import num_blocks
from tokenmill.bench.results.reports import CellReport
from tokenmill.bench.workload import Cell
from tokenmill.settings import by_key

SIZES = {"vocab_size": 422, "hidden_size": 64, "intermediate_size": 96}
LENGTHS = [(30, 5), (7, 2), (40, 9)]
# All that a host with torch, triton, numpy, safetensors, msgspec and typer alone does not have.
ABSENT = {
    *("tqdm", "gguf", "tokenizers", "huggingface_hub", "zmq", "fastapi", "starlette", "uvicorn"),
    *("uvloop", "httptools", "jinja2", "prometheus_client", "xgrammar", "numba", "llvmlite"),
    *("openai", "transformers"),
}
HIDE = """
import sys
from importlib.machinery import PathFinder
class Bare(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.split(".")[0] in ABSENT else super().find_spec(name, path, target)
sys.meta_path[sys.meta_path.index(PathFinder)] = Bare
"""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_config(tmp_path, **SIZES)
    return tmp_path / "config.json"


@pytest.fixture
def workload(tmp_path: Path) -> Path:
    rows = [f"{i},{o}" for i, o in LENGTHS]
    (tmp_path / "mine.csv").write_text("\n".join(["input_length,output_length", *rows]))
    return tmp_path / "mine.csv"


@pytest.fixture
def flags(model: Path, workload: Path) -> list[str]:
    line = ["--model", str(model), "--random-weights", "--lengths", str(workload)]
    return [*line, "--num-threads", "1", "--device", "cpu"]


def bare_python(
    tmp_path: Path,
    *arguments: str,
    absent: set[str] = ABSENT,
    module: str = "tokenmill",
) -> subprocess.CompletedProcess[str]:
    """`python -m MODULE` that finds nothing of `absent`, in its children as well."""
    (tmp_path / "sitecustomize.py").write_text(f"ABSENT = {absent!r}\n{HIDE}")
    paths = [str(tmp_path), *(path for path in sys.path if path)]
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, cwd=tmp_path, timeout=300, check=False
    )


def check_throughput(report: dict[str, Any]) -> None:
    ours = report["cells"]["mine"]["tokenmill"]
    assert (ours["num_prompts"], ours["num_input_tokens"]) == (3, 77)
    assert ours["num_output_tokens"] == 16
    assert 0 < ours["tok_s"] < ours["ceiling_tok_s"] <= ours["overlap_ceiling_tok_s"]
    assert 0 < ours["mfu"] < 1 and 0 < ours["mbu"] < 1
    assert report["device"] == "cpu" and report["kv_dtype"] == "fp32"
    assert report["peak_rss_mib"] > 0 and report["peak_gpu_mib"] == {}


def test_a_workload_is_one_cell(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "throughput", *flags, "--dtype", "fp32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    check_throughput(json.loads(lines[-1]))
    assert any("mine 3 requests (77 in, 16 out)" in line for line in lines)
    assert any("all of it overlapped" in line for line in lines)


def test_throughput_needs_few_packages(flags: list[str], tmp_path: Path) -> None:
    result = bare_python(tmp_path, "bench", "throughput", *flags)
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    check_throughput(json.loads(lines[-1]))
    assert any(line.startswith("mine 3 requests (77 in, 16 out)") for line in lines)
    assert "Benchmark runs: 100%" in result.stderr


def test_ladder_and_benchmarks_need_no_more(flags: list[str], tmp_path: Path) -> None:
    plot = tmp_path / "ladder.html"
    line = ["bench", "ladder", *flags, "--rungs", "eager,fused", "--gpu-price", "7.2"]
    result = bare_python(tmp_path, *line, "--plot", str(plot))
    assert result.returncode == 0, result.stderr
    report = json.loads(result.stdout.splitlines()[-1])
    eager, fused = report["rungs"]
    assert eager["usd_per_million"] == pytest.approx(7.2 / 3600 * 1e6 / eager["tok_s"], rel=1e-3)
    assert fused["skipped"] == ladder.NEEDS["compiled"]  # numba is blocked
    assert "eager torch" in plot.read_text()
    sizes = ("--num-running", "4", "--num-steps", "3")
    result = bare_python(tmp_path, *sizes, module="benchmarks.scheduler")
    assert json.loads(result.stdout.splitlines()[-1])["num_running"] == 4


def test_bare_endpoint_needs_its_own_packages_alone(tmp_path: Path) -> None:
    with scripted_server() as server:
        line = ["bench", "endpoint", "--url", server.url, "--concurrency", "2", "--no-audit"]
        line += ["--num-requests", "4", "--warmup-requests", "0"]
        result = bare_python(tmp_path, *line, absent=ABSENT - {"httptools"})
        assert result.returncode == 0, result.stderr
        assert json.loads(result.stdout.splitlines()[-1])["points"][0]["num_completed"] == 4
        for name in ("httptools", "typer"):
            result = bare_python(tmp_path, *line, absent=ABSENT - {"httptools"} | {name})
            assert result.returncode == 1
            assert f"pip install {name}" in result.stderr.splitlines()[-1]


def test_a_ladder_goes_on_after_a_rung_that_fails(
    flags: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    broken = ladder.LadderRung("broken", "broken", {"max-model-len": 10**6})
    mended = ladder.LadderRung("mended", "mended", {"max-model-len": 256})
    for name in ("choose", "settings_of"):
        monkeypatch.setattr(
            getattr(ladder, name), "__defaults__", ((ladder.RUNGS[0], broken, mended),)
        )
    monkeypatch.setattr(ladder, "run_benchmark", run_benchmark)
    assert run(["bench", "ladder", *flags]) == 1
    captured = capfd.readouterr()
    report = json.loads(captured.out.splitlines()[-1])
    assert [row["rung"] for row in report["rungs"]] == ["eager", "broken", "mended"]
    assert "max_model_len is 1000000" in report["rungs"][1]["error"]
    assert report["rungs"][2]["tok_s"] > 0
    assert captured.err.splitlines()[-1] == "error: 1 of 3 rungs failed: broken"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "uniform:2-4", "--cell", "batch"], "--cell shapes the cells and does not"),
        (["--lengths", "nowhere.csv"], "--lengths nowhere.csv: no such file; known are"),
        (["--model", "qwen3-0.6b"], "qwen3-0.6b is a shape without weights: add --random-weights"),
        (["--model", "gpt-9", "--random-weights"], "model 'gpt-9': tried it as a path"),
    ],
)
def test_errors_come_before_any_work(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["bench", "throughput", *arguments]) in (1, 2)
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.startswith(f"error: {message}")
    if "gpt-9" in arguments:
        listed = captured.err.strip().rpartition("shapes of this package: ")[2].split(", ")
        assert {"gpt-oss-120b", "llama3.1-8b", "qwen3-30b-a3b"} <= set(listed)


def test_the_ladder_offers_nothing_that_a_rung_sets() -> None:
    offered = set(by_key(*ladder.PANELS.values()))
    assert not offered & ladder.CHANGED
    assert {"model", "lengths", "num-prompts", "gpu-price", "plot", "rungs"} <= offered


def test_memory_of_the_cache() -> None:
    cell = Cell("m", ((30, 2), (5, 5), (100, 28)))
    # 32, 10 and 128 tokens take 2, 0 and 8 full blocks of 16, and two more each.
    assert num_blocks([cell], 16, max_num_seqs=9) == 2 * (4 + 2 + 10)
    assert num_blocks([cell], 16, max_num_seqs=2) == 2 * (4 + 10)


def ladder_figures() -> CellReport:
    counts = {name: 1 for name in ("num_prompts", "num_input_tokens", "num_output_tokens")}
    rates = {"tok_s": 10.0, "tok_s_runs": [10.0], "output_tok_s": 10.0, "total_tok_s": 10.0}
    roof = {"ceiling_tok_s": 40.0, "share_of_ceiling": 0.25, "mfu": 0.0, "mbu": 0.0}
    return msgspec.convert(counts | rates | roof, CellReport)


def test_ctrl_c_reports_the_rungs_that_ran(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    figures = ladder_figures()

    def attempt(rung: ladder.LadderRung, *_: Any) -> ladder.RungAttempt:
        if rung.key == "overlap":
            raise KeyboardInterrupt
        return ladder.RungAttempt(rung, figures=figures)

    monkeypatch.setattr(ladder, "_attempt", attempt)
    assert run(["bench", "ladder", "--device", "cpu"]) == 1
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row.get("error", row.get("tok_s")) for row in report["rungs"]][-1] == "interrupted"
    assert report["rungs"][0]["tok_s"] == 10.0


def test_a_full_disk_costs_the_plot_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = ladder_figures()
    monkeypatch.setattr(ladder, "_attempt", lambda rung, *_: ladder.RungAttempt(rung, figures))
    (tmp_path / "full.html").symlink_to("/dev/full")
    flags = ("--device", "cpu", "--plot", str(tmp_path / "full.html"))
    assert run(["bench", "ladder", *flags]) == 1
    shown = capsys.readouterr()
    assert json.loads(shown.out.splitlines()[-1])["rungs"][0]["tok_s"] == 10.0
    assert "No space left on device" in shown.err
