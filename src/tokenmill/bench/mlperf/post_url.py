"""A server under LoadGen's test that answers a query by one POST with one whole answer.

A query that fails is completed without data, so that LoadGen can end, and the run is INVALID.
"""

from __future__ import annotations

import asyncio
import time
from abc import abstractmethod
from array import array
from typing import NamedTuple
from urllib.parse import urlsplit

from tokenmill.bench.client.records import Record, Target, error_text
from tokenmill.bench.mlperf.loadgen import respond
from tokenmill.bench.mlperf.loadgen_url import GIVE_UP, OPENED, GivenUp, Tally, UrlUnderTest
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import Headers, HttpConnection, tls_of

OK = 200


class Answer(NamedTuple):
    """What a server says to one call."""

    status: int
    headers: Headers
    body: bytes

    @property
    def problem(self) -> str:
        """Status and message of an answer that is an error."""
        return f"http_{self.status}: {error_text(self.body)}"


class AnswerConnection(HttpConnection):
    """A connection that asks one question at a time and waits for the whole answer."""

    def __init__(self) -> None:
        super().__init__()
        self._head: tuple[int, Headers] = (0, [])
        self._body: list[bytes] = []
        self._answer: asyncio.Future[Answer] | None = None

    async def ask(self, request: bytes) -> Answer:
        """The answer; OSError where there is none."""
        self._body = []
        self._answer = asyncio.get_running_loop().create_future()
        self.write(request)
        return await self._answer

    def take_head(self, status: int, headers: Headers) -> None:
        self._head = status, headers

    def take_body(self, parts: list[bytes]) -> None:
        self._body += parts

    def finish(self, keep_alive: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(Answer(*self._head, b"".join(self._body)))
        if not keep_alive:
            self.close()

    def fail(self, reason: str) -> None:
        self.lose(OSError(reason))
        self.close()

    def lose(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(OSError(str(error or "the connection was closed")))


class Caller:
    """Calls a server over connections that are used again."""

    def __init__(self, target: Target) -> None:
        parts = urlsplit(target.url)
        self._tls = tls_of(parts, target.insecure)
        self._address = (parts.hostname or "", parts.port or (443 if self._tls else 80))
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        self._headers = (
            f"Host: {parts.netloc.rpartition('@')[2]}\r\nContent-Type: application/json\r\n{key}"
        )
        self._path = parts.path
        self._opened: list[AnswerConnection] = []
        self._idle: list[AnswerConnection] = []

    async def open(self, count: int) -> None:
        """Make connections before they are needed."""
        self._idle = [await self._connect() for _ in range(count)]

    async def ask(self, method: str, below: str = "", body: bytes = b"") -> Answer:
        """One call of the target or of a path below it; a new connection where none is free."""
        head = f"{method} {self._path}{below} HTTP/1.1\r\n{self._headers}Content-Length: "
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        try:
            answer = await connection.ask(f"{head}{len(body)}\r\n\r\n".encode() + body)
        except BaseException:  # a server stops what nobody waits for any more
            connection.close()
            raise
        self._idle.append(connection)
        return answer

    def close(self) -> None:
        for connection in self._opened:
            connection.close()

    async def _connect(self) -> AnswerConnection:
        loop = asyncio.get_running_loop()
        made = loop.create_connection(AnswerConnection, *self._address, ssl=self._tls)
        _, connection = await made
        self._opened.append(connection)
        return connection


class PostUnderTest(UrlUnderTest):
    """A server; more than `max_in_flight` queries wait here for their turn."""

    def __init__(self, target: Target, max_in_flight: int) -> None:
        super().__init__(target, [], False, max_in_flight)
        self._caller = Caller(target)

    @abstractmethod
    def _body(self, index: int) -> bytes:
        """What is sent for a sample."""

    @abstractmethod
    def _data(self, index: int, body: bytes) -> array:
        """What LoadGen gets of an answer; ValueError or KeyError where it is not as expected."""

    async def _drive(self) -> None:
        try:
            await self._caller.open(min(OPENED, self._max_in_flight))
        except OSError as error:
            raise BenchError(f"{self._target.url} does not answer: {error}") from None
        await self._over
        self._caller.close()

    async def _ask(self, query_id: int, index: int, issued_ns: int) -> None:
        record, data = Record(index, 0, issued_ns), array("B")
        try:
            answer = await self._answer(self._body(index))
            if answer.status == OK:
                data = self._data(index, answer.body)
            elif self._waits(query_id, record, answer):
                return
            else:
                record.error, record.detail = f"http_{answer.status}", error_text(answer.body)
        except TimeoutError:
            waited = f"no answer within {self._target.timeout_s:g} s (--timeout)"
            record.error, record.detail = "timeout", waited
        except (OSError, ValueError, KeyError) as error:
            record.error, record.detail = type(error).__name__.lower(), str(error)
        self._complete(query_id, record, data)

    async def _answer(self, body: bytes) -> Answer:
        async with asyncio.timeout(self._target.timeout_s):
            return await self._caller.ask("POST", body=body)

    def _waits(self, query_id: int, record: Record, answer: Answer) -> bool:
        """True where a query that was not taken is sent again later."""
        return False

    def _complete(self, query_id: int, record: Record, data: array) -> None:
        """Report the answer, or the failure as one without data."""
        respond(self._library, self._library.QuerySamplesComplete, [(query_id, data, 1)])
        if record.error is None:
            self.tally.failed_in_a_row = 0
            times = RequestTimes(record.planned_ns)
            times.record(time.monotonic_ns(), 1)
            self.times.append(times)
            return
        self.tally.take(record)
        if self.tally.failed_in_a_row >= GIVE_UP:
            why = f"given up after {GIVE_UP} failed queries in a row"
            told = f"{self._target.url}: {why}, {record.error}: {record.detail}"
            self._finish(GivenUp(told))


def failures(url: str, tally: Tally) -> list[str]:
    """Why a run with failed queries is INVALID."""
    return [
        f"{url}: {entry['count']} queries failed, {name}: {entry['first']}"
        for name, entry in tally.errors.items()
    ]
