"""README's commands on a terminal of 80 columns, by the script that a stranger can run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import first_hour
import pytest

SCRIPT = Path(first_hour.__file__)


def test_the_first_hour_as_installed_here(smollm2_path: Path) -> None:
    """All steps of --here go well; a line a step."""
    env = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--here"], capture_output=True, text=True, env=env
    )
    assert done.returncode == 0, done.stdout + done.stderr
    *steps, last = done.stdout.splitlines()
    assert last == "all steps went well" and {line[:2] for line in steps} == {"ok"}
    for typed in ("tokenmill serve --workers 2", "curl ", "tokenmill status", "tokenmill generate"):
        assert [line for line in steps if typed in line]


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        ("print('x' * 80)", ""),
        ("print('x' * 81)", "wider than the terminal"),
        ("print('{}')", "wider than the terminal, or JSON"),
        ("raise SystemExit(3)", "exit status 3"),
        ("import os; print(os.get_terminal_size().columns); assert os.isatty(1)", ""),
    ],
)
def test_what_a_terminal_must_not_show(code: str, fault: str, tmp_path: Path) -> None:
    command = [sys.executable, "-c", code]
    found = first_hour.on_terminal(command, tmp_path, dict(os.environ))
    assert found.startswith(fault) and bool(found) == bool(fault)
