"""Seconds from the start of a process to its first token, phase by phase."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Benchmark, Report, child, run_child
from tokenmill import console
from tokenmill.bench.commands.throughput import model_path
from tokenmill.bench.workload import BenchError
from tokenmill.core.config import ModelConfig
from tokenmill.core.flags import SWITCH, count, setting
from tokenmill.core.requests import Generate, Request
from tokenmill.core.types import GrammarVocab, SamplingParams
from tokenmill.settings import (
    CACHE,
    EXECUTION,
    MODEL,
    PARALLEL,
    SCHEDULER,
    Settings,
    SettingsError,
)

if TYPE_CHECKING:  # a start imports what it needs within the phases
    from tokenmill.engine.build import BuiltEngine

ENGINE = (*MODEL, *CACHE, *SCHEDULER, *EXECUTION, *PARALLEL)
PROMPT_TOKENS = 32
KERNEL_CACHES = ("TRITON_CACHE_DIR", "TOKENMILL_CACHE")
_ROOM = 1.1  # of a folder's bytes, that a file system must have


@dataclass(frozen=True)
class Options:
    starts: int = setting(3, "Measured starts with warm kernels; the median counts.", count(1))
    cold_kernels: bool = setting(
        False, "Measure one start with empty caches of compiled kernels, too."
    )
    random_folder: str | None = setting(
        None, "Shape or config.json of a model that is written to disk with random weights."
    )
    once: bool = setting(False, "Be one of the starts, and print when each phase ended.", SWITCH)


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


def run(options: Options, settings: Settings) -> Report:
    """Seconds from the start of a process to its first token, phase by phase.

    Each start is an engine in a process of its own, which answers one prompt of 32 tokens. Weights
    come from the page cache: a start before the first that counts reads them, and compiles kernels
    that are not in the cache. With --cold-kernels that one counts as well, and finds no compiled
    kernel. What weights are read at stands beside plain reads and copies of as many threads.

    --random-folder writes a model of a shape of tokenmill, or of a config.json, with random weights
    to /dev/shm or to the folder for temporary files, and deletes it at the end.

    python -m benchmarks.start --random-folder llama3.1-8b --device cuda --cold-kernels
    python -m benchmarks.start --model ./my-model --starts 5
    """
    if options.once:
        return start_once(settings)
    with ExitStack() as stack:
        folder = stack.enter_context(_model_folder(options.random_folder, settings))
        environ = {}
        if options.cold_kernels:
            empty = stack.enter_context(tempfile.TemporaryDirectory(prefix="tokenmill-kernels-"))
            environ = {name: f"{empty}/{name}" for name in KERNEL_CACHES}
        starts = list(_starts(options.starts, settings, folder, environ))
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
        "random_folder": options.random_folder,
        **warm[-1].facts,
    }


def show(report: Report) -> None:
    """A row for each phase, and a column for each start."""
    if "starts" not in report:
        return
    starts = report["starts"]
    rows = [["seconds", *(f"{one['kernels']} {index + 1}" for index, one in enumerate(starts))]]
    names = starts[0]["phases"]
    rows += [[name, *(f"{one['phases'][name]:.2f}" for one in starts)] for name in names]
    rows.append(["first token after", *(f"{one['seconds']:.2f}" for one in starts)])
    console.print_table(rows)
    bounds = {"weights": "weights", "read": "a plain read", "copy": "a plain copy"}
    rates = {name: report[f"{key}_gb_s"] for key, name in bounds.items()}
    shown = ", ".join(f"{name} {rate:.2f}" for name, rate in rates.items() if rate is not None)
    console.out.print(f"GB/s: {shown}")


@contextmanager
def _model_folder(shape: str | None, settings: Settings) -> Iterator[Path]:
    """What is loaded; the folder of random weights is there as long as it is used."""
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


def _starts(count: int, settings: Settings, path: Path, environ: dict[str, str]) -> Iterator[Start]:
    """The cold one, if it counts, and the warm ones, each noted as it is known."""
    own = Settings(settings.values | {"model": str(path)})
    command = child("start", "--once", "--json", *own.flags(ENGINE))
    for index in range(count + 1):
        begin_ns = time.monotonic_ns()
        facts = run_child(command, **environ)
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


def start_once(settings: Settings) -> Report:
    """Start an engine, answer one prompt, and tell when each phase ended."""
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
    report = {"stamps": stamps, **_facts(built)}
    built.close()
    return report


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
    built.engine.submit(Request("first", Generate([0] * length, sampling)))
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


def read_rate(files: Sequence[Path], most_bytes: int = 2**32) -> float:
    """Bytes/s at which the loader's threads read these files into memory, and leave them there."""
    from tokenmill.models.checkpoints.upload import NUM_THREADS, PIECE_BYTES

    begins = [(f, b) for f in files for b in range(0, f.stat().st_size, PIECE_BYTES)]
    pieces = begins[: most_bytes // PIECE_BYTES]
    own = threading.local()

    def read(piece: tuple[Path, int]) -> int:
        if not hasattr(own, "buffer"):
            own.buffer = bytearray(PIECE_BYTES)
        with piece[0].open("rb", buffering=0) as file:
            return os.preadv(file.fileno(), [own.buffer], piece[1])

    with ThreadPoolExecutor(NUM_THREADS) as threads:
        list(threads.map(read, pieces[:NUM_THREADS]))  # the buffers' pages
        begin = time.monotonic()
        total = sum(threads.map(read, pieces))
        return total / (time.monotonic() - begin)


def copy_rate(num_copies: int = 64) -> float:
    """Bytes/s of copies from one pinned buffer to the GPU."""
    import torch

    from tokenmill.models.checkpoints.upload import PIECE_BYTES

    source = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    target.copy_(source)
    torch.cuda.synchronize()
    begin = time.monotonic()
    for _ in range(num_copies):
        target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return num_copies * PIECE_BYTES / (time.monotonic() - begin)


BENCHMARK = Benchmark("start", Options, run, show, ENGINE)

if __name__ == "__main__":
    BENCHMARK.main()
