"""From the body of POST /v1/rank to tasks; bodies that take long are read by another process."""

from __future__ import annotations

import msgspec
from starlette.types import Receive

from tokenmill.api.access import CallPlace
from tokenmill.api.bodies.body_processes import BodyProcesses, NotElsewhereError, unless_gone
from tokenmill.api.protocol.decoding import decode_call
from tokenmill.api.ranking.rank_protocol import RankCall, task_of
from tokenmill.core.tasks import Rank

LONG_BODY_BYTES = 2**18  # as many small users, or unknown fields, as take some 30 ms


class RankBody(msgspec.Struct):
    """What a body asks for."""

    model: str | None
    timeout_s: float | None
    binary: bool
    num_users: int
    tasks: list[Rank]  # of all users, or of none where there are too many
    request_ids: list[str | None]  # that the client gave them


def read_rank(
    body: bytes, in_msgpack: bool, request_timeout_s: float | None, most: int
) -> RankBody:
    """The tasks of a body, if they are `most` at most; raises ApiError."""
    call = decode_call(body, RankCall, msgpack=in_msgpack)
    limits = [t for t in (call.timeout, request_timeout_s) if t is not None]
    users = call.users if len(call.users) <= most else []
    return RankBody(
        call.model,
        min(limits, default=None),
        call.binary,
        len(call.users),
        [task_of(user, index, call) for index, user in enumerate(users)],
        [user.request_id for user in users],
    )


async def read_body(
    processes: BodyProcesses,
    receive: Receive,
    place: CallPlace,
    body: bytes,
    in_msgpack: bool,
    request_timeout_s: float | None,
    most: int,
) -> RankBody:
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
