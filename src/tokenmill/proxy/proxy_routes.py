"""The HTTP routes of `tokenmill route`: it passes calls on, and answers for itself.

Calls of the routes of inference servers are passed on (forwarding.py), those about a stored
response or a video to the backend that has it. The app answers requests about the router itself:
models, health, metrics, pool and dashboard.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from fastapi import Depends, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from tokenmill import __version__
from tokenmill.api.access import CallPlace, Calls, read_bytes
from tokenmill.api.call import record_of
from tokenmill.api.errors import VIDEOS_PATH, ApiError
from tokenmill.api.keys import Keys, caller, wrong_key
from tokenmill.api.openapi import document
from tokenmill.api.operations import add_operations, exception_handlers, json_response
from tokenmill.api.protocol.answers import ServiceInfo
from tokenmill.api.routes import LANGUAGE, MODEL, MODELS
from tokenmill.api.stream import send_error
from tokenmill.api.telemetry.dashboard import add_page
from tokenmill.api.telemetry.dashboard_view import DashboardView
from tokenmill.api.telemetry.tracing import NO_TRACING, Tracing
from tokenmill.api.worker_routes import add_pool_view
from tokenmill.core.config import ServerConfig
from tokenmill.core.keys.key_ring import OPERATOR
from tokenmill.core.types import EngineStats
from tokenmill.proxy.backends import Backends
from tokenmill.proxy.forwarding import POSTS, Forwarding, check_target
from tokenmill.proxy.prompt_reader import PromptReader
from tokenmill.proxy.proxy_metrics import RouteMetrics
from tokenmill.proxy.relay import KEY_HEADERS, SHUTDOWN, Relay
from tokenmill.proxy.tenants import Tenant
from tokenmill.proxy.upstream import header
from tokenmill.text.tokenizer import Tokenizer
from tokenmill.vision.processor import ImageProcessor


@dataclass(slots=True)
class RouteState:
    backends: Backends
    tokenizer: Tokenizer | None
    keys: Keys
    calls: Calls
    tracing: Tracing = NO_TRACING
    processor: ImageProcessor | None = None  # of a model that takes images
    metrics: RouteMetrics = field(default_factory=RouteMetrics)

    @property
    def config(self) -> ServerConfig:
        return self.keys.config


class RouteApp:
    """An ASGI app; calls on their way pass none of FastAPI's layers."""

    def __init__(self, state: RouteState) -> None:
        self._state = state
        self._forwarding = Forwarding(state.backends.config.forward)
        self._rest = _create_rest(state, self._forwarding)
        self._relays: set[Relay] = set()  # under way
        self._prompts = PromptReader(state.tokenizer, state.processor)

    def end_calls(self) -> None:
        for relay in self._relays:
            relay.give_up(SHUTDOWN)

    def close(self) -> None:
        self._prompts.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._rest(scope, receive, send)
        record = record_of(scope)
        try:
            check_target(scope["raw_path"])
            endpoint = self._forwarding.find(scope["method"], scope["path"])
            if endpoint is None:
                return await self._rest(scope, receive, send)
            record.endpoint = endpoint
            place = self._admit(scope)
        except ApiError as error:
            record.fail(error)
            return await send_error(send, error, scope["path"])
        with place:
            await self._relay(scope, receive, send, place)

    def _admit(self, scope: Scope) -> CallPlace:
        """Let a call in; ApiError where there is no room or no key that a backend may see."""
        account = self._state.keys.account(Request(scope))
        if account == OPERATOR:
            raise wrong_key()
        self._state.calls.check_draining()
        return self._state.calls.enter(account)

    def _tenant(self, account: str) -> Tenant | None:
        """Who calls, where the backends cannot tell."""
        keys, backend_key = self._state.keys, self._state.backends.config.backend_key
        is_one_of_several = backend_key is not None and keys.ring.is_needed
        return Tenant(account, keys.ring.salt) if is_one_of_several else None

    async def _relay(self, scope: Scope, receive: Receive, send: Send, place: CallPlace) -> None:
        state, tenant = self._state, self._tenant(place.account)
        record = record_of(scope)
        if tenant is not None:
            scope = tenant.request(scope)
        span = state.tracing.begin(scope["path"], scope["headers"])
        span.set({"gen_ai.request.id": record.request_id})
        path = scope["path"]
        prompts = partial(self._prompts.read, place.account)
        relay = Relay(state.backends, state.metrics, prompts, span, record, path, tenant)
        try:
            declared = header(scope["headers"], b"content-length").decode("latin-1")
            limit = state.config.max_body_bytes
            body = await read_bytes(receive, declared, limit, place.body)
            if tenant is not None:
                body = await self._prompts.opened(tenant, body, path, receive)
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


def _create_rest(state: RouteState, forwarding: Forwarding) -> FastAPI:
    app = FastAPI(
        title="tokenmill route",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=exception_handlers(),
    )
    app.openapi = cache(lambda: _document(state, forwarding))  # type: ignore[method-assign]
    _add_models(app, state)
    _add_videos(app, state)
    _add_operations(app, state)
    add_pool_view(app, state.keys, state.backends.view)
    add_page(app, state.keys, lambda uptime_s, decisions: _dashboard(state, uptime_s, decisions))
    _add_forwarded(app, forwarding)
    return app


def _add_forwarded(app: FastAPI, forwarding: Forwarding) -> None:
    """Let the app know the routes of the calls that it never sees, for its 404 and 405."""

    async def never(request: Request) -> Response:
        if request.url.path in POSTS:  # it could be the name of something stored
            raise HTTPException(405, headers={"Allow": "POST"})
        raise HTTPException(404)

    forwarding.check([str(getattr(route, "path", "")) for route in app.routes])
    for path, methods in forwarding.routes():
        app.add_api_route(path, never, methods=list(methods), include_in_schema=False)


def _document(state: RouteState, forwarding: Forwarding) -> dict[str, Any]:
    """Calls as `tokenmill serve` has them, and what else is passed on."""
    passed_on = ((path.replace(":path", ""), methods) for path, methods in forwarding.routes())
    return document(LANGUAGE, __version__, None, state.keys.ring.is_needed, passed_on)


def _add_models(app: FastAPI, state: RouteState) -> None:
    guard = caller(state.keys)

    @MODELS.on(app, guard)
    async def models(request: Request) -> Response:
        cards = await state.backends.models(_authorization(request))
        return json_response({"object": "list", "data": cards})

    @MODEL.on(app, guard)
    async def model(request: Request, model_id: str) -> Response:
        cards = await state.backends.models(_authorization(request))
        for card in cards:
            if card["id"] == model_id:
                return json_response(card)
        known = ", ".join(repr(card["id"]) for card in cards) or "none"
        message = f"the model {model_id!r} does not exist; the backends have {known}"
        raise ApiError(404, message, "model", "model_not_found")


def _add_videos(app: FastAPI, state: RouteState) -> None:
    @app.get(VIDEOS_PATH, dependencies=[Depends(caller(state.keys))])
    async def list_videos() -> Response:
        message = "a router lists no videos: ask each of its backends, or for one video by its id"
        raise HTTPException(405, message, {"Allow": "POST"})


def _authorization(request: Request) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in request.headers.raw if name in KEY_HEADERS]


def _add_operations(app: FastAPI, state: RouteState) -> None:
    def fault() -> ApiError | None:
        if state.backends.ready:
            return None
        return ApiError(503, "no backend is up", code="no_backend")

    async def metrics() -> bytes:
        return state.metrics.render(EngineStats(), 0, state.backends.view())

    service = ServiceInfo(service="tokenmill route", version=__version__)
    add_operations(app, state.keys, state.calls, fault, metrics, service)


def routed_stats(state: RouteState) -> EngineStats:
    workers = state.backends.view(False).workers
    return EngineStats(
        num_running=state.calls.num_open,
        prefix_query_tokens=sum(worker.routed_tokens for worker in workers),
        prefix_hit_tokens=sum(worker.overlap_tokens for worker in workers),
    )


def _dashboard(state: RouteState, uptime_s: float, decisions: bool) -> DashboardView:
    metrics, pool = state.metrics, state.backends.view(decisions)
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
        restarts=0,
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
