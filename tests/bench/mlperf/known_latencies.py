"""Runs of LoadGen against an engine of known latencies, and how near figures have to be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

DRIVER = Path(__file__).with_name("mlperf_driver.py")


def drive(folder: Path, scenario: str, **options: Any) -> subprocess.CompletedProcess[str]:
    known = {"qps": 100, "ttft_s": 0.04, "tpot_s": 0.01, "end": "length"}
    text = json.dumps({"scenario": scenario} | known | options)
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(DRIVER), str(folder), text]
    return subprocess.run(
        command, capture_output=True, text=True, env=environ, timeout=600, check=False
    )


def report_of(folder: Path, scenario: str, **options: Any) -> dict[str, Any]:
    result = drive(folder, scenario, **options)
    assert result.returncode == 0, result.stderr
    report: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return report


def near(value_ms: float, expected_ms: float, late_ms: float = 8) -> bool:
    """Never early, and late by no more than a busy machine's wake-up."""
    return expected_ms - 0.1 <= value_ms < expected_ms + late_ms


def about(value_ms: float, expected_ms: float) -> bool:
    """A time between two outputs, of which the first may have been late too."""
    return abs(value_ms - expected_ms) < 5
