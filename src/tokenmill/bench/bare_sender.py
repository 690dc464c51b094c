"""A process that sends one finished event per token and does nothing else.

It is the ceiling of `bench frontend`: what the kernel takes to send an event on a connection of
this machine, at the same rate, to the same client.
"""

from __future__ import annotations

import multiprocessing
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection

from tokenmill.bench.front_load import FRAME_EVENTS, RECEIVE_BYTES, FrontLoad

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
        """Listen, tell the port, send everything, and tell the CPU time of that."""
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
