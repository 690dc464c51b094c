"""POST /v1/rank over a pool of ranking workers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from fastapi import Request
from starlette.responses import Response

from tokenmill import __version__
from tokenmill.api.access import CallPlace, Calls, read_bytes
from tokenmill.api.bodies.body_processes import BodyProcesses
from tokenmill.api.call import record_of
from tokenmill.api.errors import ApiError
from tokenmill.api.jobs.job_app import JobState, answer, create_job_app
from tokenmill.api.jobs.task_call import run_tasks
from tokenmill.api.keys import Keys, caller
from tokenmill.api.openapi import document
from tokenmill.api.ranking.rank_body import RankBody, read_body
from tokenmill.api.ranking.rank_protocol import RankAnswer, RankCall, RankUsage, result_of
from tokenmill.api.routes import EVERYWHERE, GENERATION_ERRORS, Route
from tokenmill.api.server import HttpService
from tokenmill.api.sites import JSON, MSGPACK, kind_of
from tokenmill.api.telemetry.job_metrics import JobMetrics
from tokenmill.api.telemetry.job_view import facts_of
from tokenmill.core.tasks import Scores
from tokenmill.workers.pool import WorkerPool

RANK = Route(
    *("POST", "/v1/rank", "Score candidates for some users", RankAnswer, GENERATION_ERRORS),
    body=RankCall,
    kinds=(JSON, "application/msgpack"),
    answers_in_kind=True,
)
FIGURES = {  # what workers tell, by its name
    "num_waiting": "Requests that wait for a step.",
    "num_running": "Requests in the step that runs.",
    "steps": "Batches that were run.",
    "candidates": "Candidates that were scored.",
    "tokens": "Rows of the model that were computed.",
    "step_seconds": "Time of steps.",
    "batch_requests": "Requests of a batch.",
    "batch_tokens": "Rows of a batch.",
    "requests": "Requests by how they ended.",
    "embedding_keys": "Keys looked up, by table and the tier that had them.",
    "embedding_bytes": "Bytes of rows read, by table and tier.",
    "embedding_hits": "Keys found in the nearest tier.",
}


async def make_rank_service(model: str, max_open: int, keys: Keys, pool: WorkerPool) -> HttpService:
    """The service of a started pool; `model` is the name clients use."""
    metrics = JobMetrics("rank", model, FIGURES)
    length = int(facts_of(pool)["max_seq_len"])
    state = JobState(pool, keys, model, "rank", metrics, Calls(keys.config), max_open, length)
    routes = (RANK, *EVERYWHERE)
    api = partial(document, routes, __version__, model, keys.ring.is_needed)
    app = create_job_app(state, api, "ranking")
    processes = BodyProcesses(num_fronts=1)

    @RANK.on(app, caller(keys))
    async def rank(request: Request) -> Response:
        with state.admit(request.state.account) as place:
            return await _rank(request, state, place, processes)

    running = _failing_at_the_end(pool, processes)
    return HttpService(app, keys, metrics, state.calls, running, streams=False)


@contextlib.asynccontextmanager
async def _failing_at_the_end(pool: WorkerPool, processes: BodyProcesses) -> AsyncIterator[None]:
    """Calls that outlast the drain are answered with an error."""
    yield
    pool.drain()
    pool.fail_open("the server is shutting down", "shutdown")
    processes.close()


async def _rank(
    request: Request, state: JobState, place: CallPlace, processes: BodyProcesses
) -> Response:
    began_s, config = time.monotonic(), state.config
    declared = request.headers.get("content-length", "")
    body = await read_bytes(request.receive, declared, config.max_body_bytes, place.body)
    in_msgpack = kind_of(request.headers.get("content-type", "")) in MSGPACK
    how = in_msgpack, config.request_timeout_s, config.max_concurrency
    call = await read_body(processes, request.receive, place, body, *how)
    out_msgpack = _wants_msgpack(request.headers.get("accept", ""), in_msgpack)
    if call.binary and not out_msgpack:
        message = "binary: answers in JSON have no bytes; send 'Accept: application/msgpack'"
        raise ApiError(400, message, "binary", "invalid_value")
    state.check_model(call.model)
    del body
    place.body.release()
    found = await _scores(request, state, call, place)
    state.metrics.answered(time.monotonic() - began_s, [each.queue_ms / 1e3 for each in found])
    return answer(_answer(request, state, call, found), out_msgpack)


async def _scores(
    request: Request, state: JobState, call: RankBody, place: CallPlace
) -> list[Scores]:
    state.take(place, call.num_users)
    names = [f"users[{index}]" for index in range(len(call.tasks))]
    limits = state.max_open, call.timeout_s
    outputs = await run_tasks(state.pool, call.tasks, request.receive, *limits, names)
    return [output.delta for output in outputs if isinstance(output.delta, Scores)]


def _answer(request: Request, state: JobState, call: RankBody, found: list[Scores]) -> RankAnswer:
    pairs = enumerate(zip(call.request_ids, found, strict=True))
    of_batch = facts_of(state.pool)["scaling_seqlen"] == "batch"
    record = record_of(request.scope)
    tokens = record.num_prompt_tokens = sum(each.num_tokens for each in found)
    record.finish_reason = "done"
    return RankAnswer(
        id=record.request_id,
        created=int(time.time()),
        model=state.model,
        scaling_seqlen="batch" if of_batch else "fixed",
        results=[result_of(own, index, each, call.binary) for index, (own, each) in pairs],
        usage=RankUsage(
            num_users=len(found),
            num_candidates=sum(task.num_candidates for task in call.tasks),
            num_tokens=tokens,
        ),
    )


def _wants_msgpack(accept: str, in_msgpack: bool) -> bool:
    """By Accept, the first kind that is known; without one as the body came."""
    for kind in map(kind_of, accept.split(",")):
        if kind in MSGPACK:
            return True
        if kind == JSON:
            return False
    return in_msgpack


def describe(facts: dict[str, Any]) -> str:
    """The engine of a server in a few words."""
    return (
        f"{facts['dtype']} on {facts['device']}, {facts['num_items']} items, at most "
        f"{facts['max_candidates']} candidates and {facts['max_seq_len']} tokens, "
        f"scaling_seqlen {facts['scaling_seqlen']}"
    )
