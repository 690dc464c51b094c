"""Tokens per second of the HTTP server, and what a token costs it, without a model.

The engine is simulated, and the client runs on the same machine. A request is priced by answers of
one token; what longer answers take beyond that is the price of their tokens.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from benchmarks.front_client import TICK_NS, CpuTimes, FrontLoad, Streamed, us_per_send
from benchmarks.harness import Benchmark, Report, child, command, environment
from tokenmill import console
from tokenmill.api.front_server import serve_fronts
from tokenmill.api.server import serve
from tokenmill.console import fetch
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, PoolConfig, SchedulerConfig, ServerConfig
from tokenmill.core.flags import count, number, numbers, read_int, setting
from tokenmill.core.metrics import summarize
from tokenmill.core.types import TokenmillError
from tokenmill.engine.engine import LanguageEngine
from tokenmill.plan.simulator import SimRunner
from tokenmill.sched.cache.blocks import BlockPool
from tokenmill.sched.scheduler import Scheduler
from tokenmill.sched.sequence import Batch
from tokenmill.sched.sequence import Sequence as Stream
from tokenmill.text.tokenizer import Tokenizer, load_tokenizer
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.worker_process import run_worker

NAME = "simulated"
PROMPT_TOKENS = 256  # room for the prompt of a stream
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not mind at all. "
STOP_TIMEOUT_S = 30
MIN_REQUESTS = 64  # whose mean is the price of a request
WARMUP_TOKENS = 64
WORKER_ROLE: Literal["frontend-worker"] = "frontend-worker"
COLUMNS = {  # of a point, with its digits
    "fronts": ("fronts", 0),
    "num_streams": ("streams", 0),
    "tok_s": ("tok/s", 0),
    "offered_tok_s": ("offered", 0),
    "tokens_per_chunk": ("tokens/event", 2),
    "us_per_token": ("us/token", 1),
    "us_per_send": ("bare send", 1),
    "us_per_request": ("us/request", 0),
    "of_first": ("of first", 2),
    "server_cpu": ("CPUs", 1),
    "worker_cpu": ("of engines", 1),
    "client_cpu": ("of client", 1),
}
_WORD = re.compile(" [a-z]+")


@dataclass(frozen=True)
class Options:
    model: str = setting("smollm2", "Model whose tokenizer the server has.")
    num_streams: tuple[int, ...] = setting(
        (1, 128, 2000), "Streams at once, of each front.", numbers(read_int, 1, "N,N")
    )
    stream_tokens: int = setting(512, "Tokens of each stream.", count(1))
    offered_tok_s: float = setting(
        80_000.0, "Tokens per second of the simulated engine, over all streams.", number(1, 1e9)
    )
    step_ms: float | None = setting(
        None, "Time of its step, instead of --offered-tok-s; 0 does not wait.", number(0, 1000)
    )
    stream_interval: int = setting(1, "Tokens of an event, at least.", count(1))
    fronts: tuple[int, ...] = setting((1,), "API processes.", numbers(read_int, 1, "N,N"))
    workers: int = setting(1, "Simulated engines.", count(1))
    client_processes: int = setting(1, "Processes of the streams' client.", count(1))
    role: Literal["bench", "frontend-server", "frontend-worker"] = setting(
        "bench", "What this process is; the others are started by the benchmark."
    )
    address: str | None = setting(None, "Of a worker: the server's socket.")

    def offered(self, num_streams: int) -> float | None:
        """Tokens/s that the engine makes if nothing holds it up; None: as many as it can."""
        if self.step_ms is None:
            return self.offered_tok_s
        return 1000 * num_streams / self.step_ms if self.step_ms else None

    def step_s(self, batch: Batch) -> float:
        if self.step_ms is not None:
            return self.step_ms / 1e3
        return len(batch.items) * self.workers / self.offered_tok_s


def run(options: Options) -> Report:
    """Streamed tokens per second of the HTTP server, without a model.

    The engine is simulated: a step gives each stream one token. The table has the CPU time that the
    server takes for a token, beside that of an event that is only sent, and for a request, and how
    long a token is on its way from the engine to the client, which runs on the same machine: once
    all streams have begun, and the p99 with the time in which they begin. Several numbers of fronts
    get as many streams each; `of_first` is a front's rate of events over that of the first number.
    Where clients, engines and fronts take nearly all CPUs, the machine is what limits them.

    python -m benchmarks.frontend --num-streams 128
    python -m benchmarks.frontend --num-streams 128,256 --step-ms 4 --fronts 1,2,4 --workers 2
    """
    if options.role == "frontend-server":
        run_server(options)
    elif options.role == WORKER_ROLE:
        simulate_engine(options)
    else:
        return {"points": points(options), "num_cpus": os.cpu_count()}
    return {}


def points(options: Options) -> list[Report]:
    """A point for each number of fronts and of streams; a server for each number of fronts."""
    words = clock_words(load_tokenizer(fetch(options.model)))
    found: list[Report] = []
    first: dict[int, float] = {}
    for fronts in options.fronts:
        several = tuple(fronts * each for each in options.num_streams)
        with simulated_server(replace(options, num_streams=several, fronts=(fronts,))) as server:
            client = FrontLoad(server[0], NAME, options.client_processes, words)
            with contextlib.closing(client) as load:
                made = [measure(load, n, options.stream_tokens, server[1]) for n in several]
        for each, point in zip(options.num_streams, made, strict=True):
            point |= {"fronts": fronts, "offered_tok_s": options.offered(point["num_streams"])}
            rate = point["chunks_s"] / fronts
            point["of_first"] = rate / first.setdefault(each, rate)
            sizes = point["num_streams"], point["tokens_per_stream"], point["offered_tok_s"]
            point["us_per_send"] = us_per_send(*sizes)
        found += made
    return found


def show(report: Report) -> None:
    if "points" not in report:  # of a server or worker
        return
    heads = [head for head, _ in COLUMNS.values()]
    rows = [[*heads, "ms to client p50", "p99", "with start"]]
    for point in report["points"]:
        cells = [_shown(point[key], digits) for key, (_, digits) in COLUMNS.items()]
        delay = point["steady_delay_ms"]
        cells += [_shown(delay.get(key), 2) for key in ("p50", "p99")]
        rows.append([*cells, _shown(point["delay_ms"].get("p99"), 2)])
    console.print_table(rows)


def _shown(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


@contextlib.contextmanager
def simulated_server(options: Options) -> Iterator[tuple[str, int]]:
    """A server in a process of its own: its URL and its process id."""
    with started(_child(replace(options, role="frontend-server"))) as found:
        yield found


@contextlib.contextmanager
def started(words: list[str]) -> Iterator[tuple[str, int]]:
    """A process that prints its URL, and its process id."""
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment())
    assert process.stdout is not None
    try:
        url = next((line.strip() for line in process.stdout if line.startswith("http://")), "")
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


def _child(options: Options) -> list[str]:
    """The command line of a server or worker; a worker is told by a word of it."""
    words = [word for word in BENCHMARK.flags(options) if not word.startswith("--role")]
    return child("frontend", "--role", options.role, *words)


def run_server(options: Options) -> None:
    """Serve the simulated engine on a free port and print the URL."""
    path = fetch(options.model)
    config = ServerConfig(
        port=0,
        fronts=options.fronts[0],
        max_concurrency=2 * max(options.num_streams),
        stream_interval=options.stream_interval,
    )
    pool = PoolConfig(workers=options.workers)
    worker = _child(replace(options, role=WORKER_ROLE, model=str(path)))
    tokenizer = load_tokenizer(path)

    def on_listening(url: str, facts: object) -> None:
        print(url, flush=True)

    if config.fronts == 1:
        serve(worker, tokenizer, config, NAME, on_listening, pool)
        return
    front = command("front")
    serve_fronts(
        *(worker, front, tokenizer, config, NAME, on_listening, pool),
        path=str(path),
    )


def simulate_engine(options: Options) -> None:
    """Own an engine whose model answers every prompt with the time, told by words."""
    tokenizer = load_tokenizer(options.model)
    clock = [tokenizer.encode(word)[0] for word in clock_words(tokenizer)]

    class ClockRunner(SimRunner):
        """Answers with the word of the moment; with a fixed text where there are no words."""

        def sample(self, sequence: Stream, num_new: int) -> list[int]:
            tokens = super().sample(sequence, num_new)
            if clock and tokens:
                return [clock[time.monotonic_ns() // TICK_NS % len(clock)]]
            return tokens

    num_streams = max(options.num_streams)
    longest = PROMPT_TOKENS + options.stream_tokens
    block_size = DEFAULT_BLOCK_SIZE
    num_blocks = num_streams * (longest // block_size + 1)
    limits = SchedulerConfig(
        max_num_seqs=num_streams, max_model_len=longest, max_waiting=num_streams
    )
    scheduler = Scheduler(limits, BlockPool(num_blocks, block_size), frozenset())
    runner = ClockRunner(tokenizer.encode(TEXT), options.step_s)
    facts = ModelFacts(longest, tokenizer.vocab_size, num_blocks, block_size, "none")
    assert options.address is not None
    run_worker(LanguageEngine(scheduler, runner), options.address, facts)


def clock_words(tokenizer: Tokenizer) -> list[str]:
    """Words that are one token each, wherever they stand: a clock of as many ticks."""
    pieces = dict.fromkeys(p for p in tokenizer.pieces(True) if isinstance(p, str))
    return [p for p in pieces if _WORD.fullmatch(p) and len(tokenizer.encode(p)) == 1]


def measure(
    load: FrontLoad, num_streams: int, num_tokens: int, server_pid: int | None = None
) -> Report:
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
) -> Report:
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


BENCHMARK = Benchmark("frontend", Options, run, show)

if __name__ == "__main__":
    BENCHMARK.main()
