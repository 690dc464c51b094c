"""The pool over HTTP: see it; with the control token also scale it, and drain a worker."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tokenmill.api.access import read_body
from tokenmill.api.errors import ApiError
from tokenmill.api.keys import Guard, Keys, is_local, operator, overseer, wrong_token
from tokenmill.api.operations import json_response
from tokenmill.api.protocol.receipts import receipts_of
from tokenmill.api.sites import SiteGuard
from tokenmill.api.stream import ApiState
from tokenmill.core.config import RouterPolicy
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.pool_view import PoolView
from tokenmill.workers.slot import Role

Handler = Callable[[Request], Awaitable[Response]]

MAX_BODY_BYTES = 4096


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How many there shall be; what is not named stays."""

    workers: int | None = None
    prefill: int | None = None
    decode: int | None = None

    def counts(self) -> dict[Role, int]:
        given: dict[Role, int | None]
        given = {"both": self.workers, "prefill": self.prefill, "decode": self.decode}
        return {role: count for role, count in given.items() if count is not None}


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class RouterRequest(msgspec.Struct, forbid_unknown_fields=True):
    policy: RouterPolicy | None = None  # None: as it is


def add_pool_view(
    app: FastAPI,
    keys: Keys,
    view: Callable[[], PoolView],
    refresh: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Add GET /workers; `refresh` is awaited first."""

    async def show(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        return json_response(view())

    add_guarded(app, keys, "GET", "", show)


def add_workers(app: FastAPI, state: ApiState) -> None:
    """Add /workers, what lies below it, and POST /reset_prefix_cache."""
    add_pool_view(app, state.keys, state.client.view, state.client.refresh)

    async def receipts(request: Request) -> Response:
        await state.client.stats()
        price = state.config.price_per_gpu_hour
        return json_response(receipts_of(state.client.accounts(), price))

    add_guarded(app, state.keys, "GET", "/receipts", receipts)

    async def scale(request: Request) -> Response:
        counts = (await read_body(request, ScaleRequest, MAX_BODY_BYTES)).counts()
        if not counts:
            message = "send how many workers there shall be: workers, or prefill and decode"
            raise ApiError(400, message, "workers", "missing_field")
        try:
            for role, count in counts.items():
                await state.client.scale(count, role)
        except PoolError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0], "invalid_value") from None
        except WorkerStartError as error:
            raise ApiError(503, f"a worker did not start: {error}", code="no_worker") from None
        return _view(state)

    async def renew_router(request: Request) -> Response:
        call = await read_body(request, RouterRequest, MAX_BODY_BYTES)
        await state.client.renew_routers(call.policy)
        return _view(state)

    @app.post("/reset_prefix_cache", dependencies=[Depends(operator(state.keys))])
    async def reset_prefix_cache() -> Response:
        await state.client.reset_prefix_cache()
        return _view(state)

    async def drain(request: Request) -> Response:
        call = await read_body(request, DrainRequest, MAX_BODY_BYTES)
        try:
            await state.client.drain_worker(call.worker, state.config.drain_timeout_s)
        except PoolError as error:
            raise ApiError(400, str(error), "worker", "invalid_value") from None
        return _view(state)

    for path, handler in (("/scale", scale), ("/router", renew_router), ("/drain", drain)):
        add_guarded(app, state.keys, "POST", path, handler)


def add_guarded(app: FastAPI, keys: Keys, method: str, path: str, handler: Handler) -> None:
    """Add a route below /workers: what it shows is for an overseer, to change it for operators."""
    guard = [Depends(_viewer(keys) if method == "GET" else operator(keys))]
    app.add_api_route("/workers" + path, handler, methods=[method], dependencies=guard)


def _view(state: ApiState) -> Response:
    return json_response(state.client.view())


def _viewer(keys: Keys) -> Guard:
    """A dependency: figures over all keys; a server without keys and token shows them here."""
    see, site = overseer(keys), SiteGuard(keys)

    async def check(request: Request) -> None:
        await see(request)
        if keys.ring.is_needed or keys.is_operator(request):
            return
        if keys.config.control_token is not None:
            raise wrong_token()
        if not is_local(request):
            message = "/workers answers callers on this machine; others send the control token"
            raise ApiError(403, message, code="not_local")
        site.check_page(request.scope["headers"])

    return check
