"""The metrics of a router in front of other servers, from what it sees of each call."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily
from prometheus_client.metrics_core import Metric

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
        """All families; called by prometheus_client."""
        attempts = CounterMetricFamily(
            "tokenmill_backend_attempts",
            "Calls sent to a backend by the status of its answer, unreachable, unreadable or cut.",
            labels=["worker", "result"],
        )
        for labels, count in sorted(self.attempts.items()):
            attempts.add_metric(list(labels), float(count))
        yield attempts
        yield self._events()
        yield from self.own_counters()
        yield from self.latencies()
        yield from self.workers()

    def _events(self) -> Metric:
        batches = CounterMetricFamily(
            "tokenmill_backend_event_batches",
            "Batches of KV cache events: received (replayed ones too), replayed, lost.",
            labels=["worker", "result"],
        )
        for worker in self._pool.workers if self._pool is not None else ():
            for result, count in worker.event_batches.items():
                batches.add_metric([worker.name, result], float(count))
        return batches
