"""The systems under LoadGen's test, an engine of this process or a server, for every task.

LoadGen counts from the scheduled arrival, so the time that a query waits is part of its latency.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Protocol

from tokenmill.bench.client.client_process import loop_factory
from tokenmill.bench.client.connections import TIMEOUT, Client
from tokenmill.bench.client.records import Endpoint, LoadRecord
from tokenmill.bench.client.summary import EMPTY, num_tokens, times_of, usage_fault
from tokenmill.bench.mlperf.compliance import Verdict
from tokenmill.bench.mlperf.loadgen import load_library, respond
from tokenmill.bench.results.mlperf_reports import Fields
from tokenmill.bench.results.reports import Occurrence
from tokenmill.bench.workload import BenchError
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import raise_file_limit
from tokenmill.settings import Settings

SUBMITTED_PER_STEP = 256  # more than a step takes, and few enough to delay none
GIVE_UP = 32  # queries in a row that fail: the run is INVALID anyway, and a server may be gone
OPENED = 16  # connections made before the test
FULL = "http_429"
RETRY_S = 1.0  # while a server is full with the requests of others
FOREVER_S = 1e8


class GivenUp(BenchError):
    """The server answers no more: the test was left before its end."""


@dataclass(slots=True)
class Query:
    """A sample that LoadGen wants answered, and what has come of the answer."""

    id: int  # LoadGen's
    sample: int  # its place in the library
    times: RequestTimes
    token_ids: list[int] = field(default_factory=list)  # where answers are tokens
    answer: Any = None  # else


def queries_of(issued: Iterable[Any]) -> list[Query]:
    """What LoadGen's callback gets, with the time at which it came."""
    now_ns = time.monotonic_ns()
    return [Query(query.id, query.index, RequestTimes(now_ns)) for query in issued]


class Stepped(Protocol):
    """The part of an engine that a test drives."""

    def submit(self, request: Any, /) -> None: ...
    def has_work(self) -> bool: ...
    def step(self) -> Sequence[Any]: ...


class EngineSamples(Protocol):
    """The samples of a benchmark, for an engine."""

    def request(self, name: str, query: Query, /) -> Any:
        """What is submitted; `name` is new for every query."""

    def take(self, query: Query, output: Any, /) -> tuple[int, bool]:
        """(new tokens, whether the answer is whole); BenchError where it went wrong."""

    def data(self, query: Query, /) -> array[Any]:
        """What LoadGen gets of the answer so far."""


class UrlSamples(Protocol):
    """The samples of a benchmark, for a server."""

    def body(self, sample: int, /) -> bytes: ...
    def max_tokens(self, sample: int, /) -> int | None: ...


class BenchmarkTask(ABC):
    """The samples of a benchmark with the system that answers them."""

    sut: EngineUnderTest | UrlUnderTest
    num_samples: int

    @abstractmethod
    def facts(self) -> Fields:
        """What was under test, and by which samples."""

    @abstractmethod
    def score(self, folder: Path) -> Fields:
        """The scores of the answers that an accuracy run has logged."""

    def failures(self) -> list[str]:
        """What makes the run INVALID whatever LoadGen says."""
        return self.sut.failures()

    def figures(self, fields: Fields) -> Fields:
        """What is to be added to the figures of a performance run."""
        return {}

    def verify(self, folder: Path) -> Verdict:
        """The verdict of a compliance test on what it has logged."""
        raise BenchError("MLPerf's compliance tests are for language models in this process")

    def max_tokens(self, sample: int) -> int | None:
        return None


class EngineUnderTest:
    """An engine that the caller's thread steps; an answer is reported in the step that ends it."""

    def __init__(self, engine: Stepped, task: EngineSamples, first_tokens: bool = False) -> None:
        self._engine, self._task, self._first_tokens = engine, task, first_tokens
        self._library = load_library()
        self._arrivals: SimpleQueue[list[Query] | None] = SimpleQueue()
        self._arrived: deque[Query] = deque()
        self._open: dict[str, Query] = {}
        self._num_issued = 0
        self.times: list[RequestTimes] = []

    def issue(self, queries: Iterable[Any]) -> None:
        self._arrivals.put(queries_of(queries))

    def end(self) -> None:
        self._arrivals.put(None)

    def failures(self) -> list[str]:
        return []  # what an engine does not answer ends the test

    def drive(self) -> None:
        """Step the engine until the end; BenchError when it does not answer a query."""
        while self._take():
            self._report(self._engine.step())

    def _take(self) -> bool:
        """Submit what has arrived; an idle engine waits for it. False at the end.

        All samples of Offline arrive at once: the engine begins with the first of them.
        """
        while not (self._arrivals.empty() and (self._arrived or self._engine.has_work())):
            queries = self._arrivals.get()
            if queries is None:
                return False
            self._arrived.extend(queries)
        for _ in range(min(len(self._arrived), SUBMITTED_PER_STEP)):
            name, query = f"query-{self._num_issued}", self._arrived.popleft()
            self._open[name] = query
            self._engine.submit(self._task.request(name, query))
            self._num_issued += 1
        return True

    def _report(self, outputs: Sequence[Any]) -> None:
        """Tell LoadGen of first tokens, and of whole answers with their number of tokens."""
        begun: list[Query] = []
        ended: list[Query] = []
        now_ns = time.monotonic_ns()
        for output in outputs:
            query = self._open[output.request_id]
            num_new, is_whole = self._task.take(query, output)
            if num_new:
                if self._first_tokens and not query.times.num_tokens:
                    begun.append(query)
                query.times.record(now_ns, num_new)
            if is_whole:
                ended.append(self._open.pop(output.request_id))
        if begun:
            self._respond(self._library.FirstTokenComplete, begun)
        if ended:
            self.times += [query.times for query in ended]
            self._respond(self._library.QuerySamplesComplete, ended)

    def _respond(self, complete: Any, queries: Sequence[Query]) -> None:
        respond(complete, ((q.id, self._task.data(q), q.times.num_tokens) for q in queries))


@dataclass(slots=True)
class QueryTally:
    errors: dict[str, Occurrence] = field(default_factory=dict)
    doubts: dict[str, Occurrence] = field(default_factory=dict)
    num_failed: int = 0
    num_cached: int = 0  # answers with prompt tokens from a cache
    failed_in_a_row: int = 0

    def take(self, record: LoadRecord, checks_usage: bool) -> None:
        if record.error is not None:
            self.num_failed += 1
            self.failed_in_a_row += 1
            _count(self.errors, record.error, record.detail)
            return
        self.failed_in_a_row = 0
        self.num_cached += bool(record.cached_tokens)
        if checks_usage and (fault := usage_fault(record)):
            _count(self.doubts, *fault)


def _count(classes: dict[str, Occurrence], name: str, detail: str) -> None:
    classes.setdefault(name, Occurrence(count=0, first=detail)).count += 1


class UrlUnderTest:
    """A server, to which every query is one request; the time that it waits here counts, too.

    A stream's first output is reported in the read that received it. A query that fails is
    completed without data, so that LoadGen can end, and the run is INVALID. Answers that are no
    streams are read by `read`: ValueError, KeyError or IndexError for a wrong one. A patient test,
    whose answers take minutes, asks a full server anew, and --timeout is the longest time in which
    no answer ends; for others it is that of an answer.
    """

    def __init__(
        self,
        target: Endpoint,
        task: UrlSamples,
        max_in_flight: int,
        read: Callable[[int, bytes], array[Any]] | None = None,
        patient: bool = False,
    ) -> None:
        self._target, self._task, self._read, self._patient = target, task, read, patient
        self._most = self._room = max_in_flight
        self._library = load_library()
        self._runner = asyncio.Runner(loop_factory=loop_factory())
        self._loop = self._runner.get_loop()
        timeout_s = target.timeout_s if target.stream else FOREVER_S
        self._client = Client(replace(target, timeout_s=timeout_s))
        self._over = self._loop.create_future()
        self._waiting: deque[Query] = deque()
        self._open: set[asyncio.Task[None]] = set()
        self._deadlines: set[asyncio.Timeout] = set()
        self._last_end_s = self._loop.time()
        self.times: list[RequestTimes] = []
        self.tally = QueryTally()
        self.num_prompt_tokens = 0
        self.cpu_share = 0.0  # of one core, while the test ran

    def issue(self, queries: Iterable[Any]) -> None:
        self._loop.call_soon_threadsafe(self._take, queries_of(queries))

    def end(self) -> None:
        self._loop.call_soon_threadsafe(self._finish, None)

    def failures(self) -> list[str]:
        return [
            f"{entry.count} queries failed, {name}: {entry.first}"
            for name, entry in self.tally.errors.items()
        ]

    def facts(self, url: str) -> Fields:
        return {
            "url": url,
            "dtype": "as served",
            "device": "remote",
            "accelerator": {},
            "num_failed": self.tally.num_failed,
            "errors": self.tally.errors,
            "client_cpu_share": round(self.cpu_share, 3),
        }

    def drive(self) -> None:
        """Send and report until the end; GivenUp when nothing is answered any more."""
        raise_file_limit()
        cpu_s, wall_s = time.process_time(), time.monotonic()
        try:
            self._runner.run(self._drive())
        finally:
            self.cpu_share = (time.process_time() - cpu_s) / (time.monotonic() - wall_s)

    async def _drive(self) -> None:
        if failed := await self._client.open(min(OPENED, self._most)):
            raise BenchError(f"{self._target.url} does not answer: {failed[0]}")
        await self._over
        self._client.close()

    def _finish(self, error: BaseException | None) -> None:
        if self._over.done():
            return
        if error is None:
            self._over.set_result(None)
        else:
            self._over.set_exception(error)

    def _take(self, arrived: list[Query]) -> None:
        self._waiting.extend(arrived)
        self._fill()

    def _fill(self) -> None:
        while self._waiting and len(self._open) < self._room:
            task = self._loop.create_task(self._ask(self._waiting.popleft()))
            self._open.add(task)
            task.add_done_callback(self._done)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._open.discard(task)
        if task.cancelled():
            return
        if error := task.exception():
            self._finish(error)
        self._fill()

    async def _ask(self, query: Query) -> None:
        most = self._task.max_tokens(query.sample)
        record = LoadRecord(query.sample, 0, query.times.arrival_ns, max_tokens=most)
        body, begin = self._task.body(query.sample), partial(self._begin, query)
        if self._target.stream:
            await self._client.call(record, body, begin)
            data, tokens = self._streamed(query, record)
        else:
            bodies = await self._call_whole(record, body)
            if record.error == FULL and self._waits(query):
                return
            data, tokens = self._whole(query, record, bodies), 1
        respond(self._library.QuerySamplesComplete, [(query.id, data, tokens)])
        self.tally.take(record, checks_usage=self._target.stream)
        if record.error is None:
            self.times.append(query.times)
        elif self.tally.failed_in_a_row >= GIVE_UP:
            why = f"{record.error}: {record.detail}"
            self._finish(GivenUp(f"given up after {GIVE_UP} failed queries in a row, {why}"))

    def _begin(self, query: Query) -> None:
        respond(self._library.FirstTokenComplete, [(query.id, array("B"), 1)])

    def _streamed(self, query: Query, record: LoadRecord) -> tuple[array[int], int]:
        """The text of a stream, and its tokens as far as they can be trusted."""
        tokens = num_tokens(record, stream=True)
        if record.error is None and not tokens:
            record.error, record.detail = EMPTY, f"no output, finish reason {record.finish_reason}"
        if not record.first_ns:
            self._begin(query)
        query.times = times_of(record, True, record.planned_ns)
        if record.error is None:
            self.num_prompt_tokens += record.prompt_tokens or 0
        return array("B", (record.text or "").encode()), 0 if record.error else tokens

    async def _call_whole(self, record: LoadRecord, body: bytes) -> list[bytes]:
        bodies: list[bytes] = []
        try:
            async with asyncio.timeout(self._target.timeout_s) as deadline:
                self._deadlines.add(deadline)
                await self._client.call(record, body, take=bodies.append)
        except TimeoutError:
            waited = f"no answer within {self._target.timeout_s:g} s (--timeout)"
            record.error, record.detail = TIMEOUT, waited
        finally:
            self._deadlines.discard(deadline)
        return bodies

    def _whole(self, query: Query, record: LoadRecord, bodies: Sequence[bytes]) -> array[Any]:
        if record.error is not None:
            return array("B")
        if self._patient:
            self._note_end()
        query.times.record(record.end_ns, 1)
        try:
            assert self._read is not None
            return self._read(query.sample, bodies[0])
        except (ValueError, KeyError, IndexError) as error:
            record.error, record.detail = type(error).__name__.lower(), str(error)
            return array("B")

    def _note_end(self) -> None:
        """The others get their time anew, and one more may be taken by now."""
        self._last_end_s = self._loop.time()
        for deadline in self._deadlines:
            if not deadline.expired():
                deadline.reschedule(self._last_end_s + self._target.timeout_s)
        self._grow()

    def _waits(self, query: Query) -> bool:
        """A server that is full has as many requests as it takes: those that are open now."""
        others = len(self._open) - 1
        waited_s = self._loop.time() - self._last_end_s
        if not self._patient or (not others and waited_s > self._target.timeout_s):
            return False
        self._waiting.appendleft(query)
        self._room = others
        if not others:
            self._loop.call_later(RETRY_S, self._grow)
        return True

    def _grow(self) -> None:
        self._room = min(self._most, self._room + 1)
        self._fill()


def target_of(settings: Settings, url: str) -> Endpoint:
    return Endpoint(
        url=url,
        model="",
        stream=False,
        api_key=next(iter(settings.values.get("api-key", ())), None),
        timeout_s=settings.get("timeout"),
        insecure=settings.get("insecure"),
    )
