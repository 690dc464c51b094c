"""Runs a benchmark in its own process and returns its JSON line, or its last error message."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any


def run_benchmark(
    command: Sequence[str], environ: Mapping[str, str] | None = None
) -> tuple[Any, str]:
    """The report and no error, or {} and the error; what the child writes to stderr passes on.

    `environ` joins the environment: what a process list must not show, such as keys.
    """
    last_line = ""
    environment = os.environ | dict(environ or {})
    with tempfile.TemporaryFile("w+", encoding="utf-8") as stdout:
        with subprocess.Popen(
            command, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment
        ) as process:
            assert process.stderr is not None
            for line in process.stderr:
                sys.stderr.write(line)
                last_line = line.strip() or last_line
        if process.returncode:
            reason = last_line.removeprefix("error: ")
            return {}, reason or f"exit status {process.returncode}"
        stdout.seek(0)
        return json.loads(stdout.read().splitlines()[-1]), ""
