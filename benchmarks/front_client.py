"""The client of the frontend's benchmark: streams on raw sockets, and what processes cost.

The client is a loop over non-blocking sockets that counts events and keeps the tail of each stream,
so it costs little beside the server that it measures. Tokens are those that the server's usage
reports. Some streams are probes: the simulated engine answers with words that tell the time, and a
probe reads from them how long each token was on its way.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import secrets
import selectors
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from selectors import SelectorKey
from urllib.parse import urlsplit

from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import TokenmillError

STALL_S = 60.0
START_S = 0.2  # for all client processes to have connected
RECEIVE_BYTES = 1 << 16
TAIL_BYTES = 1024  # holds the usage event and what follows it
FRAME_EVENTS = 3  # of a stream's events: role, finish reason and usage carry no token
TICK_NS = 20_000  # of the clock that the words tell
PROBE_EVERY = 16  # streams
_EVENT = b"data: {"
_END = b"0\r\n\r\n"
_USAGE = re.compile(rb'"completion_tokens":\s?(\d+)')
_WORDS = re.compile(rb'"content":\s?"((?: [a-z]+)+)"')

Address = tuple[str, int]


class FrontendBenchError(TokenmillError):
    """A stream failed; the message has the server's answer."""


@dataclass(slots=True)
class Probe:
    """Reads the time from the words of a stream."""

    clock: dict[bytes, int]  # the tick that a word stands for
    delays_ms: list[float] = field(default_factory=list)
    read_ns: list[int] = field(default_factory=list)  # when each of them was read
    rest: bytes = b""  # may be the beginning of an event

    def read(self, data: bytes, now_ns: int) -> None:
        """Note how long the words were on their way; ticks begin anew after the last word."""
        data, end = self.rest + data, 0
        for match in _WORDS.finditer(data):
            for word in match[1].split():
                ticks = (now_ns // TICK_NS - self.clock[word]) % len(self.clock)
                self.delays_ms.append(ticks * TICK_NS / 1e6)
                self.read_ns.append(now_ns)
            end = match.end()
        self.rest = data[end:][-TAIL_BYTES:]


@dataclass(slots=True)
class Stream:
    connection: socket.socket
    times: RequestTimes
    probe: Probe | None = None
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
        if self.probe is not None:
            self.probe.read(data, now_ns)
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


@dataclass(slots=True)
class Streamed:
    """What streams that ran at once have received."""

    num_streams: int = 0
    num_tokens: int = 0
    num_chunks: int = 0
    wall_s: float = 0.0
    client_s: float = 0.0  # CPU time
    ttft_ms: list[float | None] = field(default_factory=list)
    e2e_ms: list[float | None] = field(default_factory=list)
    delays_ms: list[float] = field(default_factory=list)
    read_ns: list[int] = field(default_factory=list)  # when each of them was read
    begun_ns: int = 0  # when the last stream began

    @property
    def steady_delays_ms(self) -> list[float]:
        """Delays since all streams have begun: no prompt was read meanwhile."""
        pairs = zip(self.read_ns, self.delays_ms, strict=True)
        return [delay_ms for read_ns, delay_ms in pairs if read_ns > self.begun_ns]

    def add(self, other: Streamed) -> None:
        self.num_streams += other.num_streams
        self.num_tokens += other.num_tokens
        self.num_chunks += other.num_chunks
        self.wall_s = max(self.wall_s, other.wall_s)
        self.client_s += other.client_s
        self.ttft_ms += other.ttft_ms
        self.e2e_ms += other.e2e_ms
        self.delays_ms += other.delays_ms
        self.read_ns += other.read_ns
        self.begun_ns = max(self.begun_ns, other.begun_ns)


@dataclass(frozen=True, slots=True)
class Share:
    address: Address
    model: str
    streams: range
    num_tokens: int
    words: tuple[str, ...] = ()  # that tell the time, in their order

    def run(self, start_s: float) -> Streamed:
        """Connect all, send all from `start_s` on, and read until the last answer is complete."""
        clock = {word.strip().encode(): tick for tick, word in enumerate(self.words)}
        connections = [socket.create_connection(self.address) for _ in self.streams]
        selector = selectors.DefaultSelector()
        streams: list[Stream] = []
        num_done = 0
        try:
            time.sleep(max(0.0, start_s - time.monotonic()))
            before_s = time.process_time()
            for index, connection in zip(self.streams, connections, strict=True):
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                probe = Probe(clock) if clock and not index % PROBE_EVERY else None
                stream = Stream(connection, RequestTimes(time.monotonic_ns()), probe)
                connection.sendall(_request(self.address, self.model, self.num_tokens))
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, stream)
                streams.append(stream)
                num_done += _receive(selector, selector.select(0))  # of those that have begun
            while num_done < len(streams):
                if not (ready := selector.select(STALL_S)):
                    raise FrontendBenchError(f"a stream got nothing for {STALL_S:.0f} s")
                num_done += _receive(selector, ready)
            wall_s, client_s = time.monotonic() - start_s, time.process_time() - before_s
        finally:
            selector.close()
            for connection in connections:
                connection.close()
        probes = [s.probe for s in streams if s.probe is not None]
        return Streamed(
            num_streams=len(streams),
            num_tokens=sum(s.num_tokens for s in streams),
            num_chunks=sum(s.num_events - FRAME_EVENTS for s in streams),
            wall_s=wall_s,
            client_s=client_s,
            ttft_ms=[s.times.ttft_ms for s in streams],
            e2e_ms=[s.times.e2e_ms for s in streams],
            delays_ms=[delay for probe in probes for delay in probe.delays_ms],
            read_ns=[read for probe in probes for read in probe.read_ns],
            begun_ns=max(s.times.first_ns for s in streams),
        )


class FrontLoad:
    """Streams from client processes to one server; with one process, from this one."""

    def __init__(
        self, url: str, model: str, num_processes: int = 1, words: Sequence[str] = ()
    ) -> None:
        self._address = address_of(url)
        self._model = model
        self._words = tuple(words)
        self._num_processes = num_processes
        self._pool: ProcessPoolExecutor | None = None
        if num_processes > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(num_processes, mp_context=context)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown()

    def run(self, num_streams: int, num_tokens: int) -> Streamed:
        """Stream answers of `num_tokens` tokens, all at once."""
        if self._pool is None:
            return self._share(range(num_streams), num_tokens).run(time.monotonic())
        start_s = time.monotonic() + START_S
        starts = range(min(self._num_processes, num_streams))
        shares = [range(start, num_streams, self._num_processes) for start in starts]
        waiting = [
            self._pool.submit(self._share(share, num_tokens).run, start_s) for share in shares
        ]
        total = Streamed()
        for each in waiting:
            total.add(each.result())
        return total

    def _share(self, streams: range, num_tokens: int) -> Share:
        return Share(self._address, self._model, streams, num_tokens, self._words)


def _receive(selector: selectors.BaseSelector, ready: list[tuple[SelectorKey, int]]) -> int:
    """Take what has come; how many answers are complete."""
    num_done = 0
    for key, _ in ready:
        if key.data.receive():
            selector.unregister(key.fileobj)
            num_done += 1
    return num_done


def _request(address: Address, model: str, num_tokens: int) -> bytes:
    """A call whose prompt no worker has cached a block of, so that a router spreads the streams."""
    begin = {"role": "system", "content": f"{secrets.token_hex(4)} is the name of this stream."}
    call = {
        "model": model,
        "messages": [begin, {"role": "user", "content": "Tell me something."}],
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


def address_of(url: str) -> Address:
    parts = urlsplit(url)
    if parts.scheme != "http" or parts.hostname is None or parts.port is None:
        raise FrontendBenchError(f"expected http://HOST:PORT, got {url!r}")
    return parts.hostname, parts.port


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds of a server's processes, where /proc tells them."""

    fronts_s: float
    workers_s: float

    @classmethod
    def of(cls, pid: int, worker_role: str) -> CpuTimes:
        """Of a process and all below it; those that `worker_role` is an argument of are workers."""
        fronts_s = workers_s = 0.0
        for each in _family(pid):
            if worker_role.encode() in _read(f"/proc/{each}/cmdline").split(b"\0"):
                workers_s += _cpu_s(each)
            else:
                fronts_s += _cpu_s(each)
        return cls(fronts_s, workers_s)

    def since(self, before: CpuTimes) -> CpuTimes:
        return CpuTimes(self.fronts_s - before.fronts_s, self.workers_s - before.workers_s)


def _family(pid: int) -> list[int]:
    below = b" ".join(
        [_read(str(path)) for path in Path(f"/proc/{pid}/task").glob("*/children")]
    ).split()
    return [pid, *(each for child in below for each in _family(int(child)))]


def _cpu_s(pid: int) -> float:
    """User and system time of all threads; in clock ticks where the kernel keeps no other."""
    schedstats = [_read(str(path)) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    if any(schedstats):
        return sum(int(line.split()[0]) for line in schedstats if line) / 1e9
    fields = _read(f"/proc/{pid}/stat").rpartition(b")")[2].split()
    ticks = int(fields[11]) + int(fields[12]) if fields else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _read(path: str) -> bytes:
    """A file of /proc; b"" where the process has gone."""
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


# The ceiling: what the kernel takes to send events to the same client, at the same rate.

MAX_TOKENS = 100_000  # of all streams: enough for a mean
HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"chatcmpl-00000000000000000000000000000000","object":"chat.completion.chunk",'
    b'"created":1700000000,"model":"simulated","choices":[{"index":0,"delta":{"content":" word"},'
    b'"logprobs":null,"finish_reason":null}],"usage":null}\n\n'
)


@dataclass(frozen=True, slots=True)
class Sending:
    """Streams that get a token each, `tok_s` over all of them; None: as fast as it goes."""

    num_streams: int
    num_tokens: int
    tok_s: float | None

    def serve(self, pipe: Connection) -> None:
        """Be a process that sends one finished event per token, and tell the CPU time of that."""
        with socket.create_server(("127.0.0.1", 0), backlog=self.num_streams) as listener:
            pipe.send(listener.getsockname()[1])
            connections = [listener.accept()[0] for _ in range(self.num_streams)]
        for connection in connections:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.recv(RECEIVE_BYTES)
            connection.sendall(HEAD)
        before_s = time.process_time()
        self._send(connections)
        pipe.send(time.process_time() - before_s)
        usage = b'data: {"usage":{"completion_tokens":%d}}\n\n' % self.num_tokens
        last = b"data: {}\n\n" * (FRAME_EVENTS - 1) + usage
        for connection in connections:
            connection.sendall(_chunk(last) + b"0\r\n\r\n")
            connection.close()

    def _send(self, connections: list[socket.socket]) -> None:
        chunk, next_s = _chunk(EVENT), time.monotonic()
        for _ in range(self.num_tokens):
            next_s += self.num_streams / self.tok_s if self.tok_s else 0.0
            for connection in connections:
                connection.sendall(chunk)
            time.sleep(max(0.0, next_s - time.monotonic()))


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def us_per_send(num_streams: int, num_tokens: int, tok_s: float | None) -> float:
    """The CPU time of one event that is only sent."""
    num_tokens = max(1, min(num_tokens, MAX_TOKENS // num_streams))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    sending = Sending(num_streams, num_tokens, tok_s)
    process = context.Process(target=sending.serve, args=(theirs,))
    process.start()
    try:
        FrontLoad(f"http://127.0.0.1:{ours.recv()}", "bare").run(num_streams, num_tokens)
        cpu_s: float = ours.recv()
    finally:
        process.terminate()
        process.join()
    return 1e6 * cpu_s / (num_streams * num_tokens)
