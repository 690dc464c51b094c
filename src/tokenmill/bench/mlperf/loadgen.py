"""Connects MLPerf's LoadGen to a system under test: one adapter for every scenario.

LoadGen keeps its settings and loggers in globals, so a process runs one test. It issues queries
from its own threads; the caller's thread drives the system, which is an engine or a server
(loadgen_url.py). An answer is reported in the step that completes it. LoadGen counts from the
scheduled arrival, so the time that a query waits is part of its latency.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

from tokenmill.bench.workload import BenchError
from tokenmill.core.images import ImageSpan
from tokenmill.core.metrics import RequestTimes
from tokenmill.core.types import Engine, FinishReason, Request, RequestOutput, SamplingParams

SUMMARY, DETAIL = "mlperf_log_summary.txt", "mlperf_log_detail.txt"
ACCURACY = "mlperf_log_accuracy.json"
MARK = ":::MLLOG "
Text = Callable[[list[int]], str]
SWITCH_INTERVAL_S = 0.0005  # LoadGen's threads need the interpreter to issue a query
SUBMITTED_PER_STEP = 256  # more than a step takes, and few enough to delay none
ENDED_WELL = (FinishReason.STOP, FinishReason.LENGTH)


@dataclass(frozen=True, slots=True)
class Sample:
    """One entry of the query sample library."""

    prompt_token_ids: array[int]  # a library of lists would take ten times the memory
    sampling: SamplingParams
    text: str = ""  # of the prompt, for a server that takes no token ids
    # Makes the images of the prompt when it is issued: all at once would not fit in memory.
    images: Callable[[], tuple[ImageSpan, ...]] | None = None


@dataclass(frozen=True, slots=True)
class Test:
    """What LoadGen is told; `overrides` are fields of its TestSettings, set after the files."""

    key: str  # the model's name in mlperf.conf
    scenario: str
    user_conf: Path
    folder: Path  # the logs go here
    accuracy: bool = False
    audit_config: Path | None = None  # of a compliance test; it overrides all the others
    overrides: Mapping[str, Any] = field(default_factory=dict)


class SystemUnderTest(Protocol):
    """Answers what LoadGen issues from its threads, while the caller's thread is in `drive`."""

    times: list[RequestTimes]  # of answered queries, from their issue

    def issue(self, queries: Iterable[Any]) -> None:
        """LoadGen's callback: some samples to answer."""

    def end(self) -> None:
        """No query comes any more."""

    def drive(self) -> None:
        """Answer until the end."""


@dataclass(slots=True)
class _Job:
    query_id: int
    times: RequestTimes
    token_ids: list[int] = field(default_factory=list)


def load_library() -> Any:
    """LoadGen, or one sentence on how to get it."""
    try:
        import mlperf_loadgen
    except ModuleNotFoundError:
        raise BenchError("LoadGen is not installed: pip install mlcommons-loadgen") from None
    return mlperf_loadgen


def respond(library: Any, complete: Any, answers: Iterable[tuple[int, array[Any], int]]) -> None:
    """Call `complete` of LoadGen with (query, data, number of tokens) of each answer."""
    responses, kept = [], []
    for query_id, data, num_tokens in answers:
        address, length = data.buffer_info()
        size = length * data.itemsize
        responses.append(library.QuerySampleResponse(query_id, address, size, num_tokens))
        kept.append(data)  # LoadGen copies the bytes inside the call
    complete(responses)


class Stepped(Protocol):
    """The part of an engine that a test drives."""

    def has_work(self) -> bool: ...
    def step(self) -> Sequence[Any]: ...


class Arrival(NamedTuple):
    """A sample that LoadGen wants answered."""

    query_id: int
    sample: int  # its place in the library
    issued_ns: int


class SteppedSystem(ABC):
    """A system under test whose engine the caller's thread steps."""

    def __init__(self, engine: Stepped) -> None:
        self._stepped = engine
        self._library = load_library()
        self._arrivals: SimpleQueue[list[Arrival] | None] = SimpleQueue()
        self._arrived: deque[Arrival] = deque()
        self._num_issued = 0
        self.times: list[RequestTimes] = []

    def issue(self, queries: Iterable[Any]) -> None:
        """LoadGen's callback: some samples to answer."""
        now_ns = time.monotonic_ns()
        self._arrivals.put([Arrival(query.id, query.index, now_ns) for query in queries])

    def end(self) -> None:
        """No query comes any more."""
        self._arrivals.put(None)

    def drive(self) -> None:
        """Step the engine until the end; BenchError when it does not answer a query."""
        while self._take():
            self._report(self._stepped.step())

    def _take(self) -> bool:
        """Submit what has arrived; an idle engine waits for it. False at the end.

        All samples of Offline arrive at once: the engine begins with the first of them.
        """
        while not (self._arrivals.empty() and (self._arrived or self._stepped.has_work())):
            queries = self._arrivals.get()
            if queries is None:
                return False
            self._arrived.extend(queries)
        for _ in range(min(len(self._arrived), SUBMITTED_PER_STEP)):
            self._submit(f"query-{self._num_issued}", self._arrived.popleft())
            self._num_issued += 1
        return True

    @abstractmethod
    def _submit(self, request_id: str, arrival: Arrival) -> None:
        """Give the engine a sample of the library."""

    @abstractmethod
    def _report(self, outputs: Sequence[Any]) -> None:
        """Tell LoadGen what a step has put out."""


class EngineUnderTest(SteppedSystem):
    """A language engine."""

    def __init__(self, engine: Engine, samples: Sequence[Sample], text: Text | None = None) -> None:
        """With `text` LoadGen logs whole answers as what it makes of their tokens."""
        super().__init__(engine)
        self.engine = engine
        self._samples, self._text = samples, text
        self._jobs: dict[str, _Job] = {}

    def _submit(self, request_id: str, arrival: Arrival) -> None:
        sample, now_ns = self._samples[arrival.sample], arrival.issued_ns
        self._jobs[request_id] = _Job(arrival.query_id, RequestTimes(now_ns))
        prompt = sample.prompt_token_ids.tolist()
        images = _unknown(sample.images(), request_id) if sample.images is not None else ()
        request = Request(request_id, prompt, sample.sampling, arrival_ns=now_ns, images=images)
        self.engine.submit(request)

    def _report(self, outputs: Sequence[RequestOutput]) -> None:
        """Tell LoadGen of first tokens, and of whole answers with their number of tokens."""
        begun: list[_Job] = []
        ended: list[_Job] = []
        now_ns = time.monotonic_ns()
        for output in outputs:
            job = self._jobs[output.request_id]
            if output.token_ids:
                if not job.token_ids:
                    begun.append(job)
                job.times.record(now_ns, len(output.token_ids))
                job.token_ids += output.token_ids
            if output.finish_reason is not None:
                _check(output)
                ended.append(self._jobs.pop(output.request_id))
        if begun:
            self._respond(self._library.FirstTokenComplete, begun)
        if ended:
            self.times += [job.times for job in ended]
            self._respond(self._library.QuerySamplesComplete, ended)

    def _respond(self, complete: Any, jobs: Sequence[_Job]) -> None:
        answers = ((j.query_id, self._data(j.token_ids), len(j.token_ids)) for j in jobs)
        respond(self._library, complete, answers)

    def _data(self, token_ids: list[int]) -> array[int]:
        if self._text is None:
            return array("i", token_ids)
        return array("B", self._text(token_ids).encode())


def _unknown(images: tuple[ImageSpan, ...], query: str) -> tuple[ImageSpan, ...]:
    """The same images under names of their own: the rules want every query computed in full."""
    names = (blake2b(f"{query}/{i}".encode(), digest_size=32).digest() for i in range(len(images)))
    return tuple(
        replace(span, image=replace(span.image, content_hash=name))
        for span, name in zip(images, names, strict=True)
    )


def _check(output: RequestOutput) -> None:
    if output.finish_reason not in ENDED_WELL:
        reason = output.error or output.finish_reason
        raise BenchError(f"{output.request_id} was not answered: {reason}")
    if output.num_cached_tokens:
        raise BenchError(
            f"{output.request_id} was answered from the prefix cache, which the rules forbid"
        )


def run_test(sut: SystemUnderTest, num_samples: int, test: Test) -> None:
    """Run one test of LoadGen; its logs are in `test.folder` afterwards.

    After an error LoadGen's threads still wait for answers: the process must end.
    """
    library = load_library()
    settings = make_settings(test, library)
    system = library.ConstructSUT(sut.issue, lambda: None)
    qsl = library.ConstructQSL(num_samples, num_samples, lambda indices: None, lambda indices: None)
    failures: list[BaseException] = []

    def start() -> None:
        try:
            audit = str(test.audit_config or test.folder / "no-audit.config")
            logs = _log_settings(test, library)
            library.StartTestWithLogSettings(system, qsl, settings, logs, audit)
        except BaseException as error:
            failures.append(error)
        finally:
            sut.end()

    previous = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    thread = threading.Thread(target=start, daemon=True)
    thread.start()
    sut.drive()
    thread.join()
    sys.setswitchinterval(previous)
    library.DestroyQSL(qsl)
    library.DestroySUT(system)
    if failures:
        raise BenchError(f"LoadGen failed: {failures[0]}")


def make_settings(test: Test, library: Any) -> Any:
    """LoadGen's settings: its built-in mlperf.conf, then user.conf, then the overrides."""
    settings = library.TestSettings()
    if settings.FromConfig(str(test.user_conf), test.key, test.scenario):
        raise BenchError(f"{test.user_conf}: LoadGen cannot read this file")
    settings.scenario = getattr(library.TestScenario, test.scenario)
    mode = "AccuracyOnly" if test.accuracy else "PerformanceOnly"
    settings.mode = getattr(library.TestMode, mode)
    for name, value in test.overrides.items():
        setattr(settings, name, value)
    return settings


def _log_settings(test: Test, library: Any) -> Any:
    output = library.LogOutputSettings()
    output.outdir = str(test.folder)
    output.copy_summary_to_stdout = False
    settings = library.LogSettings()
    settings.log_output = output
    settings.enable_trace = False  # its default writes gigabytes while the clock runs
    return settings


def read_detail(folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Values by key of the detail log, the last of each, and LoadGen's errors."""
    values: dict[str, Any] = {}
    errors: list[str] = []
    for line in (folder / DETAIL).read_text(encoding="utf-8").splitlines():
        if not line.startswith(MARK):
            continue
        entry = json.loads(line.removeprefix(MARK))
        values[entry["key"]] = entry["value"]
        if entry.get("metadata", {}).get("is_error"):
            errors.append(f"{entry['key']}: {entry['value']}")
    return values, errors


def read_answers(folder: Path) -> dict[int, tuple[bytes, int]]:
    """Data by sample index of an accuracy run, and the number of tokens where it is logged."""
    entries = json.loads((folder / ACCURACY).read_text(encoding="utf-8"))
    return {e["qsl_idx"]: (bytes.fromhex(e["data"]), e.get("token_count", 0)) for e in entries}


def token_ids(data: bytes) -> list[int]:
    """The tokens of an answer that an engine gave."""
    tokens = array("i")
    tokens.frombytes(data)
    return tokens.tolist()
