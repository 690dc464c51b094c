"""From the body of POST /v1/rank to jobs; bodies that take long are read by another process."""

from __future__ import annotations

import msgspec
from starlette.types import Receive

from tokenmill.api.access import Place
from tokenmill.api.bodies.body_processes import BodyProcesses, NotElsewhereError, unless_gone
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.ranking.rank_protocol import RankCall, job_of, num_candidates
from tokenmill.core.jobs.rank_job import pack

LONG_BODY_BYTES = 2**18  # as many small users, or unknown fields, as take some 30 ms


class UserJob(msgspec.Struct):
    """One user of a call."""

    payload: bytes
    cost: float
    num_candidates: int
    request_id: str | None


class RankBody(msgspec.Struct):
    """What a body asks for."""

    model: str | None
    timeout_s: float | None
    binary: bool
    num_users: int
    jobs: list[UserJob]  # of all users, or of none where there are too many


def read_rank(
    body: bytes, in_msgpack: bool, request_timeout_s: float | None, most: int
) -> RankBody:
    """The jobs of a body, if they are `most` at most; raises ApiError."""
    call = decode_call(body, RankCall, msgpack=in_msgpack)
    limits = [t for t in (call.timeout, request_timeout_s) if t is not None]
    timeout_s = min(limits, default=None)
    jobs = []
    for index, user in enumerate(call.users if len(call.users) <= most else ()):
        job = job_of(user, index, call, timeout_s)
        cost = float(len(job.item_ids) + len(job.candidate_ids))
        jobs.append(UserJob(pack(job), cost, num_candidates(user), user.request_id))
    return RankBody(call.model, timeout_s, call.binary, len(call.users), jobs)


async def read_body(
    processes: BodyProcesses,
    receive: Receive,
    place: Place,
    body: bytes,
    in_msgpack: bool,
    request_timeout_s: float | None,
    most: int,
) -> RankBody:
    """The same, and no other call waits for it."""
    work = body, in_msgpack, request_timeout_s, most
    if len(body) > LONG_BODY_BYTES:
        reading = processes.run(place.account, len(body), _read_elsewhere, *work)
        try:
            return _DECODER.decode(await unless_gone(receive, reading))
        except NotElsewhereError:
            pass
    return read_rank(*work)


_DECODER = msgspec.msgpack.Decoder(RankBody)


def _read_elsewhere(
    body: bytes, in_msgpack: bool, request_timeout_s: float | None, most: int
) -> bytes:
    return msgspec.msgpack.encode(read_rank(body, in_msgpack, request_timeout_s, most))
