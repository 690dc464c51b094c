"""A Ray of this process alone: it listens at loopback, and nothing of it outlives us.

The module runs as a program, too: a process that ends what is left of Ray when we have ended, be it
by SIGKILL. Ray's own agents would wait a minute for its server.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

OBJECT_STORE_BYTES = 80 * 2**20  # Ray's least; nothing is stored there


@contextmanager
def local_ray() -> Iterator[dict[str, Any]]:
    """What ray.init() needs for it; `ray` is imported within the block and shut down there."""
    folder = os.path.realpath(tempfile.mkdtemp(prefix="tokenmill-ray-"))
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    own["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # its address is loopback's, as it is there
    command = [sys.executable, "-P", "-m", __name__, folder]
    os.environ.update(own)
    try:
        # In a session of its own: Ctrl-C is for us.
        with subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True):
            yield {
                "num_cpus": 0,
                "include_dashboard": False,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_temp_dir": folder,
            }
    finally:
        for name in own:
            os.environ.pop(name, None)


def main(folder: str) -> None:
    """Wait for the end of the process that has started this one; then end what Ray has left."""
    sys.stdin.read()
    while left := set(_holders(folder)) - {os.getppid()}:
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def _holders(folder: str) -> Iterator[int]:
    """Processes with an open file below a folder: all of Ray's write logs there."""
    for file in Path("/proc").glob("[0-9]*/fd/*"):
        with suppress(OSError):
            if os.readlink(file).startswith(f"{folder}/"):
                yield int(file.parts[2])


if __name__ == "__main__":
    main(sys.argv[1])
