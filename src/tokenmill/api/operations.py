"""What every front answers alike: errors, /, /health, /ping, /version and /metrics."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response

from tokenmill import __version__
from tokenmill.api.access import Calls
from tokenmill.api.call import GONE, record_of
from tokenmill.api.errors import ApiError, of_invalid
from tokenmill.api.keys import Keys, overseer
from tokenmill.api.openapi import docs_page
from tokenmill.api.protocol.answers import Health, ServiceInfo, Version, json_encode
from tokenmill.api.routes import DOCS, HEALTH, METRICS, PING, ROOT, VERSION
from tokenmill.api.telemetry.prometheus import CONTENT_TYPE
from tokenmill.core.types import InvalidRequestError

MAX_SHOWN = 100  # characters of a path in an error
# Routes of ollama, llama.cpp and text-generation-inference, and what does the same here.
_SAME = {
    "/api/chat": ("POST", "/v1/chat/completions"),
    "/api/generate": ("POST", "/v1/completions"),
    "/api/tags": ("GET", "/v1/models"),
    "/api/ps": ("GET", "/v1/models"),
    "/api/show": ("GET", "/v1/models"),
    "/api/version": ("GET", "/version"),
    "/completion": ("POST", "/v1/completions"),
    "/generate": ("POST", "/v1/completions"),
    "/generate_stream": ("POST", "/v1/completions"),
    "/models": ("GET", "/v1/models"),
}

Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]


def exception_handlers() -> dict[Any, Handler]:
    async def api_error(request: Request, error: Exception) -> Response:
        answer = _as_api_error(error, request)
        record_of(request.scope).fail(answer)
        headers = {**(getattr(error, "headers", None) or {}), **answer.answer_headers()}
        if headers.get("Allow") == "GET":
            headers["Allow"] = "GET, HEAD"
        return Response(answer.body(request.url.path), answer.status, headers, "application/json")

    async def gone(_request: Request, _error: ClientDisconnect) -> Response:
        return Response(status_code=GONE)  # nobody reads it

    return {
        ApiError: api_error,
        InvalidRequestError: api_error,
        HTTPException: api_error,
        ClientDisconnect: gone,
        Exception: api_error,
    }


def _as_api_error(error: Exception, request: Request) -> ApiError:
    match error:
        case ApiError():
            return error
        case InvalidRequestError():
            return of_invalid(error)
        case HTTPException(status_code=404):
            return _no_route(request)
        case HTTPException(status_code=405, headers=headers, detail=message):
            if message == "Method Not Allowed":
                allowed = (headers or {}).get("Allow", "")
                message = f"{request.url.path} does not take {request.method}; use {allowed}"
            return ApiError(405, message, code="method_not_allowed")
        case HTTPException(status_code=status, detail=detail):
            return ApiError(status, str(detail))
        case _:
            return ApiError(500, "internal error", code="internal_error")


def _no_route(request: Request) -> ApiError:
    """404 that names the route which does the same, if the server has one."""
    path = request.url.path[:MAX_SHOWN]
    method, same = _SAME.get(path, ("POST", f"/v1{path}"))
    known = {getattr(route, "path", None) for route in request.app.routes}
    instead = f"{method} {same} does the same" if same in known else "GET / says what there is"
    return ApiError(404, f"there is no route {path!r}; {instead}", code="unknown_route")


def json_response(answer: object) -> Response:
    return Response(json_encode(answer), media_type="application/json")


def add_operations(
    app: FastAPI,
    keys: Keys,
    calls: Calls,
    fault: Callable[[], ApiError | None],
    metrics: Callable[[], Awaitable[bytes]],
    service: ServiceInfo,
) -> None:
    """Add GET /, /docs, /health, which answers the `fault` if any, /version and /metrics."""

    @ROOT.on(app)
    async def root() -> Response:
        return json_response(service)

    @app.post("/ping")
    @PING.on(app)
    @HEALTH.on(app)
    async def health() -> Response:
        if calls.draining:
            raise ApiError(503, "the server is draining", code="draining")
        error = fault()
        if error is not None:
            raise error
        return json_response(Health())

    @VERSION.on(app)
    async def server_version() -> Response:
        return json_response(Version(version=__version__))

    @METRICS.on(app, overseer(keys))
    async def metrics_text() -> Response:
        return Response(await metrics(), media_type=CONTENT_TYPE)

    @DOCS.on(app)
    async def docs() -> Response:
        return HTMLResponse(docs_page(app.openapi()))
