"""Launches of compiled kernels without what Triton checks again, and compiling many at once.

Triton compares every global that a kernel reads with what it was compiled with, makes strings of
its options and asks for hooks: 80 us of the host for a launch of 5. Nothing of that changes here
once a kernel is compiled. What decides which compiled form fits stays Triton's own: the types,
alignments and constants that its binder finds.

A start on a machine without compiled kernels would wait for one after the other. compile_ahead()
runs the warm-up without launching anything, so that all kernels are known at once, and threads
compile them: most of that is done outside of the interpreter's lock.
"""

from __future__ import annotations

import contextvars
import hashlib
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

K = TypeVar("K")
MOST_THREADS = 16
_AHEAD = contextvars.ContextVar[set[Any] | None]("compiled ahead", default=None)
_EMPTY = {
    *(torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.empty_strided),
    *(torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided),
}
_log = logging.getLogger(__name__)


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
            if (ahead := _AHEAD.get()) is not None:
                if (self, key) not in ahead:
                    ahead.add((self, key))
                    self._first(*args, grid=grid, warmup=True, **kwargs)
                return None
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


class _Zeroed(TorchDispatchMode):
    """New memory is zero: what a kernel would have written there may be an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in _EMPTY else result


def compile_ahead(run: Callable[[], None], key: object) -> int:
    """Compile in threads all kernels that `run` would launch and that are not compiled yet.

    Returns how many were asked for: none where a process with the same `key` has been here
    before, whose kernels lie in Triton's cache. `run` sees zeros where kernels would have written.
    """
    mark = _mark(key)
    if mark.exists():
        return 0
    try:
        # What is set in a context of its own ends with it, also where a kernel does not compile.
        count = contextvars.copy_context().run(_compile_all, run)
    except Exception as error:  # the warm-up meets it again, and says where
        _log.warning("kernels are compiled one by one, not ahead: %s", error)
        return 0
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()
    return count


def _compile_all(run: Callable[[], None]) -> int:
    asked: set[Any] = set()
    _AHEAD.set(asked)
    num_threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(num_threads) as threads, triton.AsyncCompileMode(threads), _Zeroed():
        run()
    return len(asked)


def _mark(key: object) -> Path:
    """A file in Triton's cache, which says that kernels as they are now were compiled for it."""
    digest = hashlib.sha256(f"{triton.__version__} {driver.active.get_current_target()}".encode())
    for file in sorted(Path(__file__).parent.rglob("*.py")):
        digest.update(file.read_bytes())
    digest.update(repr(key).encode())
    return Path(knobs.cache.dir) / f"tokenmill-{digest.hexdigest()[:32]}"


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up. Triton's own, which kernels can call too, takes several us."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The least power of two that is not smaller; 0 stays 0."""
    return 1 << (n - 1).bit_length() if n else 0
