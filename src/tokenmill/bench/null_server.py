"""A server that answers at once, in a process of its own: what is left is the client's own time."""

from __future__ import annotations

import asyncio
import json
import signal
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tokenmill.bench.issue import loop_factory

NUM_TOKENS = 32
_LENGTH = b"content-length:"


def answer_of(api: str, stream: bool) -> bytes:
    """The bytes of the one answer, with NUM_TOKENS tokens."""
    usage = {
        "prompt_tokens": 1,
        "completion_tokens": NUM_TOKENS,
        "total_tokens": NUM_TOKENS + 1,
    }
    if not stream:
        choice = _choice(api, " null" * NUM_TOKENS, "message") | {"finish_reason": "length"}
        body = json.dumps({"choices": [choice], "usage": usage}).encode()
        return _head("application/json", f"Content-Length: {len(body)}") + body
    tokens = [{"choices": [_choice(api, " null", "delta")]} for _ in range(NUM_TOKENS)]
    end = {"choices": [_choice(api, "", "delta") | {"finish_reason": "length"}]}
    events = [json.dumps(e) for e in (*tokens, end, {"choices": [], "usage": usage})]
    chunks = [f"data: {event}\n\n".encode() for event in (*events, "[DONE]")]
    body = b"".join(b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in (*chunks, b""))
    return _head("text/event-stream", "Transfer-Encoding: chunked") + body


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
    head = buffer[:end].lower()
    at = head.find(_LENGTH)
    length = int(head[at + len(_LENGTH) :].split(b"\r\n", 1)[0]) if at >= 0 else 0
    size = end + 4 + length
    return size if len(buffer) >= size else 0


def run_null_server(api: str, stream: bool, pipe: Pipe) -> None:
    """Serve on a free port, send the port, and end when the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(_serve(answer_of(api, stream), pipe))


async def _serve(answer: bytes, pipe: Pipe) -> None:
    loop = asyncio.get_running_loop()
    closed = asyncio.Event()
    loop.add_reader(pipe.fileno(), closed.set)
    server = await loop.create_server(lambda: NullProtocol(answer), "127.0.0.1", 0)
    pipe.send(server.sockets[0].getsockname()[1])
    await closed.wait()
    server.close()
