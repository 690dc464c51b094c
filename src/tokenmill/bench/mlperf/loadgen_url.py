"""A server under LoadGen's test: every query is one streamed request.

The first output is reported in the read that received it; the end of an answer is reported with the
number of tokens of the checked usage. A query that fails is completed without tokens, so that
LoadGen can end, and the run is INVALID.
"""

from __future__ import annotations

import asyncio
import time
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tokenmill.bench.client.client_process import loop_factory
from tokenmill.bench.client.connections import Client
from tokenmill.bench.client.records import Record, Target, request_body
from tokenmill.bench.client.summary import EMPTY, num_tokens, times_of, usage_fault
from tokenmill.bench.mlperf.loadgen import Sample, load_library, respond
from tokenmill.bench.results.reports import Occurrence
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import raise_file_limit

GIVE_UP = 32  # queries in a row that fail: the run is INVALID anyway, and a server may be gone
OPENED = 16  # connections made before the test
PROBE_TOKENS, PROBE_OUTPUT = 24, 2
SPECIAL_TOKENS = 2  # that a server may put around a prompt


class GivenUp(BenchError):
    """The server answers no more: the test was left before its end."""


@dataclass(slots=True)
class Tally:
    """What went wrong, by class: how often, and what the first one said."""

    errors: dict[str, Occurrence] = field(default_factory=dict)
    doubts: dict[str, Occurrence] = field(default_factory=dict)
    num_failed: int = 0
    num_cached: int = 0  # answers with prompt tokens from a cache
    failed_in_a_row: int = 0

    def take(self, record: Record) -> None:
        """Count one request that has ended."""
        if record.error is not None:
            self.num_failed += 1
            self.failed_in_a_row += 1
            _count(self.errors, record.error, record.detail)
            return
        self.failed_in_a_row = 0
        self.num_cached += bool(record.cached_tokens)
        if fault := usage_fault(record):
            _count(self.doubts, *fault)


def _count(classes: dict[str, Occurrence], name: str, detail: str) -> None:
    classes.setdefault(name, {"count": 0, "first": detail})["count"] += 1


class UrlUnderTest:
    """An OpenAI-compatible server; more than `max_in_flight` queries wait here for their turn."""

    def __init__(
        self, target: Target, samples: Sequence[Sample], send_ids: bool, max_in_flight: int
    ) -> None:
        self._target = target
        self._samples = samples
        self._send_ids = send_ids
        self._max_in_flight = max_in_flight
        self._library = load_library()
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._loop = self._runner.get_loop()
        self._client = Client(target)
        self._over = self._loop.create_future()
        self._waiting: deque[tuple[int, int, int]] = deque()  # query, sample, when issued
        self._open: set[asyncio.Task[None]] = set()
        self.times: list[RequestTimes] = []
        self.tally = Tally()
        self.num_prompt_tokens = 0
        self.cpu_share = 0.0  # of one core, while the test ran

    def issue(self, queries: Iterable[Any]) -> None:
        """LoadGen's callback: some samples to answer."""
        now_ns = time.monotonic_ns()
        arrived = [(query.id, query.index, now_ns) for query in queries]
        self._loop.call_soon_threadsafe(self._take, arrived)

    def end(self) -> None:
        """No query comes any more."""
        self._loop.call_soon_threadsafe(self._finish, None)

    def drive(self) -> None:
        """Send and report until the end; GivenUp when nothing is answered any more."""
        raise_file_limit()
        cpu_s, wall_s = time.process_time(), time.monotonic()
        try:
            self._runner.run(self._drive())
        finally:
            self.cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)

    async def _drive(self) -> None:
        await self._client.open(min(OPENED, self._max_in_flight))
        await self._over
        self._client.close()

    def _finish(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _take(self, arrived: list[tuple[int, int, int]]) -> None:
        self._waiting.extend(arrived)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._open) < self._max_in_flight:
            task = self._loop.create_task(self._ask(*self._waiting.popleft()))
            self._open.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self._finish(error)
        self._fill()

    async def _ask(self, query_id: int, index: int, issued_ns: int) -> None:
        sample = self._samples[index]
        max_tokens = sample.sampling.max_tokens
        content = sample.prompt_token_ids.tolist() if self._send_ids else sample.text
        body = request_body(self._target, content, max_tokens)
        record = Record(index, 0, issued_ns, max_tokens=max_tokens)
        await self._client.call(record, body, partial(self._begin, query_id))
        self._end(query_id, record)

    def _begin(self, query_id: int) -> None:
        respond(self._library, self._library.FirstTokenComplete, [(query_id, array("B"), 1)])

    def _end(self, query_id: int, record: Record) -> None:
        """Report the whole answer, or the failure as an answer without tokens."""
        tokens = num_tokens(record, stream=True)
        if record.error is None and not tokens:
            record.error, record.detail = EMPTY, f"no output, finish reason {record.finish_reason}"
        if not record.first_ns:
            self._begin(query_id)
        text = array("B", (record.text or "").encode())
        answer = (query_id, text, 0 if record.error else tokens)
        respond(self._library, self._library.QuerySamplesComplete, [answer])
        self.tally.take(record)
        if record.error is None:
            self.times.append(times_of(record, True, record.planned_ns))
            self.num_prompt_tokens += record.prompt_tokens or 0
        elif self.tally.failed_in_a_row >= GIVE_UP:
            why = f"{record.error}: {record.detail}"
            self._finish(GivenUp(f"given up after {GIVE_UP} failed queries in a row, {why}"))


def takes_token_ids(target: Target, vocab_size: int) -> bool:
    """Ask once with token ids; False where the server refuses them or counts other tokens."""
    first = vocab_size // 2
    record = _ask_once(target, list(range(first, first + PROBE_TOKENS)))
    if record.error is None and record.prompt_tokens is not None:
        return 0 <= record.prompt_tokens - PROBE_TOKENS <= SPECIAL_TOKENS
    if record.error is None or record.error.startswith("http_4"):
        return False
    raise BenchError(f"{target.url} does not answer: {record.error}: {record.detail}")


def probe_text(target: Target) -> None:
    """Ask once with a text; BenchError where there is no answer."""
    record = _ask_once(target, "How do you do?")
    if record.error is not None:
        raise BenchError(f"{target.url} does not answer: {record.error}: {record.detail}")


def _ask_once(target: Target, content: str | list[int]) -> Record:
    async def ask() -> Record:
        client = Client(target)
        body = request_body(target, content, PROBE_OUTPUT)
        record = await client.call(Record(0, 0, time.monotonic_ns()), body)
        client.close()
        return record

    return asyncio.run(ask())
