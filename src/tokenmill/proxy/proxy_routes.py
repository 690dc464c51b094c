"""The HTTP routes of `tokenmill route`: it passes calls on, and answers for itself.

Every POST below /v1/ is passed on to a backend, and every call about a stored response or a video
to the backend that has it. The app answers requests about the router itself: models, health,
metrics, pool and dashboard.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from fastapi import Depends, FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill import __version__
from tokenmill.api.access import (
    Calls,
    authorizer,
    key_matcher,
    note_key,
    read_bytes,
    wrong_key,
)
from tokenmill.api.call import record_of
from tokenmill.api.errors import VIDEOS_PATH, ApiError
from tokenmill.api.operations import add_operations, exception_handlers, json_response
from tokenmill.api.protocol.answers import Service
from tokenmill.api.stream import send_error
from tokenmill.api.telemetry.dashboard import add_page
from tokenmill.api.telemetry.dashboard_view import DashboardView
from tokenmill.api.telemetry.prometheus import ServerMetrics
from tokenmill.api.telemetry.tracing import NO_TRACING, Tracing
from tokenmill.api.worker_routes import add_pool_view
from tokenmill.core.config import ServerConfig
from tokenmill.core.types import EngineStats
from tokenmill.proxy.backends import Backends
from tokenmill.proxy.fronts_view import summed_view
from tokenmill.proxy.prompt_reader import PromptReader
from tokenmill.proxy.proxy_metrics import RouteMetrics
from tokenmill.proxy.relay import KEY_HEADERS, SHUTDOWN, Relay
from tokenmill.proxy.response_owners import stored_in
from tokenmill.proxy.upstream import header
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.processor import ImageProcessor
from tokenmill.workers.fronts.owner_link import Membership
from tokenmill.workers.pool_view import PoolView

PASSED_ON = ("/tokenize", "/detokenize")  # beside all of /v1/
# Calls with a label of their own in the metrics; what else clients ask for shares one.
ENDPOINTS = frozenset(
    {
        *PASSED_ON,
        *(f"/v1/{name}" for name in ("chat/completions", "completions", "embeddings")),
        *(f"/v1/{name}" for name in ("responses", "rerank", "score", "messages")),
        *("/v1/messages/count_tokens", "/v1/responses/input_tokens"),
        *(VIDEOS_PATH, f"{VIDEOS_PATH}/sync", f"{VIDEOS_PATH}/generations"),
    }
)
# The labels of calls about what a backend has stored.
STORED_RESPONSE, STORED_VIDEO = "/v1/responses/{response_id}", "/v1/videos/{video_id}"


@dataclass(slots=True)
class RouteState:
    """What the calls share."""

    backends: Backends
    tokenizer: Tokenizer | None
    config: ServerConfig
    calls: Calls
    tracing: Tracing = NO_TRACING
    processor: ImageProcessor | None = None  # of a model that takes images
    metrics: RouteMetrics = field(default_factory=RouteMetrics)
    membership: Membership | None = None  # where there are several fronts

    async def refresh(self) -> None:
        """Have the figures of all fronts be those of now."""
        if self.membership is not None:
            await self.membership.refresh()

    def view(self, decisions: bool = True) -> PoolView:
        """The backends, with what all fronts sent there."""
        own = self.backends.view(decisions)
        totals = None if self.membership is None else self.membership.totals
        return own if totals is None else summed_view(own, totals)

    def total_metrics(self) -> ServerMetrics:
        """What all fronts have counted."""
        counts = None if self.membership is None else self.membership.total_counts()
        return self.metrics.total(counts)


class RouteApp:
    """An ASGI app; calls on their way pass none of FastAPI's layers."""

    def __init__(self, state: RouteState) -> None:
        self._state = state
        self._rest = _create_rest(state)
        self._key_number = key_matcher(state.config.api_keys)
        self._relays: set[Relay] = set()  # under way
        self._prompts = PromptReader(state.tokenizer, state.processor, state.config.fronts)

    def end_calls(self) -> None:
        """End the open calls, each with an error."""
        for relay in self._relays:
            relay.give_up(SHUTDOWN)

    def close(self) -> None:
        """End the processes that read prompts."""
        self._prompts.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _is_call(scope["method"], scope["path"]):
            return await self._rest(scope, receive, send)
        record = record_of(scope)
        record.endpoint = _endpoint(scope["path"])
        try:
            key = self._admit(scope)
        except ApiError as error:
            record.fail(error)
            return await send_error(send, error, scope["path"])
        self._state.calls.begin(key)
        try:
            await self._relay(scope, receive, send)
        finally:
            self._state.calls.end(key)

    def _admit(self, scope: Scope) -> int:
        """The number of the caller's key; raises ApiError where there is no room or no key."""
        key = self._key_number(Request(scope)) if self._state.config.api_keys else 0
        if key is None:
            raise wrong_key()
        note_key(scope, self._state.config, key)
        self._state.calls.check_draining()
        self._state.calls.check_limits(key)
        return key

    async def _relay(self, scope: Scope, receive: Receive, send: Send) -> None:
        state = self._state
        record = record_of(scope)
        span = state.tracing.begin(scope["path"], scope["headers"])
        span.set({"gen_ai.request.id": record.request_id})
        path = scope["path"]
        relay = Relay(state.backends, state.metrics, self._prompts, span, record, path)
        try:
            declared = header(scope["headers"], b"content-length").decode("latin-1")
            body = await read_bytes(receive, declared, state.config.max_body_bytes)
        except (ApiError, ClientDisconnect) as error:
            code = error.code if isinstance(error, ApiError) else "cancelled"
            span.end(f"{code}: {error}")
            if isinstance(error, ApiError):
                record.fail(error)
                await send_error(send, error, scope["path"])
            return None
        self._relays.add(relay)
        try:
            await relay.run(scope, body, receive, send, state.config.request_timeout_s)
        finally:
            self._relays.discard(relay)


def _is_call(method: str, path: str) -> bool:
    if method in ("GET", "DELETE"):
        return bool(stored_in(path))
    return method == "POST" and (path.startswith("/v1/") or path in PASSED_ON)


def _endpoint(path: str) -> str:
    """The label of a path in the metrics."""
    if path in ENDPOINTS:
        return path
    if not stored_in(path):
        return "/v1/*"
    return STORED_VIDEO if path.startswith(VIDEOS_PATH) else STORED_RESPONSE


def _create_rest(state: RouteState) -> FastAPI:
    app = FastAPI(
        title="tokenmill route",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        redirect_slashes=False,
        exception_handlers=exception_handlers(),
    )
    _add_models(app, state)
    _add_videos(app, state)
    _add_operations(app, state)
    add_pool_view(app, state.config, state.view, state.refresh)
    add_page(app, state.config, lambda uptime_s, decisions: _dashboard(state, uptime_s, decisions))
    return app


def _add_models(app: FastAPI, state: RouteState) -> None:
    guard = [Depends(authorizer(state.config))]

    @app.get("/v1/models", dependencies=guard)
    async def models(request: Request) -> Response:
        cards = await state.backends.models(_authorization(request))
        return json_response({"object": "list", "data": cards})

    @app.get("/v1/models/{model_id:path}", dependencies=guard)
    async def model(request: Request, model_id: str) -> Response:
        cards = await state.backends.models(_authorization(request))
        for card in cards:
            if card["id"] == model_id:
                return json_response(card)
        known = ", ".join(repr(card["id"]) for card in cards) or "none"
        message = f"the model {model_id!r} does not exist; the backends have {known}"
        raise ApiError(404, message, "model", "model_not_found")


def _add_videos(app: FastAPI, state: RouteState) -> None:
    @app.get(VIDEOS_PATH, dependencies=[Depends(authorizer(state.config))])
    async def list_videos() -> Response:
        message = "a router lists no videos: ask each of its backends, or for one video by its id"
        raise ApiError(405, message, code="unsupported")


def _authorization(request: Request) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in request.headers.raw if name in KEY_HEADERS]


def _add_operations(app: FastAPI, state: RouteState) -> None:
    def fault() -> ApiError | None:
        if state.backends.ready:
            return None
        return ApiError(503, "no backend is up", code="no_backend")

    async def metrics() -> bytes:
        await state.refresh()
        return state.total_metrics().render(EngineStats(), 0, state.view())

    service = Service(service="tokenmill route", version=__version__, docs=None)
    add_operations(app, state.calls, fault, metrics, service)


def routed_stats(state: RouteState) -> EngineStats:
    """What a router knows of the engines behind its backends."""
    workers = state.view(False).workers
    return EngineStats(
        num_running=state.calls.num_open,
        prefix_query_tokens=sum(worker.routed_tokens for worker in workers),
        prefix_hit_tokens=sum(worker.overlap_tokens for worker in workers),
    )


def _dashboard(state: RouteState, uptime_s: float, decisions: bool) -> DashboardView:
    metrics, pool = state.total_metrics(), state.view(decisions)
    return DashboardView(
        model=next(iter(state.backends.known_models()), ""),
        version=__version__,
        dtype="",
        device="",
        max_model_len=0,
        block_size=0,
        time_s=time.time(),
        uptime_s=uptime_s,
        draining=state.calls.draining,
        num_pending=sum(worker.num_waiting for worker in pool.workers),
        restarts=sum(worker.restarts for worker in pool.workers),
        prompt_tokens=metrics.num_prompt_tokens,
        output_tokens=metrics.num_output_tokens,
        finished=dict(metrics.finished),
        rejected=dict(metrics.rejected),
        window_s=metrics.recent_ttft_ms.window_s,
        ttft_ms=metrics.recent_ttft_ms.summary(),
        tpot_ms=metrics.recent_tpot_ms.summary(),
        engine=routed_stats(state),
        pool=pool,
    )
