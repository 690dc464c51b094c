"""The pool over HTTP: see it, scale it, drain a worker. For this machine, or with the token."""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from fastapi import Depends, FastAPI, Request
from starlette.responses import Response

from tokenmill.api.access import key_matcher, read_body
from tokenmill.api.errors import ApiError
from tokenmill.api.operations import json_response
from tokenmill.api.protocol.receipts import receipts_of
from tokenmill.api.stream import ApiState
from tokenmill.core.config import RouterPolicy, ServerConfig
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.pool_view import PoolView
from tokenmill.workers.slot import Role

Handler = Callable[[Request], Awaitable[Response]]

MAX_BODY_BYTES = 4096
# A proxy on this machine makes everybody a local caller; it says so in one of these.
PROXY_HEADERS = ("forwarded", "x-forwarded-for", "x-real-ip", "via")


class ScaleRequest(msgspec.Struct, forbid_unknown_fields=True):
    """How many there shall be; what is not named stays."""

    workers: int | None = None
    prefill: int | None = None
    decode: int | None = None
    encoder: int | None = None

    def counts(self) -> dict[Role, int]:
        """The counts that were given, by role."""
        given: dict[Role, int | None]
        given = {"both": self.workers, "prefill": self.prefill, "decode": self.decode}
        given["encoder"] = self.encoder
        return {role: count for role, count in given.items() if count is not None}


class DrainRequest(msgspec.Struct, forbid_unknown_fields=True):
    worker: str


class JoinRequest(msgspec.Struct, forbid_unknown_fields=True):
    """A front that wants to join."""

    version: str
    model: str | None = None


class RouterRequest(msgspec.Struct, forbid_unknown_fields=True):
    policy: RouterPolicy | None = None  # None: as it is


def add_pool_view(
    app: FastAPI,
    config: ServerConfig,
    view: Callable[[], PoolView],
    refresh: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Add GET /workers; `refresh` is awaited first."""

    async def show(request: Request) -> Response:
        if refresh is not None:
            await refresh()
        return json_response(view())

    add_guarded(app, config, "GET", "", show)


def add_workers(app: FastAPI, state: ApiState) -> None:
    """Add GET /workers and /workers/receipts, POST /workers/fronts, /scale, /drain and /router."""
    add_pool_view(app, state.config, state.client.view, state.client.refresh)
    _add_join(app, state)

    async def receipts(request: Request) -> Response:
        await state.client.stats()
        price = state.config.price_per_gpu_hour
        return json_response(receipts_of(state.client.accounts(), price))

    add_guarded(app, state.config, "GET", "/receipts", receipts)

    async def scale(request: Request) -> Response:
        counts = (await read_body(request, ScaleRequest, MAX_BODY_BYTES)).counts()
        if not counts:
            message = (
                "send how many workers there shall be: workers, or prefill and decode; encoder"
            )
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

    async def drain(request: Request) -> Response:
        call = await read_body(request, DrainRequest, MAX_BODY_BYTES)
        try:
            await state.client.drain_worker(call.worker, state.config.drain_timeout_s)
        except PoolError as error:
            raise ApiError(400, str(error), "worker", "invalid_value") from None
        return _view(state)

    for path, handler in (("/scale", scale), ("/router", renew_router), ("/drain", drain)):
        add_guarded(app, state.config, "POST", path, handler)


def _add_join(app: FastAPI, state: ApiState) -> None:
    """Add POST /workers/fronts, where a front of another host gets its ticket."""

    async def join(request: Request) -> Response:
        call = await read_body(request, JoinRequest, MAX_BODY_BYTES)
        try:
            ticket = await state.client.ticket(call.version, call.model)
        except PoolError as error:
            raise ApiError(409, str(error), code="front_refused") from None
        return json_response(ticket)

    add_guarded(app, state.config, "POST", "/fronts", join)


def add_guarded(
    app: FastAPI, config: ServerConfig, method: str, path: str, handler: Handler
) -> None:
    """Add a guarded route below /workers, and below /floor, its name before this release."""

    async def renamed(request: Request) -> Response:
        answer = await handler(request)
        answer.headers["deprecation"] = "true"
        answer.headers["link"] = f'</workers{path}>; rel="successor-version"'
        return answer

    guard = [Depends(_controller(config))]
    app.add_api_route("/workers" + path, handler, methods=[method], dependencies=guard)
    app.add_api_route("/floor" + path, renamed, methods=[method], dependencies=guard)


def _view(state: ApiState) -> Response:
    return json_response(state.client.view())


def _controller(config: ServerConfig) -> Callable[[Request], None]:
    """A dependency: the control token where there is one, else a caller on this machine."""
    token = config.control_token
    bears_token = key_matcher([token] if token else [])
    names = frozenset(name.lower() for name in (config.host, *config.allowed_hosts))

    def check(request: Request) -> None:
        if token is not None:
            if bears_token(request) is None:
                message = "missing or wrong control token; send the server's --control-token in "
                message += "the header 'Authorization: Bearer TOKEN'"
                raise ApiError(401, message, code="invalid_token")
        else:
            if not _is_local(request):
                message = "/workers answers callers on this machine; set --control-token for others"
                raise ApiError(403, message, code="not_local")
            check_site(request.headers, names)
        # A page in a browser can post a form to this machine, but not JSON without being asked.
        kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if request.method == "POST" and kind != "application/json":
            raise ApiError(415, "content-type: must be application/json", code="not_json")

    return check


def check_site(headers: Mapping[str, str], names: frozenset[str]) -> None:
    """Refuse a call that a web page made in the browser of somebody on this machine.

    A name that an attacker's DNS points here comes as the Host; another page's call as its Origin.
    """
    host = headers.get("host", "")
    name = _host_name(host)
    if name not in names and not _is_own_name(name):
        message = (
            f"/workers does not answer to the Host {host!r}: call it by localhost or an address, "
            "or start the server with --allowed-host NAME"
        )
        raise ApiError(403, message, code="unknown_host")
    origin = headers.get("origin")
    is_foreign = origin is not None and origin.partition("://")[2].lower() != host.lower()
    if is_foreign or headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        message = f"/workers does not answer to web pages of another origin ({origin or 'unknown'})"
        raise ApiError(403, message, code="foreign_origin")


def _host_name(host: str) -> str:
    """A Host header without its port and the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower()


def _is_own_name(name: str) -> bool:
    """Loopback's names, and addresses: nobody's DNS decides where these lead."""
    if name == "localhost" or name.endswith(".localhost"):
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _is_local(request: Request) -> bool:
    if request.client is None or any(name in request.headers for name in PROXY_HEADERS):
        return False
    try:
        address = ipaddress.ip_address(request.client.host)
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
