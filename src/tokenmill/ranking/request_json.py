"""Requests and answers as JSON objects: the lines of `tokenmill rank`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from tokenmill.core.requests import RequestOutput
from tokenmill.core.tasks import Scores
from tokenmill.core.types import InvalidRequestError
from tokenmill.ranking.requests import RankRequest, best_of, ids_of, scores_of
from tokenmill.ranking.synthetic import LabelledRequest

_FIELDS = {"request_id", "user_id", "history", "candidates", "query_time"}
_HISTORY = {"item_ids", "category_ids", "actions"}
_CANDIDATES = {"item_ids", "category_ids"}


def read_request(data: Any, default_id: str) -> RankRequest:
    """A request of a parsed object; an error names the field."""
    fields = _object("request", data, {"user_id", "history", "candidates"}, _FIELDS)
    history = _object("history", fields["history"], _HISTORY, _HISTORY | {"timestamps"})
    candidates = _object("candidates", fields["candidates"], _CANDIDATES, _CANDIDATES | {"labels"})
    times = history.get("timestamps")
    request_id = fields.get("request_id", default_id)
    if not isinstance(request_id, str):
        wrong = f"request_id: expected a string, got {request_id!r}"
        raise InvalidRequestError(wrong, "request_id")
    return RankRequest(
        request_id=request_id,
        user_id=_integer("user_id", fields["user_id"]),
        item_ids=ids_of("history.item_ids", history["item_ids"]),
        category_ids=ids_of("history.category_ids", history["category_ids"]),
        actions=ids_of("history.actions", history["actions"]),
        candidate_ids=ids_of("candidates.item_ids", candidates["item_ids"]),
        candidate_category_ids=ids_of("candidates.category_ids", candidates["category_ids"]),
        timestamps=None if times is None else ids_of("history.timestamps", times),
        query_time=_integer("query_time", fields.get("query_time", 1)),
    )


def read_labels(data: Mapping[str, Any], count: int) -> np.ndarray | None:
    labels = data["candidates"].get("labels")
    if labels is None:
        return None
    found = ids_of("candidates.labels", labels)
    if len(found) != count or not np.isin(found, (0, 1)).all():
        wrong = f"candidates.labels: expected {count} values of 0 or 1"
        raise InvalidRequestError(wrong, "candidates.labels")
    return found.astype(np.float32)


def _object(name: str, data: Any, needed: set[str], known: set[str]) -> Mapping[str, Any]:
    if not isinstance(data, dict):
        raise InvalidRequestError(f"{name}: expected an object, got {str(data)[:60]!r}", name)
    for key in sorted(needed):
        if key not in data:
            raise InvalidRequestError(f"{name}: {key} is missing", key)
    for key in data:
        if key not in known:
            names = ", ".join(sorted(known))
            raise InvalidRequestError(f"{name}: {key} is unknown; its fields are {names}", key)
    return data


def _integer(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidRequestError(f"{name}: expected an integer, got {value!r}", name)
    return value


def write_request(labelled: LabelledRequest) -> dict[str, Any]:
    """The object that reads back as the request, with its labels."""
    request = labelled.request
    history: dict[str, Any] = {
        "item_ids": request.item_ids.tolist(),
        "category_ids": request.category_ids.tolist(),
        "actions": request.actions.tolist(),
    }
    if request.timestamps is not None:
        history["timestamps"] = request.timestamps.tolist()
    candidates = {
        "item_ids": request.candidate_ids.tolist(),
        "category_ids": request.candidate_category_ids.tolist(),
        "labels": labelled.labels.astype(int).tolist(),
    }
    return {
        "request_id": request.request_id,
        "user_id": request.user_id,
        "history": history,
        "candidates": candidates,
        "query_time": request.query_time,
    }


def write_answer(
    output: RequestOutput, candidate_ids: np.ndarray, top_k: int | None
) -> dict[str, Any]:
    """Scores in the order of the candidates, or the best of them with their items."""
    answer: dict[str, Any] = {"request_id": output.request_id}
    if not isinstance(found := output.delta, Scores):
        return answer | {"error": output.error}
    of_tasks = scores_of(output)
    scores = of_tasks[:, 0] if found.num_tasks == 1 else of_tasks
    if top_k is None:
        answer["scores"] = np.round(scores.astype(float), 6).tolist()
    else:
        best = best_of(of_tasks, top_k)
        answer["item_ids"] = candidate_ids[best].tolist()
        answer["scores"] = np.round(scores[best].astype(float), 6).tolist()
    answer["scaling_seqlen"] = found.scaling_seqlen
    if found.depends_on_batch:
        answer["depends_on_batch_of"] = found.batch_size
    return answer
