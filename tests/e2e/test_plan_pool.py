"""A pool of two workers of the default model: calibrated on one, sized, run, and compared.

The figures are shown at the end of the test run. Nothing is asserted of speed: other work on the
machine slows the runs down.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tokenmill.__main__ import run
from tokenmill.bench.ceiling import measure_machine
from tokenmill.plan.fit.calibration import CalibrationTarget, closed_loop_tok_s
from tokenmill.plan.hardware import find_gpu
from tokenmill.plan.predict.catalog import find_model
from tokenmill.plan.predict.efficiencies import find_fit
from tokenmill.plan.predict.lengths import Lengths
from tokenmill.plan.predict.search import SearchSpace

INPUT, OUTPUT = 32, 16
LOAD = ("--input-len", str(INPUT), "--output-len", str(OUTPUT), "--api", "completions")
FEW = ("--warmup-requests", "2", "--no-audit")


def bench(*words: str) -> dict[str, Any]:
    """The JSON line of a command in a process of its own."""
    command = [sys.executable, "-m", "tokenmill", "bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return report


def plan(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """The JSON line of a plan."""
    assert run(["plan", *words]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return report


@contextmanager
def served(*words: str) -> Iterator[str]:
    """The URL of a server whose workers compute in one thread each."""
    command = [sys.executable, "-m", "tokenmill", "serve", *words, "--port", "0"]
    command += ["--num-threads", "1", "--max-model-len", "512"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        try:
            yield next(m[1] for line in process.stderr if (m := re.search(r"at (\S+/v1)", line)))
        finally:
            process.terminate()
            process.communicate(timeout=180)


def hardware(folder: Path) -> Path:
    """One thread of this machine as a table of --hardware, by what `bench` measures of it."""
    machine = measure_machine(find_model("smollm2"), 1, "cpu")
    lines = (
        "[core]",
        "memory-gb = 4",
        f"memory-tb-s = {machine.read_bytes_per_s / 1e12}",
        f"bf16-tflops = {machine.gemm_flops['fp32'] / 1e12}",
        f"int8-tflops = {machine.gemm_flops['int8'] / 1e12}",
        "node-gpus = 1",
        "price-per-gpu-hour = 0.05",
    )
    path = folder / "core.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_two_workers_as_they_were_planned(
    smollm2_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    record_property: Any,
) -> None:
    own, mine, file = hardware(tmp_path), tmp_path / "mine.toml", tmp_path / "plan.toml"
    system = ("--model", "smollm2", "--gpu", "core", "--hardware", str(own), "--precision", "int8")
    with served("smollm2", "--dtype", "int8") as url:
        sweep = ("--concurrency", "1,4", "--num-requests", "6", *LOAD, *FEW)
        bench("endpoint", "--url", url, *sweep, "--output-dir", str(tmp_path / "one"))
    written = ("--write", str(mine))
    fitted = plan(capsys, "calibrate", str(tmp_path / "one"), *system, *written)
    assert len(fitted["rows"]) == 2

    demand = ("--lengths", f"uniform:{INPUT}-{INPUT}", "--output-len", str(OUTPUT))
    limits = ("--ttft", "10000", "--tpot", "500", "--gpus", "2", "--round", "tokenmill")
    size = ("size", *system, *demand, *limits, "--efficiencies", str(mine))
    one = plan(capsys, *size, "--rate", "0.001", "--write", str(file))["max_rate"]
    sized = plan(capsys, *size, "--rate", f"{1.5 * one:.4f}", "--write", str(file))
    assert sized["workers"] == 2 and "--rate" in sized["bench"]

    target = CalibrationTarget(
        find_model("smollm2"), find_gpu("core", own), 2, SearchSpace(precision="int8"), None
    )
    lengths = Lengths("equal", ((INPUT, OUTPUT),))
    efficiency = find_fit("tokenmill", mine).efficiency
    with served("--config", str(file)) as url:
        closed = ("--concurrency", "8", "--num-requests", "16", *LOAD, *FEW)
        measured = bench("endpoint", "--url", url, *closed)["points"][0]
        words = sized["bench"].split()[2:]
        words[words.index("--url") + 1], words[words.index("--duration") + 1] = url, "3"
        tested = bench(*words, "--api", "completions", *FEW)["points"][0]
    assert measured["num_completed"] == 16 and tested["num_failed"] == 0
    figures = {
        "closed loop of 8, tok/s": {
            "predicted": round(closed_loop_tok_s(target, lengths, 8.0, efficiency), 1),
            "measured": measured["output_tok_s"],
        },
        "at the planned rate, ms per token": {
            "predicted": sized["tpot_ms"]["mean"],
            "interval": sized["intervals"]["tpot_ms"],
            "measured": tested["tpot_ms"]["mean"],
        },
        "first token, ms": {
            "predicted": sized["ttft_ms"]["p50"],
            "measured": tested["ttft_ms"]["p50"],
        },
    }
    record_property("figures", figures)
    for name, values in figures.items():
        assert values["predicted"] > 0 and values["measured"] > 0, name
    assert one < sized["max_rate"] < 2.2 * one
