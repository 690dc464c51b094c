"""Kernels: each file holds a torch reference and the dispatch; `cpu/` and `gpu/` the twins."""

from __future__ import annotations

import functools
import importlib.util
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


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
    from tokenmill.kernels.cpu import compiler

    return compiler.supported()


@functools.cache
def compiled(name: str) -> Any:
    """The module kernels/cpu/<name>.py, imported on first use."""
    return importlib.import_module(f"tokenmill.kernels.cpu.{name}")


@functools.cache
def triton_kernels(name: str) -> Any:
    """The module kernels/gpu/<name>.py, imported on first use."""
    return importlib.import_module(f"tokenmill.kernels.gpu.{name}")


def prepare_triton() -> threading.Thread:
    """Import Triton in a thread, and do there what its first kernel would else wait for."""
    thread = threading.Thread(target=_prepare_triton, name="triton", daemon=True)
    thread.start()
    return thread


def _prepare_triton() -> None:
    with suppress(Exception):  # the first kernel meets it, and says so
        triton_kernels("launch").prepare()


def gpu_twin(reference: Kernel) -> Kernel:
    """The Triton twin of a reference, whose signature it has: tests/kernels/test_twins.py."""
    return cast(Kernel, _twin(triton_kernels, reference))


def cpu_twin(reference: Kernel) -> Kernel:
    """The compiled CPU twin of a reference, with the same signature."""
    return cast(Kernel, _twin(compiled, reference))


@functools.cache
def _twin(modules: Callable[[str], Any], reference: Callable[..., Any]) -> Any:
    module = modules(reference.__module__.rpartition(".")[2])
    return getattr(module, reference.__name__.removesuffix("_reference"))
