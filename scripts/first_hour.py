"""What a stranger does in the first hour, a line a step; a failed step says what it saw.

    python scripts/first_hour.py          # a clone, make, README, uv, the wheel and full disks
    python scripts/first_hour.py --here   # README's commands and the terminal, as installed here

Commands run on a pseudo-terminal of 80 columns, where each must end well, keep within the width and
show no JSON. All of it takes a quarter of an hour and a few GB in a temporary folder.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import pty
import re
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import time
import urllib.request
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from page_outputs import ROOT, blocks_of

COLUMNS, ROWS = 80, 30
CONTROL = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SERVED = "http://127.0.0.1:8000"
STARTED_S = 180
LOOKED_AT = (
    ["tokenmill"],
    ["tokenmill", "serve", "--help"],
    ["tokenmill", "models"],
    ["tokenmill", "recipes"],
    ["tokenmill", "config"],
    ["tokenmill", "bench", "published"],
    ["tokenmill", "plan", "predict"],
)
MEASURED = ["tokenmill", "bench", "endpoint", "--num-requests", "4", "--output-len", "4"]


class Hour:
    """The steps so far: their environment, and how many failed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {key: value for key, value in os.environ.items() if key[:10] != "TOKENMILL_"}
        self.env |= {"TERM": "xterm-256color"}
        self.num_failed = 0

    def step(self, name: str, work: Callable[[], str]) -> bool:
        """Do it and print its line; `work` returns what was wrong."""
        begin = time.monotonic()
        fault = work()
        verdict = "FAILED" if fault else "ok"
        print(f"{verdict:6} {time.monotonic() - begin:6.1f} s  {name}", flush=True)
        if fault:
            self.num_failed += 1
            print(fault, flush=True)
        return not fault

    def run(self, *words: str) -> bool:
        """A step that is one command, without a terminal."""
        return self.step(" ".join(words), lambda: self._silent(words))

    def type(self, words: Sequence[str]) -> bool:
        """A step that is one command on a terminal of 80 columns."""
        return self.step(" ".join(words), lambda: on_terminal(words, self.folder, self.env))

    def _silent(self, words: Sequence[str]) -> str:
        done = subprocess.run(
            words, cwd=self.folder, env=self.env, text=True, capture_output=True, check=False
        )
        return (done.stdout + done.stderr)[-2000:] if done.returncode else ""

    def readme(self) -> None:
        """Its commands in their order, around a server on a free port."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.env |= {"TOKENMILL_URL": f"{url}/v1", "TOKENMILL_PORT": url.rpartition(":")[2]}
        blocks = [block for block in blocks_of(ROOT / "README.md") if "not run" not in block.marker]
        servers: list[subprocess.Popen[bytes]] = []
        log = self.folder / "served.log"
        try:
            for words in (words for block in blocks for words in block.commands):
                if words[:2] == ["tokenmill", "serve"]:
                    with log.open("wb") as file:
                        server = subprocess.Popen(
                            words, cwd=self.folder, env=self.env, stdout=file, stderr=file
                        )
                    servers.append(server)
                    self.step(" ".join(words), partial(answers, url, server, log))
                elif words[0] == "curl":
                    self.run(*(word.replace(SERVED, url) for word in (*words, "--fail")))
                else:
                    self.type(words)
            self.type(MEASURED)
        finally:
            for server in servers:
                self.step("SIGTERM to the server", partial(ended, server))
            del self.env["TOKENMILL_URL"], self.env["TOKENMILL_PORT"]


def ended(server: subprocess.Popen[bytes]) -> str:
    server.terminate()
    status = server.wait(STARTED_S)
    return f"exit status {status}" if status else ""


def answers(url: str, server: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until a server is healthy."""
    deadline = time.monotonic() + STARTED_S
    while server.poll() is None and time.monotonic() < deadline:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return ""
    return log.read_text(errors="replace")[-2000:]


def on_terminal(words: Sequence[str], folder: Path, env: dict[str, str]) -> str:
    """Run a command where a user would, and look at what the terminal shows."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    with subprocess.Popen(
        words, cwd=folder, env=env, stdin=slave, stdout=slave, stderr=slave, start_new_session=True
    ) as process:
        os.close(slave)
        shown = b""
        try:
            while data := os.read(master, 1 << 16):
                shown += data
        except OSError:  # Linux says so where the last process has left the terminal
            pass
    os.close(master)
    text = CONTROL.sub("", shown.decode(errors="replace"))
    lines = [part for line in text.split("\n") for part in line.rstrip("\r").split("\r")]
    wide = [line for line in lines if len(line) > COLUMNS]
    if process.returncode not in (0, 2 if len(words) == 1 else 0):
        return f"exit status {process.returncode}\n{text[-2000:]}"
    if wide or [line for line in lines if line.startswith("{")]:
        return "\n".join(["wider than the terminal, or JSON:", *(wide or lines)[:5]])
    return ""


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--here", action="store_true", help="README and the terminal alone")
    here = parser.parse_args(arguments).here
    with tempfile.TemporaryDirectory() as folder:
        hour = Hour(Path(folder))
        binaries = Path(sys.executable).parent
        if not here:
            if not hour.run("git", "clone", "--quiet", str(ROOT), "clone"):
                return 1
            hour.folder /= "clone"
            if not hour.run("make", "setup"):
                return 1
            binaries = hour.folder / ".venv" / "bin"
            hour.env.pop("PYTHONPATH", None)
        hour.env["PATH"] = f"{binaries}:{hour.env['PATH']}"
        for words in LOOKED_AT:
            hour.type(words)
        hour.readme()
        if not here:
            hour.type(["make", "demo"])
            hour.env["UV_PROJECT_ENVIRONMENT"] = ".uv"
            if shutil.which("uv", path=hour.env["PATH"]):
                hour.run("uv", "sync", "--quiet", "--extra", "cpu")
                hour.run("uv", "run", "--extra", "cpu", "tokenmill", "generate", "The sea is")
            hour.run("make", "package")
            hour.run("python", "-m", "pytest", "tests/e2e/test_full_disk.py", "tests/clients")
        print(f"{hour.num_failed} steps failed" if hour.num_failed else "all steps went well")
    return 1 if hour.num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
