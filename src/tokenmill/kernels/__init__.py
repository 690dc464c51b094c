"""Kernels: each file holds a torch reference and the dispatch; `cpu/` and `gpu/` the twins."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(slots=True)
class Mode:
    """Switches of the whole process, set once by engine/build.py."""

    fused: bool = True  # off: the torch references run everywhere
    batch_invariant: bool = False  # a row's result may not depend on the other rows of a batch
    without: frozenset[str] = frozenset()  # single Triton kernels that the references replace


MODE = Mode()


def use_triton(x: torch.Tensor, kernel: str = "") -> bool:
    """True where the Triton twin of a kernel takes x."""
    return x.is_cuda and MODE.fused and kernel not in MODE.without


def cpu_kernels() -> bool:
    """True when the compiled CPU kernels are to run: they are switched on and can run here."""
    return MODE.fused and _cpu_kernels_run()


@functools.cache
def _cpu_kernels_run() -> bool:
    """numba is installed and the CPU has AVX2."""
    if importlib.util.find_spec("numba") is None:
        return False
    from tokenmill.kernels.cpu import build

    return build.supported()


@functools.cache
def compiled(name: str) -> Any:
    """The module kernels/cpu/<name>.py, imported on first use."""
    return importlib.import_module(f"tokenmill.kernels.cpu.{name}")


@functools.cache
def triton_kernels(name: str) -> Any:
    """The module kernels/gpu/<name>.py, imported on first use."""
    return importlib.import_module(f"tokenmill.kernels.gpu.{name}")
