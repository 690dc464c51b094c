"""The app of a server of jobs: health, metrics, models, workers, the live page and the document."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import msgspec
from fastapi import FastAPI, Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.api.access import CallPlace, Calls, read_body
from tokenmill.api.errors import ApiError, unknown_model
from tokenmill.api.keys import Keys, caller, overseer
from tokenmill.api.operations import add_operations, exception_handlers, json_response
from tokenmill.api.protocol.answers import ModelCard, ModelList, ServiceInfo
from tokenmill.api.routes import MODEL, MODELS
from tokenmill.api.telemetry.dashboard import JobsView, add_job_page
from tokenmill.api.telemetry.job_metrics import JobMetrics
from tokenmill.api.telemetry.job_view import facts_of, worker_views
from tokenmill.api.worker_routes import MAX_BODY_BYTES, DrainRequest, ScaleRequest, add_guarded
from tokenmill.core.config import ServerConfig
from tokenmill.workers.lifecycle import PoolError
from tokenmill.workers.link import WorkerStartError
from tokenmill.workers.pool import WorkerPool
from tokenmill.workers.slot import Role


@dataclass(slots=True)
class JobState:
    """What all handlers of a server of jobs share."""

    pool: WorkerPool
    keys: Keys
    model: str
    task: str
    metrics: JobMetrics
    calls: Calls
    max_open: int  # tasks that have not ended; a whole call is refused where they would be more
    max_model_len: int = 0
    started_s: float = field(default_factory=time.monotonic)

    @property
    def config(self) -> ServerConfig:
        return self.keys.config

    def admit(self, account: str) -> CallPlace:
        """Let in a call whose head has come, or raise what it is to be answered with."""
        self._check()
        return self.calls.enter(account)

    def take(self, place: CallPlace, count: int) -> None:
        """Count a call for its jobs, or raise what it is to be answered with."""
        self._check()
        place.take(count)

    def _check(self) -> None:
        self.calls.check_draining()
        if not self.pool.ready:
            raise no_worker()

    def check_model(self, name: str | None) -> None:
        """404 for a model that is not served here."""
        if name is not None and name != self.model:
            raise unknown_model(name, self.model)


def base_app(
    pool: WorkerPool,
    keys: Keys,
    calls: Calls,
    document: Callable[[], dict[str, Any]],
    metrics: Callable[[], Awaitable[bytes]],
) -> FastAPI:
    """An app with its OpenAPI document, /docs, /metrics, and health by its workers' state."""
    app = FastAPI(
        title="tokenmill",
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=exception_handlers(),
    )
    app.openapi = cache(document)  # type: ignore[method-assign]

    def fault() -> ApiError | None:
        return None if pool.ready else no_worker()

    service = ServiceInfo(service="tokenmill", version=__version__)
    add_operations(app, keys, calls, fault, metrics, service)

    return app


def create_job_app(state: JobState, document: Callable[[], dict[str, Any]], page: str) -> FastAPI:
    """The app without the routes of its task, with its OpenAPI document and its live page."""

    async def metrics() -> bytes:
        return await state.metrics.render(state.pool)

    app = base_app(state.pool, state.keys, state.calls, document, metrics)
    add_model(app, state.keys, state.model, state.max_model_len)
    add_job_workers(app, state.keys, state.pool, lambda: view_of(state))
    add_job_page(app, state.keys, page, lambda _: view_of(state), overseer(state.keys))
    return app


def no_worker() -> ApiError:
    """503 while all workers are down."""
    message = "no worker is there, the engine is restarting; try again shortly, or see GET /workers"
    return ApiError(503, message, code="restarting")


def view_of(state: JobState) -> JobsView:
    """The server as data, for /workers and the live page."""
    pool, metrics = state.pool, state.metrics
    return JobsView(
        task=state.task,
        model=state.model,
        version=__version__,
        time_s=time.time(),
        uptime_s=time.monotonic() - state.started_s,
        draining=state.calls.draining,
        num_open=pool.num_open,
        num_held=pool.num_held,
        max_open=state.max_open,
        migrations=pool.num_migrations,
        answered=metrics.num_answered,
        latency_ms=metrics.recent_ms.summary(),
        rejected=dict(metrics.rejected),
        figures=pool.known_stats().figures,
        workers=worker_views(pool),
        facts=facts_of(pool),
    )


def add_model(app: FastAPI, keys: Keys, name: str, max_model_len: int) -> None:
    """Add GET /v1/models for the only model of a server."""
    guard = caller(keys)
    card = ModelCard(id=name, created=int(time.time()), root=name, max_model_len=max_model_len)

    @MODELS.on(app, guard)
    async def models() -> Response:
        return json_response(ModelList(data=[card]))

    @MODEL.on(app, guard)
    async def model(model_id: str) -> Response:
        if model_id != name:
            raise unknown_model(model_id, name)
        return json_response(card)


def add_job_workers(
    app: FastAPI, keys: Keys, pool: WorkerPool, view: Callable[[], JobsView]
) -> None:
    """Add GET /workers, POST /workers/scale and /workers/drain."""

    async def show(request: Request) -> Response:
        await pool.stats()
        return json_response(view())

    async def scale(request: Request) -> Response:
        counts = (await read_body(request, ScaleRequest, MAX_BODY_BYTES)).counts()
        check_scale(counts, view().task)
        try:
            await pool.scale(counts["both"])
        except PoolError as error:
            raise ApiError(400, str(error), "workers", "invalid_value") from None
        except WorkerStartError as error:
            raise ApiError(503, f"a worker did not start: {error}", code="no_worker") from None
        return json_response(view())

    async def drain(request: Request) -> Response:
        call = await read_body(request, DrainRequest, MAX_BODY_BYTES)
        try:
            await pool.drain_worker(call.worker, keys.config.drain_timeout_s)
        except PoolError as error:
            raise ApiError(400, str(error), "worker", "invalid_value") from None
        return json_response(view())

    for method, path, handler in (
        ("GET", "", show),
        ("POST", "/scale", scale),
        ("POST", "/drain", drain),
    ):
        add_guarded(app, keys, method, path, handler)


def check_scale(counts: Mapping[Role, int], task: str) -> None:
    """400 where a call of /workers/scale does not name workers, or others than these."""
    if not counts:
        message = 'workers: send how many there shall be, such as {"workers": 2}'
        raise ApiError(400, message, "workers", "missing_field")
    others = [role for role in counts if role != "both"]
    if others:
        message = f"{others[0]}: --task {task} has no such workers; send "
        raise ApiError(400, message + '{"workers": N}', others[0], "invalid_value")


def answer(value: object, msgpack: bool) -> Response:
    """200 with a struct as JSON or msgpack."""
    if msgpack:
        body = msgspec.msgpack.encode(value)
        return Response(body, media_type="application/msgpack")
    return json_response(value)
