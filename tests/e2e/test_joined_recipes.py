"""The commands of the recipes whose workers join a server, with a tiny model on this machine."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tiny_configs import write_config
from tiny_tokenizers import byte_level, save_folder

GENEROUS_S = 180.0
RECIPES = Path(__file__).parents[2] / "recipes"
MODEL = "/models/Llama-3.1-8B-Instruct"
TOKEN = "0123456789abcdef" * 2
SMALL = {
    "RANDOM_WEIGHTS": "true",
    "DTYPE": "fp32",
    "NUM_THREADS": "1",
    "KV_CACHE_MEMORY": "4MiB",
    "PORT": "0",
}


class Machine:
    """What the commands of a recipe find: programs, files and variables."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = save_folder(byte_level(), folder / "tiny", eos_token="<|im_end|>")
        write_config(self.model, vocab_size=422, hidden_size=64, intermediate_size=96)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port: int = probe.getsockname()[1]
        (folder / "secret").write_text(TOKEN)
        (folder / "bin").mkdir()
        self.program("tokenmill", f'exec {sys.executable} -P -m tokenmill "$@"')
        # Slurm's, with as many tasks as the job has nodes.
        self.program("srun", 'shift; "$@" & "$@" & wait')
        self.program("hostname", "echo 127.0.0.1 fe80::1")
        private = folder / "join-token"
        private.touch(0o600)
        private.write_text(TOKEN)
        (folder / "keys.txt").write_text("someone = sk-0\n")

    def program(self, name: str, body: str) -> None:
        path = self.folder / "bin" / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)

    def here(self, text: str) -> str:
        """A command with the names of this machine."""
        port, folder = f":{self.port}", str(self.folder)
        for name, own in (
            (MODEL, str(self.model)),
            (":7001", port),
            ("$POD_IP", "127.0.0.1"),
            ("tokenmill-join:", "127.0.0.1:"),
            ("10.0.0.1", "127.0.0.1"),
            ("0.0.0.0", "127.0.0.1"),
            ("/run/join/join-token", f"{folder}/secret"),
            ("/tmp/join-token", f"{folder}/copied-token"),
            ("/etc/tokenmill", folder),
            ("/opt/tokenmill/bin", f"{folder}/bin"),
        ):
            text = text.replace(name, own)
        return text

    @contextmanager
    def running(self, log: str, *command: str, **more: str) -> Iterator[subprocess.Popen[bytes]]:
        env = os.environ | {f"TOKENMILL_{name}": value for name, value in SMALL.items()} | more
        env |= {"PATH": f"{self.folder / 'bin'}:{os.environ['PATH']}", "TOKENMILL_API_KEY": "sk-0"}
        with (self.folder / log).open("ab") as file:
            process = subprocess.Popen(
                command, stderr=file, env=env, cwd=self.folder, start_new_session=True
            )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            finally:
                os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None

    def said(self, log: str) -> str:
        return (self.folder / log).read_text()


def call(url: str, path: str, body: Any = None) -> Any:
    head = {"Content-Type": "application/json", "Authorization": "Bearer sk-0"}
    data = None if body is None else json.dumps(body).encode()
    with urllib.request.urlopen(urllib.request.Request(url + path, data, head)) as answer:
        return json.load(answer)


def check(machine: Machine, num_workers: int) -> None:
    """The server of a recipe answers, and has its workers."""
    deadline_s = time.monotonic() + GENEROUS_S
    while not (found := re.search(r"served at (http\S+)/v1", machine.said("server"))):
        assert time.monotonic() < deadline_s, machine.said("server") + machine.said("worker")
        time.sleep(0.05)
    while len(call(found[1], "/workers")["workers"]) < num_workers:
        assert time.monotonic() < deadline_s, machine.said("server") + machine.said("worker")
        time.sleep(0.05)
    body = {"prompt": "Hello", "max_tokens": 5, "ignore_eos": True}
    assert call(found[1], "/v1/completions", body)["usage"]["completion_tokens"] == 5


def scripts_of(name: str) -> dict[str, str]:
    """The shell script of each container of a manifest."""
    text = (RECIPES / name).read_text(encoding="utf-8")
    found: dict[str, str] = {}

    def search(value: Any) -> None:
        if isinstance(value, dict):
            for container in value.get("containers", []):
                found[container["name"]] = container["args"][0]
            for inner in value.values():
                search(inner)

    for document in yaml.safe_load_all(text):
        search(document)
    return found


@pytest.mark.parametrize(("name", "num_workers"), [("joined-pods.yaml", 2), ("lws.yaml", 1)])
def test_pods(tmp_path: Path, name: str, num_workers: int) -> None:
    machine, scripts = Machine(tmp_path), scripts_of(name)
    group = {"LWS_GROUP_SIZE": "2", "LWS_LEADER_ADDRESS": f"127.0.0.1:{machine.port}"}
    more = group if name == "lws.yaml" else {}
    with ExitStack() as stack:
        for index, role in enumerate(("server", "worker")):
            own = more | ({"LWS_WORKER_INDEX": str(index)} if more else {})
            script = machine.here(scripts[role])
            stack.enter_context(machine.running(role, "/bin/sh", "-c", script, **own))
        check(machine, num_workers)
        assert (tmp_path / "copied-token").stat().st_mode & 0o777 == 0o600


def settings_of(unit: str) -> tuple[list[str], dict[str, str]]:
    """The command and the variables of a systemd unit."""
    lines = (RECIPES / unit).read_text(encoding="utf-8").splitlines()
    pairs = [line.split("=", 1) for line in lines if "=" in line and line[0] != "#"]
    (command,) = [value for key, value in pairs if key == "ExecStart"]
    variables = [value.split("=", 1) for key, value in pairs if key == "Environment"]
    return shlex.split(command), {name: value for name, value in variables}


def test_units_of_systemd(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    with ExitStack() as stack:
        for role, unit in (
            ("server", "tokenmill-server.service"),
            ("worker", "tokenmill-worker@.service"),
        ):
            command, variables = settings_of(unit)
            variables = {k: v.replace("%i", "0") for k, v in variables.items()}
            variables |= {"XDG_RUNTIME_DIR": str(tmp_path)}
            here = [machine.here(word) for word in command]
            process = stack.enter_context(machine.running(role, *here, **variables))
        check(machine, 1)
        process.terminate()
        assert process.wait(GENEROUS_S) == 0


def test_a_job_of_slurm(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    job = {"SLURM_JOB_ID": str(machine.port), "SLURM_SUBMIT_DIR": str(tmp_path)}
    job |= {"MODEL": str(machine.model), "SLURM_CPUS_PER_TASK": "1"}
    with machine.running("server", "bash", str(RECIPES / "slurm.sbatch"), **job) as script:
        (tmp_path / "worker").touch()
        check(machine, 2)
        (token,) = tmp_path.glob("join-token-*")
        assert token.stat().st_mode & 0o777 == 0o600
        script.terminate()
        assert script.wait(GENEROUS_S) == 0
    assert not token.exists()
