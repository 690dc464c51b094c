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


def start(folder: Path, code: str, cache: Path) -> subprocess.Popen[str]:
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(code)
    env = os.environ | {"TOKENMILL_CACHE": str(cache)}
    command = [sys.executable, str(folder / "script.py")]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


@pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")
def test_copies_that_start_together_compile_once_and_give_the_same_bits(tmp_path: Path) -> None:
    """Two copies of the sources share what is compiled; a changed one is compiled anew."""
    pair = [start(tmp_path / name, CODE, tmp_path) for name in ("one", "other")]
    hits, values = zip(*(run.communicate()[0].split(" ", 1) for run in pair), strict=True)
    assert sorted(hits) == ["0", "1"]
    assert values[0] == values[1]
    changed = start(tmp_path / "one", CODE.replace("+ scale", "- scale"), tmp_path)
    hit, other = changed.communicate()[0].split(" ", 1)
    assert hit == "0" and other != values[0]


FULL = """
import os
os.statvfs = lambda path: os.statvfs_result((4096, 4096, 10**6, 0, 0, 0, 0, 0, 0, 255))
"""


@pytest.mark.skipif(not cpu_kernels(), reason="no compiled kernels here")
def test_a_cache_on_a_full_disk_is_not_used(tmp_path: Path) -> None:
    run = start(tmp_path / "one", FULL + CODE, tmp_path / "cache")
    assert run.communicate()[0].startswith("0 [") and run.returncode == 0
    assert not list((tmp_path / "cache").rglob("*.nbi"))
