"""Processes that work for this one: functions of modules over bytes, within time and memory.

A work that goes beyond its limits, or crashes, ends its process and concerns that work alone; the
next one has another process. The program's own module is not imported there, so that a script may
be one without a guard.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import resource
import select
import signal
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

Work = Callable[..., list[bytes]]
Parts = Sequence[bytes]
PIPE_BYTES = 2**20  # that one side may be ahead of the other
# Memory that one work gives back is the next one's: to ask for it anew costs half of the work.
ENVIRONMENT = {
    "MALLOC_MMAP_THRESHOLD_": str(2**25),
    "MALLOC_TRIM_THRESHOLD_": str(2**26),
    "OPENBLAS_NUM_THREADS": "1",
}
_COUNT, _LENGTH = struct.Struct("<i"), struct.Struct("<q")
_FAILED = -1  # in place of the number of parts: one follows, the exception
_CHILD = "from tokenmill.vision.work_process import main; main()"


@dataclass(frozen=True, slots=True)
class Allowance:
    """What one work may take, its imports included; the start of its process is not."""

    seconds: float  # by the clock
    memory_bytes: int  # beyond what the process has before


class WorkEndedError(Exception):
    """The process ended before the work did."""

    def __init__(self, is_late: bool) -> None:
        super().__init__("it took too long" if is_late else "its process ended")
        self.is_late = is_late


class WorkProcess:
    """One process; it does one work after the other, for one thread at a time."""

    def __init__(self, niceness: int) -> None:
        # -P: a folder named tokenmill in the working directory is not the package.
        command = [sys.executable, "-P", "-c", _CHILD, str(niceness)]
        path = os.pathsep.join(filter(None, sys.path))
        env = os.environ | {"PYTHONPATH": path} | ENVIRONMENT
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe)
        for file in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(AttributeError, OSError):  # not Linux, or too many are large
                fcntl.fcntl(file, fcntl.F_SETPIPE_SZ, PIPE_BYTES)  # type: ignore[arg-type]

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def run(self, allowed: Allowance, work: Work, data: bytes, *args: Any) -> list[bytes]:
        """What `work` makes of `data` and the rest, or its exception; WorkEndedError."""
        source, target = self._process.stdout, self._process.stdin
        assert source is not None and target is not None
        try:
            _write(target, [pickle.dumps((allowed, work, args)), data])
            return _read(source)
        except (EOFError, OSError):
            self.end()
            raise WorkEndedError(self._process.returncode == -signal.SIGALRM) from None

    def end(self) -> None:
        """End the process, whatever it does, and whichever thread waits for it."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        self.end()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # bytes that it never took
                    pipe.close()


class WorkProcesses:
    """Processes that are started when they are needed, for any number of threads."""

    def __init__(self, niceness: int = 0) -> None:
        self._niceness = niceness
        self._idle: list[WorkProcess] = []
        self._busy: set[WorkProcess] = set()
        self._lock = threading.Lock()
        self.is_closed = False

    @contextlib.contextmanager
    def one(self) -> Iterator[WorkProcess]:
        """A process for one work; OSError where none can be started."""
        process = self._take()
        try:
            yield process
        finally:
            with self._lock:
                self._busy.discard(process)
                keeps = process.is_alive and not self.is_closed
                if keeps:
                    self._idle.append(process)
            if not keeps:
                process.close()

    def run(self, allowed: Allowance, work: Work, data: bytes, *args: Any) -> list[bytes]:
        """What `work` makes of `data` and the rest, or its exception; WorkEndedError."""
        with self.one() as process:
            return process.run(allowed, work, data, *args)

    def close(self) -> None:
        with self._lock:
            self.is_closed = True
            idle, self._idle = self._idle, []
            for process in self._busy:
                process.end()
        for process in idle:
            process.close()

    def _take(self) -> WorkProcess:
        while True:
            with self._lock:
                process = self._idle.pop() if self._idle else None
                if process is not None and process.is_alive:
                    self._busy.add(process)
                    return process
            if process is None:
                break
            process.close()  # it ended while it was idle
        process = WorkProcess(self._niceness)
        with self._lock:
            self._busy.add(process)
        return process


def _write(target: IO[bytes], parts: Parts, count: int | None = None) -> None:
    target.write(_COUNT.pack(len(parts) if count is None else count))
    for part in parts:
        target.write(_LENGTH.pack(len(part)))
        target.write(part)
    target.flush()


def _read(source: IO[bytes]) -> list[bytes]:
    (count,) = _COUNT.unpack(_exactly(source, _COUNT.size))
    parts = []
    for _ in range(abs(count)):
        (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
        parts.append(_exactly(source, length))
    if count == _FAILED:
        raise pickle.loads(parts[0])
    return parts


def _exactly(source: IO[bytes], length: int) -> bytes:
    data = source.read(length)
    if len(data) < length:
        raise EOFError
    return data


# In the other process.


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who started it decides when it ends
    os.nice(int(sys.argv[1]))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    source, target = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints is no answer
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while True:
        try:
            order, data = _read(source)
        except EOFError:
            return
        try:
            count, parts = None, _answer(order, data)
        except Exception as error:
            count, parts = _FAILED, [_pickled(error)]
        signal.setitimer(signal.ITIMER_REAL, 0)
        _limit_memory(None)
        _write(target, parts, count)
        del order, data, parts


def _answer(order: bytes, data: bytes) -> list[bytes]:
    allowed, work, args = pickle.loads(order)
    signal.setitimer(signal.ITIMER_REAL, allowed.seconds)
    _limit_memory(_data_bytes() + allowed.memory_bytes)
    parts: list[bytes] = work(data, *args)
    return parts


def _limit_memory(num_bytes: int | None) -> None:
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]  # the operator's, if there is one
    if num_bytes is None or (hard != resource.RLIM_INFINITY and num_bytes > hard):
        num_bytes = hard
    resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, hard))


def _data_bytes() -> int:
    """What the process has now; where it cannot be told, what an interpreter has is little."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[5]) * resource.getpagesize()
    except OSError:
        return 0


def _pickled(error: Exception) -> bytes:
    try:
        return pickle.dumps(error)
    except Exception:
        return pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))


def _end_with_parent() -> None:
    """End the process, whatever it does, when nobody is at the other end any more."""
    poller = select.poll()
    poller.register(0, 0)  # told of a hang-up alone
    poller.poll()
    os._exit(0)
