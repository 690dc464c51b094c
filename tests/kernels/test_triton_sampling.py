"""The Triton sampling kernels against the torch references, interpreted on CPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_sampling_parity.py")
CHECKS = ["argmax", "not_finite", "sample", "ties", "capacity", "adjust"]


@pytest.mark.parametrize("check", CHECKS)
def test_triton_matches_reference(check: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), check]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{check}: ok")
