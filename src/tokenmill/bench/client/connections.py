"""An OpenAI client for measuring: raw connections, stamped when bytes leave and when they come.

A stamp is taken once per read, before anything is parsed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from email.message import Message
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from tokenmill.bench.client.records import (
    DONE,
    Chunk,
    ChunkUsage,
    Endpoint,
    LoadRecord,
    SseError,
    SseScanner,
    decode_chunk,
    error_text,
)
from tokenmill.bench.workload import BenchError
from tokenmill.http_connection import MAX_FILES, ConnectionPool, Headers, HttpConnection, tls_of

CONNECT, TIMEOUT, DROPPED = "connect", "timeout", "dropped"
MALFORMED_SSE, MALFORMED_BODY, IN_STREAM = "malformed_sse", "malformed_body", "error_in_stream"
CANCELLED = "cancelled"
ROUTES = {"chat": "chat/completions", "completions": "completions"}


def route_url(url: str, api: str) -> str:
    """The route of an API below a base URL such as http://host:8000 or http://host:8000/v1."""
    parts = urlsplit(url)
    try:
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise BenchError(f"--url must be http://HOST:PORT or https://..., got {url!r}")
    path = parts.path.rstrip("/")
    if not path.endswith("/" + ROUTES[api]):
        path = f"{path or '/v1'}/{ROUTES[api]}"
    return parts._replace(path=path, query="", fragment="").geturl()


def call_once(
    target: Endpoint,
    url: str,
    method: str = "GET",
    body: bytes | None = None,
    timeout_s: float | None = None,
    max_bytes: int | None = None,
) -> tuple[Message, bytes]:
    """Headers and body of an answer where speed does not matter; OSError or HTTPException."""
    parts = urlsplit(url)
    call = Request(url, body, {"Content-Type": "application/json"} if body else {}, method=method)
    if target.api_key and parts.netloc == urlsplit(target.url).netloc:
        call.add_header("Authorization", f"Bearer {target.api_key}")
    tls = tls_of(parts, target.insecure)
    with urlopen(call, timeout=timeout_s or target.timeout_s, context=tls) as answer:
        return answer.headers, answer.read(max_bytes)


@dataclass(slots=True)
class LoadExchange:
    """One request on its way: what has come so far, and the future that waits for the end."""

    record: LoadRecord
    stream: bool
    keep_text: bool
    done: asyncio.Future[None]
    on_first: Callable[[], None] | None = None  # called inside the read of the first output
    take: Callable[[bytes], None] | None = None  # gets the body of an answer that is no chunk
    scanner: SseScanner = field(default_factory=SseScanner)
    body: bytearray = field(default_factory=bytearray)
    texts: list[str] = field(default_factory=list)
    is_stream: bool = False  # the answer is one, so far
    is_complete: bool = False  # [DONE] has come

    def receive(self, data: bytes, now_ns: int) -> None:
        if not self.is_stream:
            self.body += data
            return
        if self.record.error is None:
            self._scan(data, now_ns)

    def _scan(self, data: bytes, now_ns: int) -> None:
        try:
            for event in self.scanner.feed(data):
                if event == DONE:
                    self.is_complete = True
                else:
                    self._take(decode_chunk(event), now_ns)
        except SseError as error:
            self.fail(MALFORMED_SSE, str(error))

    def _take(self, chunk: Chunk, now_ns: int) -> None:
        """This runs for every token: nothing more is called than must be."""
        record = self.record
        if chunk.error is not None:
            self.fail(IN_STREAM, str(chunk.error)[:200])
        if chunk.usage is not None:
            self._take_usage(chunk.usage)
        for choice in chunk.choices:
            if text := choice.output():
                if record.first_ns:
                    record.gaps_ns.append(now_ns - record.last_ns)
                else:
                    record.first_ns = now_ns
                    if self.on_first is not None:
                        self.on_first()
                record.last_ns = now_ns
                record.num_outputs += 1
                record.num_bytes += len(text) if text.isascii() else len(text.encode())
                if self.keep_text:
                    self.texts.append(text)
            if choice.finish_reason is not None:
                record.finish_reason = choice.finish_reason

    def _take_usage(self, usage: ChunkUsage) -> None:
        record = self.record
        record.prompt_tokens = usage.prompt_tokens
        record.completion_tokens = usage.completion_tokens
        record.total_tokens = usage.total_tokens
        if usage.prompt_tokens_details is not None:
            record.cached_tokens = usage.prompt_tokens_details.cached_tokens
            record.image_tokens = usage.prompt_tokens_details.image_tokens

    def fail(self, error: str, detail: str = "") -> None:
        if self.record.error is None:
            self.record.error, self.record.detail = error, detail

    def finish(self, now_ns: int) -> None:
        """Take the end of the HTTP answer, and decide whether the answer is complete."""
        record = self.record
        if record.status != 200:
            self.fail(f"http_{record.status}", error_text(bytes(self.body)))
        elif self.is_stream:
            self._scan(b"\n\n", now_ns)
            record.saw_done = self.is_complete
            if not self.is_complete and record.finish_reason is None:
                self.fail(DROPPED, f"the stream ended after {record.num_outputs} outputs")
        elif self.take is not None:
            self.take(bytes(self.body))
        else:
            self._take_body(now_ns)
        self.close(now_ns)

    def _take_body(self, now_ns: int) -> None:
        try:
            answer = decode_chunk(bytes(self.body))
        except SseError as error:
            return self.fail(MALFORMED_BODY, str(error))
        if self.stream:
            self.fail(MALFORMED_SSE, "asked for a stream, answered with one JSON object")
        elif not answer.choices:
            self.fail(MALFORMED_BODY, "no choices")
        self._take(answer, now_ns)

    def close(self, now_ns: int) -> None:
        self.record.end_ns = now_ns
        if self.keep_text:
            self.record.text = "".join(self.texts)
        if not self.done.done():
            self.done.set_result(None)


class ClientConnection(HttpConnection):
    """A connection to the server under test; stamps are taken when bytes leave and come."""

    def __init__(self) -> None:
        super().__init__()
        self.exchange: LoadExchange | None = None

    @property
    def peer(self) -> tuple[str, int]:
        host, port = self.transport.get_extra_info("peername")[:2]
        return host, port

    def send(self, payload: bytes, exchange: LoadExchange) -> None:
        self.exchange = exchange
        exchange.record.sent_ns = time.monotonic_ns()
        self.write(payload)

    def take_head(self, status: int, headers: Headers) -> None:
        if exchange := self.exchange:
            kind = next((value for name, value in headers if name == b"content-type"), b"")
            exchange.record.status = status
            is_stream = kind.startswith(b"text/event-stream")
            exchange.is_stream = is_stream and status == 200 and exchange.stream

    def take_body(self, parts: list[bytes]) -> None:
        if self.exchange is not None:
            self.exchange.receive(b"".join(parts), self.read_ns)

    def finish(self, keep_alive: bool) -> None:
        exchange, self.exchange = self.exchange, None
        if not keep_alive:
            self.close()
        if exchange is not None:
            exchange.finish(self.read_ns)

    def fail(self, reason: str) -> None:
        self._end(MALFORMED_BODY, reason)

    def answer_cut_off(self, error: Exception | None) -> None:
        if self.exchange is not None:
            after = f"after {self.exchange.record.num_outputs} outputs"
            self._end(DROPPED, f"the connection closed {after}" + (f": {error}" if error else ""))

    def _end(self, error: str, detail: str) -> None:
        exchange, self.exchange = self.exchange, None
        self.close()
        if exchange is not None:
            exchange.fail(error, detail)
            exchange.close(time.monotonic_ns())

    def time_out(self) -> None:
        self._end(TIMEOUT, "no whole answer in time")


class Client:
    def __init__(self, target: Endpoint) -> None:
        self._target = target
        self._pool: ConnectionPool[ClientConnection] = ConnectionPool(
            target.url, target.insecure, max_idle=MAX_FILES
        )
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        head = f"POST {urlsplit(target.url).path} HTTP/1.1\r\n{key}"
        head += "Content-Type: application/json\r\nAccept: */*\r\n"
        self._head = head.encode() + self._pool.host_line + b"Content-Length: "

    async def call(
        self,
        record: LoadRecord,
        body: bytes,
        on_first: Callable[[], None] | None = None,
        take: Callable[[bytes], None] | None = None,
    ) -> LoadRecord:
        """Send one request and wait for its end; what went wrong is in the record."""
        payload = self._head + b"%d\r\n\r\n" % len(body) + body
        target = self._target

        def exchange() -> LoadExchange:
            done = asyncio.get_running_loop().create_future()
            return LoadExchange(record, target.stream, target.keep_text, done, on_first, take)

        connection = await self._attempt(exchange(), payload, self._pool.take())
        if connection is not None and self._went_stale(record, connection):
            record.error, record.detail, record.retried = None, "", True
            await self._attempt(exchange(), payload, None)
        return record

    async def open(self, count: int) -> list[BaseException]:
        """Open connections ahead; a failure is also reported by the request that needs it."""
        opened = await asyncio.gather(
            *(self._connect() for _ in range(count)), return_exceptions=True
        )
        for connection in opened:
            if isinstance(connection, ClientConnection):
                self._pool.give(connection)
        return [error for error in opened if isinstance(error, BaseException)]

    def close(self) -> None:
        self._pool.close()

    def _went_stale(self, record: LoadRecord, connection: ClientConnection) -> bool:
        return record.error == DROPPED and self._pool.went_stale(connection)

    async def _attempt(
        self, exchange: LoadExchange, payload: bytes, connection: ClientConnection | None
    ) -> ClientConnection | None:
        if connection is None:
            try:
                async with asyncio.timeout(self._target.timeout_s):
                    connection = await self._connect()
            except (OSError, TimeoutError) as error:
                exchange.fail(CONNECT, str(error) or "timed out")
                exchange.record.end_ns = time.monotonic_ns()
                return None
        await self._exchange(exchange, payload, connection)
        if connection.is_open:
            self._pool.give(connection)
        return connection

    async def _exchange(
        self, exchange: LoadExchange, payload: bytes, connection: ClientConnection
    ) -> None:
        connection.send(payload, exchange)
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._target.timeout_s, connection.time_out)
        try:
            await exchange.done
        except asyncio.CancelledError:
            exchange.fail(CANCELLED)
            connection.exchange = None
            connection.close()
            exchange.close(time.monotonic_ns())
            raise
        finally:
            timer.cancel()

    async def _connect(self) -> ClientConnection:
        connection = await self._pool.connect(ClientConnection)
        self._pool.address = connection.peer  # resolve once
        return connection
