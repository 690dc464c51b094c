"""The answer to a generation call as an ASGI response: whole JSON or server-sent events."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill.api.access import CallPlace, Calls
from tokenmill.api.call import CHUNK_WRITER, GONE, WARNING, record_of
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Keys
from tokenmill.api.middleware import take_turn
from tokenmill.api.open_call import DirectText, OpenCall, PlainFormat, TextDelta, join_deltas
from tokenmill.api.protocol.answers import Usage
from tokenmill.api.protocol.prepare import PreparedCall
from tokenmill.api.protocol.receipts import receipt_of
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.request_trace import CallTrace
from tokenmill.api.telemetry.tracing import NO_TRACING, OPERATIONS, Tracing
from tokenmill.core.config import ServerConfig
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.workers.link import WorkerDownError
from tokenmill.workers.messages import ModelFacts
from tokenmill.workers.output_stream import OutputStream, StreamClosedError
from tokenmill.workers.pool import WorkerPool

RECEIPT_TIMEOUT_S = 10.0
JSON_HEADERS = [(b"content-type", b"application/json")]
SSE_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
MAX_WARNING = 1000  # characters of the header


@dataclass(slots=True)
class ApiState:
    """What all handlers of a server share."""

    client: WorkerPool
    tokenizer: Tokenizer
    keys: Keys
    model: str
    metrics: ServerMetrics
    calls: Calls  # of generation
    tracing: Tracing = NO_TRACING
    takes_images: bool = False

    @property
    def config(self) -> ServerConfig:
        return self.keys.config

    def facts(self) -> ModelFacts:
        facts = self.client.facts
        assert facts is not None
        return facts

    def traced(self, request: Request) -> CallTrace:
        """The trace of a call, around a block that may fail."""
        start_ns, path = time.monotonic_ns(), request.scope["path"]
        span = self.tracing.begin(path, request.headers.raw, start_ns)
        span.set({"gen_ai.request.id": record_of(request.scope).request_id})
        return CallTrace(span, OPERATIONS[path], start_ns)

    def enter(self, account: str) -> CallPlace:
        """Let in a call that wants no engine, or raise what it is to be answered with."""
        self.calls.check_draining()
        return self.calls.enter(account)

    def admit(self, account: str) -> CallPlace:
        """Let in a generation call whose head has come, or raise what it is to be answered with."""
        self._check_engine()
        return self.calls.enter(account)

    def take(self, place: CallPlace, num_choices: int) -> None:
        """Count a call for its choices, or raise what it is to be answered with."""
        self._check_engine()
        place.take(num_choices)

    def _check_engine(self) -> None:
        self.calls.check_draining()
        if not self.client.ready:
            raise ApiError(503, "the engine is restarting; try again shortly", code="restarting")


class Frame(Protocol):
    """What stands around the events of a stream."""

    @property
    def counts(self) -> bool: ...  # `count` is wanted before each event

    def count(self, usage: Usage) -> None: ...  # the tokens so far

    def start(self, usage: Usage) -> bytes: ...  # before anything is generated

    def end(self, usage: Usage) -> bytes: ...

    def failure(self, error: ApiError) -> bytes: ...  # ends a stream that an error has cut off


class Format(Protocol):
    """How one kind of call is written."""

    @property
    def frame(self) -> Frame: ...

    def event(self, delta: TextDelta) -> bytes: ...  # b"" when nothing is certain yet

    def answer(self, wholes: list[TextDelta], usage: Usage) -> bytes: ...  # a delta for each choice


class GenerationResponse(Response):
    """Submits a job when it is called, and aborts it when the client goes away."""

    def __init__(
        self,
        state: ApiState,
        job: PreparedCall,
        form: Format,
        streams: bool,
        place: CallPlace,
        trace: CallTrace,
    ) -> None:
        super().__init__()
        self._state = state
        self._job = job
        self._call = OpenCall(job, state.tokenizer, state.metrics, streams)
        self._form = form
        self._streams = streams
        self._place = place
        self._trace = trace
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._place:
            await self._run(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        trace, error, record = self._trace, None, record_of(scope)
        state, call = self._state, self._call
        try:
            account = self._place.account
            state.take(self._place, len(self._job.requests))
            requests = state.keys.salted(self._job.requests, account)
            traces = trace.requests(self._job)
            stream = state.client.submit(requests, traces, self._job.hash_inputs, account)
        except (ApiError, WorkerDownError) as refused:
            error = _as_api_error(refused)
            trace.end(call.usage(), [], error)
            record.fail(error)
            await send_error(send, error, scope["path"])
            return
        if self._streams:
            stream.interval = state.config.stream_interval
        if self._streams and CHUNK_WRITER in scope and isinstance(self._form, PlainFormat):
            text = DirectText(call, self._form, scope[CHUNK_WRITER])
            stream.direct = text.write
            if stream.interval == 1 and len(call.choices) == 1:
                stream.direct_one = text.write_one
        watcher = asyncio.create_task(_watch(receive, stream))
        try:
            # A task of its own: each wake-up would otherwise pass through all of the app's layers.
            await asyncio.create_task(self._answer(stream, scope, send))
        except StreamClosedError:
            error = ApiError(GONE, "the client has gone", code="cancelled")
        except ApiError as failure:
            error = failure
            record.error = error.code
            await self._fail(send, error, scope["path"])
        finally:
            watcher.cancel()
            call.close()
            self._state.client.abort(stream.request_ids)
            reasons = [choice.reason for choice in call.choices]
            call.describe(record)
            record.worker = ",".join(sorted(set(stream.workers.values()))) or "-"
            trace.end(call.usage(), reasons, error)

    async def _answer(self, stream: OutputStream, scope: Scope, send: Send) -> None:
        # The status line waits for the first output, which may be a refusal.
        outputs = await stream.get()
        await take_turn(scope)
        deltas = self._call.advance(outputs)
        if self._streams:
            await self._send_events(stream, deltas, send)
        else:
            await self._send_whole(stream, deltas, send)

    async def _send_events(self, stream: OutputStream, deltas: list[TextDelta], send: Send) -> None:
        self._started = True
        headers = [*SSE_HEADERS, *_warnings(self._job)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        body = self._form.frame.start(self._call.usage())
        while self._call.num_open:
            self._abort_stopped()
            if body := body + self._events(deltas):
                await send({"type": "http.response.body", "body": body, "more_body": True})
                body = b""
            deltas = self._call.advance(await stream.get())
        self._abort_stopped()
        body += self._events(deltas)
        body += self._form.frame.end(await self._last_usage(stream))
        await send({"type": "http.response.body", "body": body})

    def _events(self, deltas: list[TextDelta]) -> bytes:
        frame, event = self._form.frame, self._form.event
        if frame.counts:
            frame.count(self._call.usage())
        return b"".join([event(delta) for delta in deltas])

    async def _send_whole(self, stream: OutputStream, deltas: list[TextDelta], send: Send) -> None:
        by_choice: list[list[TextDelta]] = [[] for _ in self._call.choices]
        while True:
            self._abort_stopped()
            for delta in deltas:
                by_choice[delta.index].append(delta)
            if not self._call.num_open:
                break
            deltas = self._call.advance(await stream.get())
        wholes = [join_deltas(each) for each in by_choice]
        usage = await self._last_usage(stream)
        await send_json(send, 200, self._form.answer(wholes, usage), _warnings(self._job))

    async def _last_usage(self, stream: OutputStream) -> Usage:
        """The usage of a whole answer, with its receipt if it is wanted.

        A worker that was told to stop says what the answer took a step later.
        """
        usage = self._call.usage()
        if self._job.include_receipt:
            cost = await stream.cost(RECEIPT_TIMEOUT_S)
            usage.receipt = receipt_of(cost, self._state.config.price_per_gpu_hour)
        return usage

    def _abort_stopped(self) -> None:
        if self._call.stopped:
            self._state.client.abort(self._call.stopped)
            self._call.stopped = []

    async def _fail(self, send: Send, error: ApiError, path: str) -> None:
        if not self._started:
            await send_error(send, error, path)
            return
        await send({"type": "http.response.body", "body": self._form.frame.failure(error)})


def _warnings(job: PreparedCall) -> list[tuple[bytes, bytes]]:
    """The header that names what an answer is not checked against."""
    if not job.unenforced:
        return []
    text = f"not enforced: {', '.join(job.unenforced)}"
    if len(text) > MAX_WARNING:
        text = text[: MAX_WARNING - 3] + "..."
    return [(WARNING, text.encode("ascii", "replace"))]


async def send_error(send: Send, error: ApiError, path: str) -> None:
    """An error as the whole answer to a call of `path`."""
    extra = [(k.encode(), v.encode()) for k, v in error.answer_headers().items()]
    await send_json(send, error.status, error.body(path), extra)


async def send_json(
    send: Send, status: int, body: bytes, extra: list[tuple[bytes, bytes]] | None = None
) -> None:
    headers = [*JSON_HEADERS, (b"content-length", b"%d" % len(body)), *(extra or [])]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _as_api_error(error: ApiError | WorkerDownError) -> ApiError:
    if isinstance(error, ApiError):
        return error
    return ApiError(503, str(error), code="restarting")


async def _watch(receive: Receive, stream: OutputStream) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    stream.close()
