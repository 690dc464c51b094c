"""A server process that answers at once, to measure the time that the client itself takes."""

from __future__ import annotations

import asyncio
import json
import signal
from multiprocessing.connection import Connection as Pipe
from typing import Any

from tokenmill.bench.client.client_process import loop_factory

NUM_TOKENS = 32
OBJECTS = {"chat": "chat.completion", "completions": "text_completion"}
_LENGTH = b"content-length:"


def answer_of(api: str, stream: bool) -> bytes:
    """The bytes of the one answer, with NUM_TOKENS tokens."""
    if stream:
        return STREAM_HEAD + b"".join(stream_chunks(api, NUM_TOKENS))
    choice = _choice(api, " null" * NUM_TOKENS, "message") | {"finish_reason": "length"}
    whole = {"object": OBJECTS[api], "choices": [choice], "usage": _usage(NUM_TOKENS)}
    body = json.dumps(whole).encode()
    return _head("application/json", f"Content-Length: {len(body)}") + body


def stream_chunks(api: str, num_tokens: int) -> list[bytes]:
    """A chunk of HTTP per token, and one with all that follows the last token."""
    token = {"choices": [_choice(api, " null", "delta")]}
    end = {"choices": [_choice(api, "", "delta") | {"finish_reason": "length"}]}
    usage: dict[str, Any] = {"choices": [], "usage": _usage(num_tokens)}
    kind = {"object": OBJECTS[api] + (".chunk" if api == "chat" else "")}
    text, *last = (b"data: %s\n\n" % json.dumps(kind | e).encode() for e in (token, end, usage))
    tail = b"".join(_chunk(event) for event in (*last, b"data: [DONE]\n\n", b""))
    return [*[_chunk(text)] * num_tokens, tail]


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def _usage(num_tokens: int) -> dict[str, int]:
    total = num_tokens + 1
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": total}


def _choice(api: str, text: str, name: str) -> dict[str, Any]:
    words = {"text": text} if api == "completions" else {name: {"content": text}}
    return {"index": 0, "finish_reason": None, **words}


def _head(content_type: str, length: str) -> bytes:
    return f"HTTP/1.1 200 OK\r\nContent-Type: {content_type}\r\n{length}\r\n\r\n".encode()


STREAM_HEAD = _head("text/event-stream", "Transfer-Encoding: chunked")


class NullProtocol(asyncio.Protocol):
    """Reads whole requests by their length and writes the answer."""

    def __init__(self, answer: bytes) -> None:
        self._answer = answer
        self._buffer = b""
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def answer(self) -> None:
        """A whole request has come."""
        self.transport.write(self._answer)

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while size := _request_size(self._buffer):
            self._buffer = self._buffer[size:]
            self.answer()


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
