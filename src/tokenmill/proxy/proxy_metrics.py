"""The metrics of a router in front of other servers, from what it sees of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry import figures
from tokenmill.api.telemetry.prometheus import ServerMetrics

ALL_MODELS = "all"


class RouteMetrics(ServerMetrics):
    """Latencies and counts at the router; the backends' own counters are at the backends.

    A token is an event of a stream here, or what the usage of a whole answer says.
    """

    SUCCESSES = ("answered",)
    FAILURES = ("abort", "error", "refused", "reject")

    def __init__(self) -> None:
        super().__init__(ALL_MODELS)
        self.attempts: Counter[tuple[str, str]] = Counter()  # (backend, how it went)

    def collect(self) -> Iterator[Metric]:
        yield from self.families(figures.BACKENDS, with_model=False)
        own = (*figures.CALLS, *figures.ANSWERS, *figures.LATENCIES, *figures.POOL)
        yield from self.families(own)
        yield from self.by_worker(figures.WORKERS, self.pool.workers)

    def derived(self) -> dict[str, Any]:
        batches = {
            (worker.name, result): count
            for worker in self.pool.workers
            for result, count in worker.event_batches.items()
        }
        return super().derived() | {"event_batches": batches}
