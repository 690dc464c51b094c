"""Offline throughput beside other engines: the same requests, token by token, in turns."""

from __future__ import annotations

import importlib.util
import json
import os
import selectors
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import Benchmark, Report, command, environment, parse, run_child
from tokenmill import console
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.options import BenchConfig
from tokenmill.bench.workload import BenchError, Cell, make_cells, make_prompts
from tokenmill.core.config import ModelConfig
from tokenmill.core.flags import count, setting
from tokenmill.core.installation import package_version
from tokenmill.engine.choices import choose_device
from tokenmill.models.checkpoints.weights import read_spec
from tokenmill.settings import CACHE, EXECUTION, MODEL, SCHEDULER, Settings, SettingsError, without

OURS = "tokenmill"
PEERS = {  # by name: the module that is imported, and the package that has it
    "transformers": ("transformers", "transformers"),
    "llama.cpp": ("xllamacpp", "xllamacpp"),
    "openvino": ("openvino_genai", "openvino-genai"),
    "ctranslate2": ("ctranslate2", "ctranslate2"),
    "vllm": ("vllm", "vllm"),
}
ENGINE = (
    *without(BenchConfig, "rounds", "bench-seed"),
    *(*MODEL, *CACHE, *SCHEDULER, *EXECUTION),
)
LOAD_TIMEOUT_S, RUN_TIMEOUT_S = 600, 900
_OMP_POLICY = "OMP_WAIT_POLICY"  # "passive" more than halves llama.cpp
_GPU = "--random-weights --device cuda --model"
_FP8 = f"{_GPU} llama3.1-8b --dtype fp8 --kv-cache-dtype fp8"
ROWS = {  # of the table in docs/benchmarking.md
    "8b": f"{_GPU} llama3.1-8b --dtype bf16 --lengths llama3.1-8b --num-prompts 2000 "
    "--output-len 128",
    "8b-fp8": f"{_FP8} --lengths llama3.1-8b --num-prompts 2000 --output-len 128",
    "8b-fp8-long": f"{_FP8} --lengths uniform:1000-1000 --num-prompts 1000 --output-len 1000",
    "0.6b": f"{_GPU} qwen3-0.6b --dtype bf16 --lengths uniform:100-1024 --num-prompts 256",
    "14b": f"{_GPU} qwen3-14b --dtype bf16 --lengths uniform:100-1024 --num-prompts 256",
    "30b-a3b": f"{_GPU} qwen3-30b-a3b --dtype bf16 --lengths uniform:1024-1024 "
    "--num-prompts 1024 --output-len 1024",
}


@dataclass(frozen=True)
class Options:
    rows: str = setting("", f"Rows of the documentation's table, by commas: {', '.join(ROWS)}.")
    skip: tuple[str, ...] = setting(
        (), "Peer to leave out; several by commas.", listed=True, repeated=True
    )
    site: str = setting("", "Folder that vLLM is imported from, in its own process alone.")
    rounds: int | None = setting(
        None, "Turns of each engine (3; with --lengths 1); the median counts.", count(1, 100)
    )


def run(options: Options, settings: Settings) -> Report:
    """Tokens/s of the cells of `bench throughput`, or of --lengths, and of each installed peer.

    Each engine is a process of its own. Prompts are the same tokens for all; prefix caches are off,
    decoding is greedy and goes on past the end of a text. Ours stands beside its ceiling. On a CPU
    all peers stay loaded and take turns; on a GPU an engine starts when the one before has ended.
    With --random-weights all sides have random weights.

    python -m benchmarks.peers --skip transformers
    python -m benchmarks.peers --rows 14b,8b-fp8 --site VLLM
    """
    if unknown := sorted(set(options.skip) - PEERS.keys()):
        raise SettingsError(f"--skip {unknown[0]}: no such peer; there are {', '.join(PEERS)}")
    asked = {"": settings}
    if options.rows:
        names = options.rows.split(",")
        if strange := [name for name in names if name not in ROWS]:
            raise SettingsError(f"--rows {strange[0]}: no such row; there are {', '.join(ROWS)}")
        asked = {f"{name} ": parse(ENGINE, ROWS[name].split()) for name in names}
    cells: Report = {}
    for name, one in asked.items():
        cells |= {f"{name}{cell}": found for cell, found in measure(options, one).items()}
    return {"cells": cells}


def measure(options: Options, settings: Settings) -> Report:
    """Figures by cell; `ratio` is ours over the best peer's."""
    model = settings.build(ModelConfig)
    config = settings.build(BenchConfig)
    cells, on_gpu = make_cells(config), choose_device(model) == "cuda"
    vocab_size = read_spec(model_path(model)).vocab_size
    peers = [Peer(name, model, options) for name in PEERS]
    rates: dict[str, dict[str, list[float]]] = {cell.name: {} for cell in cells}
    ceilings: dict[str, float] = {}

    def note(cell: str, name: str, tok_s: float) -> None:
        rates[cell].setdefault(name, []).append(tok_s)
        console.note(f"{cell}, {name}: {tok_s:,.1f} tok/s")

    with ExitStack() as stack:
        for number in range(options.rounds or config.num_rounds):
            for cell, figures in _run_ours(settings, number).items():
                ceilings[cell] = figures["ceiling_tok_s"]
                note(cell, OURS, figures["tok_s"])
            for peer in (peer for peer in peers if not peer.fault):
                stack.callback(peer.close)
                try:
                    for each in cells:
                        note(each.name, peer.name, peer.run(each, number, vocab_size))
                except BenchError as error:
                    peer.fault = str(error)
                if on_gpu or peer.fault:
                    peer.close()
    absent = {peer.name: peer.fault for peer in peers if peer.fault}
    return {name: _figures(runs, ceilings[name], absent) for name, runs in rates.items()}


def _run_ours(settings: Settings, number: int) -> Report:
    """Figures of `bench throughput` in a process of its own, by cell."""
    seed = [] if "lengths" in settings else ["--bench-seed", str(number)]
    flags = ["--json", "--rounds", "1", *seed, *settings.flags(ENGINE)]
    report = run_child(command("bench", "throughput", *flags))
    return {cell: by_engine[OURS] for cell, by_engine in report["cells"].items()}


def _figures(runs: dict[str, list[float]], ceiling: float, absent: dict[str, str]) -> Report:
    medians = {name: round(median(each), 2) for name, each in runs.items()}
    others = [rate for name, rate in medians.items() if name != OURS]
    return {
        "tok_s": medians,
        "tok_s_runs": {name: [round(rate, 2) for rate in each] for name, each in runs.items()},
        "ceiling_tok_s": ceiling,
        "of_ceiling": round(medians[OURS] / ceiling, 3),
        "ratio": round(medians[OURS] / max(others), 3) if others else None,
        "versions": {name: package_version(PEERS[name][1]) for name in runs if name != OURS},
        "absent": absent,
    }


def show(report: Report) -> None:
    for cell, found in report["cells"].items():
        rates = ", ".join(f"{name} {rate:,.1f}" for name, rate in found["tok_s"].items())
        ratio = f"; {found['ratio']:.2f}x the best peer" if found["ratio"] else "; no peer ran"
        console.out.print(
            f"{cell}: tok/s {rates}; ceiling ~{found['ceiling_tok_s']:,.0f} "
            f"({found['of_ceiling']:.0%}){ratio}"
        )
    for name, reason in found["absent"].items():
        console.out.print(f"{name}: {reason}", markup=False)


class Peer:
    """An engine in a process of its own, which starts with its first run; `fault` ends it."""

    def __init__(self, name: str, model: ModelConfig, options: Options) -> None:
        module, package = PEERS[name]
        self.name, self.fault = name, ""
        self._model, self._site = model, options.site if name == "vllm" else ""
        self._warm: set[str] = set()
        self._process: subprocess.Popen[str] | None = None
        if name in options.skip:
            self.fault = "left out by --skip"
        elif not self._site and importlib.util.find_spec(module) is None:
            self.fault = f"not installed (pip install {package})"

    def run(self, cell: Cell, number: int, vocab_size: int) -> float:
        """Tokens/s of a round, timed by the peer, after a short one of each cell to warm up."""
        if cell.name not in self._warm:
            self._generate(cell.warmup(), number, vocab_size)
            self._warm.add(cell.name)
        return cell.num_counted_tokens / self._generate(cell, number, vocab_size)

    def _generate(self, cell: Cell, number: int, vocab_size: int) -> float:
        process = self._process or self._start()
        assert process.stdin is not None
        task = {"prompts": make_prompts(cell, 0, number, vocab_size), "lens": cell.output_lens}
        try:
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
        except OSError:
            raise BenchError(self._last_words()) from None
        answer = self._receive(RUN_TIMEOUT_S)
        if answer["num_tokens"] != cell.output_lens:
            raise BenchError(f"{cell.name}: generated {answer['num_tokens'][:9]} tokens")
        return float(answer["seconds"])

    def _start(self) -> subprocess.Popen[str]:
        self._log = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        threads = self._model.num_threads or os.cpu_count() or 1
        facts: Report = {"dtype": self._model.dtype, "random": self._model.random_weights}
        facts |= {"gpu": choose_device(self._model) == "cuda", "threads": threads}
        runner, path = Path(__file__).with_name("peer_runners.py"), model_path(self._model)
        self._process = subprocess.Popen(
            [sys.executable, str(runner), self.name, str(path), json.dumps(facts)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=_environment(threads, self._site),
        )
        self._receive(LOAD_TIMEOUT_S)
        return self._process

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._log.close()
            self._process = None
            self._warm.clear()

    def _receive(self, timeout_s: float) -> dict[str, Any]:
        assert self._process is not None and self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise BenchError(f"no answer after {timeout_s:g} s")
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line else {"error": self._last_words()}
        if "error" in answer:
            raise BenchError(answer["error"])
        return answer

    def _last_words(self) -> str:
        assert self._process is not None
        status = self._process.wait()
        self._log.seek(0)
        lines = [line for line in self._log.read().splitlines() if line.strip()]
        return f"exit status {status}: {lines[-1] if lines else 'no message'}"


def _environment(num_threads: int, site: str) -> dict[str, str]:
    """The parent's, without thread tuning that suits this engine, and without the network."""
    kept = {name: value for name, value in environment().items() if name != _OMP_POLICY}
    return (
        kept
        | ({"PYTHONPATH": site} if site else {})
        | {
            "OMP_NUM_THREADS": str(num_threads),
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_USE_FLASHINFER_SAMPLER": "0",  # it would be compiled first
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in one process vLLM's own errors are seen
        }
    )


BENCHMARK = Benchmark("peers", Options, run, show, ENGINE)

if __name__ == "__main__":
    BENCHMARK.main()
