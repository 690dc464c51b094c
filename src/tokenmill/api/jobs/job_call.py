"""One HTTP call as some jobs: all of them are done, or the call fails and the rest is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.api.errors import ApiError
from tokenmill.core.jobs.job_engine import JobOutput
from tokenmill.workers.jobs.job_pool import JobPool
from tokenmill.workers.link import WorkerDownError

# How a job failed -> status; any other way is a 500.
_STATUS = {"invalid": 400, "deadline": 408, "shutdown": 503}
_CODES = {"invalid": "invalid_value", "shutdown": "draining"}
_numbers = itertools.count()


async def run_jobs(
    pool: JobPool,
    jobs: Sequence[tuple[bytes, float]],
    receive: Receive,
    timeout_s: float | None = None,
    names: Sequence[str] = (),
) -> list[JobOutput]:
    """The outputs of jobs, given with their costs; ApiError where one of them fails.

    A client that goes away aborts them. `names` say where in the call a job stands.
    """
    ids = [f"job-{next(_numbers)}" for _ in jobs]
    outputs: dict[str, JobOutput] = {}
    ended: asyncio.Future[JobOutput] = asyncio.get_running_loop().create_future()

    def take(output: JobOutput) -> None:
        if output.is_terminal:
            outputs[output.job_id] = output
            if (output.kind == "failed" or len(outputs) == len(ids)) and not ended.done():
                ended.set_result(output)

    _check_room(pool, len(jobs))
    try:
        for job_id, (payload, cost) in zip(ids, jobs, strict=True):
            pool.submit(job_id, payload, take, timeout_s, cost)
        last = await _or_gone(ended, receive)
    except WorkerDownError as down:
        raise ApiError(503, str(down), code="restarting") from None
    finally:
        for job_id in ids:
            pool.abort(job_id)
    if last.kind == "failed":
        raise failure(last, names[ids.index(last.job_id)] if names else "")
    return [outputs[job_id] for job_id in ids]


def _check_room(pool: JobPool, count: int) -> None:
    if count > pool.max_open:
        message = f"this call asks for {count} answers; the most are {pool.max_open} (--max-queue)"
        raise ApiError(400, message, code="too_many")
    if pool.num_open + count > pool.max_open:
        message = f"{pool.num_open} requests are open; the limit is {pool.max_open} (--max-queue); "
        raise ApiError(429, message + "try again when some have ended", code="queue_full")


async def _or_gone(ended: asyncio.Future[JobOutput], receive: Receive) -> JobOutput:
    """The output that ends the call, unless the client goes first."""
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await gone
    if not ended.done():
        raise ClientDisconnect
    return ended.result()


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failure(output: JobOutput, name: str = "") -> ApiError:
    """The error that a failed job stands for; `name` says where in the call it stands."""
    kind, message, param = output.error_kind, output.error, None
    if kind == "invalid":
        message = f"{name}.{message}" if name else message
        param = message.partition(":")[0]
    elif kind == "deadline":
        param = "timeout"
    return ApiError(_STATUS.get(kind, 500), message, param, _CODES.get(kind, kind))
