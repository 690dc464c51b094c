"""tokenmill bench frontend: the HTTP server around a simulated engine."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.console import fetch
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, ModelConfig, SchedulerConfig, ServerConfig
from tokenmill.core.types import TokenmillError
from tokenmill.settings import SETTINGS, Settings

NAME = "simulated"
STREAMS = (
    SETTINGS["model"],
    SETTINGS["num-streams"],
    SETTINGS["stream-tokens"],
    SETTINGS["step-ms"],
)
PANELS = {"Benchmark": (*STREAMS, SETTINGS["json-only"])}
PROMPT_TOKENS = 256  # room for the prompt of a stream
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
STOP_TIMEOUT_S = 30


def frontend(settings: Settings) -> None:
    """Streamed tokens per second of the HTTP server, without a model.

    The engine is simulated: every step takes the same time, and gives each
    stream one token. The client runs on the same machine.

    tokenmill bench frontend --num-streams 128
    """
    from tokenmill.bench.frontend_client import measure_frontend

    num_streams, num_tokens = settings.get("num-streams"), settings.get("stream-tokens")
    with simulated_server(settings) as (url, pid):
        console.note(f"{num_streams} streams of {num_tokens} tokens from {url}")
        report = measure_frontend(url, NAME, num_streams, num_tokens, pid)
    step_ms = settings.get("step-ms")
    report["offered_tok_s"] = 1000 * num_streams / step_ms if step_ms else None
    if not settings.get("json-only"):
        offered = report["offered_tok_s"]
        ceiling = "" if offered is None else f" of {offered:.0f} that the engine offers"
        console.out.print(
            f"{num_streams} streams: {report['tok_s']:.0f} tok/s{ceiling}; "
            f"required are {report['required_tok_s']}"
        )
    console.print_json(report)


@contextlib.contextmanager
def simulated_server(settings: Settings) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its URL and its process id."""
    process = subprocess.Popen(
        _child("frontend-server", settings), stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        url = process.stdout.readline().strip()
        if not url:
            raise TokenmillError(f"the simulated server ended with status {process.wait()}")
        yield url, process.pid
    finally:
        process.terminate()
        try:
            process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()


def run_server(settings: Settings) -> None:
    """Serve the simulated engine on a free port and print the URL."""
    path = fetch(settings.build(ModelConfig).model)
    from tokenmill.api.server import serve
    from tokenmill.text.tokenizer import load_tokenizer

    config = ServerConfig(port=0, max_concurrency=2 * settings.get("num-streams"))
    worker = _child("frontend-worker", Settings(settings.values | {"model": str(path)}))
    serve(worker, load_tokenizer(path), config, NAME, lambda url, facts: print(url, flush=True))


def run_worker(settings: Settings, address: Annotated[str, typer.Option("--address")]) -> None:
    """Own an engine whose model answers every prompt with the same text."""
    from tokenmill.engine.engine import LanguageEngine
    from tokenmill.plan.simulator import SimRunner
    from tokenmill.sched.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.workers.link import ModelFacts
    from tokenmill.workers.worker_process import run_worker as run

    tokenizer = load_tokenizer(settings.build(ModelConfig).model)
    num_streams, step_s = settings.get("num-streams"), settings.get("step-ms") / 1e3
    longest = PROMPT_TOKENS + settings.get("stream-tokens")
    block_size = DEFAULT_BLOCK_SIZE
    num_blocks = num_streams * (longest // block_size + 1)
    limits = SchedulerConfig(max_num_seqs=num_streams, max_model_len=longest)
    scheduler = Scheduler(limits, BlockPool(num_blocks, block_size), frozenset())
    runner = SimRunner(tokenizer.encode(TEXT), lambda batch: step_s)
    facts = ModelFacts(longest, tokenizer.vocab_size, num_blocks, block_size, "none")
    run(LanguageEngine(scheduler, runner), address, facts)


def _child(role: str, settings: Settings) -> list[str]:
    command_line = [sys.executable, "-P", "-m", "tokenmill", "bench", role]
    return [*command_line, *settings.flags(STREAMS)]


COMMANDS = (
    BenchCommand("frontend", frontend, PANELS),
    BenchCommand("frontend-server", run_server, {"Benchmark": STREAMS}, hidden=True),
    BenchCommand("frontend-worker", run_worker, {"Benchmark": STREAMS}, hidden=True),
)
