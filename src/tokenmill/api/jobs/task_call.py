"""One HTTP call as some tasks: all of them are done, or the call fails and the rest is aborted."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import Sequence

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from tokenmill.api.errors import ApiError
from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.tasks import Rank
from tokenmill.core.types import FinishReason
from tokenmill.workers.link import WorkerDownError
from tokenmill.workers.output_stream import OutputStream
from tokenmill.workers.pool import WorkerPool

# Why a request ended -> status; any other way is a 500.
_STATUS = {"invalid": 400, "deadline": 408, "shutdown": 503, "draining": 503}
_CODES = {"invalid": "invalid_value", "shutdown": "draining"}
_numbers = itertools.count()


async def run_tasks(
    pool: WorkerPool,
    tasks: Sequence[Rank],
    receive: Receive,
    max_open: int,
    timeout_s: float | None = None,
    names: Sequence[str] = (),
) -> list[RequestOutput]:
    """The outputs of tasks; ApiError where one of them fails.

    A client that goes away aborts them. `names` say where in the call a task stands.
    """
    _check_room(pool, len(tasks), max_open)
    ids, now_ns = [f"task-{next(_numbers)}" for _ in tasks], time.monotonic_ns()
    late_ns = None if timeout_s is None else now_ns + int(timeout_s * 1e9)
    try:
        stream = pool.submit(
            [
                Request(name, task, arrival_ns=now_ns, deadline_ns=late_ns)
                for name, task in zip(ids, tasks, strict=True)
            ]
        )
        async with asyncio.timeout(timeout_s):
            outputs = await _or_gone(stream, receive)
    except WorkerDownError as down:
        raise ApiError(503, str(down), code="restarting") from None
    except TimeoutError:
        late = f"the request was not answered within {timeout_s:g} s; raise its "
        late += "timeout, or add workers"
        raise ApiError(408, late, "timeout", "deadline") from None
    finally:
        pool.abort(ids)
    for index, output in outputs.items():
        if output.finish_reason is not FinishReason.STOP:
            raise failure(output, names[index] if names else "")
    return [outputs[index] for index in range(len(ids))]


def _check_room(pool: WorkerPool, count: int, max_open: int) -> None:
    if count > max_open:
        message = f"this call asks for {count} answers; the most are {max_open} (--max-queue)"
        raise ApiError(400, message, code="too_many")
    if pool.num_open + count > max_open:
        message = f"{pool.num_open} requests are open; the limit is {max_open} (--max-queue); "
        raise ApiError(429, message + "try again when some have ended", code="queue_full")


async def _or_gone(stream: OutputStream, receive: Receive) -> dict[int, RequestOutput]:
    """The ends of all requests, or of those up to a failure, unless the client goes first."""
    ended = asyncio.create_task(_ends(stream))
    gone = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((ended, gone), return_when=asyncio.FIRST_COMPLETED)
        if not ended.done():
            raise ClientDisconnect
        return ended.result()
    finally:
        for task in (ended, gone):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _ends(stream: OutputStream) -> dict[int, RequestOutput]:
    ends: dict[int, RequestOutput] = {}
    while len(ends) < len(stream.request_ids):
        for index, output in (await stream.get()).items():
            if output.finish_reason is not None:
                ends[index] = output
            if output.finish_reason not in (None, FinishReason.STOP):
                return {index: output}
    return ends


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def failure(output: RequestOutput, name: str = "") -> ApiError:
    """The error that a failed task stands for; `name` says where in the call it stands."""
    kind, message, param = str(output.stop_reason), output.error or "the task failed", None
    if kind == "invalid":
        message = f"{name}.{message}" if name else message
        param = message.partition(":")[0]
    elif kind == "deadline":
        param = "timeout"
    return ApiError(_STATUS.get(kind, 500), message, param, _CODES.get(kind, kind))
