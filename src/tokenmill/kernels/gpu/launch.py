"""Launches of compiled kernels without what Triton checks again at each of them.

Triton compares every global that a kernel reads with what it was compiled with, makes strings of
its options and asks for hooks: 80 us of the host for a launch of 5. Nothing of that changes here
once a kernel is compiled. What decides which compiled form fits stays Triton's own: the types,
alignments and constants that its binder finds.
"""

from __future__ import annotations

from typing import Any, TypeVar

from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

K = TypeVar("K")


class _Run:
    """In place of a kernel's `run`."""

    def __init__(self, kernel: Any) -> None:
        self._kernel, self._first = kernel, kernel.run
        self._compiled: dict[Any, tuple[Any, Any, Any]] = {}  # launcher, function, metadata

    def __call__(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        if warmup or knobs.runtime.launch_enter_hook.calls:  # a profiler of Triton's own
            return self._first(*args, grid=grid, warmup=warmup, **kwargs)
        device = driver.active.get_current_device()
        bound, forms, options = self._kernel.device_caches[device][-1](*args, **kwargs)
        key = device, tuple(forms), tuple(options.items())
        found = self._compiled.get(key)
        if found is None:
            compiled = self._first(*args, grid=grid, warmup=False, **kwargs)
            self._compiled[key] = compiled.run, compiled.function, compiled.packed_metadata
            return compiled
        run, function, metadata = found
        stream = driver.active.get_current_stream(device)
        sizes = (*grid, 1, 1)[:3]
        run(*sizes, stream, function, metadata, None, None, None, *bound.values())
        return None


def quick(kernel: K) -> K:
    """A kernel whose launches are cheap for the host; the interpreter's stay as they are."""
    if isinstance(kernel, JITFunction):
        kernel.run = _Run(kernel)
    return kernel


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own, which kernels can call too, takes several us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not smaller; 0 stays 0."""
    return 1 << (n - 1).bit_length() if n else 0
