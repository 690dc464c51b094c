"""Lines of requests to lines of answers, for `tokenmill rank`; answers keep the lines' order."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from tokenmill.core.requests import Engine, RequestOutput
from tokenmill.core.tasks import Scores
from tokenmill.core.types import InvalidRequestError
from tokenmill.ranking.metrics import RankMetrics, rank_metrics
from tokenmill.ranking.request_json import read_labels, read_request, write_answer
from tokenmill.ranking.requests import RankRequest, scores_of

LINES_AT_ONCE = 256
Metrics = Sequence[float | None]  # as RankMetrics has them


class LineRanker:
    """Lines through the engine, some at a time, and beside it through another to compare with."""

    def __init__(self, engine: Engine, top_k: int | None, other: Engine | None = None) -> None:
        self._engine, self._top_k, self._other = engine, top_k, other
        self.num_failed = self._num_done = 0
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []
        self._other_scores: list[np.ndarray] = []  # of the lines that have labels
        self._apart: list[np.ndarray] = []  # scores minus the other's
        self.compared_s = 0.0  # time of the other engine

    def answers(self, lines: Iterable[str]) -> Iterator[dict[str, Any]]:
        """An object for each line that is not empty."""
        numbered = ((number, line) for number, line in enumerate(lines, 1) if line.strip())
        while some := list(islice(numbered, LINES_AT_ONCE)):
            yield from self._answer(some)

    def _answer(self, lines: list[tuple[int, str]]) -> Iterator[dict[str, Any]]:
        requests: dict[str, tuple[RankRequest, Any]] = {}
        faults: dict[str, dict[str, Any]] = {}
        for number, line in lines:
            name = f"line-{number}"
            try:
                requests[name] = self._submit(name, line)
            except InvalidRequestError as wrong:
                faults[name] = {"line": number, "error": str(wrong)}
        outputs = _finish(self._engine)
        self._compare(requests, outputs)
        for number, _ in lines:
            name = f"line-{number}"
            answer = faults.get(name) or self._write(number, *requests[name], outputs[name])
            self.num_failed += "error" in answer
            yield answer

    def _compare(
        self, requests: dict[str, tuple[RankRequest, Any]], outputs: dict[str, RequestOutput]
    ) -> None:
        if self._other is None:
            return
        start = time.perf_counter()
        for name, (request, _) in requests.items():
            self._other.submit(replace(request, request_id=name).asked())
        others = _finish(self._other)
        for name, (_, labels) in requests.items():
            found, expected = outputs[name], others[name]
            if isinstance(found.delta, Scores) and isinstance(expected.delta, Scores):
                self._apart.append((scores_of(found) - scores_of(expected))[:, 0])
                if labels is not None:
                    self._other_scores.append(scores_of(expected)[:, 0])
        self.compared_s += time.perf_counter() - start

    def _submit(self, name: str, line: str) -> tuple[RankRequest, Any]:
        """Queue a line under its number: two lines may have one request_id."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as wrong:
            raise InvalidRequestError(f"not a JSON object: {wrong}") from None
        request = read_request(data, name)
        labels = read_labels(data, request.num_candidates)
        self._engine.submit(replace(request, request_id=name).asked())
        return request, labels

    def _write(
        self, number: int, request: RankRequest, labels: np.ndarray | None, output: RequestOutput
    ) -> dict[str, Any]:
        named = replace(output, request_id=request.request_id)
        answer = write_answer(named, request.candidate_ids, self._top_k)
        if "error" in answer:
            return {"line": number, **answer}
        self._num_done += 1
        if labels is not None:
            self._scores.append(scores_of(output)[:, 0])
            self._labels.append(labels)
        return answer

    def report(self, elapsed_s: float) -> list[str]:
        """Sentences on how many and how fast, and with labels how good."""
        stats = self._engine.stats()
        candidates = stats.figures["candidates_total"]
        rate = self._num_done / elapsed_s if elapsed_s else 0.0
        lines = [
            f"{self._num_done} requests with {candidates:.0f} candidates in {elapsed_s:.2f} s"
            f" ({rate:.1f} requests/s, {stats.num_steps} steps); {self.num_failed} failed"
        ]
        if self._scores:
            lines.append(_told(rank_metrics(self._scores, self._labels), ".2f", " %"))
        return lines

    def comparison(self) -> list[str]:
        """Sentences on how far the scores are from the other engine's, and the quality with them.

        Figures are of this engine minus the other.
        """
        if not self._apart:
            return []
        apart = np.abs(np.concatenate(self._apart))
        lines = [f"scores are {apart.mean():.1e} apart on average, {apart.max():.1e} at most"]
        if len(self._other_scores) == len(self._scores) > 0:
            found = rank_metrics(self._scores, self._labels)
            expected = rank_metrics(self._other_scores, self._labels)
            lines.append(_told(_minus(found, expected), "+.3f", " points"))
        return lines


def _finish(engine: Engine) -> dict[str, RequestOutput]:
    outputs: dict[str, RequestOutput] = {}
    while engine.has_work():
        outputs |= {output.request_id: output for output in engine.step()}
    return outputs


def _minus(found: RankMetrics, expected: RankMetrics) -> Metrics:
    pairs = zip(found, expected, strict=True)
    return [None if one is None or two is None else one - two for one, two in pairs]


def _told(found: Metrics, form: str, unit: str) -> str:
    ne, accuracy, gauc = ("not defined" if v is None else f"{v:{form}}{unit}" for v in found)
    return f"normalised entropy {ne}, accuracy {accuracy}, GAUC {gauc}"
