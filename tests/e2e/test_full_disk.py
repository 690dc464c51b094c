"""Files that are an extra never take the main job down: each is on a disk that is full."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tiny_configs import EXPERTS
from tiny_tokenizers import byte_level, save_folder
from tokenmill.bench.results.manifest import verify

GENEROUS_S = 180
DISK_BYTES = 256 * 1024
FLAGS = ("--port", "0", "--dtype", "fp32", "--device", "cpu", "--num-threads", "1")
SMALL = ("--random-weights", "--kv-cache-memory", "4MiB")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("only root may mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "tiny"
    save_folder(byte_level(), path, eos_token="<|im_end|>")
    (path / "config.json").write_text(json.dumps(EXPERTS | {"vocab_size": 422}))
    return path


def fill(disk: Path) -> None:
    with (disk / "filling").open("ab", buffering=0) as file:
        for size in (4096, 512, 64, 8, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass


class Serving:
    """A server whose stderr goes to a file."""

    def __init__(self, model: Path, stderr: Path, *flags: str, **variables: str) -> None:
        command = [sys.executable, "-m", "tokenmill", "serve", str(model), *FLAGS, *SMALL, *flags]
        self.said = stderr
        with stderr.open("ab") as file:
            env = os.environ | variables
            self.process = subprocess.Popen(command, stderr=file, stdout=file, env=env)

    def url(self) -> str:
        while not (found := re.search(r"served at (http\S+/v1)", self.said.read_text())):
            assert self.process.poll() is None, self.said.read_text()
            time.sleep(0.05)
        return found[1]

    def stop(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(GENEROUS_S)


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + GENEROUS_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def answer(url: str) -> int:
    """Tokens of one answer."""
    body = {"model": "tiny", "prompt": "one two", "max_tokens": 8, "ignore_eos": True}
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=GENEROUS_S) as response:
        report: dict[str, Any] = json.load(response)
    return int(report["usage"]["completion_tokens"])


def test_a_server_that_records_goes_on(disk: Path, model: Path, tmp_path: Path) -> None:
    """While it answers, after a worker's restart, and where the disk is full at the start."""
    server = Serving(model, tmp_path / "log", "--record", str(disk / "r.jsonl"))
    try:
        url = server.url()
        assert answer(url) == 8
        fill(disk)
        stops = "No space left on device; recording stops"
        until(lambda: answer(url) == 8 and stops in server.said.read_text())
        assert answer(url) == 8
        assert server.stop() == 0
    finally:
        server.process.kill()
    again = Serving(model, tmp_path / "log2", "--record", str(disk / "r.jsonl"))
    try:
        assert answer(again.url()) == 8
        assert again.stop() == 0
    finally:
        again.process.kill()
    assert again.said.read_text().count("recording stops") == 1


def test_a_server_serves_whose_log_is_on_a_full_disk(disk: Path, model: Path) -> None:
    """Its stderr, and the folder of its token."""
    (disk / "run").mkdir(mode=0o700)
    log = disk / "log"
    log.write_text("")
    server = Serving(model, log, XDG_RUNTIME_DIR=str(disk / "run"))
    try:
        url = server.url()
        fill(disk)
        assert [answer(url), answer(url)] == [8, 8]
        assert server.stop() == 0
    finally:
        server.process.kill()


def test_a_measurement_names_another_folder(disk: Path, model: Path, tmp_path: Path) -> None:
    server = Serving(model, tmp_path / "log")
    try:
        command = [sys.executable, "-m", "tokenmill", "bench", "endpoint", "--url", server.url()]
        command += [
            "--num-requests",
            "2",
            "--input-len",
            "8",
            "--output-len",
            "4",
            "--api",
            "completions",
        ]
        command += ["--output-dir", str(disk / "results")]
        (disk / "results").mkdir()
        fill(disk)
        env = os.environ | {"TMPDIR": str(tmp_path)}
        done = subprocess.run(command, capture_output=True, text=True, env=env)
    finally:
        server.stop()
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["points"][0]["num_completed"] == 2
    (folder,) = tmp_path.glob("tokenmill-result-*")
    assert json.loads((folder / "summary.json").read_text()) == report and verify(folder).ok
    said = done.stderr.replace("\n", "")
    assert "results: No space left on device" in said and f"the result is in {folder}" in said
