"""tokenmill bench start."""

from __future__ import annotations

import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenmill import console
from tokenmill.bench.child_process import run_benchmark
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.types import GrammarVocab, Request, SamplingParams
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    SCHEDULER,
    SETTINGS,
    Settings,
    SettingsError,
)

if TYPE_CHECKING:
    from tokenmill.engine.build import BuiltEngine

ENGINE = (*MODEL, *CACHE, *SCHEDULER, *EXECUTION, *PARALLEL)
PANELS = {
    "Benchmark": tuple(
        SETTINGS[key] for key in ("starts", "cold-kernels", "random-folder", "json-only")
    ),
    "Model": MODEL,
    "KV cache": CACHE,
    "Scheduler": SCHEDULER,
    "Execution": EXECUTION,
    "Ranks": PARALLEL,
}
CHILD = "start-once"
PROMPT_TOKENS = 32
KERNEL_CACHES = ("TRITON_CACHE_DIR", "TOKENMILL_CACHE")
_ROOM = 1.1  # of a folder's bytes, that a file system must have


@dataclass(frozen=True, slots=True)
class Start:
    """One start: seconds of each phase in order, and what its process said."""

    kernels: str  # "cold" or "warm"
    phases: dict[str, float]
    facts: dict[str, Any]

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())

    @property
    def read_gb_s(self) -> float:
        return float(self.facts["file_bytes"] / self.phases["weights"] / 1e9)


def start(settings: Settings) -> None:
    """Seconds from the start of a process to its first token, phase by phase.

    Each start is an engine in a process of its own, which answers one prompt of
    32 tokens. Weights come from the page cache: a start before the first that
    counts reads them, and compiles kernels that are not in the cache. With
    --cold-kernels that one counts as well, and finds no compiled kernel. What
    weights are read at stands beside plain reads and copies of as many threads.

    --random-folder writes a model of a shape of this package, or of a
    config.json, with random weights to /dev/shm or to the folder for temporary
    files, and deletes it at the end.

    tokenmill bench start
    tokenmill bench start --random-folder llama3.1-8b --device cuda --cold-kernels
    tokenmill bench start --model ./my-model --starts 5
    """
    with ExitStack() as stack:
        folder = stack.enter_context(_model_folder(settings))
        environ = {}
        if settings.get("cold-kernels"):
            empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-kernels-"))
            environ = {name: f"{empty}/{name}" for name in KERNEL_CACHES}
        starts = list(_starts(settings, folder, environ))
    report = _report(starts, settings)
    if not settings.get("json-only"):
        _print(starts)
    console.print_json(report)


@contextmanager
def _model_folder(settings: Settings) -> Iterator[Path]:
    """What is loaded; the folder of random weights is there as long as it is used."""
    shape = settings.get("random-folder")
    if shape is None:
        yield model_path(settings.build(ModelConfig))
        return
    if "model" in settings or settings.get("random-weights"):
        raise SettingsError("--random-folder is the model: leave out --model and --random-weights")
    from tokenmill.engine.choices import choose_device
    from tokenmill.models.checkpoints.random_folder import write_random_folder
    from tokenmill.models.checkpoints.weights import read_spec

    config = model_path(ModelConfig(shape, random_weights=True))
    device = choose_device(settings.build(ModelConfig))
    place = _place(read_spec(config).weight_bytes(2))
    with tempfile.TemporaryDirectory(prefix="tokenmill-start-", dir=place) as name:
        begin = time.monotonic()
        num_bytes = write_random_folder(config, Path(name), device)
        seconds = time.monotonic() - begin
        console.note(f"{name}: {num_bytes / 1e9:.2f} GB written in {seconds:.1f} s")
        yield Path(name)


def _place(num_bytes: int) -> str:
    """Memory where there is room, else the disk."""
    places = [place for place in ("/dev/shm", tempfile.gettempdir()) if os.path.isdir(place)]
    for place in places:
        if shutil.disk_usage(place).free > _ROOM * num_bytes:
            return place
    raise BenchError(f"{' and '.join(places)} have no room for {num_bytes / 1e9:.1f} GB")


def _starts(settings: Settings, path: Path, environ: dict[str, str]) -> Iterator[Start]:
    """The cold one, if it counts, and the warm ones, each noted as it is known."""
    own = Settings(settings.values | {"model": str(path)})
    command = [sys.executable, "-P", "-m", "tokenmill", "bench", CHILD, *own.flags(ENGINE)]
    for index in range(settings.get("starts") + 1):
        begin_ns = time.monotonic_ns()
        facts, error = run_benchmark(command, environ)
        if error:
            raise BenchError(f"the engine did not start: {error}")
        kernels = "warm" if index else "cold" if environ else "first"
        one = Start(kernels, _phases(begin_ns, facts.pop("stamps")), facts)
        console.note(f"{kernels} kernels: first token after {one.seconds:.2f} s, {one.phases}")
        if kernels != "first":
            yield one


def _phases(begin_ns: int, stamps: list[tuple[str, int]]) -> dict[str, float]:
    """Seconds of each phase, from the ends of all in order."""
    begins = [begin_ns, *(end for _, end in stamps)]
    return {
        name: round((end - begin) / 1e9, 3)
        for (name, end), begin in zip(stamps, begins[:-1], strict=True)
    }


def _report(starts: list[Start], settings: Settings) -> dict[str, Any]:
    warm = [one for one in starts if one.kernels == "warm"]
    return {
        "first_token_s": round(statistics.median(one.seconds for one in warm), 3),
        "first_token_s_cold_kernels": max(
            (round(one.seconds, 3) for one in starts if one.kernels == "cold"), default=None
        ),
        "weights_gb_s": round(statistics.median(one.read_gb_s for one in warm), 3),
        "starts": [
            {"kernels": one.kernels, "seconds": round(one.seconds, 3), "phases": one.phases}
            for one in starts
        ],
        "random_folder": settings.get("random-folder"),
        **warm[-1].facts,
    }


def _print(starts: list[Start]) -> None:
    """A row for each phase, and a column for each start."""
    rows = [["seconds", *(f"{one.kernels} {index + 1}" for index, one in enumerate(starts))]]
    names = starts[0].phases
    rows += [[name, *(f"{one.phases[name]:.2f}" for one in starts)] for name in names]
    rows.append(["first token after", *(f"{one.seconds:.2f}" for one in starts)])
    rows.append(["weights, GB/s", *(f"{one.read_gb_s:.2f}" for one in starts)])
    for key, name in (("read_gb_s", "a plain read"), ("copy_gb_s", "a plain copy")):
        if starts[0].facts[key] is not None:
            rows.append([f"{name}, GB/s", *(f"{one.facts[key]:.2f}" for one in starts)])
    console.print_table(rows)


def start_once(settings: Settings) -> None:
    """Start an engine, answer one prompt, and print when each phase ended."""
    stamps: list[tuple[str, int]] = []

    def stamp(name: str) -> None:
        stamps.append((name, time.monotonic_ns()))

    from tokenmill.engine.build import build_engine
    from tokenmill.engine.choices import open_device, resolve_setup

    stamp("process and imports")
    setup = resolve_setup(settings.setup())
    open_device(setup.model.device)
    stamp("device")
    vocab = _vocab(Path(setup.model.model))
    stamp("tokenizer")
    built = build_engine(setup, vocab, on_phase=stamp)
    stamp("ready")
    _first_token(built)
    stamp("first token")
    console.print_json({"stamps": stamps, **_facts(built)})
    built.close()


def _vocab(path: Path) -> GrammarVocab | None:
    """As a worker of the server has it, where the model has a tokenizer that can be read here."""
    has_one = path.suffix == ".gguf" or (path / "tokenizer.json").exists()
    if not has_one or find_spec("tokenizers") is None:
        return None
    from tokenmill.text.tokenizer import load_tokenizer

    return load_tokenizer(path).grammar_vocab()


def _first_token(built: BuiltEngine) -> None:
    length = min(PROMPT_TOKENS, built.max_model_len - 1)
    sampling = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    built.engine.submit(Request("first", [0] * length, sampling))
    for _ in range(100):
        for output in built.engine.step():
            if output.error:
                raise BenchError(f"the prompt was not answered: {output.error}")
            if output.token_ids:
                return
    raise BenchError("the engine gave no token in 100 steps")


def _facts(built: BuiltEngine) -> dict[str, Any]:
    """What was loaded, and the rates that bound it on this machine."""
    from tokenmill.bench.ceiling import accelerator
    from tokenmill.models.checkpoints.upload import copy_rate, read_rate

    single = [built.path] if built.path.is_file() else []
    files = single or sorted(built.path.glob("*.safetensors"))
    return {
        "model": built.description,
        "dtype": built.dtype,
        "file_bytes": sum(file.stat().st_size for file in files),
        "weight_bytes": built.weight_bytes,
        "read_gb_s": round(read_rate(files) / 1e9, 3),
        "copy_gb_s": round(copy_rate() / 1e9, 3) if built.device == "cuda" else None,
        "accelerator": accelerator(built.device)["accelerator_model_name"],
    }


COMMANDS = (
    BenchCommand("start", start, PANELS),
    BenchCommand(CHILD, start_once, {"Engine": ENGINE}, hidden=True),
)
