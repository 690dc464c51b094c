"""Processes that work for this one: answers, limits, and what becomes of those that end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tokenmill.vision.work_process import Allowance, WorkEndedError, WorkProcesses
from vision import works

ALLOWED = Allowance(100.0, 2**26)


@pytest.fixture
def processes() -> Iterator[WorkProcesses]:
    made = WorkProcesses()
    yield made
    made.close()


def pid_of(processes: WorkProcesses) -> int:
    return int(processes.run(ALLOWED, works.process_id, b"")[0])


def test_works_answer_in_one_process_after_the_other(processes: WorkProcesses) -> None:
    large = os.urandom(3 * 2**20)
    assert processes.run(ALLOWED, works.echo, large, 1, "x") == [large, b"(1, 'x')", b""]
    with pytest.raises(ValueError, match="no such thing"):
        processes.run(ALLOWED, works.fail, b"", "no such thing")
    with pytest.raises(RuntimeError, match="LocalError: oddly"):
        processes.run(ALLOWED, works.fail_oddly, b"")
    first = pid_of(processes)
    assert first != os.getpid() and pid_of(processes) == first
    with processes.one(), processes.one():
        pass
    assert len(processes._idle) == 2


def test_a_work_has_the_memory_that_it_is_allowed(processes: WorkProcesses) -> None:
    before = pid_of(processes)
    with pytest.raises(MemoryError):
        processes.run(ALLOWED, works.allocate, b"", 2**27)
    assert processes.run(Allowance(100.0, 2**28), works.allocate, b"", 2**27) == [b"%d" % 2**27]
    with pytest.raises(MemoryError):
        processes.run(ALLOWED, works.allocate, b"", 2**27)
    assert pid_of(processes) == before


def test_a_work_that_crashes_or_is_late_ends_its_process(processes: WorkProcesses) -> None:
    before = pid_of(processes)
    with pytest.raises(WorkEndedError) as crashed:
        processes.run(ALLOWED, works.crash, b"")
    assert not crashed.value.is_late and pid_of(processes) != before
    with pytest.raises(WorkEndedError) as late:
        processes.run(Allowance(0.1, 2**26), works.hang, b"")
    assert late.value.is_late and pid_of(processes) > 0


def test_a_process_that_ends_while_it_is_idle_is_replaced(processes: WorkProcesses) -> None:
    before = pid_of(processes)
    os.kill(before, signal.SIGKILL)
    while processes._idle[0].is_alive:
        time.sleep(0.001)
    assert pid_of(processes) not in (before, os.getpid())


def test_busy_processes_end_with_the_others() -> None:
    processes = WorkProcesses()
    with ThreadPoolExecutor(1) as thread:
        hanging = thread.submit(processes.run, ALLOWED, works.hang, b"")
        while not processes._busy:
            time.sleep(0.001)
        processes.close()
        with contextlib.suppress(WorkEndedError):  # what it was told when its process ended
            hanging.result()
    assert not processes._idle and not processes._busy


SCRIPT = """
import pickle
from vision import works
from tokenmill.vision.work_process import Allowance, WorkProcess, _write
process = WorkProcess(0)  # without a guard: the script must not run again
print("pid", process.run(Allowance(100.0, 2**26), works.process_id, b"")[0].decode(), flush=True)
_write(process._process.stdin, [pickle.dumps((Allowance(100.0, 2**26), works.hang, ())), b""])
raise SystemExit
"""


def test_scripts_need_no_guard_and_take_their_processes_along(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-W", "ignore", str(script)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, "")
    ((_, pid),) = [line.split() for line in done.stdout.splitlines()]
    deadline_s = time.monotonic() + 180
    while Path(f"/proc/{pid}/cmdline").exists() and time.monotonic() < deadline_s:
        time.sleep(0.01)
    assert not Path(f"/proc/{pid}/cmdline").exists()
