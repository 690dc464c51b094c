"""What a client may send to POST /v1/rank, and what it is answered."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from msgspec import Meta

from tokenmill.api.errors import ApiError
from tokenmill.api.protocol.answers import AnswerSchema
from tokenmill.api.protocol.requests import INT64_MAX, Schema
from tokenmill.core.tasks import ID_BYTES, Rank, Scores

Id = Annotated[int, Meta(ge=0, le=INT64_MAX)]
# A list, or its little-endian int64 values as bytes: in JSON base64, in msgpack binary.
Ids = list[Id] | bytes
_BIG_ENDIAN = sys.byteorder == "big"


class RankHistory(Schema, kw_only=True):
    """What a user did, the oldest first; all lists have one length."""

    item_ids: Ids
    category_ids: Ids
    actions: Ids  # bits: what the user did with each item
    timestamps: Ids | None = None  # seconds; query_time where they are left out


class RankCandidates(Schema, kw_only=True):
    """What is to be scored; both lists have one length."""

    item_ids: Ids
    category_ids: Ids


class RankUser(Schema, kw_only=True):
    user_id: Id
    history: RankHistory
    candidates: RankCandidates
    query_time: Id = 1  # seconds
    request_id: str | None = None  # comes back with the scores


class RankCall(Schema, kw_only=True):
    """Score the candidates of some users."""

    users: Annotated[list[RankUser], Meta(min_length=1)]
    model: str | None = None
    top_k: Annotated[int, Meta(ge=1, le=INT64_MAX)] | None = (
        None  # the best candidates only, best first
    )
    timeout: Annotated[float, Meta(gt=0, le=86_400)] | None = None  # seconds
    binary: bool = False  # scores as bytes of float32, item_ids as bytes of int64


class RankResult(AnswerSchema, kw_only=True):
    """The scores of one user: in the order of the candidates, or with top_k of the best."""

    index: int  # in users
    request_id: str | None = None
    scores: list[float | list[float]] | bytes  # of several tasks, a list for each candidate
    item_ids: list[int] | bytes | None = None  # with top_k
    scaling_seqlen: int  # what attention was divided by
    depends_on_batch: bool  # that number came from the batch: others change these scores
    batch_size: int  # requests that were computed together
    queue_ms: float
    run_ms: float


class RankUsage(AnswerSchema, kw_only=True):
    num_users: int
    num_candidates: int
    num_tokens: int


class RankAnswer(AnswerSchema, kw_only=True):
    """The answer to POST /v1/rank."""

    id: str
    object: Literal["rank"] = "rank"
    created: int
    model: str
    scaling_seqlen: Literal["batch", "fixed"]  # batch: scores depend on who is computed together
    results: list[RankResult]
    usage: RankUsage


def task_of(user: RankUser, index: int, call: RankCall) -> Rank:
    at, history, candidates = f"users[{index}]", user.history, user.candidates
    times = history.timestamps
    return Rank(
        user_id=user.user_id,
        item_ids=_ids(f"{at}.history.item_ids", history.item_ids),
        category_ids=_ids(f"{at}.history.category_ids", history.category_ids),
        actions=_ids(f"{at}.history.actions", history.actions),
        candidate_ids=_ids(f"{at}.candidates.item_ids", candidates.item_ids),
        candidate_category_ids=_ids(f"{at}.candidates.category_ids", candidates.category_ids),
        timestamps=None if times is None else _ids(f"{at}.history.timestamps", times),
        query_time=user.query_time,
        top_k=call.top_k,
    )


def _ids(name: str, ids: Sequence[int] | bytes) -> bytes:
    if not isinstance(ids, bytes):
        return _little_endian(array("q", ids)).tobytes()
    if len(ids) % ID_BYTES:
        message = f"{name}: {len(ids)} bytes are no whole number of int64 values of 8 bytes"
        raise ApiError(400, message, name, "invalid_value")
    return ids


def _little_endian(values: array[Any]) -> array[Any]:
    if _BIG_ENDIAN:
        values.byteswap()
    return values


def result_of(request_id: str | None, index: int, found: Scores, binary: bool) -> RankResult:
    scores: Any = found.scores
    items: Any = found.item_ids
    if not binary:
        scores = _scores(found)
        items = None if items is None else _numbers("q", items)
    return RankResult(
        index=index,
        request_id=request_id,
        scores=scores,
        item_ids=items,
        scaling_seqlen=found.scaling_seqlen,
        depends_on_batch=found.depends_on_batch,
        batch_size=found.batch_size,
        queue_ms=round(found.queue_ms, 3),
        run_ms=round(found.run_ms, 3),
    )


def _scores(found: Scores) -> list[Any]:
    flat, tasks = _numbers("f", found.scores), found.num_tasks
    if tasks == 1:
        return flat
    return [flat[at : at + tasks] for at in range(0, len(flat), tasks)]


def _numbers(kind: str, data: bytes) -> list[Any]:
    values: array[Any] = array(kind)
    values.frombytes(data)
    return _little_endian(values).tolist()
