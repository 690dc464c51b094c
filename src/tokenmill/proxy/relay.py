"""Relays one call: sends it to a backend, or to the next one if that fails, and returns the answer.

Bodies pass unchanged in both directions. Another backend is tried if one cannot be reached, answers
429 or 5xx, or is lost before the first byte of its answer was passed on; each is tried once, and no
more than --max-migrations calls for another one, unless they were busy or not reached. A stream
that breaks later ends in an error event, because no other backend can continue it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec
from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive, Scope, Send

from tokenmill.api.call import REQUEST_ID, CallRecord
from tokenmill.api.errors import RESPONSES_PATH, RETRY_AFTER_S, VIDEOS_PATH, ApiError
from tokenmill.api.stream import JSON_HEADERS, send_error, send_json
from tokenmill.api.telemetry.tracing import Span, terms_of
from tokenmill.core.metrics import RequestTimes
from tokenmill.http_connection import Headers
from tokenmill.proxy.backends import Attempt, Backends
from tokenmill.proxy.call_prompt import RoutedPrompt
from tokenmill.proxy.forwarding import is_sent_once, stored_in
from tokenmill.proxy.proxy_metrics import RouteMetrics
from tokenmill.proxy.tenants import MAX_LINE, Tenant, has_ids
from tokenmill.proxy.upstream import (
    AnswerError,
    ConnectError,
    UpstreamAnswer,
    UpstreamError,
    end_to_end,
    header,
    via,
    with_entry,
)

KEY_HEADERS = (b"authorization", b"x-api-key")  # where clients send their keys
CLIENT_GONE = "cancelled: the client has gone"
SHUTDOWN = "shutdown: the router is shutting down"
MAX_HELD = 1 << 20  # bytes of an answer that is no stream, kept until it is whole


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    output_tokens: int = 0  # what the Responses and Messages APIs call it


class _Counted(msgspec.Struct):
    usage: _Usage | None = None


@dataclass(slots=True)
class Refusal:
    """What a backend said instead of taking a call."""

    backend: str
    reason: str
    status: int = 0  # 0: it could not be reached, or was lost
    headers: Headers = field(default_factory=list)
    body: bytes = b""
    has_begun: bool = True  # the backend may have worked at the call


class Relay:
    """One call; `run` answers it."""

    def __init__(
        self,
        backends: Backends,
        metrics: RouteMetrics,
        read_prompt: Callable[[bytes, str, Receive], Awaitable[RoutedPrompt]],
        span: Span,
        record: CallRecord,
        path: str,
        tenant: Tenant | None = None,
    ) -> None:
        self._record, self._tenant = record, tenant
        self._path = path
        self._response_id = stored_in(path)  # the response or video that the call is about
        self._backends = backends
        self._metrics = metrics
        self._read_prompt = read_prompt
        self._span = span
        self._call_id = backends.new_call()
        self._times = RequestTimes(time.monotonic_ns())
        self._answer: UpstreamAnswer | None = None
        self._gone: str | None = None  # why there is nobody to answer any more
        self._started = False
        self._refusals: list[Refusal] = []
        self._num_prompt_tokens = 0
        self._status = 0  # of the answer that was passed on
        self._is_stream = False
        self._tail = b""  # of what was passed on last
        self._num_events = 0
        self._may_be_elsewhere = False  # another backend may have what this one does not know
        self._is_sent_once = False
        # As a suspect: it begins anew at each backend, so that progress clears it of nothing.
        self.num_deaths = self.num_tokens_at_death = 0
        self.token_ids: tuple[()] = ()

    async def run(
        self, scope: Scope, body: bytes, receive: Receive, send: Send, timeout_s: float | None
    ) -> None:
        self._is_sent_once = is_sent_once(scope["method"], self._path)
        prompt = await self._read(body, receive)
        watcher = asyncio.create_task(self._watch(receive))
        loop = asyncio.get_running_loop()
        late = f"deadline: no whole answer within {timeout_s} s"
        timer = None if timeout_s is None else loop.call_later(timeout_s, self.give_up, late)
        try:
            error = await self._relay(scope, body, prompt, send)
        finally:
            watcher.cancel()
            self._backends.ended(self)
            if timer is not None:
                timer.cancel()
        self._finish(error)

    async def _read(self, body: bytes, receive: Receive) -> RoutedPrompt:
        began_ns = time.monotonic_ns()
        try:
            prompt = await self._read_prompt(body, self._path, receive)
        except ClientDisconnect:
            self.give_up(CLIENT_GONE)
            return RoutedPrompt()
        facts = {"tokenmill.prompt.num_tokens": len(prompt.token_ids)}
        self._span.child("tokenize", facts, began_ns, time.monotonic_ns())
        self._span.set({"gen_ai.request.model": prompt.model})
        self._num_prompt_tokens = len(prompt.token_ids)
        return prompt

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.give_up(CLIENT_GONE)

    def give_up(self, reason: str) -> None:
        """End the call early; the reason begins with its code."""
        self._gone = self._gone or reason
        self._backends.wake()
        if self._answer is not None:
            self._answer.close()

    async def _relay(
        self, scope: Scope, body: bytes, prompt: RoutedPrompt, send: Send
    ) -> ApiError | None:
        """Try backends until one has answered; returns the error that the client was told."""
        tried: set[str] = set()
        self._response_id = self._response_id or prompt.previous_response_id
        if not self._is_sent_once:
            self._may_be_elsewhere = bool(self._response_id) or b"item_reference" in body
        owner = self._backends.owners.find(self._response_id)
        while await self._may_go():
            began_ns = time.monotonic_ns()
            attempt = self._backends.choose(self._call_id, prompt, tried, owner)
            if attempt is None:
                return await self._refuse(prompt.model, owner, send)
            tried.add(attempt.backend.name)
            self._record.worker = attempt.backend.name
            self._trace_choice(attempt, began_ns)
            method = scope["method"]
            facts = {"server.address": attempt.backend.name, "http.request.method": method}
            span = self._span.child(f"{method} {attempt.backend.name}", facts, kind="CLIENT")
            try:
                refusal = await self._attempt(attempt, scope, body, send, span)
            finally:
                self._backends.end(attempt)
            span.end(refusal.reason if refusal is not None else None)
            if refusal is None:
                return None
            self._refusals.append(refusal)
            if self._gone is None:
                if self._started:
                    return await self._cut(refusal, send)
                if not self._may_be_repeated(refusal):
                    return await self._give_up_on(refusal, send)
        return await self._end_early(send)

    async def _may_go(self) -> bool:
        """False when nobody waits for the answer any more; a suspect waits for another one."""
        while self._gone is None and not self._backends.may_go(self):
            await self._backends.wait()
        return self._gone is None

    def _may_be_repeated(self, refusal: Refusal) -> bool:
        """Whether another backend may get the call, which one has refused or was lost with."""
        if not refusal.has_begun:
            return True
        is_cause = refusal.status == 0 and self._backends.died(self)
        num_begun = sum(each.has_begun for each in self._refusals)
        return not (
            self._is_sent_once or is_cause or num_begun > self._backends.config.max_migrations
        )

    async def _attempt(
        self, attempt: Attempt, scope: Scope, body: bytes, send: Send, span: Span
    ) -> Refusal | None:
        """Pass the call on and its answer back; a refusal where that did not come to an end."""
        backend = attempt.backend
        answer = self._answer = UpstreamAnswer()
        path = scope["raw_path"]
        if scope["query_string"]:
            path += b"?" + scope["query_string"]
        own = [(REQUEST_ID, self._record.request_id.encode()), *backend.key()]
        headers = _forwarded(scope, own + span.headers())
        try:
            call = (scope["method"], path, headers, body, self._is_sent_once)
            await backend.upstream.send(answer, *call)
            is_elsewhere = answer.status == 404 and self._may_be_elsewhere
            if answer.status == 429 or answer.status >= 500 or is_elsewhere:
                return await self._note_refusal(attempt, answer)
            await self._pass_on(attempt, answer, send)
        except UpstreamError as error:
            return self._note_loss(attempt, answer, error)
        finally:
            answer.close()
        self._count(backend.name, str(answer.status))
        span.set({"http.response.status_code": answer.status})
        return None

    async def _pass_on(self, attempt: Attempt, answer: UpstreamAnswer, send: Send) -> None:
        """Send a stream as it comes, anything else when it is whole or large."""
        kind = answer.header(b"content-type")
        is_stream = self._is_stream = kind.startswith(b"text/event-stream")
        data = await answer.read()
        self._backends.first_byte(attempt)
        if not is_stream and not answer.is_whole:
            data += await self._hold(answer)
        if answer.status < 400:
            self._note_owner(attempt, data)
            self._metrics.num_prompt_tokens += self._num_prompt_tokens
        data = self._sealed(answer, data)
        self._started, self._status = True, answer.status
        self._backends.ended(self)
        await send(_start(answer.status, answer.headers, len(data) if answer.is_whole else None))
        while True:
            self._count_tokens(attempt, data, is_stream)
            if answer.is_whole:
                attempt.num_output_tokens = self._times.num_tokens
                return await send({"type": "http.response.body", "body": data})
            await send({"type": "http.response.body", "body": data, "more_body": True})
            self._tail = data[-4:] or self._tail
            data = self._sealed(answer, await answer.read())
            self._backends.stepped(attempt)

    async def _hold(self, answer: UpstreamAnswer) -> bytes:
        """All of an answer that is not large, or in which ids are to be changed."""
        if self._tenant is not None and has_ids(self._path):
            return await answer.read_whole(MAX_LINE)
        return await answer.read_up_to(MAX_HELD)

    def _sealed(self, answer: UpstreamAnswer, data: bytes) -> bytes:
        """A part of the answer with ids as the client gets them."""
        if self._tenant is None:
            return data
        if self._is_stream:
            return self._tenant.events(self._path, data, answer.is_whole)
        return self._tenant.whole(self._path, answer.status, data)

    def _note_owner(self, attempt: Attempt, data: bytes) -> None:
        """Remember who has what was asked for, and the response or video that begins."""
        name = attempt.backend.name
        if self._response_id:
            self._backends.owners.note(self._response_id, name)
        if self._path in (RESPONSES_PATH, VIDEOS_PATH):
            self._backends.owners.learn(data, name)

    def _count_tokens(self, attempt: Attempt, data: bytes, is_stream: bool) -> None:
        self._num_events += data.count(b"\n\n") if is_stream else 0
        if stored_in(self._path):  # a stored answer is not a new one
            return
        num_tokens = _num_events(data) if is_stream else _num_completion_tokens(data)
        if num_tokens:
            self._metrics.output(self._times, time.monotonic_ns(), num_tokens)
            attempt.backend.tokens.add(num_tokens)

    async def _note_refusal(self, attempt: Attempt, answer: UpstreamAnswer) -> Refusal:
        """Read the answer of a backend that refuses the call."""
        status, name = answer.status, attempt.backend.name
        if status in (429, 503):
            attempt.backend.rest(answer.header(b"retry-after"))
        body = self._sealed(answer, await answer.read_whole(MAX_HELD))
        self._count(name, str(status))
        reason, has_begun = f"{status}: {name} answered {status}", status not in (404, 429, 503)
        return Refusal(name, reason, status, answer.headers, body, has_begun)

    def _note_loss(self, attempt: Attempt, answer: UpstreamAnswer, error: UpstreamError) -> Refusal:
        backend = attempt.backend
        if self._gone is not None:
            self._count(backend.name, "given_up")
            return Refusal(backend.name, self._gone)
        backend.fail(error)
        if isinstance(error, AnswerError):
            self._count(backend.name, "unreadable")
            answered = ApiError(502, f"{backend.name}: {error}", code="bad_backend_answer")
            body = answered.body(self._path)
            return Refusal(backend.name, f"bad_answer: {answered}", 502, JSON_HEADERS, body)
        self._count(backend.name, "cut" if answer.status else "unreachable")
        reason = f"connection_error: {backend.name}: {error}"
        return Refusal(backend.name, reason, has_begun=not isinstance(error, ConnectError))

    def _count(self, backend: str, result: str) -> None:
        self._metrics.attempts[backend, result] += 1

    # When it does not end well.

    async def _refuse(self, model: str, owner: str | None, send: Send) -> ApiError | None:
        """No backend is left to try: say what all of them said."""
        refusals = self._refusals
        missing = [refusal for refusal in refusals if refusal.status == 404]
        if missing and len(missing) == len(refusals):
            return await _send_refusal(missing[-1], send)
        reasons = "; ".join(refusal.reason.partition(": ")[2] for refusal in refusals)
        if refusals and all(refusal.status == 429 for refusal in refusals):
            error = ApiError(429, f"all backends are busy: {reasons}", code="backends_busy")
            waits = [header(refusal.headers, b"retry-after") for refusal in refusals]
            wait = min([int(w) for w in waits if w.isdigit()], default=RETRY_AFTER_S)
            body = error.body(self._path)
            await send_json(send, 429, body, [(b"retry-after", b"%d" % wait)])
            return error
        said = [refusal for refusal in refusals if refusal.status >= 500]
        if said:
            return await _send_refusal(said[-1], send)
        message = f"no backend could be reached: {reasons}"
        if not refusals:
            name = f" that has the model {model!r}" if self._backends.ready else ""
            message = f"no backend{name} is up: {self._backends.failures()}"
        if owner is not None and not refusals:
            message = self._stored_there(owner)
        error = ApiError(503, message, code="no_backend")
        await send_error(send, error, self._path)
        return error

    async def _give_up_on(self, refusal: Refusal, send: Send) -> ApiError:
        """The call is not sent to the backends that are left."""
        if refusal.status:
            return await _send_refusal(refusal, send)
        if self._is_sent_once:
            why = "the call may have had its effect, so that it is not sent again"
        else:
            why = f"the call may be the cause: {len(self._refusals)} backends have failed with it, "
            why += "and it is not sent to others (--max-migrations)"
        error = ApiError(502, f"{refusal.reason.partition(': ')[2]}; {why}", code="backend_lost")
        await send_error(send, error, self._path)
        return error

    def _stored_there(self, owner: str) -> str:
        name = self._tenant.given(self._response_id) if self._tenant else self._response_id
        if self._path.startswith(VIDEOS_PATH):
            return f"the video {name!r} is at {owner}, which is down; try again"
        message = f"the response {name!r} is stored at {owner}, which is down; "
        return message + "send the conversation as input, or try again"

    async def _cut(self, refusal: Refusal, send: Send) -> ApiError:
        """The answer broke off: a stream says so, a whole answer stays visibly incomplete."""
        message = f"the backend was lost in the middle of its answer: {refusal.reason}"
        error = ApiError(502, message, code="backend_lost")
        await self._send_error_event(error, send)
        return error

    async def _end_early(self, send: Send) -> ApiError:
        assert self._gone is not None
        status = 503 if self._gone == SHUTDOWN else 408
        error = ApiError(status, self._gone, code=self._gone.partition(":")[0])
        if self._gone == CLIENT_GONE:
            return error
        if self._started:
            await self._send_error_event(error, send)
        else:
            await send_error(send, error, self._path)
        return error

    async def _send_error_event(self, error: ApiError, send: Send) -> None:
        if self._is_stream:
            gap = b"" if self._tail.endswith((b"\n\n", b"\r\n\r\n")) else b"\n\n"
            event = gap + error.event(self._path, self._num_events)
            await send({"type": "http.response.body", "body": event})

    # What is told of it.

    def _finish(self, error: ApiError | None) -> None:
        if error is None:
            reason = "refused" if 400 <= self._status < 500 else "answered"
        else:
            reasons = {404: "refused", 408: "abort", 429: "reject", 503: "reject"}
            reason = reasons.get(error.status, "error")
        self._metrics.finish(self._times, self._num_prompt_tokens, reason)
        self._describe(reason, error)
        status = self._status if error is None else error.status
        self._span.set({"http.response.status_code": status})
        self._span.end(None if error is None else f"{error.code}: {error}")

    def _describe(self, reason: str, error: ApiError | None) -> None:
        record = self._record
        record.num_prompt_tokens = self._num_prompt_tokens
        record.num_output_tokens = self._times.num_tokens
        record.ttft_ms, record.finish_reason = self._times.ttft_ms, reason
        if error is not None:
            record.error = error.code
        elif self._status >= 400:
            record.error = f"backend_{self._status}"

    def _trace_choice(self, attempt: Attempt, began_ns: int) -> None:
        if not self._span.recording:  # terms cost more than the rest
            return
        decision = attempt.decision
        facts = {
            "tokenmill.router.worker": decision.worker,
            "tokenmill.router.num_cached_tokens": decision.num_cached_tokens,
            "tokenmill.router.cache_basis": decision.basis or "assumed",
            "tokenmill.router.attempt": len(self._refusals) + 1,
        }
        facts |= terms_of(decision.terms())
        self._span.child("route", facts, began_ns, time.monotonic_ns())
        if self._refusals:
            what = {"tokenmill.reason": self._refusals[-1].reason}
            self._span.event("retried on another backend", what)


def _forwarded(scope: Scope, own: Headers) -> Headers:
    """The client's headers, but for those that we have of our `own`; we are named as a hop."""
    headers = via(scope["http_version"], end_to_end(scope["headers"]))
    host = scope["client"][0] if scope["client"] else "unknown"
    headers = with_entry(headers, b"x-forwarded-for", host.encode())
    names = {name for name, _ in own}
    if names.intersection(KEY_HEADERS):
        names.update(KEY_HEADERS)
    return [pair for pair in headers if pair[0] not in names] + own


def _start(status: int, headers: Headers, length: int | None) -> Message:
    """The head of an answer; with a length where all of the body is here."""
    if length is not None:
        headers = [*headers, (b"content-length", b"%d" % length)]
    return {"type": "http.response.start", "status": status, "headers": headers}


async def _send_refusal(refusal: Refusal, send: Send) -> ApiError:
    await send(_start(refusal.status, refusal.headers, len(refusal.body)))
    await send({"type": "http.response.body", "body": refusal.body})
    return ApiError(refusal.status, refusal.reason, code="backend_error")


def _num_events(data: bytes) -> int:
    """Events with text in a piece of a stream; the [DONE] at its end is none."""
    if b"event: " in data:  # each says its type
        return data.count(b".delta\n") + data.count(b"event: content_block_delta\n")
    count = data.count(b"\n\n") or data.count(b"\r\n\r\n")
    return count - (count > 0 and data.rstrip().endswith(b"[DONE]"))


def _num_completion_tokens(data: bytes) -> int:
    try:
        usage = msgspec.json.decode(data, type=_Counted).usage
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
    return 0 if usage is None else usage.completion_tokens or usage.output_tokens
