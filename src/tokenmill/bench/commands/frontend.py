"""tokenmill bench frontend: tokens per second of the HTTP server, and what a token costs it.

The engine is simulated, and the client runs on the same machine. A request is priced by answers of
one token; what longer answers take beyond that is the price of their tokens.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from tokenmill import console
from tokenmill.bench.bare_sender import us_per_send
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.front_load import TICK_NS, CpuTimes, FrontLoad, Streamed
from tokenmill.bench.results.reports import FrontendPoint, FrontendReport
from tokenmill.console import fetch
from tokenmill.core.config import (
    DEFAULT_BLOCK_SIZE,
    ModelConfig,
    PoolConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenmill.core.metrics import summarize
from tokenmill.core.types import TokenmillError
from tokenmill.settings import SETTINGS, Settings

if TYPE_CHECKING:
    from tokenmill.sched.sequence import Batch
    from tokenmill.text.tokenizer import Tokenizer

NAME = "simulated"
STREAMS = (
    SETTINGS["model"],
    SETTINGS["num-streams"],
    SETTINGS["stream-tokens"],
    SETTINGS["offered-tok-s"],
    SETTINGS["step-ms"],
    SETTINGS["stream-interval"],
    SETTINGS["workers"],
    SETTINGS["fronts"],
)
PANELS = {"Benchmark": (*STREAMS, SETTINGS["client-processes"], SETTINGS["json-only"])}
PROMPT_TOKENS = 256  # room for the prompt of a stream
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
STOP_TIMEOUT_S = 30
MIN_REQUESTS = 64  # whose mean is the price of a request
WARMUP_TOKENS = 64
WORKER_ROLE = "frontend-worker"
_WORD = re.compile(" [a-z]+")


def frontend(settings: Settings) -> None:
    """Streamed tokens per second of the HTTP server, without a model.

    The engine is simulated: a step gives each stream one token. The table has
    the CPU time that the server takes for a token, beside that of an event
    that is only sent, and for a request, and how long a token is on its way
    from the engine to the client, which runs on the same machine: once all
    streams have begun, and the p99 with the time in which they begin.

    tokenmill bench frontend --num-streams 128
    """
    path = fetch(settings.build(ModelConfig).model)
    words = clock_words(_load_tokenizer(path))
    with simulated_server(settings) as (url, pid):
        console.note(f"streams of {settings.get('stream-tokens')} tokens from {url}")
        with contextlib.closing(
            FrontLoad(url, NAME, settings.get("client-processes"), words)
        ) as load:
            points = [
                measure(load, num_streams, settings.get("stream-tokens"), pid)
                for num_streams in settings.get("num-streams")
            ]
    for point in points:
        num_streams = point["num_streams"]
        offered = point["offered_tok_s"] = _offered(settings, num_streams)
        point["us_per_send"] = us_per_send(num_streams, point["tokens_per_stream"], offered)
    if not settings.get("json-only"):
        console.print_table(_rows(points))
    report = FrontendReport(benchmark="frontend", points=points, num_cpus=os.cpu_count())
    console.print_json(report)


def _rows(points: Sequence[FrontendPoint]) -> list[list[str]]:
    heads = ["streams", "tok/s", "offered", "tokens/event", "us/token", "bare send", "us/request"]
    rows = [[*heads, "ms to client p50", "p99", "with start"]]
    for point in points:
        delay = point["steady_delay_ms"]
        rows.append(
            [
                f"{point['num_streams']}",
                f"{point['tok_s']:.0f}",
                _shown(point["offered_tok_s"], 0),
                _shown(point["tokens_per_chunk"], 2),
                _shown(point["us_per_token"], 1),
                _shown(point.get("us_per_send"), 1),
                _shown(point["us_per_request"], 0),
                *(_shown(delay.get(key), 2) for key in ("p50", "p99")),
                _shown(point["delay_ms"].get("p99"), 2),
            ]
        )
    return rows


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _offered(settings: Settings, num_streams: int) -> float | None:
    """Tokens per second that the engine makes if nothing holds it up; None: as many as it can."""
    step_ms = settings.get("step-ms")
    if step_ms is None:
        return float(settings.get("offered-tok-s"))
    return 1000 * num_streams / step_ms if step_ms else None


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
    from tokenmill.api.front_server import serve_fronts
    from tokenmill.api.server import serve

    num_streams = max(settings.get("num-streams"))
    config = ServerConfig(
        port=0,
        fronts=settings.get("fronts"),
        max_concurrency=2 * num_streams,
        stream_interval=settings.get("stream-interval"),
    )
    pool = PoolConfig(workers=settings.get("workers"), placement="process")
    worker = _child(WORKER_ROLE, Settings(settings.values | {"model": str(path)}))
    tokenizer = _load_tokenizer(path)

    def on_listening(url: str, facts: object) -> None:
        print(url, flush=True)

    if config.fronts == 1:
        serve(worker, tokenizer, config, NAME, on_listening, pool)
        return
    front = [sys.executable, "-P", "-m", "tokenmill", "front"]
    serve_fronts(
        *(worker, front, tokenizer, config, NAME, on_listening, pool),
        path=str(path),
        source=settings.build(ModelConfig).model,
    )


def run_worker(settings: Settings, address: Annotated[str, typer.Option("--address")]) -> None:
    """Own an engine whose model answers every prompt with the time, told by words."""
    from tokenmill.engine.engine import LanguageEngine
    from tokenmill.plan.simulator import SimRunner
    from tokenmill.sched.cache.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler
    from tokenmill.sched.sequence import Sequence as Stream
    from tokenmill.workers.messages import ModelFacts
    from tokenmill.workers.worker_process import run_worker as run

    tokenizer = _load_tokenizer(settings.build(ModelConfig).model)
    clock = [tokenizer.encode(word)[0] for word in clock_words(tokenizer)]

    class ClockRunner(SimRunner):
        """Answers with the word of the moment; with a fixed text where there are no words."""

        def sample(self, sequence: Stream, num_new: int) -> list[int]:
            tokens = super().sample(sequence, num_new)
            if clock and tokens:
                return [clock[time.monotonic_ns() // TICK_NS % len(clock)]]
            return tokens

    num_streams = max(settings.get("num-streams"))
    longest = PROMPT_TOKENS + settings.get("stream-tokens")
    block_size = DEFAULT_BLOCK_SIZE
    num_blocks = num_streams * (longest // block_size + 1)
    limits = SchedulerConfig(
        max_num_seqs=num_streams, max_model_len=longest, max_waiting=num_streams
    )
    scheduler = Scheduler(limits, BlockPool(num_blocks, block_size), frozenset())

    def step_s(batch: Batch) -> float:
        if (step_ms := settings.get("step-ms")) is not None:
            return float(step_ms) / 1e3
        num_workers: int = settings.get("workers")
        return len(batch.items) * num_workers / float(settings.get("offered-tok-s"))

    runner = ClockRunner(tokenizer.encode(TEXT), step_s)
    facts = ModelFacts(longest, tokenizer.vocab_size, num_blocks, block_size, "none")
    run(LanguageEngine(scheduler, runner), address, facts)


def clock_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, wherever they stand: a clock of as many ticks."""
    pieces = dict.fromkeys(p for p in tokenizer.pieces(True) if isinstance(p, str))
    return [p for p in pieces if _WORD.fullmatch(p) and len(tokenizer.encode(p)) == 1]


def _load_tokenizer(path: str | Path) -> Tokenizer:
    from tokenmill.text.tokenizer import load_tokenizer

    return load_tokenizer(path)


def _child(role: str, settings: Settings) -> list[str]:
    command_line = [sys.executable, "-P", "-m", "tokenmill", "bench", role]
    streams = ",".join(map(str, settings.get("num-streams")))
    return [*command_line, *Settings(settings.values | {"num-streams": streams}).flags(STREAMS)]


def measure(
    load: FrontLoad, num_streams: int, num_tokens: int, server_pid: int | None = None
) -> FrontendPoint:
    """Stream `num_streams` chat completions of `num_tokens` tokens at once; report the rates.

    With `server_pid` the CPU time of the server and of its children is reported too.
    """
    load.run(num_streams, min(WARMUP_TOKENS, num_tokens))
    begin = _cpu(server_pid)
    num_rounds = -(-MIN_REQUESTS // num_streams)
    for _ in range(num_rounds):
        load.run(num_streams, 1)
    middle = _cpu(server_pid)
    streamed = load.run(num_streams, num_tokens)
    end = _cpu(server_pid)
    if begin is None or middle is None or end is None:
        return _point(streamed, num_tokens, None, None)
    request_s = middle.since(begin).fronts_s / (num_rounds * num_streams)
    return _point(streamed, num_tokens, request_s, end.since(middle))


def _cpu(pid: int | None) -> CpuTimes | None:
    if pid is None or not Path(f"/proc/{pid}/stat").exists():
        return None
    return CpuTimes.of(pid, WORKER_ROLE)


def _point(
    streamed: Streamed, tokens_per_stream: int, request_s: float | None, cpu: CpuTimes | None
) -> FrontendPoint:
    num_streams, num_tokens, wall_s = streamed.num_streams, streamed.num_tokens, streamed.wall_s
    num_later = num_tokens - num_streams  # those after the first ones
    token_s = None
    if cpu is not None and request_s is not None and num_later:
        token_s = (cpu.fronts_s - num_streams * request_s) / num_later
    return {
        "num_streams": num_streams,
        "tokens_per_stream": tokens_per_stream,
        "tok_s": num_tokens / wall_s,
        "offered_tok_s": None,
        "chunks_s": streamed.num_chunks / wall_s,
        "tokens_per_chunk": num_tokens / streamed.num_chunks if streamed.num_chunks else 0.0,
        "us_per_token": None if token_s is None else 1e6 * token_s,
        "us_per_request": None if request_s is None else 1e6 * request_s,
        "num_tokens": num_tokens,
        "wall_s": wall_s,
        "ttft_ms": summarize(streamed.ttft_ms),
        "e2e_ms": summarize(streamed.e2e_ms),
        "delay_ms": summarize(streamed.delays_ms),
        "steady_delay_ms": summarize(streamed.steady_delays_ms),
        "client_cpu": streamed.client_s / wall_s,
        "server_cpu": None if cpu is None else cpu.fronts_s / wall_s,
        "worker_cpu": None if cpu is None else cpu.workers_s / wall_s,
    }


COMMANDS = (
    BenchCommand("frontend", frontend, PANELS),
    BenchCommand("frontend-server", run_server, {"Benchmark": STREAMS}, hidden=True),
    BenchCommand(WORKER_ROLE, run_worker, {"Benchmark": STREAMS}, hidden=True),
)
