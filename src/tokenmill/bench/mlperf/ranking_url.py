"""A ranking server under LoadGen's test: every query is one POST /v1/rank of one user.

Ids travel as base64 of int64, scores come as JSON.
"""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenmill.bench.client.records import Target
from tokenmill.bench.mlperf.post_url import PostUnderTest

if TYPE_CHECKING:
    from tokenmill.ranking.requests import RankRequest

ROUTE = "/v1/rank"
Data = Callable[[int, Sequence[float]], array]  # of LoadGen, from a sample's index and its scores


def rank_url(url: str) -> str:
    """The route of a server, however its address was given."""
    return url.rstrip("/").removesuffix(ROUTE).removesuffix("/v1") + ROUTE


def body_of(request: RankRequest) -> bytes:
    """The body of a call for one user."""

    def ids(values: Any) -> str:
        return base64.b64encode(values.astype("<i8").tobytes()).decode()

    history = {
        "item_ids": ids(request.item_ids),
        "category_ids": ids(request.category_ids),
        "actions": ids(request.actions),
    }
    if request.timestamps is not None:
        history["timestamps"] = ids(request.timestamps)
    candidates = {
        "item_ids": ids(request.candidate_ids),
        "category_ids": ids(request.candidate_category_ids),
    }
    user = {"user_id": request.user_id, "query_time": request.query_time}
    return json.dumps({"users": [{**user, "history": history, "candidates": candidates}]}).encode()


class RankingServerUnderTest(PostUnderTest):
    """A server of a ranking model."""

    def __init__(
        self, target: Target, requests: Sequence[RankRequest], data: Data, max_in_flight: int
    ) -> None:
        super().__init__(target, max_in_flight)
        self._requests, self._data_of = requests, data

    def _body(self, index: int) -> bytes:
        return body_of(self._requests[index])

    def _data(self, index: int, body: bytes) -> array:
        return self._data_of(index, json.loads(body)["results"][0]["scores"])
