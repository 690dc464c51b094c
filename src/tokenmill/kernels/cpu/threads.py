"""Threads for the compiled kernels: whoever is free takes the next task, nobody waits to be joined.

An OpenMP team waits for every member to arrive, so one thread that the operating system has put
aside stalls each launch for a whole time slice. Here the launching thread works through the tasks
itself, helpers join when they can, and a launch ends when its tasks are done. All of a launch that
helpers must agree on lies in one atomic word, the ticket: generation, number of tasks, next task.
"""

from __future__ import annotations

import functools
import struct
import threading
from array import array
from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, cfunc, types

from tokenmill.kernels.cpu.compiler import cached, compiled, emitted
from tokenmill.kernels.cpu.tiles import i64_at

# The control block: ticket at 0, tasks done at 64, kernel and args at 128; a cache line each,
# so that taking a task, finishing one and reading what to run do not disturb each other.
_POLLS_PER_YIELD = 64  # a yield is a system call; in between a helper sees a launch at once
_TASK_ELEMENTS = 4096  # of a row-wise kernel: a few microseconds
_SPINS = 200_000  # idle polls before a helper goes to sleep: a few milliseconds
_I64 = ir.IntType(64)
MAX_ARGS = 24  # of a kernel

_sched_yield = types.ExternalFunction("sched_yield", types.int32())


@emitted(types.int64(types.int64, types.int64))
def _fetch_add(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    return b.atomic_rmw("add", b.inttoptr(address, _I64.as_pointer()), value, "seq_cst")


@emitted(types.int64(types.int64, types.int64))
def _exchange(b: ir.IRBuilder, address: Any, value: Any) -> Any:
    return b.atomic_rmw("xchg", b.inttoptr(address, _I64.as_pointer()), value, "seq_cst")


@emitted(types.int64(types.int64))
def _load(b: ir.IRBuilder, address: Any) -> Any:
    pointer = b.inttoptr(address, _I64.as_pointer())
    return b.load_atomic(pointer, "seq_cst", 8)


@emitted(types.void())
def _pause(b: ir.IRBuilder) -> None:
    kind = ir.FunctionType(ir.VoidType(), [])
    b.call(b.module.declare_intrinsic("llvm.x86.sse2.pause", (), kind), [])


@emitted(types.void(types.int64, types.int64, types.int64))
def _call(b: ir.IRBuilder, kernel: Any, args_at: Any, task: Any) -> None:
    """Call the kernel at an address: void(int64 args, int64 task)."""
    kind = ir.FunctionType(ir.VoidType(), [_I64, _I64])
    b.call(b.inttoptr(kernel, kind.as_pointer()), [args_at, task])


@compiled
def _work(control: int) -> int:
    """Take tasks of the current launch until none is left; returns how many were done."""
    done = 0
    mask = (1 << 24) - 1
    while True:
        seen = _load(control)
        if seen & mask >= (seen >> 24) & mask:
            return done
        ticket = _fetch_add(control, 1)
        task = ticket & mask
        # A task taken keeps its launch, and so kernel and args, alive until it is counted done.
        if task >= (ticket >> 24) & mask:
            return done
        _call(_load(control + 128), _load(control + 136), task)
        _fetch_add(control + 64, 1)
        done += 1


@compiled
def _run(control: int, kernel: int, args: int, num_tasks: int) -> None:
    """Publish a launch, work on it, and wait for the tasks that helpers took."""
    generation = (_load(control) >> 48) + 1
    _exchange(control + 64, 0)
    _exchange(control + 128, kernel)
    _exchange(control + 136, args)
    _exchange(control, (generation << 48) | (num_tasks << 24))
    _work(control)
    while _load(control + 64) < num_tasks:
        pass


@compiled
def _run_all(control: int, table: int, count: int, width: int) -> None:
    """Run launches one after the other; a row of the table is kernel, tasks, args."""
    for row in range(table, table + count * width, width):
        kernel, num_tasks = _load(row), _load(row + 8)
        if num_tasks == 1:
            _call(kernel, row + 16, 0)
        else:
            _run(control, kernel, row + 16, num_tasks)


@compiled
def _help(control: int, spins: int) -> None:
    """A helper's watch: work when there is work, return after `spins` idle polls."""
    idle = 0
    while idle < spins:
        if _work(control) > 0:
            idle = 0
            continue
        idle += 1
        if idle % _POLLS_PER_YIELD == 0:
            _sched_yield()
        else:
            _pause()


class ThreadPool:
    """The launching thread and num_threads - 1 helpers around one control block."""

    def __init__(self) -> None:
        self._memory = np.zeros(32, np.int64)
        self._control = -(-self._memory.ctypes.data // 64) * 64
        self._lock = threading.Lock()
        self._wake: list[threading.Event] = []
        self._asleep: list[bool] = []

    @property
    def num_threads(self) -> int:
        return 1 + len(self._wake)

    def resize(self, num_threads: int) -> None:
        """Grow to num_threads; the pool never shrinks."""
        for index in range(len(self._wake), num_threads - 1):
            self._wake.append(threading.Event())
            self._asleep.append(False)
            threading.Thread(target=self._watch, args=(index,), daemon=True).start()

    def _watch(self, index: int) -> None:
        while True:
            _help(self._control, _SPINS)
            self._wake[index].clear()
            self._asleep[index] = True  # a launch that misses this simply runs with one thread less
            self._wake[index].wait()
            self._asleep[index] = False

    def run(self, kernel: int, args: int, num_tasks: int) -> None:
        with self._lock:
            self._wake_all()
            _run(self._control, kernel, args, num_tasks)

    def run_all(self, table: np.ndarray) -> None:
        """Launches [kernel, tasks, args...], each after the one before, in one call."""
        assert table.flags.c_contiguous and table.dtype == np.int64
        with self._lock:
            self._wake_all()
            _run_all(self._control, table.ctypes.data, len(table), table.strides[0])

    def _wake_all(self) -> None:
        for index, asleep in enumerate(self._asleep):
            if asleep:
                self._wake[index].set()


_POOL = ThreadPool()


def set_num_threads(num_threads: int) -> None:
    """Threads that the compiled kernels may use, the caller's included."""
    _POOL.resize(num_threads)


def get_num_threads() -> int:
    return _POOL.num_threads


def rows_of_task(num_rows: int, row_size: int) -> int:
    """Rows for each task of a row-wise kernel: some tasks a thread, none too small to hand over."""
    return max(-(-num_rows // (4 * get_num_threads())), -(-_TASK_ELEMENTS // row_size), 1)


def _entry(args_at: int, task: int) -> None:
    _body(carray(i64_at(args_at), (MAX_ARGS,)), task)  # type: ignore[name-defined]  # noqa: F821


def task_kernel(body: Callable[[Any, int], None]) -> Any:
    """Compile `body(args, task)`, args an int64 array, into a kernel for `launch`.

    numba finds it in the cache by the body's file and name; a closure would never be found.
    """
    code = _entry.__code__.replace(co_filename=body.__code__.co_filename)
    entry = FunctionType(code, globals() | {"_body": compiled(body)})
    entry.__name__ = entry.__qualname__ = f"{body.__qualname__}.entry"
    return cached(cfunc(types.void(types.int64, types.int64), nopython=True, cache=True), entry)


@functools.lru_cache(maxsize=1024)
def float_bits(value: float) -> int:
    """A double as the int64 argument that `tiles.as_float` turns back."""
    return int(struct.unpack("q", struct.pack("d", value))[0])


def launch_all(table: np.ndarray) -> None:
    """Run the launches of a table [launches, 2 + MAX_ARGS], see ThreadPool.run_all."""
    _POOL.run_all(table)


def launch(kernel: Any, num_tasks: int, *args: int) -> None:
    """Run `kernel`'s tasks 0..num_tasks-1 over its int64 args: addresses, sizes, float_bits."""
    slots = array("q", args)  # alive until the launch is over
    if num_tasks == 1:
        kernel.ctypes(slots.buffer_info()[0], 0)
    else:
        _POOL.run(kernel.address, slots.buffer_info()[0], num_tasks)
