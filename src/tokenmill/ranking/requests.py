"""What is asked and answered: a user's history and candidates, a score for each; what is refused.

Every check is here and comes before a batch is formed, so that no batch fails for one request.
Errors name a field as a request's JSON has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tokenmill.core.requests import Request, RequestOutput
from tokenmill.core.specs.hstu import HstuSpec
from tokenmill.core.tasks import Rank, Scores
from tokenmill.core.types import InvalidRequestError

Ids = np.ndarray  # int64[n]


@dataclass(frozen=True, slots=True, eq=False)
class RankRequest:
    """One user's history and the candidates to score; arrays are int64."""

    request_id: str
    user_id: int
    item_ids: Ids
    category_ids: Ids
    actions: Ids  # bits: what the user did with each item
    candidate_ids: Ids
    candidate_category_ids: Ids
    timestamps: Ids | None = None  # seconds, of each item of the history; absent: query_time
    query_time: int = 1
    deadline_ns: int | None = None  # of time.monotonic_ns(); later answers are worth nothing
    top_k: int | None = None  # only the best are answered, in descending order

    def asked(self) -> Request[Rank]:
        names = ("item_ids", "category_ids", "actions", "candidate_ids", "candidate_category_ids")
        ids = {name: getattr(self, name).astype("<i8").tobytes() for name in names}
        times = None if self.timestamps is None else self.timestamps.astype("<i8").tobytes()
        task = Rank(
            user_id=self.user_id,
            timestamps=times,
            query_time=self.query_time,
            top_k=self.top_k,
            **ids,
        )
        return Request(self.request_id, task, deadline_ns=self.deadline_ns)

    @property
    def num_history(self) -> int:
        return len(self.item_ids)

    @property
    def num_candidates(self) -> int:
        return len(self.candidate_ids)

    @property
    def num_tokens(self) -> int:
        """Rows of the model: the contextual token, history and candidates."""
        return 1 + self.num_history + self.num_candidates


def request_of(asked: Request) -> RankRequest:
    """A request whose task is to rank; its arrays are those of the message."""
    task: Rank = asked.task
    times = task.timestamps
    return RankRequest(
        request_id=asked.request_id,
        user_id=task.user_id,
        item_ids=_ids(task.item_ids),
        category_ids=_ids(task.category_ids),
        actions=_ids(task.actions),
        candidate_ids=_ids(task.candidate_ids),
        candidate_category_ids=_ids(task.candidate_category_ids),
        timestamps=None if times is None else _ids(times),
        query_time=task.query_time,
        deadline_ns=asked.deadline_ns,
        top_k=task.top_k,
    )


def _ids(data: bytes) -> Ids:
    return np.frombuffer(data, "<i8")


def scores_of(output: RequestOutput) -> np.ndarray:
    """Scores [n, num_tasks] of a request that was answered, float32."""
    assert isinstance(output.delta, Scores), output.error
    return np.frombuffer(output.delta.scores, "<f4").reshape(-1, output.delta.num_tasks)


def best_of(scores: np.ndarray, count: int) -> np.ndarray:
    """The candidates with the highest scores of the first task, best first; ties by their order."""
    best: np.ndarray = np.argsort(-scores[:, 0], kind="stable")[:count]
    return best


def ids_of(name: str, values: Sequence[int] | Ids) -> Ids:
    """An int64 array, or an error that names the field and what it holds."""
    try:
        found = np.asarray(values)
    except ValueError:
        raise InvalidRequestError(f"{name}: expected a flat list of integers", name) from None
    if found.size == 0:
        return np.zeros(0, np.int64)
    if found.ndim != 1 or found.dtype.kind not in "iu":
        wrong = f"{name}: expected a flat list of integers of 64 bits, got {str(values)[:60]}"
        raise InvalidRequestError(wrong, name)
    if found.dtype == np.uint64 and found.max() > np.iinfo(np.int64).max:
        raise InvalidRequestError(f"{name}: {found.max()} does not fit 64 bits", name)
    return found.astype(np.int64, copy=False)


def check_request(request: RankRequest, spec: HstuSpec) -> None:
    """Raise an error that names the field, the value and the limit; never score a wrong input."""
    _check_lengths(request, spec)
    most = spec.max_seq_len
    if request.num_tokens > most:
        left = most - 1 - request.num_candidates
        raise InvalidRequestError(
            f"history.item_ids: the history has {request.num_history} items; beside "
            f"{request.num_candidates} candidates at most {left} fit (max_seq_len {most})",
            "history.item_ids",
        )
    ranges = (
        ("history.item_ids", request.item_ids, spec.num_items, "num_items"),
        ("candidates.item_ids", request.candidate_ids, spec.num_items, "num_items"),
        ("history.category_ids", request.category_ids, spec.num_categories, "num_categories"),
        *(("candidates.category_ids", request.candidate_category_ids, spec.num_categories,
           "num_categories"),),
        ("history.actions", request.actions, 1 << spec.num_actions, "2 ** num_actions"),
    )  # fmt: skip
    if not 0 <= request.user_id < spec.num_users:
        raise _unknown("user_id", "", request.user_id, spec.num_users, "num_users")
    for name, values, count, source in ranges:
        _check_range(name, values, count, source)
    _check_times(request)


def _check_lengths(request: RankRequest, spec: HstuSpec) -> None:
    if request.num_history == 0:
        wrong = "history.item_ids: the history is empty; one item is needed"
        raise InvalidRequestError(wrong, "history.item_ids")
    if request.num_candidates == 0:
        wrong = "candidates.item_ids: there is no candidate to score"
        raise InvalidRequestError(wrong, "candidates.item_ids")
    if request.num_candidates > spec.max_candidates:
        raise InvalidRequestError(
            f"candidates.item_ids: {request.num_candidates} candidates; the most are "
            f"{spec.max_candidates} (max_candidates)",
            "candidates.item_ids",
        )
    pairs = (
        ("history.category_ids", request.category_ids, "history.item_ids", request.num_history),
        ("history.actions", request.actions, "history.item_ids", request.num_history),
        ("history.timestamps", request.timestamps, "history.item_ids", request.num_history),
        *(("candidates.category_ids", request.candidate_category_ids, "candidates.item_ids",
           request.num_candidates),),
    )  # fmt: skip
    for name, values, other, count in pairs:
        if values is not None and len(values) != count:
            wrong = f"{name}: expected {count} values, one for each of {other}, got {len(values)}"
            raise InvalidRequestError(wrong, name)


def _check_range(name: str, values: Ids, count: int, source: str) -> None:
    # As unsigned numbers those below zero are the largest: one pass finds both kinds.
    if len(values) and int(values.astype(np.int64, copy=False).view(np.uint64).max()) >= count:
        at = int(((values < 0) | (values >= count)).argmax())
        raise _unknown(name, f"[{at}]", int(values[at]), count, source)


def _unknown(name: str, place: str, value: int, count: int, source: str) -> InvalidRequestError:
    message = f"{name}{place}: {value} is unknown; values are 0 to {count - 1} ({source})"
    return InvalidRequestError(message, name)


def _check_times(request: RankRequest) -> None:
    if not 0 <= request.query_time < 2**53:
        wrong = f"query_time: expected seconds from 0 to 2 ** 53 - 1, got {request.query_time}"
        raise InvalidRequestError(wrong, "query_time")
    if request.timestamps is not None and request.timestamps.min() < 0:
        at = int(request.timestamps.argmin())
        value = request.timestamps[at]
        wrong = f"history.timestamps[{at}]: expected seconds of 0 or more, got {value}"
        raise InvalidRequestError(wrong, "history.timestamps")
