"""Kernels compiled here and kernels out of the cache: the same bits."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.kernels import cpu_kernels

CODE = """
import torch
from tokenmill.kernels.norm import rms_norm
torch.manual_seed(1)
x, weight = torch.randn(5, 77), torch.randn(77)
print(rms_norm(x, weight, 1e-5).tolist())
"""


@pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")
def test_cached_code_computes_what_fresh_code_did(tmp_path: Path) -> None:
    env = os.environ | {"TOKENMILL_CACHE": str(tmp_path)}
    runs = [
        subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, check=True)
        for _ in range(2)
    ]
    assert any(tmp_path.rglob("*.nbc"))
    fresh, cached = (run.stdout for run in runs)
    assert fresh and fresh == cached
