"""The Triton kernels against the torch references: interpreted on CPU, compiled where a GPU is."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("triton_parity.py")


KERNELS = (
    "rms_norm",
    "silu_mul",
    "quantize_rows",
    "twice_rounded",
    "matmul",
    "batch_invariance",
    "skinny_matmul",
    "scale_product",
    "layers",
    "place_tokens",
    "rope_and_cache",
    "spread_keys",
    "paged_attention",
)


@pytest.mark.parametrize("kernel", KERNELS)
def test_triton_matches_reference(kernel: str) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT), kernel]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"{kernel}: ok")


def test_experts_and_latent_attention_match_their_references() -> None:
    env = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, str(SCRIPT.with_name("triton_moe_parity.py"))]
    result = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": ok on cpu") == 5
