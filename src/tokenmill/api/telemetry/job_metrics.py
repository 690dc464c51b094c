"""Prometheus metrics of a server of jobs: calls and latencies here, and its engines' figures."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from tokenmill.api.telemetry import figures
from tokenmill.api.telemetry.job_view import worker_views
from tokenmill.api.telemetry.prometheus import CallMetrics, Histogram, Recent
from tokenmill.workers.pool import WorkerPool

_SECONDS = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0),
    *(30.0, 60.0, 300.0, 1800.0),
)
_FIGURE = re.compile(r"(\w+?)(_bucket|_sum|_count|_total)?(?:\{(.*)\})?")


class JobMetrics(CallMetrics):
    """What the front sees of calls and jobs; names begin with the task, as tokenmill_rank_."""

    def __init__(self, task: str, model: str, texts: Mapping[str, str]) -> None:
        super().__init__(model)
        self._task = task
        self._texts = texts  # by the names of figures
        self.call_s, self.queue_s = Histogram(_SECONDS), Histogram(_SECONDS)
        self.recent_ms = Recent()
        self.num_answered = 0  # jobs
        self.pool: WorkerPool | None = None

    def answered(self, call_s: float, queue_s: Sequence[float]) -> None:
        """Count a call that was answered, with the time that each of its jobs has waited."""
        self.call_s.observe(call_s)
        self.recent_ms.add(call_s * 1e3)
        self.num_answered += len(queue_s)
        for seconds in queue_s:
            self.queue_s.observe(seconds)

    async def render(self, pool: WorkerPool) -> bytes:
        told = (await pool.stats()).figures
        self.pool = pool
        return self.exposition() + self._figures(told).encode()

    def collect(self) -> Iterator[Metric]:
        yield from super().collect()
        rows = (row._replace(name=f"{self._task}_{row.name}") for row in figures.JOB_LATENCIES)
        yield from self.families(rows)
        if self.pool is not None:
            yield from self.families(figures.JOBS)
            yield from self.by_worker(figures.JOB_WORKERS, worker_views(self.pool))

    def _figures(self, told: Mapping[str, float]) -> str:
        """The engines' figures as lines: counters, histograms and gauges, by their names."""
        groups: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
        for figure, value in told.items():
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
