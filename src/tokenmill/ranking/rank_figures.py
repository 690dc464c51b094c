"""What a ranking engine tells of itself: batches, ends, and embeddings by their tier."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from tokenmill.core.requests import RequestOutput
from tokenmill.core.types import EngineStats, FinishReason
from tokenmill.ranking.requests import RankRequest
from tokenmill.ranking.stores.store import EmbeddingStore

_REQUESTS = (1, 2, 4, 8, 16, 32, 64, 128)
_TOKENS = (1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000, 160_000)
_ENDS = {
    FinishReason.STOP: "done",
    FinishReason.ABORT: "abort",
    FinishReason.REJECT: "reject",
    FinishReason.ERROR: "error",
}


class RankFigures:
    """Counts since it was made."""

    def __init__(self, stores: Mapping[str, EmbeddingStore]) -> None:
        self._stores = stores
        self._before = self._looked_up()  # by the warm-up
        self._num_finished: Counter[str] = Counter()
        self._num_steps = self._num_candidates = self._num_tokens = self._run_ns = 0
        self._batch_requests, self._batch_tokens = _Histogram(_REQUESTS), _Histogram(_TOKENS)

    def ran(self, requests: Sequence[RankRequest], run_ns: int) -> None:
        num_tokens = sum(request.num_tokens for request in requests)
        self._num_steps += 1
        self._run_ns += run_ns
        self._num_candidates += sum(request.num_candidates for request in requests)
        self._num_tokens += num_tokens
        self._batch_requests.observe(len(requests))
        self._batch_tokens.observe(num_tokens)

    def ended(self, outputs: Iterable[RequestOutput]) -> None:
        self._num_finished.update(str(output.finish_reason) for output in outputs)

    def stats(self, num_waiting: int, num_running: int) -> EngineStats:
        figures: dict[str, float] = {
            "num_waiting": num_waiting,
            "num_running": num_running,
            "steps_total": self._num_steps,
            "candidates_total": self._num_candidates,
            "tokens_total": self._num_tokens,
            "step_seconds_total": self._run_ns / 1e9,
            **self._batch_requests.figures("batch_requests"),
            **self._batch_tokens.figures("batch_tokens"),
        }
        for reason, name in _ENDS.items():
            figures[f'requests_total{{finish="{name}"}}'] = self._num_finished[reason]
        found = self._looked_up().items()
        figures |= {name: count - self._before.get(name, 0) for name, count in found}
        return EngineStats(
            num_waiting=num_waiting,
            num_running=num_running,
            num_steps=self._num_steps,
            num_finished=dict(self._num_finished),
            figures=figures,
        )

    def _looked_up(self) -> dict[str, float]:
        """Keys and bytes of each table by the tier that they came from, the warm-up's included."""
        figures: dict[str, float] = {}
        for table, store in self._stores.items():
            stats = store.stats()
            figures[f'embedding_hits_total{{table="{table}"}}'] = stats.num_hits
            for name, by_tier in (("keys", stats.keys_by_tier), ("bytes", stats.bytes_by_tier)):
                for tier, count in by_tier.items():
                    labels = f'{{table="{table}",tier="{tier}"}}'
                    figures[f"embedding_{name}_total{labels}"] = count
        return figures


class _Histogram:
    """Counts per bucket, as Prometheus has them."""

    def __init__(self, bounds: tuple[int, ...]) -> None:
        self._bounds, self._counts, self._sum = bounds, [0] * (len(bounds) + 1), 0

    def observe(self, value: int) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def figures(self, name: str) -> dict[str, float]:
        found: dict[str, float] = {}
        labels = [*map(str, self._bounds), "+Inf"]
        for bound, count in zip(labels, np.cumsum(self._counts).tolist(), strict=True):
            found[f'{name}_bucket{{le="{bound}"}}'] = count
        return found | {f"{name}_sum": self._sum, f"{name}_count": sum(self._counts)}
