"""Lines of requests to lines of answers, for `tokenmill rank`; answers keep the lines' order."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np

from tokenmill.core.types import InvalidRequestError
from tokenmill.ranking.engine import RankingEngine
from tokenmill.ranking.metrics import rank_metrics
from tokenmill.ranking.request_json import read_labels, read_request, write_answer
from tokenmill.ranking.requests import RankOutput, RankRequest

LINES_AT_ONCE = 256


class LineRanker:
    """Lines through the engine, some at a time."""

    def __init__(self, engine: RankingEngine, top_k: int | None) -> None:
        self._engine, self._top_k = engine, top_k
        self.num_failed = self._num_done = 0
        self._scores: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

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
        outputs: dict[str, RankOutput] = {}
        while self._engine.has_work():
            outputs |= {output.request_id: output for output in self._engine.step()}
        for number, _ in lines:
            name = f"line-{number}"
            answer = faults.get(name) or self._write(number, *requests[name], outputs[name])
            self.num_failed += "error" in answer
            yield answer

    def _submit(self, name: str, line: str) -> tuple[RankRequest, Any]:
        """Queue a line under its number: two lines may have one request_id."""
        try:
            data = json.loads(line)
        except json.JSONDecodeError as wrong:
            raise InvalidRequestError(f"not a JSON object: {wrong}") from None
        request = read_request(data, name)
        labels = read_labels(data, request.num_candidates)
        self._engine.submit(replace(request, request_id=name))
        return request, labels

    def _write(
        self, number: int, request: RankRequest, labels: np.ndarray | None, output: RankOutput
    ) -> dict[str, Any]:
        named = replace(output, request_id=request.request_id)
        answer = write_answer(named, request.candidate_ids, self._top_k)
        if "error" in answer:
            return {"line": number, **answer}
        self._num_done += 1
        if labels is not None:
            self._scores.append(output.scores[:, 0])
            self._labels.append(labels)
        return answer

    def report(self, elapsed_s: float) -> list[str]:
        """Sentences on how many and how fast, and with labels how good."""
        stats = self._engine.stats()
        rate = self._num_done / elapsed_s if elapsed_s else 0.0
        lines = [
            f"{self._num_done} requests with {stats.num_candidates} candidates in {elapsed_s:.2f} s"
            f" ({rate:.1f} requests/s, {stats.num_steps} steps); {self.num_failed} failed"
        ]
        if self._scores:
            found = rank_metrics(self._scores, self._labels)
            ne, accuracy, gauc = ("not defined" if v is None else f"{v:.2f} %" for v in found)
            lines.append(f"normalised entropy {ne}, accuracy {accuracy}, GAUC {gauc}")
        return lines
