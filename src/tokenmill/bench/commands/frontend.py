"""tokenmill bench frontend: streamed tokens per second of the HTTP server.

The engine is simulated. The client is a loop over non-blocking sockets that counts events and
keeps the tail of each stream: it costs little beside the server that it measures. Tokens are those
that the server's usage reports.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer

from tokenmill import console
from tokenmill.bench.commands import BenchCommand
from tokenmill.bench.results.reports import FrontendReport
from tokenmill.console import fetch
from tokenmill.core.config import DEFAULT_BLOCK_SIZE, ModelConfig, SchedulerConfig, ServerConfig
from tokenmill.core.metrics import RequestTimes, summarize
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
REQUIRED_TOK_S = 15_000
WARMUP_TOKENS = 64
STALL_S = 60.0
RECEIVE_BYTES = 1 << 16
TAIL_BYTES = 1024  # holds the usage event and what follows it
FRAME_EVENTS = 3  # of a stream's events: role, finish reason and usage carry no token
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens":\s?(\d+)')


def frontend(settings: Settings) -> None:
    """Streamed tokens per second of the HTTP server, without a model.

    The engine is simulated: every step takes the same time, and gives each
    stream one token. The client runs on the same machine.

    tokenmill bench frontend --num-streams 128
    """
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
    from tokenmill.sched.cache.blocks import BlockPool
    from tokenmill.sched.scheduler import Scheduler
    from tokenmill.text.tokenizer import load_tokenizer
    from tokenmill.workers.messages import ModelFacts
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


class FrontendBenchError(TokenmillError):
    """A stream failed; the message has the server's answer."""


@dataclass(slots=True)
class Stream:
    """One streamed chat completion on its own connection."""

    connection: socket.socket
    times: RequestTimes
    num_events: int = 0
    num_tokens: int = 0
    tail: bytes = b""

    def receive(self) -> bool:
        """Take what has arrived; True when the answer is complete."""
        data = self.connection.recv(RECEIVE_BYTES)
        now_ns = time.monotonic_ns()
        if not data:
            raise FrontendBenchError(f"the server closed a stream: {self.tail[-300:]!r}")
        if not self.times.first_ns and not data.startswith(b"HTTP/1.1 200 "):
            raise FrontendBenchError(f"the server refused a stream: {data[:500]!r}")
        num_events = (self.tail[1 - len(_EVENT) :] + data).count(_EVENT)
        self.num_events += num_events
        self.times.record(now_ns, num_events)
        self.tail = (self.tail + data)[-TAIL_BYTES:]
        if not self.tail.endswith(_END):
            return False
        usage = _USAGE.search(self.tail)
        if usage is None:
            raise FrontendBenchError(f"a stream ended without usage: {self.tail[-300:]!r}")
        self.num_tokens = int(usage[1])
        return True


def measure_frontend(
    url: str,
    model: str,
    num_streams: int = 128,
    num_tokens: int = 512,
    server_pid: int | None = None,
) -> FrontendReport:
    """Stream `num_streams` chat completions of `num_tokens` tokens at once; report the rates.

    With `server_pid` the CPU time of the server and of its children is reported too.
    """
    address = _address(url)
    _run_streams(address, model, num_streams, min(WARMUP_TOKENS, num_tokens))
    server_pids = _family(server_pid) if server_pid is not None else []
    cpu_before_s = [_cpu_s(pid) for pid in server_pids]
    client_before_s = time.process_time()
    start_s = time.monotonic()
    streams = _run_streams(address, model, num_streams, num_tokens)
    wall_s = time.monotonic() - start_s
    client_s = time.process_time() - client_before_s
    server_s = [_cpu_s(p) - b for p, b in zip(server_pids, cpu_before_s, strict=True)]
    return _report(streams, num_tokens, wall_s, client_s, server_s)


def _report(
    streams: Sequence[Stream],
    tokens_per_stream: int,
    wall_s: float,
    client_s: float,
    server_s: Sequence[float],
) -> FrontendReport:
    num_tokens = sum(s.num_tokens for s in streams)
    num_chunks = sum(s.num_events - FRAME_EVENTS for s in streams)
    tok_s = num_tokens / wall_s
    return {
        "benchmark": "frontend",
        "num_streams": len(streams),
        "tokens_per_stream": tokens_per_stream,
        "tok_s": tok_s,
        "chunks_s": num_chunks / wall_s,
        "tokens_per_chunk": num_tokens / num_chunks,
        "required_tok_s": REQUIRED_TOK_S,
        "share_of_required": tok_s / REQUIRED_TOK_S,
        "num_tokens": num_tokens,
        "wall_s": wall_s,
        "ttft_ms": summarize(s.times.ttft_ms for s in streams),
        "e2e_ms": summarize(s.times.e2e_ms for s in streams),
        "client_cpu": client_s / wall_s,
        "server_cpu": server_s[0] / wall_s if server_s else None,
        "worker_cpu": sum(server_s[1:]) / wall_s if server_s else None,
        "num_cpus": os.cpu_count(),
    }


def _run_streams(
    address: tuple[str, int], model: str, num_streams: int, num_tokens: int
) -> list[Stream]:
    """Connect all, then send all, then read until the last answer is complete."""
    connections = [socket.create_connection(address) for _ in range(num_streams)]
    selector = selectors.DefaultSelector()
    streams = []
    try:
        for index, connection in enumerate(connections):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            request = _request(address, model, index, num_tokens)
            stream = Stream(connection, RequestTimes(time.monotonic_ns()))
            connection.sendall(request)
            connection.setblocking(False)
            selector.register(connection, selectors.EVENT_READ, stream)
            streams.append(stream)
        _read_all(selector, num_streams)
    finally:
        selector.close()
        for connection in connections:
            connection.close()
    return streams


def _read_all(selector: selectors.BaseSelector, num_open: int) -> None:
    while num_open:
        ready = selector.select(STALL_S)
        if not ready:
            raise FrontendBenchError(f"{num_open} streams got nothing for {STALL_S:.0f} s")
        for key, _ in ready:
            if key.data.receive():
                selector.unregister(key.fileobj)
                num_open -= 1


def _request(address: tuple[str, int], model: str, index: int, num_tokens: int) -> bytes:
    call = {
        "model": model,
        "messages": [{"role": "user", "content": f"Stream {index}: tell me something."}],
        "max_tokens": num_tokens,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    body = json.dumps(call).encode()
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def _address(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise FrontendBenchError(f"expected http://HOST:PORT, got {url!r}")
    return parts.hostname, parts.port


def _family(pid: int) -> list[int]:
    """A process and its children, where /proc tells them."""
    task = Path(f"/proc/{pid}/task/{pid}/children")
    children = task.read_text().split() if task.exists() else []
    return [pid, *map(int, children)] if Path(f"/proc/{pid}/stat").exists() else []


def _cpu_s(pid: int) -> float:
    """User and system time of all threads of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


COMMANDS = (
    BenchCommand("frontend", frontend, PANELS),
    BenchCommand("frontend-server", run_server, {"Benchmark": STREAMS}, hidden=True),
    BenchCommand("frontend-worker", run_worker, {"Benchmark": STREAMS}, hidden=True),
)
