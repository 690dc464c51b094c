"""A server in a thread that does what the model's name says, and stamps what it does."""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tokenmill.bench.client.datasets import Synthetic

NUM_TOKENS = 6
TEMPLATE_TOKENS, BLOCK = 10, 8  # of a server that caches prefixes; a word is a token
FIRST_S, NEXT_S = 0.06, 0.02
PAUSE_S = 0.4
BREAKING = ("drop", "drop-later", "malformed", "garbage-line", "error-event")
HEAD = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


@dataclass
class Seen:
    """One request as the server saw it."""

    arrived_ns: int
    connection: int
    head: str
    body: dict[str, Any]
    wrote_ns: list[int] = field(default_factory=list)


class ScriptedServer:
    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self._tls = tls
        self.seen: list[Seen] = []
        self.port = 0
        self.num_finished = 0
        self.tokens_each = NUM_TOKENS  # that /metrics claims for an answer
        self.hits_each = 0  # of ten prompt tokens, as /metrics counts them
        self._connections = 0
        self._cached: set[tuple[str, ...]] = set()  # beginnings of prompts, of whole blocks

    @property
    def url(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self.port}/v1"

    async def serve(self, started: threading.Event, stop: asyncio.Event) -> None:
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0, ssl=self._tls)
        self.port = server.sockets[0].getsockname()[1]
        started.set()
        await stop.wait()
        server.close()

    async def _connection(self, reader: Any, writer: Any) -> None:
        self._connections += 1
        number = self._connections
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                length = int(lines.get("content-length", 0))
                body = json.loads(await reader.readexactly(length) or "{}")
                if head.startswith("GET /metrics "):
                    _text(writer, self._metrics())
                    continue
                seen = Seen(time.monotonic_ns(), number, head, body)
                self.seen.append(seen)
                if not await self._answer(seen, writer):
                    break
        writer.close()

    async def _answer(self, seen: Seen, writer: Any) -> bool:
        """Write the answer; False closes the connection."""
        name = seen.body.get("model", "models")
        if not seen.body:
            return _json(writer, 200, {"data": [{"id": "listed"}]})
        if name == "drop-later" and sum(s.body.get("model") == name for s in self.seen) == 1:
            name = "ok"  # the first one is answered
        if name == "stall":
            await asyncio.sleep(60)
        if name == "fails-some" and sum(s.body.get("model") == name for s in self.seen) % 4 == 0:
            name = "http500"
        if name in ("http500", "http429"):
            return _json(writer, int(name[4:]), {"error": {"message": f"broken: {name}"}})
        used = sum(other.connection == seen.connection for other in self.seen) > 1
        if name == "hang-up" or (name == "hang-up-later" and used):
            return False
        if name == "not-http":
            writer.write(b"hello\r\n\r\n")
            return False
        if not seen.body.get("stream"):
            await asyncio.sleep(FIRST_S)
            self.num_finished += 1
            whole = _whole(name)
            if name == "prefix-cache":
                whole["usage"] = _usage_with_hits(*self._look_up(seen.body))
            return _json(writer, 200, whole)
        return await self._stream(seen, writer, name)

    async def _stream(self, seen: Seen, writer: Any, name: str) -> bool:
        writer.write(HEAD.encode())
        _event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]}, name)
        prompt, hits = self._look_up(seen.body) if name == "prefix-cache" else (1, 0)
        await asyncio.sleep(FIRST_S * (1 - hits / prompt))
        for index in range(NUM_TOKENS):
            if index:
                await asyncio.sleep(NEXT_S)
            if index == 3 and name in (
                "drop",
                "drop-later",
                "malformed",
                "garbage-line",
                "error-event",
            ):
                return _break(writer, name)
            if index == 3 and name == "pauses":
                await asyncio.sleep(PAUSE_S)
            seen.wrote_ns.append(time.monotonic_ns())
            text = " abcdef" * (3 if name == "coalesced" else 1)
            _event(writer, {"choices": [{"delta": {"content": text}}]}, name)
        if name == "no-finish":
            writer.write(b"0\r\n\r\n")
            return True
        if name != "no-reason":
            _event(writer, {"choices": [{"delta": {}, "finish_reason": "stop"}]}, name)
        if name != "no-usage":
            usage = _usage(name, seen.body.get("prompt"))
            if name == "prefix-cache":
                usage = _usage_with_hits(prompt, hits)
            _event(writer, {"choices": [], "usage": usage}, name)
        if name != "no-done":
            _chunk(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        self.num_finished += 1
        return name != "close-after"

    def _look_up(self, body: dict[str, Any]) -> tuple[int, int]:
        """(tokens of the prompt, those that the cache had); it has them from now on."""
        said = " ".join(message["content"] for message in body["messages"])
        tokens = ("<template>",) * TEMPLATE_TOKENS + tuple(said.split())
        ends = range(BLOCK, len(tokens), BLOCK)
        hits = max((end for end in ends if tokens[:end] in self._cached), default=0)
        self._cached.update(tokens[:end] for end in ends)
        return len(tokens), hits

    def _metrics(self) -> str:
        """As vLLM has them."""
        return (
            f'vllm:request_success_total{{finished_reason="stop"}} {self.num_finished}.0\n'
            f"vllm:generation_tokens_total {self.num_finished * self.tokens_each}.0\n"
            "vllm:num_requests_running 1.0\n"
            f"vllm:prefix_cache_queries_total {self.num_finished * 10}\n"
            f"vllm:prefix_cache_hits_total {self.num_finished * self.hits_each}\n"
        )


def _break(writer: Any, name: str) -> bool:
    if name == "malformed":
        _chunk(writer, b'data: {"choices": [{"delta\n\n')
    elif name == "garbage-line":
        _chunk(writer, b"<html>\n\n")
    elif name == "error-event":
        _chunk(writer, b'data: {"error": {"message": "out of memory"}}\n\n')
    else:
        return False
    writer.write(b"0\r\n\r\n")
    return True


def _usage(name: str, prompt: Any = "") -> dict[str, int]:
    num_prompt = len(prompt) if isinstance(prompt, list) and name != "no-ids" else 7
    claims = {"lies-low": 1, "lies-high": 10_000, "lies-bytes": 60, "lies-double": 2 * NUM_TOKENS}
    claimed = (claims | {"coalesced": 3 * NUM_TOKENS}).get(name, NUM_TOKENS)
    total = 5 if name == "lies-total" else claimed + num_prompt
    return {"prompt_tokens": num_prompt, "completion_tokens": claimed, "total_tokens": total}


def _usage_with_hits(num_prompt: int, hits: int) -> dict[str, Any]:
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": NUM_TOKENS,
        "prompt_tokens_details": {"cached_tokens": hits},
    }


def _whole(name: str) -> dict[str, Any]:
    message = {"message": {"content": " abcdef" * NUM_TOKENS}, "finish_reason": "stop"}
    return {"choices": [message], "usage": _usage(name)}


def _event(writer: Any, value: dict[str, Any], name: str) -> None:
    end = "\r\n\r\n" if name == "crlf" else "\n\n"
    data = f"data: {json.dumps(value)}{end}".encode()
    if name == "split":  # every byte a chunk of its own
        for index in range(len(data)):
            _chunk(writer, data[index : index + 1])
        return
    _chunk(writer, data)


def _chunk(writer: Any, data: bytes) -> None:
    writer.write(b"%x\r\n%s\r\n" % (len(data), data))


def _text(writer: Any, text: str) -> None:
    head = f"HTTP/1.1 200 X\r\nContent-Type: text/plain\r\nContent-Length: {len(text)}\r\n\r\n"
    writer.write((head + text).encode())


def _json(writer: Any, status: int, value: dict[str, Any]) -> bool:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: application/json\r\n"
    writer.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
    return True


@contextlib.contextmanager
def scripted_server(tls: ssl.SSLContext | None = None) -> Iterator[ScriptedServer]:
    server, started = ScriptedServer(tls), threading.Event()
    loop, stop = asyncio.new_event_loop(), asyncio.Event()

    def work() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(server.serve(started, stop))
        for task in asyncio.all_tasks(loop):
            task.cancel()
        loop.run_until_complete(asyncio.sleep(0))
        loop.close()

    thread = threading.Thread(target=work)
    thread.start()
    assert started.wait(30)
    try:
        yield server
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()


class Broken(Synthetic):
    """Data that fail in the client process; here, where that process can import them from."""

    def session(self, index: int) -> Any:
        raise RuntimeError("no such session")
