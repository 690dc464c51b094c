"""A ranking server under LoadGen's test: every query is one POST /v1/rank of one user.

Ids travel as base64 of int64, scores come as JSON. A query that fails is completed without scores,
so that LoadGen can end, and the run is INVALID.
"""

from __future__ import annotations

import asyncio
import base64
import json
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from tokenmill.bench.client.records import Record, Target, error_text
from tokenmill.bench.mlperf.loadgen import respond
from tokenmill.bench.mlperf.loadgen_url import GIVE_UP, OPENED, GivenUp, UrlUnderTest
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import Headers, HttpConnection, tls_of

if TYPE_CHECKING:
    from tokenmill.ranking.requests import RankRequest

ROUTE = "/v1/rank"
Data = Callable[[int, Sequence[float]], Any]  # of LoadGen, from a sample's index and its scores


def rank_url(url: str) -> str:
    """The route of a server, however its address was given."""
    return url.rstrip("/").removesuffix(ROUTE).removesuffix("/v1") + ROUTE


def body_of(request: RankRequest) -> bytes:
    """The body of a call for one user."""

    def ids(values: Any) -> str:
        return base64.b64encode(values.astype("<i8").tobytes()).decode()

    history = {
        "item_ids": ids(request.item_ids),
        "category_ids": ids(request.category_ids),
        "actions": ids(request.actions),
    }
    if request.timestamps is not None:
        history["timestamps"] = ids(request.timestamps)
    candidates = {
        "item_ids": ids(request.candidate_ids),
        "category_ids": ids(request.candidate_category_ids),
    }
    user = {"user_id": request.user_id, "query_time": request.query_time}
    return json.dumps({"users": [{**user, "history": history, "candidates": candidates}]}).encode()


class RankConnection(HttpConnection):
    """A connection that asks one question at a time and waits for the whole answer."""

    def __init__(self) -> None:
        super().__init__()
        self._status = 0
        self._body: list[bytes] = []
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None

    async def ask(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the answer; OSError where there is none."""
        self._status, self._body = 0, []
        self._answer = asyncio.get_running_loop().create_future()
        self.write(request)
        return await self._answer

    def take_head(self, status: int, headers: Headers) -> None:
        self._status = status

    def take_body(self, parts: list[bytes]) -> None:
        self._body += parts

    def finish(self, keep_alive: bool) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((self._status, b"".join(self._body)))
        if not keep_alive:
            self.close()

    def fail(self, reason: str) -> None:
        self.lose(OSError(reason))
        self.close()

    def lose(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(OSError(str(error or "the connection was closed")))


class RankingServerUnderTest(UrlUnderTest):
    """A server of a ranking model; more than `max_in_flight` queries wait here for their turn."""

    def __init__(
        self, target: Target, requests: Sequence[RankRequest], data: Data, max_in_flight: int
    ) -> None:
        super().__init__(target, [], False, max_in_flight)
        self._requests, self._data = requests, data
        self._opened: list[RankConnection] = []
        self._idle: list[RankConnection] = []
        parts = urlsplit(target.url)
        self._tls = tls_of(parts, target.insecure)
        self._address = (parts.hostname or "", parts.port or (443 if self._tls else 80))
        key = f"Authorization: Bearer {target.api_key}\r\n" if target.api_key else ""
        self._head = (
            f"POST {parts.path} HTTP/1.1\r\nHost: {parts.netloc.rpartition('@')[2]}\r\n"
            f"Content-Type: application/json\r\n{key}Content-Length: "
        )

    async def _drive(self) -> None:
        try:
            self._idle = [await self._connect() for _ in range(min(OPENED, self._max_in_flight))]
        except OSError as error:
            raise BenchError(f"{self._target.url} does not answer: {error}") from None
        await self._over
        for connection in self._opened:
            connection.close()

    async def _connect(self) -> RankConnection:
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(RankConnection, *self._address, ssl=self._tls)
        self._opened.append(connection)
        return connection

    async def _ask(self, query_id: int, index: int, issued_ns: int) -> None:
        record, scores = Record(index, 0, issued_ns), []
        body = body_of(self._requests[index])
        request = f"{self._head}{len(body)}\r\n\r\n".encode() + body
        try:
            async with asyncio.timeout(self._target.timeout_s):
                status, answer = await self._exchange(request)
            if status == 200:
                scores = json.loads(answer)["results"][0]["scores"]
            else:
                record.error, record.detail = f"http_{status}", error_text(answer)
        except (OSError, TimeoutError, ValueError, KeyError) as error:
            record.error, record.detail = type(error).__name__.lower(), str(error)
        self._complete(query_id, record, scores)

    async def _exchange(self, request: bytes) -> tuple[int, bytes]:
        """One question over a connection that is free; a new one where the server closed it."""
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        connection = self._idle.pop() if self._idle else await self._connect()
        answer = await connection.ask(request)
        self._idle.append(connection)
        return answer

    def _complete(self, query_id: int, record: Record, scores: Sequence[float]) -> None:
        """Report the scores, or the failure as an answer without any."""
        data: Any = self._data(record.session, scores) if record.error is None else array("f")
        respond(self._library, self._library.QuerySamplesComplete, [(query_id, data, 1)])
        if record.error is None:
            self.tally.failed_in_a_row = 0
            times = RequestTimes(record.planned_ns)
            times.record(time.monotonic_ns(), 1)
            self.times.append(times)
            return
        self.tally.take(record)
        if self.tally.failed_in_a_row >= GIVE_UP:
            why = f"{record.error}: {record.detail}"
            self._finish(GivenUp(f"given up after {GIVE_UP} failed queries in a row, {why}"))
