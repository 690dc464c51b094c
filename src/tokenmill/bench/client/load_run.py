"""Runs a load against an endpoint: client processes, their start and stop, their records.

The same client is also measured alone, against a server process that answers at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection as Pipe
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from tokenmill.bench.client.arrivals import ClientLoad
from tokenmill.bench.client.client_process import ClientHealth, Task, loop_factory, run_process
from tokenmill.bench.client.connections import route_url
from tokenmill.bench.client.datasets import Dataset, Synthetic
from tokenmill.bench.client.progress import NUM_COUNTERS, Progress
from tokenmill.bench.client.records import Endpoint, LoadRecord, read_records
from tokenmill.bench.workload import BenchError

Watch = Callable[[Progress], None]

START_S = 0.05  # between the order to start and the start: all processes have read it
PULSE_S = 0.25  # between two looks at the counters
STOP_S = 10.0
SLOTS_PER_PROCESS, RATE_PER_PROCESS = 512, 2000.0
AUDIT_SLOTS, AUDIT_ALONE, AUDIT_FULL_S = 256, 200, 0.7

_SPAWN = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Run:
    """The records of one point; `interrupted` is True after Ctrl-C."""

    load: ClientLoad
    records: list[LoadRecord]
    health: list[ClientHealth]
    interrupted: bool = False
    warmup: Sequence[LoadRecord] = ()


@dataclass(frozen=True, slots=True)
class ClientBaseline:
    """The client against a server that answers at once: one user, and many."""

    alone: Run
    full: Run


def choose_processes(load: ClientLoad, num_cpus: int | None = None) -> int:
    """The number of client processes that the load needs, at most half of the cores."""
    cpus = num_cpus or len(os.sched_getaffinity(0))
    slots = (load.concurrency or 0) / SLOTS_PER_PROCESS
    wanted = math.ceil(max(slots, (load.rate or 0.0) / RATE_PER_PROCESS, 1))
    return max(1, min(wanted, cpus // 2, load.concurrency or wanted))


def run_load(
    target: Endpoint,
    load: ClientLoad,
    dataset: Dataset,
    num_processes: int,
    num_warmup: int = 0,
    watch: Watch = lambda progress: None,
    begin: Callable[[], None] = lambda: None,
) -> Run:
    """Run one point; after Ctrl-C the requests that have ended are returned.

    `begin` is called after the warm-up, just before the start.
    """
    with tempfile.TemporaryDirectory(prefix="tokenmill-") as folder:
        tasks = [
            Task(
                target,
                load,
                dataset,
                shard,
                num_processes,
                num_warmup,
                Path(folder) / f"{shard}.jsonl",
                Path(folder) / f"{shard}.warmup.jsonl",
            )
            for shard in range(num_processes)
        ]
        with contextlib.closing(ClientProcesses(tasks)) as processes:
            interrupted = processes.work(watch, begin)
            health = processes.health()
        records = _read_all(task.events for task in tasks)
        warmup = _read_all(task.warmup_events for task in tasks)
    return Run(load, records, health, interrupted, warmup)


def _read_all(paths: Iterable[Path]) -> list[LoadRecord]:
    """The records of all processes in the order of sending."""
    records = [record for path in paths if path.exists() for record in read_records(path)]
    return sorted(records, key=lambda record: record.sent_ns or record.planned_ns)


class ClientProcesses:
    def __init__(self, tasks: Sequence[Task]) -> None:
        self._counters = [_SPAWN.Array("q", NUM_COUNTERS, lock=False) for _ in tasks]
        self._tickets = _SPAWN.Array("q", 2) if tasks[0].load.pass_size else None
        self._pipes: list[Pipe] = []
        self._processes: list[Any] = []
        for task, counters in zip(tasks, self._counters, strict=True):
            ours, theirs = _SPAWN.Pipe()
            args = (task, counters, self._tickets, theirs)
            process = _SPAWN.Process(target=run_process, args=args, daemon=True)
            process.start()
            theirs.close()
            self._pipes.append(ours)
            self._processes.append(process)

    def work(self, watch: Watch, begin: Callable[[], None]) -> bool:
        """Start all at the same moment and wait for the last; True after Ctrl-C."""
        try:
            for pipe in self._pipes:
                self._receive(pipe)
            begin()
            start_ns = time.monotonic_ns() + round(START_S * 1e9)
            for pipe in self._pipes:
                pipe.send(start_ns)
            self._wait(start_ns, watch)
        except KeyboardInterrupt:
            for pipe in self._pipes:
                with contextlib.suppress(OSError):
                    pipe.send(0)
            return True
        return False

    def _wait(self, start_ns: int, watch: Watch) -> None:
        left = list(self._pipes)
        while left:
            ready = wait(left, PULSE_S)
            left = [pipe for pipe in left if pipe not in ready]
            watch(Progress.read((time.monotonic_ns() - start_ns) / 1e9, self._counters))

    def health(self) -> list[ClientHealth]:
        found = []
        for pipe in self._pipes:
            answer = self._receive(pipe)
            if answer == "ready":  # stopped before the start
                answer = self._receive(pipe)
            found.append(ClientHealth(*answer))
        return found

    def _receive(self, pipe: Pipe) -> Any:
        try:
            return pipe.recv()
        except (EOFError, OSError):
            raise BenchError("a client process died; its message is above") from None

    def close(self) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self._processes:
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()


OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}
NUM_TOKENS = 32  # of the null server's answers


def answer_of(api: str, stream: bool) -> bytes:
    usage: dict[str, Any] = {"prompt_tokens": 1, "completion_tokens": NUM_TOKENS}
    usage["total_tokens"] = NUM_TOKENS + 1
    if not stream:
        choice = _choice(api, " null" * NUM_TOKENS, "message") | {"finish_reason": "length"}
        whole = {"object": OBJECTS[api], "choices": [choice], "usage": usage}
        body = json.dumps(whole).encode()
        return _head("application/json", f"Content-Length: {len(body)}") + body
    kind = {"object": OBJECTS[api] + (".chunk" if api == "chat" else "")}
    token = {"choices": [_choice(api, " null", "delta")]}
    end = {"choices": [_choice(api, "", "delta") | {"finish_reason": "length"}]}
    text, *last = (
        b"data: %s\n\n" % json.dumps(kind | event).encode()
        for event in (token, end, {"choices": [], "usage": usage})
    )
    parts = [*[text] * NUM_TOKENS, b"".join([*last, b"data: [DONE]\n\n"]), b""]
    head = _head("text/event-stream", "Transfer-Encoding: chunked")
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


def _choice(api: str, text: str, name: str) -> dict[str, Any]:
    words = {"text": text} if api == "completions" else {name: {"content": text}}
    return {"index": 0, "finish_reason": None, **words}


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


class NullProtocol(asyncio.Protocol):
    """Reads whole requests by their length and writes the answer."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = b""
        self._transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while size := _request_size(self._buffer):
            self._buffer = self._buffer[size:]
            self._transport.write(self._answer)


def _request_size(buffer: bytes) -> int:
    """Bytes of the first request; 0 while it is not whole."""
    end = buffer.find(b"\r\n\r\n")
    if end < 0:
        return 0
    _, _, length = buffer[:end].lower().partition(b"content-length:")
    size = end + 4 + int(length.split(b"\r\n", 1)[0] or 0)
    return size if len(buffer) >= size else 0


def run_null_server(answer: bytes, pipe: Pipe) -> None:
    """Serve on a free port, send the port, and end when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(answer, pipe))


async def _serve(answer: bytes, pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(pipe.fileno(), closed.set)
    server = await loop.create_server(lambda: NullProtocol(answer), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await closed.wait()
    server.close()


@contextlib.contextmanager
def null_server(api: str, stream: bool) -> Iterator[str]:
    ours, theirs = _SPAWN.Pipe()
    process = _SPAWN.Process(
        target=run_null_server, args=(answer_of(api, stream), theirs), daemon=True
    )
    process.start()
    theirs.close()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        ours.close()
        process.join(STOP_S)


def measure_client_baseline(
    target: Endpoint, load: ClientLoad, num_processes: int
) -> ClientBaseline:
    """The same client with the same number of processes against the null server."""
    slots = min(load.concurrency or AUDIT_SLOTS, AUDIT_SLOTS)
    dataset = Synthetic(((128, NUM_TOKENS),))
    with null_server(target.api, target.stream) as url:
        null = replace(target, url=route_url(url, target.api), api_key=None, keep_text=False)
        # By count: a busy machine may give no request to a short time.
        alone = run_load(null, ClientLoad(concurrency=1, num_sessions=AUDIT_ALONE), dataset, 1, 1)
        many = ClientLoad(concurrency=max(slots, num_processes), duration_s=AUDIT_FULL_S)
        full = run_load(null, many, dataset, num_processes, slots)
    return ClientBaseline(alone, full)
