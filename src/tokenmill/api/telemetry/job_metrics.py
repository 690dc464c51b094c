"""Prometheus metrics of a server of jobs: calls and latencies here, and its engines' figures."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry.prometheus import Histogram, Recent
from tokenmill.workers.jobs.job_pool import JobPool, JobWorkerView

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 1800.0),
)
_FIGURE = re.compile(r"(\w+?)(_bucket|_sum|_count|_total)?(?:\{(.*)\})?")
_WORKER_GAUGES = (
    ("up", "1 while the worker takes jobs."),
    ("open", "Jobs that it has."),
    ("busy", "Share of the last minute with something to compute."),
)
_WORKER_COUNTERS = (
    ("routed", "Jobs that were sent to it."),
    ("failures", "Times that it died or hung."),
)
Labels = Sequence[tuple[str, str]]


class JobMetrics:
    """What the front sees of calls and jobs; names begin with the task, as tokenmill_rank_."""

    def __init__(self, task: str, model: str, texts: Mapping[str, str]) -> None:
        self._task, self._model = task, model
        self._texts = texts  # by the names of figures
        self.calls: Counter[tuple[str, str]] = Counter()  # (endpoint, status)
        self.rejected: Counter[str] = Counter()  # by the code of the error
        self.call_s, self.queue_s = Histogram(_SECONDS), Histogram(_SECONDS)
        self.recent_ms = Recent()
        self.num_answered = 0  # jobs
        self._pool: JobPool | None = None
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def count_call(self, endpoint: str, status: int, error: str | None) -> None:
        """Count the answer to a call; one that was refused also by its error."""
        self.calls[endpoint, str(status)] += 1
        if error is not None and (400 <= status < 500 or status == 503):
            self.rejected[error] += 1

    def answered(self, call_s: float, queue_s: Sequence[float]) -> None:
        """Count a call that was answered, with the time that each of its jobs has waited."""
        self.call_s.observe(call_s)
        self.recent_ms.add(call_s * 1e3)
        self.num_answered += len(queue_s)
        for seconds in queue_s:
            self.queue_s.observe(seconds)

    async def render(self, pool: JobPool) -> bytes:
        """The exposition text with the engines' figures of now."""
        figures = await pool.stats()
        self._pool = pool
        return generate_latest(self._registry) + self._figures(figures).encode()

    def collect(self) -> Iterator[Metric]:
        """What is counted here; called by prometheus_client."""
        yield from self._counters()
        name = f"tokenmill_{self._task}"
        yield self.call_s.family(f"{name}_call_seconds", "A call, to its answer.", self._model)
        text = "A request, to its first step."
        yield self.queue_s.family(f"{name}_queue_seconds", text, self._model)
        if self._pool is not None:
            yield from self._of_pool(self._pool)

    def _counters(self) -> Iterator[Metric]:
        labels = ["model_name", "endpoint", "status"]
        calls = CounterMetricFamily("tokenmill_requests", "HTTP calls by status.", labels=labels)
        for (endpoint, status), count in sorted(self.calls.items()):
            calls.add_metric([self._model, endpoint, status], float(count))
        yield calls
        rejected = CounterMetricFamily(
            "tokenmill_requests_rejected",
            "HTTP calls refused, by error code.",
            labels=["model_name", "reason"],
        )
        for reason, count in sorted(self.rejected.items()):
            rejected.add_metric([self._model, reason], float(count))
        yield rejected

    def _of_pool(self, pool: JobPool) -> Iterator[Metric]:
        for name, text, value in (
            ("jobs_open", "Jobs that have not ended.", pool.num_open),
            ("jobs_held", "Of these, jobs that wait for a worker.", pool.num_held),
        ):
            gauge = GaugeMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
            gauge.add_metric([self._model], float(value))
            yield gauge
        for name, text, value in (
            ("request_migrations", "Times a job went on elsewhere.", pool.num_migrations),
            ("worker_restarts", "Times a worker was restarted.", pool.num_restarts),
        ):
            counter = CounterMetricFamily(f"tokenmill_{name}", text, labels=["model_name"])
            counter.add_metric([self._model], float(value))
            yield counter
        workers = pool.view()
        for name, text in _WORKER_GAUGES:
            yield self._of_workers(GaugeMetricFamily, name, text, workers)
        for name, text in _WORKER_COUNTERS:
            yield self._of_workers(CounterMetricFamily, name, text, workers)

    def _of_workers(
        self,
        kind: type[GaugeMetricFamily] | type[CounterMetricFamily],
        name: str,
        text: str,
        workers: Sequence[JobWorkerView],
    ) -> Metric:
        family = kind(f"tokenmill_worker_{name}", text, labels=["model_name", "worker"])
        for worker in workers:
            own = {"up": worker.state == "ready", "open": worker.num_open}
            family.add_metric([self._model, worker.name], float(own.get(name, _of(worker, name))))
        return family

    def _figures(self, figures: Mapping[str, float]) -> str:
        """The engines' figures as lines: counters, histograms and gauges, by their names."""
        groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for figure, value in figures.items():
            found = _FIGURE.fullmatch(figure)
            if found is None:
                continue
            name, suffix, labels = found[1], found[2] or "", found[3]
            kind = {"": "gauge", "_total": "counter"}.get(suffix, "histogram")
            where = ",".join([f'model_name="{self._model}"', *([labels] if labels else [])])
            groups[name, kind].append(f"tokenmill_{self._task}_{name}{suffix}{{{where}}} {value}")
        return "".join(self._lines(*key, lines) for key, lines in sorted(groups.items()))

    def _lines(self, name: str, kind: str, lines: list[str]) -> str:
        full = f"tokenmill_{self._task}_{name}" + ("_total" if kind == "counter" else "")
        text = self._texts.get(name, "Of the engines.")
        return "\n".join([f"# HELP {full} {text}", f"# TYPE {full} {kind}", *lines]) + "\n"


def _of(worker: JobWorkerView, name: str) -> float:
    return float(getattr(worker, name, 0.0))
