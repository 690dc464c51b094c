"""Launches of compiled kernels without what Triton checks again, and compiling many at once.

Triton compares every global that a kernel reads with what it was compiled with, makes strings of
its options and asks for hooks: 80 us of the host for a launch of 5. Nothing of that changes here
once a kernel is compiled. What decides which compiled form fits stays Triton's own: the types,
alignments and constants that its binder finds.

A start on a machine without compiled kernels would wait for one after the other. compile_ahead()
runs the warm-up without launching anything, so that all kernels are known at once. Processes
compile them, since much of a compilation holds the interpreter's lock, and leave them in Triton's
cache on disk. They are forks: what is to be compiled need not be sent, and no GPU is needed for it.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import hashlib
import logging
import os
import signal
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
import triton
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.runtime import cache
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

K = TypeVar("K")
MOST_PROCESSES = 16
COMPILE_SECONDS = 300.0  # after which this process compiles what the others have not
_INDEX_BYTES = 4
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
        if (ahead := _AHEAD.get()) is not None:
            # What is compiled is not launched either: its inputs may be another's, not launched.
            if found is None and (self, key) not in ahead:
                ahead.add((self, key))
                self._first(*args, grid=grid, warmup=True, **kwargs)
            return None
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


def prepare() -> None:
    """Let Triton hash all of itself, which is in the names of compiled kernels: some 460 MB."""
    cache.triton_key()


class _Zeroed(TorchDispatchMode):
    """New memory is zero: what a kernel would have written there may be an index."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in _EMPTY else result


def compile_ahead(run: Callable[[], None], key: object) -> int:
    """Compile in processes all kernels that `run` would launch and that are not compiled yet.

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
    tasks = _Tasks()
    with triton.AsyncCompileMode(tasks), tasks, _Zeroed():
        run()
    return len(asked)


class _Task(Future[Any]):
    """A kernel that is compiled, or found in Triton's cache, when it is asked for."""

    def __init__(self, compile_kernel: Callable[[], Any]) -> None:
        super().__init__()
        self.compile_kernel = compile_kernel

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            try:
                self.set_result(self.compile_kernel())
            except Exception as error:
                self.set_exception(error)
        return super().result(timeout)


class _Tasks(Executor):
    """What is to be compiled: known one by one, and done when all of it is known."""

    def __init__(self) -> None:
        self._tasks: list[_Task] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        self._tasks.append(_Task(functools.partial(fn, *args, **kwargs)))
        return self._tasks[-1]

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Every task ends here, as Triton waits for all: also what was asked before an error."""
        try:
            if error is None or isinstance(error, Exception):
                self._finish()
        except BaseException as interrupt:
            error = interrupt
            raise
        finally:
            for task in self._tasks:
                if not task.done():
                    task.set_exception(error)

    def _finish(self) -> None:
        """Compile everything in processes, then load it here."""
        waiting = [task for task in self._tasks if not task.done()]
        try:
            compile_in_processes([task.compile_kernel for task in waiting])
        except OSError as error:
            _log.warning("fewer processes than planned compile kernels: %s", error)
        for task in waiting:
            _try(task.result)


def compile_in_processes(
    kernels: Sequence[Callable[[], Any]], seconds: float = COMPILE_SECONDS
) -> None:
    """Put kernels and what launches them into Triton's cache; those that fail are left out."""
    if not kernels:
        return
    read, write = os.pipe()  # the numbers of kernels that no process has taken yet
    os.set_blocking(write, False)  # what it has no room for is left out
    os.write(write, b"".join(i.to_bytes(_INDEX_BYTES) for i in range(len(kernels))))
    os.close(write)
    count = min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(kernels))
    processes: list[int] = []
    try:
        work = functools.partial(_compile_some, kernels, read)
        processes.extend(_fork(work) for _ in range(count))
    finally:
        os.close(read)
        _wait(processes, time.monotonic() + seconds)


def _compile_some(kernels: Sequence[Callable[[], Any]], numbers: int) -> None:
    while number := os.read(numbers, _INDEX_BYTES):
        _try(functools.partial(_compile_one, kernels[int.from_bytes(number)]))


def _compile_one(compile_kernel: Callable[[], Any]) -> None:
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)  # which some versions compile, too


def _try(call: Callable[[], object]) -> None:
    """Whoever needs the result meets the error."""
    try:
        call()
    except Exception as error:
        _log.debug("a kernel does not compile: %s", error)


def _fork(work: Callable[[], None]) -> int:
    """The id of a process that does the work and ends, without what Python does at the end."""
    with warnings.catch_warnings():  # of threads, whose locks a fork would wait for: none is needed
        warnings.simplefilter("ignore", DeprecationWarning)
        process = os.fork()
    return process or _do_and_exit(work)


def _do_and_exit(work: Callable[[], None]) -> NoReturn:
    try:
        gc.disable()  # nothing of the GPU may be freed here
        work()
    finally:
        os._exit(0)


def _wait(processes: list[int], deadline: float) -> None:
    """Until all have ended; those that have not by then are killed."""
    left = list(processes)
    while left:
        left = [process for process in left if os.waitpid(process, os.WNOHANG) == (0, 0)]
        if left and time.monotonic() > deadline:
            _log.warning("%d processes that compile kernels are stopped: they hang", len(left))
            for process in left:
                os.kill(process, signal.SIGKILL)
                os.waitpid(process, 0)
            return
        time.sleep(0.01)


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
