"""Kernels compiled here and kernels out of the cache: the same bits, compiled once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tokenmill.kernels import cpu_kernels

CODE = """
import numpy as np
from tokenmill.kernels.cpu.threads import launch, task_kernel
from tokenmill.kernels.cpu.tiles import exp32, f32_at, square_sum
from numba import carray

def body(args, task):
    x, out = carray(f32_at(args[0]), (77,)), carray(f32_at(args[1]), (77,))
    scale = np.float32(1) / square_sum(args[0], 77)
    for i in range(77):
        out[i] = exp32(x[i] * scale) * x[i] + scale

kernel = task_kernel(body)
x, out = np.random.default_rng(1).standard_normal((2, 77)).astype(np.float32)
launch(kernel, 1, x.ctypes.data, out.ctypes.data)
print(kernel.cache_hits, out.tolist())
"""


@pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")
def test_processes_that_start_together_compile_once_and_give_the_same_bits(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(CODE)
    options = {"env": os.environ | {"TOKENMILL_CACHE": str(tmp_path)}, "stdout": subprocess.PIPE}
    command = [sys.executable, str(tmp_path / "script.py")]
    runs = [subprocess.Popen(command, text=True, **options) for _ in range(2)]
    hits, values = zip(*(run.communicate()[0].split(" ", 1) for run in runs), strict=True)
    assert sorted(hits) == ["0", "1"]
    assert len(set(values)) == 1
