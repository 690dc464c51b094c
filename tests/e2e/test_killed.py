"""A server that is killed leaves no process, no socket and no file behind, in whichever mode."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import pytest

from open_ports import elsewhere, listening
from tiny_configs import EXPERTS
from tiny_tokenizers import byte_level, save_folder

GENEROUS_S = 180  # a quiet machine needs two seconds
FLAGS = ("--port", "0", "--dtype", "fp32", "--device", "cpu", "--num-threads", "1")
SMALL = ("--random-weights", "--kv-cache-memory", "4MiB")
SOON_S = 30  # a quiet machine needs one
NUM_PROCESSES = 1 + 2 + 2 + 1  # the owner, two fronts, two ranks, and the one of grammars


class Killable:
    """A server, all that it has started, and the folder for its temporary files."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self._mark = f"TOKENMILL_TEST_MARK={uuid4().hex}"
        self.temporary = Path(tempfile.mkdtemp(prefix="t"))  # a socket's path has 107 bytes at most
        name, _, value = self._mark.partition("=")
        env = os.environ | {name: value, "TMPDIR": str(self.temporary)}
        command = [sys.executable, "-P", "-m", "tokenmill", "serve", str(folder), *FLAGS, *flags]
        self.process = subprocess.Popen([*command, *SMALL], stderr=subprocess.PIPE, env=env)

    def url(self) -> str:
        """Where it serves, once it does."""
        assert self.process.stderr is not None
        said = b""
        for line in self.process.stderr:
            said += line
            if found := re.search(rb"served at (http\S+)/v1", line):
                return found[1].decode()
        raise AssertionError(said.decode())

    def pids(self) -> list[int]:
        """Its processes, wherever they hang."""
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self._mark.encode() in (folder / "environ").read_bytes().split(b"\0"):
                    found.append(int(folder.name))
        return found


@contextmanager
def killable(folder: Path, *flags: str) -> Iterator[Killable]:
    server = Killable(folder, *flags)
    try:
        yield server
        server.process.kill()
        server.process.wait()
        until(lambda: not server.pids() and not list(server.temporary.iterdir()))
    finally:
        for pid in server.pids():
            os.kill(pid, signal.SIGKILL)
        server.process.wait()
        assert server.process.stderr is not None
        server.process.stderr.close()
        shutil.rmtree(server.temporary, ignore_errors=True)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("killed") / "tiny"
    save_folder(byte_level(), path, eos_token="<|im_end|>")
    (path / "config.json").write_text(json.dumps(EXPERTS | {"vocab_size": 422}))
    return path


def test_fronts_workers_and_ranks_end_with_their_owner(folder: Path) -> None:
    with killable(folder, "--fronts", "2", "--tp", "2") as server:
        port = int(server.url().rpartition(":")[2])
        until(lambda: len(server.pids()) >= NUM_PROCESSES)
        pids = server.pids()
        assert len(pids) == NUM_PROCESSES
        ports = listening(pids)
        assert ("127.0.0.1", port) in ports and len(ports) == 1 + 2  # gloo has one in each rank
        assert elsewhere(pids) == set()


def test_a_worker_ends_with_its_owner_while_it_starts(folder: Path) -> None:
    with killable(folder) as server:
        until(lambda: len(server.pids()) == 2 and any(server.temporary.iterdir()))


def test_ray_ends_with_its_owner(folder: Path) -> None:
    """Not when its agents miss their server: that takes a minute."""
    with killable(folder, "--placement", "ray") as server:
        server.url()
        commands = [Path(f"/proc/{pid}/cmdline").read_bytes() for pid in server.pids()]
        assert any(b"raylet" in command for command in commands)
        assert list(server.temporary.glob("tokenmill-ray-*"))
        assert elsewhere(server.pids()) == set()
        killed_s = time.monotonic()
    assert time.monotonic() - killed_s < SOON_S
