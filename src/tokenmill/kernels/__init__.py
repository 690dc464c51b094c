"""Kernels: each file declares readable torch references; `gpu/` and `cpu/` hold their twins."""

from __future__ import annotations

import functools
import importlib.util
import inspect
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, ParamSpec, Protocol, TypeVar, cast

import torch

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(slots=True)
class Mode:
    """Switches of the whole process, set once by engine/choices.py."""

    fused: bool = True  # off: the torch references run everywhere
    batch_invariant: bool = False  # a row's result may not depend on the other rows of a batch
    without: frozenset[str] = frozenset()  # single Triton kernels that the references replace


MODE = Mode()


def on_gpu(x: torch.Tensor) -> bool:
    return x.is_cuda


def use_triton(x: torch.Tensor) -> bool:
    """True where the kernels of a GPU run on x."""
    return MODE.fused and on_gpu(x)


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


class Kernel(Protocol[P, R]):
    """What kernel() makes of a reference."""

    reference: Callable[P, R]
    twins: dict[str, Callable[P, R]]  # those that were called, by folder
    has_gpu: bool
    has_cpu: bool

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R: ...


Ask = Callable[..., Any]  # has some parameters of the reference: it is asked with what they are


def always() -> bool:
    return True


def kernel(
    gpu: Ask | None = None, cpu: Ask | None = None, device_of: Ask | None = None
) -> Callable[[Callable[P, R]], Kernel[P, R]]:
    """Declare a torch reference, and which calls a twin takes: gpu's or cpu's, where it says so.

    A twin has the name and the parameters of its reference, in the module of the same name in gpu/
    or cpu/, which is imported when it takes its first call; tests/kernels/test_twins.py compares
    them. The device is that of the first argument, or of the tensor that `device_of` returns.
    """

    def declare(reference: Callable[P, R]) -> Kernel[P, R]:
        name, module = reference.__name__, reference.__module__.rpartition(".")[2]
        twins: dict[str, Callable[P, R]] = {}
        on_cpu, tensor = _of_call(reference, cpu), _of_call(reference, device_of)
        takes = _of_call(reference, gpu)

        def load(folder: str) -> Callable[P, R]:
            if folder == "cpu" and not _cpu_kernels_run():
                return reference
            twins[folder] = getattr(import_module(f"{__name__}.{folder}.{module}"), name)
            return twins[folder]

        @functools.wraps(reference)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if MODE.fused:
                x: Any = args[0] if tensor is None else tensor(*args, **kwargs)
                if on_gpu(x):
                    if takes is not None and name not in MODE.without and takes(*args, **kwargs):
                        return (twins.get("gpu") or load("gpu"))(*args, **kwargs)
                elif on_cpu is not None and on_cpu(*args, **kwargs):
                    return (twins.get("cpu") or load("cpu"))(*args, **kwargs)
            return reference(*args, **kwargs)

        declared: Any = call
        declared.reference, declared.twins = reference, twins
        declared.has_gpu, declared.has_cpu = gpu is not None, cpu is not None
        return cast(Kernel[P, R], declared)

    return declare


def _of_call(reference: Callable[..., Any], ask: Ask | None) -> Ask | None:
    """ask(x, rounding) as a function of all parameters of the reference.

    It is compiled, since it is called with every call of a kernel.
    """
    if ask is None:
        return None
    own, wanted = inspect.signature(reference).parameters, list(inspect.signature(ask).parameters)
    assert own.keys() >= set(wanted), f"{reference.__name__}: asked for {wanted}"
    heads = [n if p.default is p.empty else f"{n}={p.default!r}" for n, p in own.items()]
    found: Ask = eval(f"lambda {', '.join(heads)}: ask({', '.join(wanted)})", {"ask": ask})
    return found


def prepare_triton() -> threading.Thread:
    """Import Triton in a thread, and do there what its first kernel would else wait for."""
    thread = threading.Thread(target=_prepare_triton, name="triton", daemon=True)
    thread.start()
    return thread


def _prepare_triton() -> None:
    with suppress(Exception):  # the first kernel meets it, and says so
        from tokenmill.kernels.gpu import launch

        launch.prepare()
