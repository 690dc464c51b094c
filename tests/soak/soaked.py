"""Servers that answer thousands of calls, some of which their clients abandon, and what is left."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import re
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from open_ports import descendants

HOOKS = Path(__file__).parent  # sitecustomize.py
GENEROUS_S = 180.0
PATIENCE_S = 30.0  # until processes that have nothing to do have ended
SETTLE_S = 0.5  # between two looks at what is open
ANSWER_S = 2.0  # within which all processes answer, if one has
CLIENTS = 4
JSON = {"content-type": "application/json"}


@dataclass(frozen=True)
class Held:
    """What the processes of a server have, while it is idle."""

    files: int  # open descriptors of all processes
    temporary: list[str]  # files below the temporary folder
    memory: dict[int, int]  # bytes that Python has allocated, by process
    places: dict[int, dict[str, int]]


class Soaked:
    """A server, all of whose processes tell how much memory they use."""

    def __init__(self, process: subprocess.Popen[str], folder: Path, address: str) -> None:
        self.process, self.address = process, address
        self._folder, self._asked = folder, 0

    def held(self, files: int | None = None) -> Held:
        """What it has once it is idle, waiting for a while until it has so few descriptors."""
        patience_s, last = time.monotonic() + PATIENCE_S, -1
        while (count := self._num_files()) != last or (
            files is not None and count > files and time.monotonic() < patience_s
        ):
            last = count
            time.sleep(SETTLE_S)
        temporary = sorted(str(p.relative_to(self._folder)) for p in self._below("tmp"))
        told = self._ask()
        memory = {pid: each["bytes"] for pid, each in told.items()}
        places = {pid: each.get("places", {}) for pid, each in told.items()}
        return Held(last, temporary, memory, places)

    def _below(self, name: str) -> list[Path]:
        return [path for path in (self._folder / name).rglob("*") if not path.is_dir()]

    def _num_files(self) -> int:
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in descendants(self.process.pid))

    def _ask(self) -> dict[int, Any]:
        """What the processes answer; one that was forked has no thread that would."""
        folder, mark = self._folder / "soak", f"-{self._asked}"
        (folder / f"ask{mark}").touch()
        self._asked += 1
        deadline_s, count = time.monotonic() + GENEROUS_S, 0
        while not count or len(list(folder.glob(f"[0-9]*{mark}"))) > count:
            assert time.monotonic() < deadline_s, "the server does not answer"
            count = len(list(folder.glob(f"[0-9]*{mark}")))
            time.sleep(ANSWER_S)
        told = {int(path.name.removesuffix(mark)): path for path in folder.glob(f"[0-9]*{mark}")}
        assert self.process.pid in told
        return {pid: json.loads(path.read_text()) for pid, path in told.items()}

    def call(self, path: str, body: Any, leave_after: int | None = None) -> bytes:
        """A call; its client may leave after so many bytes of the answer."""
        connection = http.client.HTTPConnection(self.address, timeout=GENEROUS_S)
        with contextlib.closing(connection):
            data = None if body is None else json.dumps(body)
            connection.request("GET" if body is None else "POST", path, data, JSON)
            if leave_after == 0:
                return b""
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            return answer.read(leave_after)

    def delete(self, path: str) -> None:
        connection = http.client.HTTPConnection(self.address, timeout=GENEROUS_S)
        with contextlib.closing(connection):
            connection.request("DELETE", path)
            answer = connection.getresponse()
            assert answer.status == 200, answer.read()
            answer.read()


Call = Callable[[Soaked, random.Random], None]


def soak(server: Soaked, call: Call, count: int, seed: int) -> None:
    """Make so many calls from several clients."""
    lock, numbers = threading.Lock(), iter(range(count))

    def client(number: int) -> None:
        source = random.Random(f"{seed} {number}")
        while True:
            with lock:
                if next(numbers, None) is None:
                    return
            call(server, source)

    with ThreadPoolExecutor(CLIENTS) as clients:
        for done in [clients.submit(client, number) for number in range(CLIENTS)]:
            done.result()


@contextlib.contextmanager
def soaked(folder: Path, arguments: Sequence[str], places: bool = False) -> Iterator[Soaked]:
    """`tokenmill serve` with these arguments, its temporary files in a folder of their own."""
    for name in ("tmp", "soak", "run"):
        (folder / name).mkdir()
    if places:
        (folder / "soak" / "places").touch()
    environment = os.environ | {
        "PYTHONPATH": f"{HOOKS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "TOKENMILL_SOAK": str(folder / "soak"),
        "TMPDIR": str(folder / "tmp"),
        "XDG_RUNTIME_DIR": str(folder / "run"),
    }
    command = [sys.executable, "-P", "-m", "tokenmill", "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        try:
            lines: list[str] = []
            found = None
            while found is None:
                lines.append(process.stderr.readline())
                assert lines[-1], "".join(lines)
                found = re.search(r"is served at http://([\w.]+:\d+)/", lines[-1])
            threading.Thread(target=process.stderr.read, daemon=True).start()
            yield Soaked(process, folder, found[1])
        finally:
            process.terminate()
            process.wait(GENEROUS_S)
